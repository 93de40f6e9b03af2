"""Exact samples of the discrete Gaussian: whole numbers x with probability in proportion to exp(-x²
/ 2σ²).

Canonne, Kamath and Steinke 2020, arXiv 2004.00010, algorithms 1 to 3, many samples at once. Samples
of a rounded floating-point Gaussian leak through their low bits (Mironov 2012), and a sum of masked
whole numbers needs whole numbers.

Exact, though numpy works in floating point: a coin of probability p compares 53 random bits with p,
and where they are nearer to each other than p's error, more bits are drawn and compared with p as a
fraction.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ...collectives.errors import ConfigError

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Truth = NDArray[np.bool_]
Exact = Callable[[int], Fraction]
"""The exact value behind an element of Floats, by its index."""

MOST_VARIANCE = 1 << 60  # samples are far below 2^40
BATCH = 1 << 16  # samples made at once
_NEAR = 2.0**-46  # far above the rounding errors of what is compared


def discrete_gaussian(variance: Fraction | int, count: int, rng: random.Random) -> Integers:
    """``count`` independent samples of parameter σ² = ``variance``: int64 (count,).

    ``rng``: `random.SystemRandom()`, where privacy depends on it; a seeded one only where the
    noise need not be secret. Raises ConfigError for a variance below 0 or above MOST_VARIANCE. A
    variance of 0 gives zeros.
    """
    variance = Fraction(variance)
    if not 0 <= variance <= MOST_VARIANCE:
        raise ConfigError(
            f"privacy: noise of variance {float(variance):g}",
            why=f"0 to {MOST_VARIANCE:g}, in units of the grid",
        )
    out = np.zeros(count, np.int64)
    if variance == 0:
        return out
    scale = _root(variance) + 1
    for start in range(0, count, BATCH):
        missing = np.arange(start, min(count, start + BATCH))
        while len(missing):
            tried = _laplace(scale, len(missing), rng)
            taken = _accepted(tried, variance, scale, rng)
            out[missing[taken]] = tried[taken]
            missing = missing[~taken]
    return out


def _root(variance: Fraction) -> int:
    """The largest integer whose square is not above ``variance``."""
    return math.isqrt(variance.numerator // variance.denominator)


def _accepted(tried: Integers, variance: Fraction, scale: int, rng: random.Random) -> Truth:
    """Heads with probability exp(-(|x| - σ²/t)² / 2σ²): what makes of a Laplace sample one of the
    Gaussian (algorithm 3).
    """
    centre = variance / scale
    gamma = (np.abs(tried) - float(centre)) ** 2 / float(2 * variance)
    # Exp(-γ) is as many coins of exp(-γ / pieces), each of an exponent below 1.
    pieces = np.floor(gamma) + 2

    def exact(index: int) -> Fraction:
        return (abs(int(tried[index])) - centre) ** 2 / (2 * variance) / int(pieces[index])

    return _all_heads(gamma / pieces, exact, pieces.astype(np.int64), rng)


def _laplace(scale: int, count: int, rng: random.Random) -> Integers:
    """Discrete Laplace samples, probability in proportion to exp(-|x| / scale) (algorithm 2)."""
    out = np.zeros(count, np.int64)
    missing = np.arange(count)
    while len(missing):
        low = _below(scale, len(missing), rng)
        taken = _all_heads(
            low / scale,
            lambda index: Fraction(int(low[index]), scale),  # noqa: B023
            np.ones(len(low), np.int64),
            rng,
        )
        low, places = low[taken], missing[taken]
        high = np.zeros(len(low), np.int64)
        going = np.arange(len(low))
        while len(going):
            going = going[
                _all_heads(
                    np.ones(len(going)),
                    lambda _: Fraction(1),
                    np.ones(len(going), np.int64),
                    rng,
                )
            ]
            high[going] += 1
        value = low + scale * high
        negative = (_bits(len(value), rng) & np.uint64(1)).astype(bool)
        good = ~(negative & (value == 0))  # zero must not count twice
        out[places[good]] = np.where(negative, -value, value)[good]
        missing = np.concatenate([missing[~taken], places[~good]])
    return out


def _all_heads(gamma: Floats, exact: Exact, coins: Integers, rng: random.Random) -> Truth:
    """Whether as many coins of exp(-gamma) as ``coins`` say all fall heads; 0 <= gamma <= 1."""
    heads = np.ones(len(gamma), bool)
    going = np.arange(len(gamma))
    left = coins.copy()
    while len(going):
        once = _exponential_coin(gamma[going], _at(exact, going), rng)
        heads[going[~once]] = False
        left[going] -= 1
        going = going[once & (left[going] > 0)]
    return heads


def _exponential_coin(gamma: Floats, exact: Exact, rng: random.Random) -> Truth:
    """Heads with probability exp(-gamma): coins of gamma, gamma/2, gamma/3 … until tails; heads if
    that was an odd one (algorithm 1).
    """
    heads = np.zeros(len(gamma), bool)
    going, k = np.arange(len(gamma)), 1
    while len(going):
        once = _coin(gamma[going] / k, _at(exact, going, k), rng)
        if k % 2:
            heads[going[~once]] = True
        going, k = going[once], k + 1
    return heads


def _at(exact: Exact, going: Integers, divisor: int = 1) -> Exact:
    """The exact values behind the elements that are still ``going``, each by ``divisor``."""
    return lambda index: exact(int(going[index])) / divisor


def _coin(p: Floats, exact: Exact, rng: random.Random) -> Truth:
    """Heads with probability p, which is near enough to ``exact`` for all but a few draws; those
    are decided by it.
    """
    drawn = (_bits(len(p), rng) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    heads = drawn < p
    for index in np.flatnonzero(np.abs(drawn - p) <= _NEAR).tolist():
        heads[index] = _decided(Fraction(float(drawn[index])), exact(index), rng)
    return heads


def _decided(low: Fraction, p: Fraction, rng: random.Random) -> bool:
    """Whether a uniform number, of which the first 53 bits are ``low``, is below p."""
    width = Fraction(1, 1 << 53)
    while low < p < low + width:
        width /= 1 << 64
        low += rng.getrandbits(64) * width
    return low + width <= p


def _below(limit: int, count: int, rng: random.Random) -> Integers:
    """Uniform int64 samples of 0 to limit - 1, by rejection; ``limit`` at most 2^31."""
    if limit & (limit - 1) == 0:
        return (_bits(count, rng) & np.uint64(limit - 1)).astype(np.int64)
    drawn = _bits(count, rng)
    last = np.uint64((1 << 64) - (1 << 64) % limit - 1)
    while len(bad := np.flatnonzero(drawn > last)):
        drawn[bad] = _bits(len(bad), rng)
    return (drawn % np.uint64(limit)).astype(np.int64)


def _bits(count: int, rng: random.Random) -> NDArray[np.uint64]:
    """64 random bits each."""
    return np.frombuffer(rng.randbytes(8 * count), "<u8").astype(np.uint64)

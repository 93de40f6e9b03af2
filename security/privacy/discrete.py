"""Exact samples of the discrete Gaussian: whole numbers x with probability in proportion to exp(-x²
/ 2σ²).

Canonne, Kamath and Steinke 2020, arXiv 2004.00010, algorithms 1 to 3, many samples at once. Samples
of a rounded floating-point Gaussian leak through their low bits (Mironov 2012), and a sum of masked
whole numbers needs whole numbers.

Exact, though numpy works in floating point: a coin of probability p compares 53 random bits with p,
and where they are nearer to each other than p's error, more bits are drawn and compared with p as a
fraction.

Wide ones, of which a step of DP-SGD has one a parameter, are made ten times faster by rejection
from steps: the numbers from 0 are cut into blocks of a 64th of the deviation, a block is drawn by
the density at its beginning, a place in it evenly, and both are kept with probability exp(-(x² -
first²) / 2σ²). Both draws are exact in the same way; left out is what is 16 deviations away (below
2^-180), and exponentials are of 60 digits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

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
_WIDE = 1 << 20  # from this variance on blocks are wide enough
_REACH = 16  # deviations
_DIGITS = Context(prec=60)


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
    if variance >= _WIDE:
        return _wide(variance, out, rng)
    scale = _root(variance) + 1
    for start in range(0, count, BATCH):
        missing = np.arange(start, min(count, start + BATCH))
        while len(missing):
            tried = _laplace(scale, len(missing), rng)
            taken = _accepted(tried, variance, scale, rng)
            out[missing[taken]] = tried[taken]
            missing = missing[~taken]
    return out


def _wide(variance: Fraction, out: Integers, rng: random.Random) -> Integers:
    """Samples by rejection from steps: see the module."""
    bits, bounds, rests = _steps(variance)
    twice = 2 * float(variance)
    for start in range(0, len(out), BATCH):
        missing = np.arange(start, min(len(out), start + BATCH))
        while len(missing):
            drawn = _bits(len(missing), rng)
            block = np.searchsorted(bounds, drawn, side="left")
            for index in np.flatnonzero(
                bounds[np.minimum(block, len(bounds) - 1)] == drawn
            ).tolist():
                # the word in which the bound lies: 64 bits more say on which side of it
                at, more = int(block[index]), rng.getrandbits(64)
                while at < len(rests) and bounds[at] == drawn[index] and more >= rests[at]:
                    at += 1
                block[index] = at
            word = _bits(len(missing), rng)
            place = (word & np.uint64((1 << bits) - 1)).astype(np.int64)
            negative = (word >> np.uint64(bits)) & np.uint64(1)
            first = block.astype(np.int64) << bits
            size = first + place + negative.astype(np.int64)  # below 0 a block begins one later
            gamma = (size - first).astype(np.float64) * (size + first) / twice
            taken = _below_exp(
                word >> np.uint64(bits + 1), 63 - bits, gamma, size, first, variance, rng
            )
            value = np.where(negative.astype(bool), -size, size)
            out[missing[taken]] = value[taken]
            missing = missing[~taken]
    return out


def _below_exp(
    word: NDArray[np.uint64],
    bits: int,
    gamma: Floats,
    size: Integers,
    first: Integers,
    variance: Fraction,
    rng: random.Random,
) -> Truth:
    """Heads with probability exp(-gamma), by so many random bits, and more where these are too
    near.
    """
    drawn = (word >> np.uint64(max(0, bits - 53))).astype(np.float64) * 2.0 ** -min(bits, 53)
    chance = np.exp(-gamma)
    heads = drawn < chance
    width = Fraction(1, 1 << min(bits, 53))
    for index in np.flatnonzero(np.abs(drawn - chance) <= _NEAR + float(width)).tolist():
        a, b = int(size[index]), int(first[index])
        exact = Fraction(_exp(Fraction(a * a - b * b) / (2 * variance)))
        heads[index] = _decided(Fraction(float(drawn[index])), exact, rng, width)
    return heads


@lru_cache(maxsize=8)
def _steps(variance: Fraction) -> tuple[int, NDArray[np.uint64], tuple[int, ...]]:
    """Blocks of 2^bits numbers each: the bits; after each block the share of all that is before its
    end, as 64 bits, and the next 64 of it.
    """
    bits = max(0, (_root(variance) >> 6).bit_length() - 1)
    count = (_REACH * (_root(variance) + 1) >> bits) + 1
    weights = [
        int(_exp(Fraction((at << bits) ** 2) / (2 * variance)) * (1 << 256)) for at in range(count)
    ]
    total, so_far, bounds, rests = sum(weights), 0, list[int](), list[int]()
    for weight in weights[:-1]:
        so_far += weight
        share = (so_far << 128) // total
        bounds.append(share >> 64)
        rests.append(share & ((1 << 64) - 1))
    return bits, np.array(bounds, np.uint64), tuple(rests)


def _exp(exponent: Fraction) -> Decimal:
    """exp(-exponent), to 60 digits."""
    return _DIGITS.exp(-_DIGITS.divide(Decimal(exponent.numerator), Decimal(exponent.denominator)))


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


def _decided(
    low: Fraction, p: Fraction, rng: random.Random, width: Fraction = Fraction(1, 1 << 53)
) -> bool:
    """Whether a uniform number is below p, of which the first bits are ``low``; as many as
    ``width`` says."""
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

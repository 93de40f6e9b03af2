"""Asynchronous rounds: what a contribution counts that was made on an older anchor, or that comes
more or less often than others. Pure functions.

Staleness is the number of outer steps since the anchor that a contribution was made on. Factors
never grow with it: one public framework has the exponent's sign wrong, so that the stalest updates
count most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ...collectives.arrivals import Fading
from ...collectives.errors import ConfigError
from ...collectives.identifiers import PeerId

Staleness = Literal["constant", "polynomial", "hinge"]


def staleness_factor(kind: Staleness, staleness: int, a: float | None = None, b: int = 4) -> float:
    """FedAsync's (arXiv 1903.03934), in 0 to 1, 1 for a fresh one: ``(1 + u)^-a``, a = 0.5; hinge:
    1 up to b, then ``1 / (a (u - b) + 1)``, a = 10.
    """
    if staleness < 0:
        raise ConfigError(f"a contribution of {-staleness} steps in the future")
    value = {"constant": 0.0, "polynomial": 0.5, "hinge": 10.0}[kind] if a is None else a
    if not (value >= 0 and math.isfinite(value)) or b < 0:
        raise ConfigError(
            f"staleness: a = {value}, b = {b}",
            key="a",
            why="below 0 stale contributions would count more than fresh ones",
        )
    if kind == "polynomial":
        return (1 + staleness) ** -value
    return 1.0 if kind == "constant" or staleness <= b else 1 / (value * (staleness - b) + 1)


def faded(fading: Fading, staleness: int) -> float:
    """FedAsync's α_t: how far a contribution moves the anchor, in 0 to α."""
    return fading.alpha * staleness_factor(fading.staleness, staleness, fading.a, fading.b)


def mixed(anchor: Tensor, parameters: Tensor, share: float) -> Tensor:
    """FedAsync's step: ``x + α_t (y - x)``, `faded` for α_t; also what a running statistic does."""
    if not 0 <= share <= 1:
        raise ConfigError(f"FedAsync: {share} of a contribution", key="alpha", why="from 0 to 1")
    return torch.lerp(anchor, parameters, share)


def buffered_factor(staleness: int) -> float:
    """FedBuff's scale of a contribution in the buffer (arXiv 2106.06639): ``1 / sqrt(1 + u)``; the
    buffer's mean is one outer step.
    """
    return staleness_factor("polynomial", staleness, 0.5)


def check_shares(shares: Mapping[PeerId, float]) -> None:
    """Raises ConfigError unless shares of members (of samples, say) are above 0 and sum to 1."""
    if not shares or min(shares.values()) <= 0 or abs(math.fsum(shares.values()) - 1) > 1e-9:
        raise ConfigError("shares of members must be above 0 and add up to 1", key="shares")


def fixed_weights(
    shares: Mapping[PeerId, float], seconds: Mapping[PeerId, float], period: float
) -> dict[PeerId, float]:
    """FedFix (arXiv 2206.10189): weights of those that arrive within a step every ``period``
    seconds: ``ceil(T_i / period) p_i``.

    On average every member moves the anchor by its share then, however slow it is; equal weights
    lead to an optimum weighted by speed. ``seconds``: T_i, of a member's round, as measured. A long
    period is synchronous (weights are the shares), a short one asynchronous. Running statistics of
    normalisation layers are averaged by the shares p_i: a weight above 1 would carry a variance
    past zero.
    """
    _check_times(shares, seconds)
    return {peer: fixed_weight(share, seconds[peer], period) for peer, share in shares.items()}


def fixed_weight(share: float, seconds: float, period: float) -> float:
    """One member's of them. Raises ConfigError for a period that is none."""
    if not period > 0:
        raise ConfigError(f"FedFix: a period of {period} s", key="period", why="it must be above 0")
    return math.ceil(seconds / period - 1e-9) * share


def async_weights(
    shares: Mapping[PeerId, float], seconds: Mapping[PeerId, float]
) -> dict[PeerId, float]:
    """The same for steps at each arrival: ``T_i p_i · sum_j 1 / T_j``."""
    _check_times(shares, seconds)
    rate = math.fsum(1 / seconds[peer] for peer in shares)
    return {peer: rate * seconds[peer] * share for peer, share in shares.items()}


def buffer_weights(
    shares: Mapping[PeerId, float], present: Mapping[PeerId, float]
) -> dict[PeerId, float]:
    """The same for FedBuff: ``p_i / P(i is in the buffer)``; ``present``: how often it is there on
    average, as measured, above 1 for one that comes more than once a step."""
    check_shares(shares)
    if any(not present.get(peer, 0) > 0 for peer in shares):
        raise ConfigError(
            "FedBuff: how often a member is in the buffer is a number above 0", key="present"
        )
    return {peer: share / present[peer] for peer, share in shares.items()}


def _check_times(shares: Mapping[PeerId, float], seconds: Mapping[PeerId, float]) -> None:
    check_shares(shares)
    if any(not seconds.get(peer, 0) > 0 for peer in shares):
        raise ConfigError("a member's round takes a time above 0 s", key="seconds")

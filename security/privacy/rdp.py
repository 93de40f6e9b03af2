"""Rényi differential privacy of the Poisson-subsampled Gaussian mechanism, and its conversion to
(epsilon, delta).

Mironov, Talwar and Zhang 2019, arXiv 1908.10530: a step adds N(0, (z S)²) to a sum of vectors of
norm at most S, each of which takes part with probability q by itself. At order a its cost is log(A)
/ (a - 1), A = E[(1 - q + q exp((2x - 1) / 2z²))^a] over x from N(0, z²). Neighbours are data sets
of which one has one more member. Batches of a fixed size, or in a shuffled order, are not sampled
like this: their cost is not what is calculated here (with q = 1, no sampling, it is at most that).

The paper has two series for A, of which the one for fractional orders loses digits to cancellation.
Here A - 1 is one integral for all orders: the trapezium rule, whose error falls exponentially for
analytic functions that vanish at both ends (Trefethen and Weideman, SIAM Review 2014).

Conversion: Balle et al. 2020, arXiv 1905.09982, theorem 21, as in opacus; also Canonne, Kamath and
Steinke, arXiv 2004.00010, proposition 12.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...collectives.errors import ConfigError

Costs = NDArray[np.float64]
"""Rényi divergence at each of ORDERS; costs of steps add up."""

# Opacus' own.
ORDERS: tuple[float, ...] = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(12, 64),
)
# Noise multiplier; below it sampling is not counted on, which costs more than it could.
SMALLEST = 0.1
SLACK = 1e-6  # relative; results are rounded up by it, which is more than their error
_REACH = 12  # standard deviations around the integrand's peaks
# points in the distance to the integrand's nearest singularity, π z² off the real line, or in a
# standard deviation
_FINE = 8

_orders = np.array(ORDERS)
_offset = np.log1p(-1 / _orders) - np.log(_orders) / (_orders - 1)


def check_rate(rate: float) -> None:
    """Raises ConfigError for a sampling rate that is no probability."""
    if not 0 <= rate <= 1:
        raise ConfigError(
            f"privacy: the sampling rate is {rate}",
            key="sampling_rate",
            why="it is a probability: 0 to 1",
        )


def check_delta(delta: float) -> None:
    """Raises ConfigError for a delta that promises nothing."""
    if not 0 < delta < 1:
        raise ConfigError(
            f"privacy: delta is {delta}",
            key="delta",
            why="it is a probability above 0 and below 1; far below 1 / clients",
        )


@lru_cache(maxsize=1024)
def step_costs(rate: float, noise: float) -> Costs:
    """What one step costs at each of ORDERS: float64, read-only. ``rate``: q. ``noise``: z, the
    standard deviation in units of the bound S.

    All infinite without noise. Raises ConfigError for a rate that is no probability, or noise that
    is no number of at least 0.
    """
    check_rate(rate)
    if not (noise >= 0 and math.isfinite(noise)):
        raise ConfigError(
            f"privacy: the noise multiplier is {noise}",
            key="noise",
            why="it is the noise's deviation / the clipping bound",
        )
    if rate == 0:
        costs = np.zeros(len(ORDERS))
    elif noise == 0:
        costs = np.full(len(ORDERS), math.inf)
    elif rate == 1 or noise < SMALLEST:
        costs = _orders / (2 * noise**2)
    else:
        # Next to nothing may round below 0.
        costs = np.array(
            [max(0.0, _log_moment(rate, noise, order)) / (order - 1) for order in ORDERS]
        )
    costs.flags.writeable = False
    return costs


def _log_moment(rate: float, noise: float, order: float) -> float:
    """log A, also where A is hardly above 1."""
    width = min(noise, math.pi * noise**2) / _FINE
    x = np.arange(-_REACH * noise, order + _REACH * noise, width)
    weight = -(x**2) / (2 * noise**2) + math.log(width / (noise * math.sqrt(2 * math.pi)))
    power = order * np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    both = power + weight
    if (peak := float(both.max())) > 1:
        return peak + math.log(float(np.exp(both - peak).sum()))
    near = np.minimum(power, 1)
    return math.log1p(
        float(
            np.where(
                power < 1, np.expm1(near) * np.exp(weight), np.exp(both) - np.exp(weight)
            ).sum()
        )
    )


def epsilon_of(costs: Costs, delta: float) -> float:
    """The smallest epsilon that costs at ORDERS prove for ``delta``, rounded up by SLACK; at least
    0. Raises ConfigError for a bad delta.
    """
    check_delta(delta)
    return max(0.0, float((costs + offsets(delta)).min())) * (1 + SLACK)


def offsets(delta: float) -> Costs:
    """What the conversion adds at each of ORDERS: epsilon is the least of costs + offsets."""
    return _offset - math.log(delta) / (_orders - 1)

"""A run's privacy: steps added up, the step that would pass epsilon refused before it is made, the
noise that a plan needs.

Costs in Rényi terms add up, whatever each step's sampling rate and noise were (Mironov 2017, arXiv
1702.07476, proposition 1), also where they were chosen in view of what went before (Feldman and
Zrnic 2021, arXiv 2008.11193, since the bound is asked before every step).

numpy's logarithms may differ in the last bit between machines: where members must agree on a last
step, one of them calculates it and the others check it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...collectives.errors import ConfigError
from .rdp import ORDERS, SLACK, Costs, check_delta, epsilon_of, offsets, step_costs

MOST_STEPS = 10**9  # what `room` says where steps cost nothing or next to it
MOST_NOISE = 1e6  # where `noise_for` gives up


def _nothing() -> Costs:
    return np.zeros(len(ORDERS))


@dataclass(slots=True)
class Accountant:
    """How much of its privacy a member has spent for ``delta``, and the epsilon that it must not
    pass (infinite: none). Ask `allows` before each step, and `spend` the step when it is made.

    >>> spent = Accountant(delta=1e-5, stop_at_epsilon=8.0)
    >>> while spent.allows(rate=1.0, noise=2.0):        # of each round this member is a part
    ...     spent.spend(rate=1.0, noise=2.0)
    >>> spent.steps, round(spent.epsilon, 1)
    (9, 7.6)

    `costs` and `steps` are all of its state. Raises ConfigError for values that promise nothing.
    """

    delta: float
    stop_at_epsilon: float = math.inf
    costs: Costs = field(default_factory=_nothing)
    steps: int = 0

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not self.stop_at_epsilon > 0:
            raise ConfigError(
                f"privacy: stop_at_epsilon is {self.stop_at_epsilon}",
                key="stop_at_epsilon",
                why="it must be above 0",
            )
        if self.costs.shape != (len(ORDERS),) or not bool(np.all(self.costs >= 0)):
            raise ConfigError(
                "privacy: the stored costs are no costs",
                why=f"one number of at least 0 for each of {len(ORDERS)} orders",
            )

    @property
    def epsilon(self) -> float:
        """What has been spent: 0 before the first step, infinite after one without noise."""
        return epsilon_of(self.costs, self.delta) if self.steps else 0.0

    def after(self, rate: float, noise: float, steps: int = 1) -> float:
        """What would have been spent after so many more steps."""
        return epsilon_of(self.costs + steps * step_costs(rate, noise), self.delta)

    def allows(self, rate: float, noise: float) -> bool:
        """Whether one more step stays at or below `stop_at_epsilon`. Ask before making it."""
        return self.after(rate, noise) <= self.stop_at_epsilon

    def spend(self, rate: float, noise: float, steps: int = 1) -> None:
        """Add steps that were made; also such as pass the limit, since what is known cannot be
        taken back.
        """
        self.costs = self.costs + steps * step_costs(rate, noise)
        self.steps += steps

    def room(self, rate: float, noise: float) -> int:
        """The largest number of further steps of this kind that stays at or below
        `stop_at_epsilon`; at most MOST_STEPS.

        Epsilon is the least of (costs so far + steps * cost + offset) over the orders, so each
        order has a last step, and the last of these counts.
        """
        if math.isinf(self.stop_at_epsilon):
            return MOST_STEPS
        left = self.stop_at_epsilon / (1 + SLACK) - self.costs - offsets(self.delta)
        cost = step_costs(rate, noise)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            last = np.where(left >= 0, np.where(cost > 0, left / cost, math.inf), -1)
        steps = int(min(MOST_STEPS, max(0.0, float(last.max()))))
        while steps and self.after(rate, noise, steps) > self.stop_at_epsilon:
            steps -= 1  # the quotient was rounded up
        return steps


def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The smallest noise multiplier, to a thousandth of itself, with which ``steps`` steps at this
    sampling rate stay at or below epsilon.

    Raises ConfigError where no noise would do (delta too small for the orders at hand).
    """
    if not epsilon > 0:
        raise ConfigError(f"privacy: epsilon is {epsilon}", key="epsilon", why="it must be above 0")
    check_delta(delta)

    def enough(noise: float) -> bool:
        return epsilon_of(steps * step_costs(rate, noise), delta) <= epsilon

    high = 1.0
    while not enough(high):
        high *= 2
        if high > MOST_NOISE:
            why = (
                "the orders calculated with prove no epsilon below "
                f"{epsilon_of(_nothing(), delta):.3g} for this delta"
            )
            raise ConfigError(
                f"privacy: no noise gives epsilon {epsilon} at delta {delta}",
                key="epsilon",
                why=why,
            )
    low = high / 2
    while low > 1e-3 and enough(low):
        low, high = low / 2, low
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high

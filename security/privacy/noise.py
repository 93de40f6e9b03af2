"""Noise of which every member adds a part: whole numbers on a grid, so that they can be masked and
their sum is exact.

Nobody is trusted with all of the noise. Of the members whose vectors are in a sum at least
``honest`` add theirs; each adds 1 / honest of the variance, so that what a liar leaves out or
learns (its own part) still leaves the noise that is accounted. With secure aggregation ``honest``
is its threshold less the members that are assumed to collude.

A sum of discrete Gaussians is not one, but so near to one (Kairouz, Liu and Steinke 2021, arXiv
2102.06387, theorem 11) that nothing is left of the difference at the deviations that are allowed
here. It is accounted as one, and that as a Gaussian, which hides no more (arXiv 2004.00010,
theorem 7).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from fractions import Fraction

from ...collectives.errors import ConfigError
from .discrete import Integers, discrete_gaussian

LEAST_DEVIATION = 4.0  # of one member's noise, in steps of the grid: the gap is then below 1e-60


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """The noise on a sum of vectors of norm at most ``clip``, which are rounded to whole multiples
    of ``step``. Each member adds its part with `add_noise`:

    >>> import random
    >>> import numpy as np
    >>> plan = NoisePlan(noise=1.0, clip=1.0, step=2**-20, numel=4, honest=3)
    >>> values = np.zeros(4, np.int64)                  # a clipped vector, in steps
    >>> add_noise(values, plan, random.SystemRandom())

    ``noise``: the multiplier that is accounted. ``honest``: how many of the summed vectors' members
    are sure to add their part. Raises ConfigError where a part would be too coarse.
    """

    noise: float
    clip: float
    step: float
    numel: int
    honest: int

    def __post_init__(self) -> None:
        if not (
            self.noise >= 0
            and self.clip > 0
            and self.step > 0
            and self.numel > 0
            and self.honest > 0
        ):
            raise ConfigError(
                "privacy: a plan of noise needs a bound, a step, elements and "
                "honest members above 0"
            )
        deviation = math.sqrt(self.share)
        if self.noise and deviation < LEAST_DEVIATION:
            why = (
                f"one member's noise deviates by {deviation:.3g} steps; {LEAST_DEVIATION:g} are "
                "needed to be as good as continuous noise"
            )
            raise ConfigError(
                f"privacy: a grid with steps of {self.step:g} is too coarse", key="step", why=why
            )

    @property
    def sensitivity(self) -> float:
        """What one client can change in the sum: its bound, and one step an element for rounding at
        worst.
        """
        return self.clip + self.step * math.sqrt(self.numel)

    @property
    def share(self) -> Fraction:
        """The variance of one member's noise, in squares of the step."""
        return Fraction(math.ceil((self.noise * self.sensitivity / self.step) ** 2), self.honest)


def add_noise(values: Integers, plan: NoisePlan, rng: random.Random) -> None:
    """Add one member's part to its vector of multiples of the step: int64 (numel,), in place.
    ``rng``: see `discrete_gaussian`.

    Raises ConfigError for a vector of another length.
    """
    if values.shape != (plan.numel,):
        raise ConfigError(
            f"privacy: {values.shape} values, noise for {plan.numel}",
            why="rounding is accounted by the number of elements",
        )
    values += discrete_gaussian(plan.share, plan.numel, rng)

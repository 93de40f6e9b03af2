"""The bound on the norm of what one client (or one example) contributes: what noise is measured by.

Fixed, or following a quantile of the norms (Andrew et al. 2021, arXiv 1905.03871): clients say with
one noisy bit whether they were clipped. The bound has the same bits on every machine, as all
members must scale by the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...collectives.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def clip(vector: Tensor, bound: float) -> bool:
    """Scale float32 (numel,) in place to a Euclidean norm of at most ``bound``; whether it was
    there already (what `AdaptiveBound` counts).

    Raises ConfigError for a bound that is not above 0, ValueError for a vector that is not finite:
    no factor makes that harmless.
    """
    import torch  # here: accounting needs none of it

    _check_bound(bound)
    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if not math.isfinite(norm):
        raise ValueError("a vector that is not finite cannot be clipped")
    if norm <= bound:
        return True
    # Rounding to float32 must not carry it past the bound.
    vector.mul_(bound / norm * (1 - 2.0**-20))
    return False


def _check_bound(bound: float) -> None:
    if not (bound > 0 and math.isfinite(bound)):
        raise ConfigError(
            f"privacy: the clipping bound is {bound}", key="clip", why="it is a norm above 0"
        )


FARTHEST = 2.0  # from the quantile that a noisy share may be


@dataclass(frozen=True, slots=True)
class AdaptiveBound:
    """A bound C that follows a quantile of the clients' norms:
    ``C ← C · exp(-rate · (b - quantile))``, b being the share of the clients whose vectors were
    within C. Immutable: `next` makes another.

    >>> bound = AdaptiveBound(1.0, quantile=0.5)
    >>> bound.next(within=-5.0, expected=10).bound      # nobody of ten was within: it rises
    1.1051709180756473

    ``count_noise``: standard deviation of the noise on the number of those within the bound; the
    paper's is a twentieth of the clients expected.
    """

    bound: float
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 0.0

    def __post_init__(self) -> None:
        _check_bound(self.bound)
        if not 0 <= self.quantile <= 1:
            raise ConfigError(
                f"privacy: the clipping quantile is {self.quantile}",
                key="quantile",
                why="it is a share: 0 to 1",
            )
        if not 0 < self.rate <= 1:
            raise ConfigError(
                f"privacy: the rate of the clipping bound is {self.rate}",
                key="rate",
                why="it must be above 0, at most 1",
            )

    def next(self, within: float, expected: float) -> AdaptiveBound:
        """The next round's. ``within``: the noisy sum of (1 if within the bound else 0) - ½ over
        the clients that took part (centring halves what one client changes); ``expected``: how many
        take part on average, a constant, as the true number would tell something."""
        # evenly: at 0 and 1 noise would pull it to the middle.
        off = min(FARTHEST, max(-FARTHEST, within / expected + 0.5 - self.quantile))
        return AdaptiveBound(
            self.bound * _exp(-self.rate * off), self.quantile, self.rate, self.count_noise
        )

    def vector_noise(self, noise: float) -> float:
        """The multiplier for the vectors that, together with the noisy count, costs as much as
        ``noise`` on the vectors alone (theorem 1: both Gaussians at once cost the sum of their 1 /
        2z², and the count changes by a half at most).

        Raises ConfigError where the count alone costs more.
        """
        twice = 2 * self.count_noise
        left = (
            1 / (noise * noise) - 1 / (twice * twice) if self.count_noise > 0 and noise > 0 else 0.0
        )
        if left <= 0:
            why = "the noise on the count must be above half the noise multiplier"
            raise ConfigError(
                f"privacy: a count with noise {self.count_noise} leaves nothing of {noise}",
                key="count_noise",
                why=why,
            )
        # And no power: members' grids follow from it, so it must have the same bits on every
        # machine.
        return 1 / math.sqrt(left)


def _exp(x: float) -> float:
    """exp of -2 to 2 by its series: IEEE operations only, so the same bits everywhere, which a
    library's does not promise.
    """
    term = total = 1.0
    for n in range(1, 31):
        term = term * x / n
        total = total + term
    return total

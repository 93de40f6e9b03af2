"""Whether a member's own progress is an outlier: EDiT's anomaly elimination (arXiv 2412.07210, its
pseudo-gradient penalty), which each member does for itself.

The norm of what it would contribute is held against the moving mean and deviation of its norms in
rounds before. An outlier is not contributed: the member drops it and goes back to the anchor, as
EDiT's worker of weight zero does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 5  # norms before anything is an outlier
WEIGHT = 0.02  # of the newest norm in the moving statistics, once they are of 50 (EDiT's alpha)
SHARE = 0.1  # of the mean that a deviation is at least: in a quiet run norms hardly differ
IN_A_ROW = 3  # outliers, after which they are what is usual now


@dataclass(slots=True)
class NormWatch:
    """Norms of one member's contributions. ``deviations`` above the mean: an outlier."""

    deviations: float
    mean: float = 0.0
    variance: float = 0.0
    count: int = 0
    outliers: int = 0  # in a row
    samples: int = 0  # of the newest whole turn

    def is_outlier(self, norm: float, samples: int) -> bool:
        """Whether this norm, of progress on so many samples, is one; else it is remembered. After
        `IN_A_ROW` in a row the statistics begin again with it: training has changed, and would
        stand still otherwise. Turns that others cut short are not looked at.
        """
        if 2 * samples < self.samples:
            return False
        self.samples = samples
        deviation = max(math.sqrt(self.variance), SHARE * self.mean)
        if self.count >= LEAST and norm > self.mean + self.deviations * deviation:
            self.outliers += 1
            if self.outliers <= IN_A_ROW:
                return True
            self.mean = self.variance = 0.0
            self.count = 0
        self.outliers = 0
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        step = norm - self.mean
        self.mean += weight * step
        self.variance = (1 - weight) * (self.variance + weight * step * step)
        return False

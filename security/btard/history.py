"""What earlier steps tell all peers alike: how far contributions lie from their aggregate, and so
where to clip, and what is too far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_low

STEPS = 50
TOO_FAR = 10.0  # times the usual distance: parts differ in scale, and looking costs vectors


class ResidualNorms:
    """Medians of residual norms per root of the length over the last steps."""

    def __init__(self, radius: float, size: int) -> None:
        """``radius``: for whole vectors of ``size`` values, until something was seen."""
        self._first = radius / math.sqrt(size)
        self._seen: deque[float] = deque(maxlen=STEPS)

    def radius(self, length: int) -> float:
        """Where residuals of a part of so many values are clipped."""
        return (median_low(self._seen) if self._seen else self._first) * math.sqrt(length)

    def too_far(self, length: int) -> float:
        """Delta max: more than half of the norms beyond it are looked into. Infinite before the
        first step.
        """
        return TOO_FAR * median_low(self._seen) * math.sqrt(length) if self._seen else math.inf

    def saw(self, norms: Iterable[tuple[float, int]]) -> None:
        """The norms of a step, each with the length of its part."""
        middle = median_low([norm / math.sqrt(length) for norm, length in norms])
        if middle > 0:
            self._seen.append(middle)

"""What the contributors of a round say of it, as its outer step and its log read that. How a member
says it: `readings`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ...collectives.group import Reading

Reported = Sequence[tuple[int, Reading]]
"""Weight and reading of each counted contribution of a round, in the order of reduction."""


def total(reported: Reported) -> int:
    """The weight of all counted contributions; 1 where nobody says it."""
    return sum(weight for weight, _ in reported) or 1


def median_lag(readings: Sequence[Reading]) -> float:
    """The median of the lags that were told, 0 where none was: half of the contributors have to lie
    to move it far.
    """
    return statistics.median(
        [reading.lag for reading in readings if reading.lag is not None] or [0.0]
    )

"""Results of simulations as one table and as curves, of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .study import StudyResult


def row(results: Sequence[StudyResult]) -> dict[str, Any]:
    """One method's line, the mean over its runs (seeds): the last accuracy, also of the site it is
    worst for, and what it took.
    """
    count = len(results)
    last = [result.points[-1] for result in results]
    return {
        "accuracy": sum(point.accuracy for point in last) / count,
        "accuracy_worst": min(point.accuracy for point in last),
        "site_accuracy_least": sum(min(result.by_site) for result in results) / count,
        "rounds": sum(point.round for point in last) / count,
        "bytes": sum(point.bytes for point in last) / count,
        "seconds": sum(point.seconds for point in last) / count,
        "idle_share": sum(result.idle for result in results) / count,
        "turns": sum(result.turns for result in results) / count,
        "dropped": sum(result.dropped for result in results) / count,
    }


def curve(result: StudyResult) -> list[dict[str, Any]]:
    """A run's points in the order of time; a loss that is no number is None."""
    return [
        asdict(point) | {"loss": point.loss if math.isfinite(point.loss) else None}
        for point in result.points
    ]

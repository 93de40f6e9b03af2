"""The durations of a run's rounds: of nodes, and of fleets that are simulated."""

from __future__ import annotations

from ...collectives.round import Timing

LEAST_TURN = 9.0  # of ten parts of the time, one at most goes into exchanges that one hastens


def durations(weight: float = 1.0) -> Timing:
    """``weight``: bytes that one byte of the vector stands for."""
    return Timing(least_turn=LEAST_TURN, weight=weight)

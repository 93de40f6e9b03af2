"""The durations of a run's rounds: of nodes, and of fleets that are simulated."""

from __future__ import annotations

from ...collectives.round import Timing
from ...collectives.swarm import RunSettings
from ...optim.rounds.slow import TWICE

LEAST_TURN = 9.0  # of ten parts of the time, one at most goes into exchanges that one hastens
EVICT_S = 10.0
SPARE = 0.005
"""Of the others' time, what uploads over a link that is much thinner than theirs may take. They
wait about as long again for the end of its member's step."""


def durations(settings: RunSettings, weight: float = 1.0) -> Timing:
    """``weight``: bytes that one byte of the vector stands for.

    However long steps are, the others may end theirs after the fastest, whose round they would miss
    else; whose steps are more than twice as long stands aside by itself (`optim.rounds.slow`).
    """
    share = TWICE / settings.sync_every if settings.sync_every else 0.0
    return Timing(least_turn=LEAST_TURN, evict_s=EVICT_S, step_share=share, weight=weight)


def spare_of(settings: RunSettings) -> float:
    """What part of the time the rounds of one log may wait for a member's thin link; 0: as long as
    it takes. With overlap nobody waits for it while it is in time.
    """
    waits = settings.overlap == "none" and settings.may_be_without
    return SPARE / settings.fragments if waits else 0.0

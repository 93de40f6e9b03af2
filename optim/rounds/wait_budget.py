"""How long a script waits for a round."""

from __future__ import annotations

import math
from collections import deque

from ...collectives.round_settings import RoundSettings
from .schedule import FLOOR_S

# Before any round was measured: long enough for a slow first link, short enough to notice.
UNMEASURED_DEADLINE_S = 60.0


CEILING_S = 600.0


FACTOR = 4.0


REMEMBERED = 8


class WaitBudget:
    """How long a script waits for a round before it trains on.

    The manifest's ``deadline_s`` if it gives one; else 4 times the slowest of the last 8 rounds,
    between 5 s and 10 minutes; 60 s before anything was measured. It always ends: no wait is for
    ever. But in a run of sites (``whole``): a site that is done makes no more steps, so it waits
    until the round is over, and says for whom.
    """

    def __init__(self, deadline_s: float | None, *, whole: bool = False) -> None:
        self._fixed_s = math.inf if whole else deadline_s
        self._measured: deque[float] = deque(maxlen=REMEMBERED)

    @classmethod
    def of(cls, settings: RoundSettings) -> WaitBudget:
        """That of a run."""
        return cls(settings.deadline_s, whole=settings.work is not None)

    def measured(self, elapsed_s: float) -> None:
        """A round took this long from the freezing of the contribution to the decision."""
        self._measured.append(elapsed_s)

    @property
    def seconds(self) -> float:
        """The wait to allow now."""
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._measured:
            return UNMEASURED_DEADLINE_S
        return min(max(FACTOR * max(self._measured), FLOOR_S), CEILING_S)

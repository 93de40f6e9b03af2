"""What the round of a free-standing operation has instead of a run's: a journal that is not kept, and perhaps all the time of the world."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ...collectives.group import Entry
from ...collectives.round import MemoryJournal, Timing


def patient(timing: Timing) -> Timing:
    """The same durations, but everybody is waited for."""
    return msgspec.structs.replace(timing, ready_grace_min_s=math.inf, ready_grace_s=math.inf)


class VolatileJournal(MemoryJournal):
    """Tells before the first promise or vote: from then on forgetting what was said could decide twice."""

    def __init__(self, incarnation: int, spend: Callable[[], None]) -> None:
        super().__init__(incarnation)
        self.spent = False
        self._spend = spend

    def promise(self, ballot: int) -> None:
        """Record a promise."""
        self._use()
        super().promise(ballot)

    def accept(self, ballot: int, entry: Entry) -> None:
        """Record a vote."""
        self._use()
        super().accept(ballot, entry)

    def _use(self) -> None:
        if not self.spent:
            self.spent = True
            self._spend()

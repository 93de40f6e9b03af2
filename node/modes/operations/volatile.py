"""Rounds of operations' logs: their votes are volatile, and there may be no limit to how long they
wait for contributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ....collectives.group import Entry, Vote
from ....collectives.round import MemoryJournal, Timing


def patient(timing: Timing) -> Timing:
    """The same durations, but everybody is waited for."""
    return msgspec.structs.replace(timing, ready_grace_min_s=math.inf, ready_grace_s=math.inf)


class VolatileJournal(MemoryJournal):
    """Called before the first promise or vote: forgetting one could decide twice."""

    def __init__(self, incarnation: int, spend: Callable[[], None]) -> None:
        super().__init__(incarnation)
        self.spent = False
        self._spend = spend

    def promise(self, ballot: int) -> None:
        self._use()
        super().promise(ballot)

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        self._use()
        super().accept(ballot, entry, proof)

    def _use(self) -> None:
        if not self.spent:
            self._spend()  # may raise StorageError: tried again before anything is said
            self.spent = True

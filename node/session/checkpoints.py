"""When the state is written to disk, and which results are kept for those that lag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...collectives.group import Certified
from ...collectives.round_settings import MOST_REPLAYED

if TYPE_CHECKING:
    from .session import Session

# The least time between two attempts that the disk refuses, and how many times an attempt's.
AGAIN_S, AGAIN_TIMES = 10.0, 4


class Checkpoints:
    """Of one session: a checkpoint every so many entries, and the last of a run."""

    def __init__(self, session: Session, every: int) -> None:
        self._session, self._every = session, min(every, MOST_REPLAYED)
        self._writing, self._again_at = False, -1e9
        self._first_applied: int | None = None  # the entry that the state here was of at first

    def installed(self) -> None:
        """The state here was fetched."""
        self._first_applied = None

    def decided(self, certified: Certified) -> None:
        """An entry is applied: write the state beside, where it is its turn."""
        session = self._session
        if certified.entry.round % self._every == 0 or session.completed == session.settings.rounds:
            self._write(certified)

    def _write(self, certified: Certified, *, late: bool = False) -> None:
        session, replica = self._session, self._session.replica
        rounds, begun = session.rounds(certified.entry.round), session.clock()
        assert replica is not None
        self._writing = True

        def ended(now: float, _: None) -> None:
            self._writing = False
            self._again_at = now + max(AGAIN_S, AGAIN_TIMES * (now - begun))
            if late and session.machine is not None:
                self.forget_results()  # the next entry, which would do it, may wait for their room

        session.ports.offload(
            lambda: session.ports.storage.states.checkpoint(replica, certified, rounds), ended
        )

    def forget_results(self) -> None:
        """Results that neither a checkpoint nor a member that lags a little needs."""
        session = self._session
        assert session.machine is not None
        session.ports.storage.results.forget(session.machine.round - session.timing.keep_rounds)

    def retry(self, now: float) -> None:
        """Write the checkpoints that the disk refused when they were due, or newer ones.

        No result newer than the older of the last two may be forgotten, and there is room for
        `results.MAX_FILES` of them: without this, a disk that was full for so many rounds would
        keep the run from ever going on, however empty it is now.
        """
        session = self._session
        machine, replica = session.machine, session.replica
        if machine is None or replica is None or machine.open.applying or session.installing.busy:
            return
        if self._first_applied is None:  # of a state that was fetched, no checkpoint was due yet
            self._first_applied = replica.applied
        written = max(session.ports.storage.states.checkpointed(), self._first_applied)
        due = written + 2 * self._every
        waited = not self._writing and now >= self._again_at
        if replica.applied > due and waited:
            self._write(machine.journal.entries[replica.applied], late=True)

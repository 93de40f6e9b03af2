"""What is said waits until what it depends on is on the medium: the write-ahead rule of a run, for
whoever drives its session.

A session writes promises, votes and entries, and sends messages that tell of them. A message is
handed to the network only once every record that was written before it has been forced to the
medium. So what a power cut takes was never said to anybody, and a member that comes back with what
its medium holds is the same voter as before. Messages stay in order; all that wait for one sync are
released together, and everything that was written while a sync was under way shares the next one (a
group commit).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .ports import Storage


class Barrier:
    """Of one run at one node. ``persist`` runs the sync in a thread (`SessionPorts.persist`)."""

    def __init__(
        self,
        storages: Sequence[Storage],
        persist: Callable[[Callable[[], None], Callable[[float, None], None]], None],
    ) -> None:
        self._storages, self._persist = storages, persist
        self._on_medium = 0  # of all records of all storages, so many
        self._held = deque[tuple[int, Callable[[float], None]]]()
        self._syncing = False

    def hold(self, act: Callable[[float], None]) -> bool:
        """Do this once all that was written is on the medium. False: it is, nothing waits."""
        written = self._written()
        if not self._held and written <= self._on_medium:
            return False
        self._held.append((written, act))
        self._sync()
        return True

    def _written(self) -> int:
        return sum(storage.written for storage in self._storages)

    def _sync(self) -> None:
        if self._syncing or not self._held:
            return
        self._syncing, covered = True, self._written()

        def synced(now: float, _: None) -> None:
            self._syncing, self._on_medium = False, max(self._on_medium, covered)
            while self._held and self._held[0][0] <= self._on_medium:
                self._held.popleft()[1](now)
            self._sync()

        self._persist(self._force, synced)

    def _force(self) -> None:
        for storage in self._storages:
            storage.sync()

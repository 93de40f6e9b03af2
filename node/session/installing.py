"""A fetched state replaces the own one: beside the control loop, never while an entry is being applied, again where the disk was full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...collectives.errors import StorageError
from ...collectives.layout import Layout

if TYPE_CHECKING:
    from .session import Session


class Installing:
    """Takes over verified states for a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.under_way = False  # nothing may be applied meanwhile
        self._half_done = False
        self._waiting: tuple[int, bytes, Layout, memoryview] | None = (
            None  # it came while an entry was being applied, or found no room
        )

    @property
    def busy(self) -> bool:
        """Whether a state is being installed, or waits for that."""
        return self.under_way or self._waiting is not None

    def arrived(
        self, now: float, round_: int, root: bytes, layout: Layout, data: memoryview
    ) -> None:
        """A verified state was fetched: install it, then take over the entries up to it."""
        session, machine = self.session, self.session.machine
        assert machine is not None
        certified = session.actions.entry_at(round_)
        if self.under_way or certified is None or not session.actions.wants_state(round_):
            return session.transfer.seek_state() if machine.stateless else None
        if machine.open.applying:  # not both at once: `retry` comes back to it
            self._waiting = (round_, root, layout, data)
            return None
        storage, rounds = session.ports.storage, session.rounds(round_)
        replica = session.replica or storage.replica(layout, restore=False)
        self.under_way = True
        session.branching.halt()  # the entry after its base is certified: a round of it would be added to the state that comes

        def install() -> None:
            session.branching.abandon()
            replica.install(data, round_)
            storage.checkpoint(replica, certified, rounds)

        def installed(later: float, _: None) -> None:
            try:
                storage.save_layout(layout)
                replica.publish(round_)
                session.adopt(later, round_, root)
            except StorageError:
                self._waiting, self._half_done = (
                    (round_, root, layout, data),
                    True,
                )  # tried again; until then nothing else is applied
                raise
            self.under_way = False
            session.installed(later, replica, round_)

        session.ports.offload(install, installed)
        return None

    def retry(self, now: float) -> None:
        """What had to wait for another job, or for room on the disk."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if self._half_done:
                self.under_way = self._half_done = False
            self.arrived(now, *waiting)

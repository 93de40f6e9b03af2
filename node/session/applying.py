"""A decided entry is applied here: it is recorded, its state is hashed and saved beside, and the
next round opens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...collectives.digest import merkle_root
from ...collectives.group import Certified, Entry
from ..manifest import MOST_REPLAYED
from . import events as ev

if TYPE_CHECKING:
    from .session import Session


class Applying:
    """What follows the outer step of an entry."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._unrecorded: Entry | None = None  # applied, but the disk was full

    @property
    def unrecorded(self) -> bool:
        """Whether an entry is applied that could not be recorded yet."""
        return self._unrecorded is not None

    def applied(self, now: float, entry: Entry) -> None:
        """The outer step of the decided entry is done: the next round opens. Raises StorageError:
        then `retry` comes back to it.
        """
        session, machine, replica = self.session, self.session.machine, self.session.replica
        assert machine is not None
        assert replica is not None
        replica.publish(entry.round)
        session.ports.exchange.close_round(session.log, entry.round)
        decided, self._unrecorded = machine.open.decided, entry
        machine.on_applied(now)
        self._unrecorded = None
        session.transfer.drop(machine.round)
        session.transfer.seeking_state = False  # replay goes on; a Catch says if it cannot
        session.actions.clear()
        self.hash_state(machine.round)
        if decided and (
            entry.round % min(session.checkpoint_every, MOST_REPLAYED) == 0
            or session.completed == session.settings.rounds
        ):
            self._checkpoint(decided)
        session.ports.storage.forget_results(machine.round - session.timing.keep_rounds)
        session.opened(now)
        session.resume(now, machine)

    def retry(self, now: float) -> None:
        """What had to wait for room on the disk."""
        if self._unrecorded is not None:
            self.session.applied(now, self._unrecorded)

    def hash_state(self, round_: int) -> None:
        """Compute the Merkle root of the state before ``round_``, beside."""
        session, replica = self.session, self.session.replica
        assert replica is not None

        def hashed(now: float, hashes: list[bytes]) -> None:
            session.hashed(now, round_, merkle_root(hashes))

        session.ports.offload(replica.hashes, hashed)

    def _checkpoint(self, certified: Certified) -> None:
        session, replica = self.session, self.session.replica
        rounds = session.rounds(certified.entry.round)
        assert replica is not None
        session.ports.offload(
            lambda: session.ports.storage.checkpoint(replica, certified, rounds),
            lambda now, _: None,
        )

    def diverged(self, entry: Entry, mine: bytes) -> None:
        """Our state is not the one the others decided on: it must never happen; fetch the state
        anew.
        """
        session = self.session
        if not session.transfer.seeking_state:
            session.ports.emit(ev.StateDiverged(entry.round, mine, entry.base_state))
            session.transfer.seek_state()

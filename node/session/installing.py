"""A fetched state replaces the own one: beside the control loop, never while an entry is being
applied, again where the disk was full.

Where the journal knows entries that follow the state (the last life's state is lost, or results
that followed its checkpoint are), their results are fetched one after the other and applied, before
the member takes part again. It is the same life: what it promised and voted is known.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...collectives.digest import merkle_root
from ...collectives.errors import StorageError
from ...collectives.group import Entry
from ...collectives.layout import Layout
from .replica import ModelReplica
from .serving import matches

if TYPE_CHECKING:
    from .session import Session


class Installing:
    """Takes over verified states for a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.under_way = False  # nothing may be applied meanwhile
        self._half_done = False
        self._applying = False
        # Behind the journal, on its way to the journal's end.
        self._replica: ModelReplica | None = None
        # It came while an entry was being applied, or found no room.
        self._waiting: tuple[int, bytes, Layout, memoryview] | None = None

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
        replica = session.replica or self._replica or storage.states.replica(layout, restore=False)
        self.under_way = True

        def install() -> None:
            replica.install(data, round_)
            storage.states.checkpoint(replica, certified, rounds)

        def installed(later: float, _: None) -> None:
            try:
                storage.states.save_layout(layout)
                replica.publish(round_)
                if round_ + 1 < machine.round:
                    self.under_way = False
                    storage.installed(round_)
                    return self.replay(later, replica)
                session.adopt(later, round_, root)
                self._replica = None  # this state is the journal's end: nothing is left to replay
            except StorageError:
                # Tried again; until then nothing else is applied.
                self._waiting = (round_, root, layout, data)
                self._half_done = True
                raise
            self.under_way = False
            storage.installed(round_)
            return session.installed(later, replica)

        session.ports.offload(install, installed)
        return None

    # ---- from a state to the end of the journal
    def replay(self, now: float, replica: ModelReplica) -> None:
        """Apply the journal's next entry to the state, or take part again where there is none."""
        session, machine = self.session, self.session.machine
        assert machine is not None
        if replica.applied + 1 == machine.round:
            self._replica = None
            return session.ports.offload(replica.hashes, partial(self._replayed, replica))
        self._replica, entry = replica, self._next(replica)
        data = session.ports.storage.results.kept(entry) if entry.contributors else None
        if not entry.contributors or (data is not None and matches(entry, data)):
            return self._apply(replica, entry, data)
        votes = machine.journal.entries[entry.round].votes
        holders = [*(vote.member.peer for vote in votes), *session.config_peers()]
        session.transfer.fetch_result(
            now, entry, [peer for peer in dict.fromkeys(holders) if peer != session.me]
        )
        return None

    def _next(self, replica: ModelReplica) -> Entry:
        machine = self.session.machine
        assert machine is not None
        return machine.journal.entries[replica.applied + 1].entry

    def result_arrived(self, entry: Entry, data: memoryview) -> None:
        """Verified bytes of an entry that is waited for."""
        if self._replica is not None and entry.round == self._replica.applied + 1:
            self.session.ports.storage.results.keep(entry, data)
            self._apply(self._replica, entry, data)

    def lacks(self, entry: Entry) -> bool:
        """Whether the state cannot advance without this result: then a newer state helps."""
        return self._replica is not None and entry.round == self._replica.applied + 1

    def _apply(self, replica: ModelReplica, entry: Entry, data: memoryview | None) -> None:
        def applied(now: float, _: None) -> None:
            self._applying = False
            replica.publish(entry.round)
            if self._replica is replica and not self.under_way:
                self.replay(now, replica)

        self._applying = True
        self.session.ports.offload(lambda: replica.apply(entry, data), applied)

    def _replayed(self, replica: ModelReplica, now: float, hashes: list[bytes]) -> None:
        session = self.session
        session.adopt(now, replica.applied, merkle_root(hashes))
        session.transfer.seeking_state = False
        session.installed(now, replica)

    def retry(self, now: float) -> None:
        """What had to wait for another job, for disk space, or for a member with a result."""
        if self._replica is not None and not (self.busy or self._applying):
            entry = self._next(self._replica)
            if entry.hash() not in self.session.transfer.fetching:
                self.replay(now, self._replica)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if self._half_done:
                self.under_way = self._half_done = False
            self.arrived(now, *waiting)

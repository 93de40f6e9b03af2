"""Answering other members: results of past rounds, and the state, from a copy so that nobody is
paused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...collectives import messages as m
from ...collectives.codecs.codec import Chunking
from ...collectives.digest import chunk_hash, merkle_root
from ...collectives.group import Entry, Plan
from ...collectives.identifiers import PeerId
from .replica import state_chunk_bytes
from .transfer import part_digests

if TYPE_CHECKING:
    from ...collectives.round import RoundMachine
    from .session import Session

SNAPSHOT_IDLE_S = 10.0  # a snapshot nobody has asked for this long is dropped
# The newest is offered; the one before it is still served to those who are fetching it.
SNAPSHOTS = 2


def result_hashes(entry: Plan | Entry, data: memoryview) -> list[bytes]:
    """blake3 of each encoded chunk of a result."""
    return [chunk_hash(chunk) for chunk in chunking_of(entry).views(data)]


def chunking_of(entry: Plan | Entry) -> Chunking:
    """How the result of an entry lies in its bytes."""
    return Chunking(entry.codec, entry.numel, entry.chunk_elements).results


def matches(entry: Entry, data: memoryview) -> bool:
    """Whether kept bytes are the result of the entry."""
    return (
        len(data) == chunking_of(entry).nbytes
        and part_digests(entry, result_hashes(entry, data)) == entry.part_digests
    )


@dataclass(eq=False)
class Snapshot:
    """A state being served."""

    round: int
    root: bytes
    hashes: list[bytes]
    data: memoryview
    used_at: float


class ServedResult(NamedTuple):
    """A result that is served: of which log and round, and the hashes of its chunks, joined; empty
    where nobody has asked for them yet.
    """

    log: str
    round: int
    hashes: bytes


class Serving:
    """What this member serves of one run. Bounded: two snapshots, and results as long as storage
    keeps them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.snapshots: list[Snapshot] = []  # oldest first
        self._making = False
        self._asking: set[PeerId] = set()
        self._asking_certified: dict[PeerId, m.AskState] = {}
        self._provided: dict[bytes, ServedResult] = {}
        self._hashing: dict[bytes, set[PeerId]] = {}  # by name: who waits for its hashes

    # ---- recovery
    def recall(self, machine: RoundMachine) -> None:
        """After a restart: the bytes of the entry voted for in the open round."""
        for voted in (machine.journal.echoed, machine.journal.accepted):
            entry = voted[1] if voted is not None else None
            data = (
                self.session.ports.storage.results.kept(entry)
                if entry is not None and entry.contributors
                else None
            )
            if entry is not None and data is not None and matches(entry, data):
                self.session.actions.results[entry.part_digests] = data
                machine.on_kept(entry)

    # ---- results
    def find(self, name: bytes) -> tuple[Entry, memoryview] | None:
        """An entry of the run's log by hash, with its result bytes, if both are here."""
        session, machine = self.session, self.session.machine
        if machine is None:
            return None
        known = machine.open.known.get(name)
        if known is not None:
            data = session.actions.results.get(known.part_digests)
            # Voted for in an earlier life, and no state is here.
            if data is None and machine.sealing.active:
                data = session.ports.storage.results.kept(known)
            return (known, data) if data is not None else None
        for certified in machine.journal.entries[max(0, session.ports.storage.results.first()) :]:
            if certified.entry.hash() == name:
                data = session.ports.storage.results.kept(certified.entry)
                return (certified.entry, data) if data is not None else None
        return None

    def on_get(self, now: float, peer: PeerId, body: m.Get) -> None:
        """A member asks for chunk hashes, or for chunks."""
        snapshot = next(
            (snapshot for snapshot in self.snapshots if snapshot.root == body.name), None
        )
        if snapshot is not None:
            snapshot.used_at = now
            self.session.ports.content.send_blob(peer, body.name, body.chunks)
        elif body.chunks and body.name in self._provided:
            self.session.ports.content.send_blob(peer, body.name, body.chunks)
        elif (known := self._provided.get(body.name)) is not None and known.hashes:
            self.session.actions.tell(peer, known.round, m.Offer(body.name, known.hashes, None))
        elif body.name in self._hashing:
            self._hashing[body.name].add(peer)
        elif (found := self.session.find(body.name)) is None:
            self.session.actions.tell(peer, 0, m.Gone(body.name))
        elif body.chunks:
            self._provide(body.name, *found)
            self.session.ports.content.send_blob(peer, body.name, body.chunks)
        else:
            self._offer_result(now, peer, body.name, *found)

    def _offer_result(
        self, now: float, peer: PeerId, name: bytes, entry: Entry, data: memoryview
    ) -> None:
        """Hash it once, whoever asks for it and how often."""
        budgets = self.session.budgets

        def hashed(now: float, hashes: list[bytes]) -> None:
            budgets.end_job(peer)
            joined = b"".join(hashes)
            self._provide(name, entry, data, joined)
            for each in sorted(self._hashing.pop(name, ())):
                self.session.actions.tell(each, entry.round, m.Offer(name, joined, None))

        if not budgets.begin_job(now, peer, "get"):
            return
        if self.session.ports.serve(lambda: result_hashes(entry, data), hashed):
            self._hashing[name] = {peer}
        else:
            budgets.end_job(peer)
            budgets.refuse(now, peer, "get")

    def _provide(self, name: bytes, entry: Entry, data: memoryview, hashes: bytes = b"") -> None:
        self.session.ports.content.provide(name, data, chunking_of(entry).bounds)
        self._provided[name] = ServedResult(entry.log, entry.round, hashes)

    # ---- state
    def on_ask_state(self, now: float, peer: PeerId, body: m.AskState) -> None:
        """A member asks which state it can have; ``certified``: it was offered one that nothing
        certifies yet.
        """
        session = self.session
        if body.certified and session.round > 0 and session.replica is not None:
            self._asking_certified[peer] = body
            if len(self._asking_certified) == 1:
                self._offer_saved()
            return None
        if session.round < 0 or session.replica is None:
            return None
        current = self.snapshots[-1] if self.snapshots else None
        if (
            current
            and current.round >= body.least
            and session.round - current.round <= session.timing.keep_rounds // 2
        ):  # what it lacks can be replayed
            return self._offer_state(peer, current)
        self._asking.add(peer)
        if not self._making:
            self._making = True
            replica = session.replica

            def copy() -> tuple[int, memoryview]:  # in turn with the outer step, which writes to it
                return replica.applied, replica.snapshot()

            session.ports.offload(copy, self._copied)
        return None

    def _copied(self, now: float, made: tuple[int, memoryview]) -> None:
        round_, data = made
        assert self.session.replica is not None
        step = state_chunk_bytes(self.session.replica.layout.numel)

        def hashed() -> tuple[int, memoryview, list[bytes]]:
            return (
                round_,
                data,
                [chunk_hash(data[at : at + step]) for at in range(0, len(data), step)],
            )

        if not self.session.ports.serve(hashed, self._hashed):
            self._making = False  # whoever still wants one asks again
            self._asking.clear()

    def _hashed(self, now: float, made: tuple[int, memoryview, list[bytes]]) -> None:
        self._making = False
        round_, data, hashes = made
        made_now = Snapshot(round_, merkle_root(hashes), hashes, data, now)
        others = [snapshot for snapshot in self.snapshots if snapshot.root != made_now.root]
        self._keep([*others[-(SNAPSHOTS - 1) :], made_now])
        assert self.session.replica is not None
        self.session.ports.content.provide(
            made_now.root, data, state_chunk_bytes(self.session.replica.layout.numel)
        )
        asking, self._asking = self._asking, set()
        for peer in sorted(asking):
            self._offer_state(peer, made_now)

    def _offer_saved(self) -> None:
        """Offer the newest state on disk that a later entry names as the state before it: results
        since it are kept, too.
        """
        session, replica = self.session, self.session.replica
        assert replica is not None
        before = session.round
        step = state_chunk_bytes(replica.layout.numel)

        def read() -> Snapshot | None:
            found = session.ports.storage.states.saved(before)
            if found is None:
                return None
            round_, data = found
            hashes = [chunk_hash(data[at : at + step]) for at in range(0, len(data), step)]
            return Snapshot(round_, merkle_root(hashes), hashes, data, 0.0)

        def offer(now: float, made: Snapshot | None) -> None:
            asking, self._asking_certified = self._asking_certified, {}
            if made is not None:
                made.used_at = now
                known = [snapshot for snapshot in self.snapshots if snapshot.root != made.root]
                self._keep([made, *known[-(SNAPSHOTS - 1) :]])
                session.ports.content.provide(made.root, made.data, step)
            for peer, body in sorted(asking.items()):
                if made is not None and made.round >= body.least:
                    self._offer_state(peer, made)
                else:
                    self.on_ask_state(now, peer, m.AskState(least=body.least))

        oldest = session.ports.storage.results.first() - 1
        kept = next((s for s in self.snapshots if oldest <= s.round < before), None)
        if kept is not None:
            offer(session.clock(), kept)
        elif not session.ports.serve(read, offer):
            self._asking_certified.clear()  # whoever still wants one asks again

    def _offer_state(self, peer: PeerId, snapshot: Snapshot) -> None:
        assert self.session.replica is not None
        self.session.actions.tell(
            peer,
            snapshot.round,
            m.Offer(snapshot.root, b"".join(snapshot.hashes), self.session.replica.layout),
        )

    def _keep(self, keep: list[Snapshot]) -> None:
        for snapshot in self.snapshots:
            if snapshot not in keep:
                self.session.ports.content.withdraw(snapshot.root)
        self.snapshots = keep

    def tick(self, now: float) -> None:
        """Drop what nobody needs any more."""
        if any(now - snapshot.used_at > SNAPSHOT_IDLE_S for snapshot in self.snapshots):
            self._keep(
                [
                    snapshot
                    for snapshot in self.snapshots
                    if now - snapshot.used_at <= SNAPSHOT_IDLE_S
                ]
            )
        if self._provided:
            oldest = self.session.ports.storage.results.first()
            for name in [
                name
                for name, known in self._provided.items()
                if known.log == self.session.log and known.round < oldest
            ]:
                self.withdraw(name)

    def drop_all(self) -> None:
        """Serve nothing any more."""
        self._keep([])
        for name in list(self._provided):
            self.withdraw(name)

    def withdraw(self, name: bytes) -> None:
        """Serve this result no longer."""
        if self._provided.pop(name, None) is not None:
            self.session.ports.content.withdraw(name)

"""What the main log's RoundMachine and Transfer ask of the session."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...collectives import messages as m
from ...collectives.errors import StorageError
from ...collectives.exchange import ResultComplete
from ...collectives.group import Certified, Entry, Member, Plan
from ...collectives.identifiers import PeerId
from ...collectives.layout import Layout
from ...collectives.pace import Pace
from ...collectives.round.faults import Proofs
from ...collectives.round.own_results import NO_RESULTS, OwnResults
from . import events as ev
from .ports import ContentPlane, DataPlane
from .serving import result_hashes
from .transfer import part_digests
from .watches import RoundTimes

if TYPE_CHECKING:
    from .session import Session

ROUND_PREFIX = b"R"


def main_log(run: str) -> str:
    """Name of a run's log: unique among all logs of a node."""
    return f"main/{run}"[:64]


class LogActions:
    """What a Transfer asks of the main log's session, and `RoundActions` for that log."""

    def __init__(self, session: Session, proofs: Proofs) -> None:
        self.session, self.proofs = session, proofs
        # Complete result bytes of the open round, by part digests.
        self.results: dict[tuple[bytes, ...], memoryview] = {}
        # What contributions were weighed with, by the same.
        self.weights: dict[tuple[bytes, ...], tuple[float, ...]] = {}
        self.storing: dict[tuple[bytes, ...], int] = {}  # on the way to the medium, for a round
        self._unstored: dict[tuple[bytes, ...], tuple[Plan | Entry, memoryview]] = {}
        self._timelines: dict[int, RoundTimes] = {}  # of the open round and the next
        self._decided_at = 0.0
        self._said: tuple[m.Envelope | None, bytes] = None, b""

    @property
    def exchange(self) -> DataPlane:
        return self.session.ports.exchange

    @property
    def content(self) -> ContentPlane:
        return self.session.ports.content

    @property
    def own_results(self) -> OwnResults:
        before = self.session.pre_round
        return NO_RESULTS if before is None else before.results

    # ---- messages
    def send(self, peer: PeerId, log: str, round_: int, body: m.Body) -> None:
        """Send a control message; one to oneself is delivered after the present input."""
        session = self.session
        if session.membership.is_doubled:
            return  # nothing is said in the name of a key that two processes have
        if log == session.log:
            self.timeline(round_).sent(session.clock(), session.me, body)
        incarnation = session.machine.me.incarnation if session.machine else 0
        envelope = m.Envelope(log, round_, incarnation, body)
        # Its own vote counts from when the others' would: once it is on the medium.
        if peer == session.me:
            if not session.ports.after_sync(lambda now: session.hear_own(now, envelope)):
                session.loop.append(envelope)
        else:
            session.ports.send(peer, self._encoded(envelope))

    def _encoded(self, envelope: m.Envelope) -> bytes:
        """On the wire. What is said to all is encoded once."""
        last, data = self._said
        if (
            last is not None
            and last.body is envelope.body
            and (last.log, last.round, last.incarnation)
            == (envelope.log, envelope.round, envelope.incarnation)
        ):
            return data
        data = ROUND_PREFIX + m.encode(envelope)
        self._said = envelope, data
        return data

    def tell(self, peer: PeerId, round_: int, body: m.Body) -> None:
        """Send on the main log."""
        self.send(peer, self.session.log, round_, body)

    def timeline(self, round_: int) -> RoundTimes:
        """That of a main log's round; one nobody looks at for rounds not open soon."""
        machine = self.session.machine
        if machine is None or not machine.round <= round_ <= machine.round + 1:
            return RoundTimes()
        found = self._timelines.get(round_)
        if found is None:
            found = self._timelines[round_] = self.session.modes.times()
        return found

    # ---- data plane
    def on_result(self, now: float, event: ResultComplete) -> None:
        """The data plane has the whole result of a plan."""
        machine = self.session.machine
        if (
            machine is not None
            and machine.open.plan is not None
            and machine.open.plan.plan_id == event.plan_id
        ):
            if self.own_results.on_result(machine.open.plan, event.digests):
                return
            self.weights[event.digests] = event.weights
            self.session.measures.weighed(event.digests, event.spread)
            self.timeline(machine.round).reduced(now, event.since)
            self.store(now, machine.open.plan, event.digests, event.data)

    def store(
        self,
        now: float,
        bound: Plan | Entry,
        digests: tuple[bytes, ...],
        data: memoryview,
        *,
        again: bool = False,
    ) -> None:
        """Result bytes of the open round are here, of this plan or entry: once they are on the
        medium, too, they may be voted on. ``again``: after the medium has refused them.
        """
        session, storage = self.session, self.session.ports.storage
        machine = session.machine
        assert machine is not None
        round_ = machine.round
        if not storage.results.forces:
            self.results[digests] = data
            return machine.on_result(now, bound, digests)

        def force() -> StorageError | bool:
            if again and part_digests(bound, result_hashes(bound, data)) != digests:
                return False  # what it could not write, the system may have dropped from memory
            try:
                storage.results.force(session.log, round_, digests, data)
            except StorageError as error:  # no room: `retry` comes back to it
                return error
            return True

        def forced(later: float, stored: StorageError | bool) -> None:
            self.storing.pop(digests, None)
            if machine.round != round_ or stored is False:
                return
            if isinstance(stored, StorageError):
                self._unstored[digests] = (bound, data)
                raise stored
            self.results[digests] = data
            session.stored(later, bound, digests)

        self.storing[digests] = round_
        return session.ports.persist(force, forced)

    def retry(self, now: float) -> None:
        """Results for which there was no room on the disk."""
        unstored, self._unstored = self._unstored, {}
        for digests, (bound, data) in unstored.items():
            self.store(now, bound, digests, data, again=True)

    def clear(self) -> None:
        """Another round opens."""
        self.results.clear()
        self.weights.clear()
        self._unstored.clear()

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        """Let the data plane carry out a plan."""
        machine = self.session.machine
        assert machine is not None
        self.timeline(plan.round).planned(self.session.clock(), plan)
        self.session.ports.emit(ev.PlanTaken(plan, machine.convener_of(plan.ballot).peer))
        if not self.own_results.execute(plan):
            self.exchange.execute(plan, audience)

    def report(self, plan_id: bytes) -> None:
        self.exchange.report(plan_id)

    def resend_parts(self, peer: PeerId, plan_id: bytes, cid: bytes, spans: m.Spans) -> None:
        self.exchange.resend_parts(peer, plan_id, cid, spans)

    def resend_results(self, peer: PeerId, plan_id: bytes, spans: m.Spans) -> None:
        self.exchange.resend_results(peer, plan_id, spans)

    def fetch_result(self, entry: Entry, holders: Sequence[PeerId]) -> None:
        """Fetch result bytes from any holder."""
        if self.storing.get(entry.part_digests) == entry.round:
            return  # it is here, and waits for the disk only
        if not self.own_results.may_fetch(entry):
            return
        self.session.transfer.fetch_result(
            self.session.clock(), entry, [peer for peer in holders if peer != self.session.me]
        )

    # ---- state
    def keep(self, entry: Entry) -> None:
        """The entry is about to be voted on."""
        data = self.results.get(entry.part_digests)
        if data is not None:
            self.session.ports.storage.results.keep(entry, data)

    def apply(self, entry: Entry) -> None:
        """Outer step of a decided entry, offloaded."""
        session = self.session
        replica, machine = session.replica, session.machine
        assert replica is not None
        assert machine is not None
        if session.installing.under_way:
            machine.on_not_applied()
            return None
        if machine.root is not None and machine.root != entry.base_state:
            machine.on_not_applied()
            return session.diverged(entry, machine.root)
        data = self.results.get(entry.part_digests) if entry.contributors else None
        self._decided_at = session.clock()

        def step() -> StorageError | None:
            try:
                replica.apply(entry, data)
            except StorageError as error:  # no memory for another generation
                return error
            return None

        def stepped(now: float, error: StorageError | None) -> None:
            if error is not None:
                machine.on_not_applied()
                raise error
            session.applied(now, entry)

        try:
            self.keep(entry)
        except StorageError:
            machine.on_not_applied()
            raise
        session.ports.offload(step, stepped)
        return None

    def decided(self, certified: Certified, counted: bool) -> None:
        """The entry is applied."""
        session, machine = self.session, self.session.machine
        assert machine is not None
        timeline = self._timelines.pop(certified.entry.round, None)
        self._timelines = {
            round_: kept
            for round_, kept in self._timelines.items()
            if round_ > certified.entry.round
        }
        timed = (
            timeline.finish(session.clock(), session.me, self._decided_at)
            if timeline is not None
            else None
        )
        if timed is not None:
            session.ports.emit(ev.Timed(*timed))
        cid = (
            machine.contribution[0]
            if machine.contribution and certified.entry.contributors
            else None
        )
        self.session.decided(self.session.clock(), certified, counted, cid)

    def closing(self, round_: int) -> None:
        """A contribution to the open round was offered."""
        machine = self.session.machine
        if machine is not None and machine.contribution is None:
            self.session.ports.emit(ev.RoundClosing(self.session.completed + 1))

    def results_from(self) -> int:
        """The oldest round whose result bytes are here."""
        return self.session.ports.storage.results.first()

    # ---- peers
    def nodes(self) -> Collection[PeerId]:
        """Whoever has a membership record."""
        return [record.peer for record in self.session.membership.records()]

    def suspected(self, peer: PeerId) -> bool:
        return self.session.membership.suspected(self.session.clock(), peer)

    def excluded(self, peer: PeerId) -> bool:
        return self.session.membership.excluded(peer)

    def deaf_to(self, peer: PeerId) -> bool:
        """Whether the peer is shut out, over its budget, or does not read its messages."""
        return self.session.budgets.deaf_to(self.session.clock(), peer) or self.unread(peer)

    def unread(self, peer: PeerId) -> bool:
        """Whether the peer does not read what it is told."""
        return self.session.ports.unread(peer)

    def unheard(self, peer: PeerId) -> bool:
        """Whether to expect nothing of the peer for now: it is suspected or ignored."""
        return self.suspected(peer) or self.deaf_to(peer)

    def let_in(self, joiners: Sequence[Member]) -> list[Member]:
        return self.session.admission.let_in(self.session.clock(), joiners)

    def helps(self, peer: PeerId) -> bool:
        return self.session.membership.roles.get(peer) == "aggregate"

    def pace(self) -> Pace:
        return self.session.ports.pace()

    def sign(self, payload: bytes) -> bytes:
        return self.session.ports.sign(payload)

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        return self.session.ports.verify(peer, payload, signature)

    # ---- transfer
    def result_arrived(self, entry: Entry, data: memoryview) -> None:
        """Verified result bytes of an entry."""
        machine = self.session.machine
        if entry.log != self.session.log:
            self.session.operations.result_arrived(self.session.clock(), entry, data)
        elif machine and machine.stateless and entry.round < machine.round:
            self.session.installing.result_arrived(entry, data)
        elif machine and entry.round == machine.round:
            self.store(self.session.clock(), entry, entry.part_digests, data)

    def result_gone(self, entry: Entry) -> None:
        """Nobody has the result any more: where it is decided, only a newer state helps."""
        machine = self.session.machine
        if machine is not None and (
            self.session.installing.lacks(entry)
            or (machine.open.decided is not None and machine.open.decided.entry == entry)
        ):
            self.session.transfer.seek_state()

    def state_arrived(self, round_: int, root: bytes, layout: Layout, data: memoryview) -> None:
        """A verified state."""
        self.session.installing.arrived(self.session.clock(), round_, root, layout, data)

    def state_progress(self, have: int, total: int, sources: tuple[PeerId, ...]) -> None:
        """How far the state is."""
        self.session.ports.emit(ev.StateProgress(have, total, sources))

    def allocate_state(self, layout: Layout) -> memoryview:
        """Where a fetched state goes."""
        return memoryview(bytearray(self.session.ports.storage.states.state_bytes(layout)))

    def allocate(self, nbytes: int) -> memoryview:
        """Where fetched bytes go."""
        return self.session.ports.storage.results.allocate(nbytes)

    def wants_state(self, round_: int) -> bool:
        """Whether the state after entry ``round_`` would bring this member on."""
        return self.session.machine is not None and round_ >= self.least_state()

    def offered_in_vain(self, peer: PeerId, round_: int) -> None:
        """Ask it for the result of the open entry: who came to that state by replay still has it,
        and a result needs no trust.
        """
        machine = self.session.machine
        decided = machine.open.decided if machine is not None else None
        if decided is not None and decided.entry.contributors and decided.entry.round <= round_:
            self.fetch_result(decided.entry, [peer])

    def least_state(self) -> int:
        """The oldest entry whose state would: any where there is none here, that before the open
        round where it is another one than was decided on."""
        machine = self.session.machine
        if machine is None:
            return 0
        decided = machine.open.decided
        diverged = (
            decided is not None
            and machine.root is not None
            and machine.root != decided.entry.base_state
        )
        return 0 if machine.stateless else max(0, machine.round - diverged)

    def entry_at(self, round_: int) -> Certified | None:
        """A verified entry, applied or not."""
        machine = self.session.machine
        if machine is None or round_ < 0:
            return None
        known = [
            *machine.journal.entries[round_ : round_ + 1],
            *(c for c in machine.frontier if c.entry.round == round_),
        ]
        return known[0] if known else None

"""Free-standing all-reduces: each is a log of one entry, with volatile votes, over the configuration of the run.

The log's name says all that a member must know to take part as an acceptor without having called: length, codec, a hash of the
operation's id and one of the configuration. A member takes part in one log of an operation only, so that two views of the configuration
do not give two results while their quorums intersect (docs/protocol.md). One that restarts remembers (through `Storage.spend`) in which
operations its earlier life promised or voted, and never takes part in those again.

A caller that is late, after the others have committed, gets their result, uncounted. One whose deadline passes takes its contribution back
where no plan names it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3
from torch import Tensor

from ...collectives import exchange as x
from ...collectives import messages as m
from ...collectives.codec import DEFAULT_CHUNK_ELEMENTS
from ...collectives.errors import LocalProtocolError, NotEnoughPeersError
from ...collectives.group import Certified, Config, Entry, Plan
from ...collectives.identifiers import HASH_BYTES, PeerId
from ...collectives.round import MemoryJournal, RoundMachine, Shape
from ...collectives.swarm import Share
from . import events as ev

if TYPE_CHECKING:
    from .session import Session

MAX_OPERATIONS = 64
MAX_SPENT = 4096
LIFETIME_S = 120.0  # how long a decided or abandoned operation is remembered for laggards
KEPT_BYTES = 256 << 20  # results of decided operations that somebody may still lack; the newest is kept whatever its size
RECENT_CONFIGS = 4  # entries whose configurations an operation may be called under: a caller may be that far behind
MAX_NUMEL = 1 << 34
NO_STATE = bytes(HASH_BYTES)


def operation_key(run: str, op_id: str) -> str:
    """What tells operations apart, whatever their length, codec and configuration."""
    return blake3(f"{run}/{op_id}".encode()).hexdigest(12)


def config_key(config: Config) -> str:
    """Short name of a configuration."""
    return blake3(msgspec.msgpack.encode(config)).hexdigest(8)


def log_name(key: str, numel: int, codec: str, config: Config) -> str:
    """Name of an operation's log: at most 61 characters."""
    return f"op/{numel}/{codec}/{key}/{config_key(config)}"


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


class Operation:
    """One free-standing all-reduce at this member. Implements `RoundActions`."""

    def __init__(self, session: Session, log: str, config: Config, now: float) -> None:
        _, numel, codec, self.key, _ = log.split("/")
        self.session, self.log, self.touched_at = session, log, now
        self.op_id: str | None = None  # None: this member only votes
        self.results: dict[tuple[bytes, ...], memoryview] = {}
        self.holders: set[PeerId] = set()  # who voted, and so has all bytes
        self.entry: Entry | None = None
        self.done = self.served = False
        self.complete_at = now
        self.decision_s = 0.0
        main = session.machine
        assert main is not None
        shape = Shape(int(numel), DEFAULT_CHUNK_ELEMENTS[codec], codec)
        base = blake3(b"atoll/op/1" + msgspec.msgpack.encode((session.run, log, config))).digest()
        genesis = Entry(log, 0, base, NO_STATE, (), (), (), shape.numel, shape.chunk_elements, codec, "mean", config)
        self.journal = VolatileJournal(main.me.incarnation, lambda: session.operations.spend(self.key))
        self.journal.append(Certified(genesis, ()))
        self.machine = RoundMachine(
            run=session.run, log=log, me=main.me, organiser=session.organiser, journal=self.journal, shape=shape, timing=session.timing,
            actions=self, rng=session.rng, now=now,
        )  # fmt: skip
        self.machine.root = NO_STATE
        self.peers = [member.peer for member in config]
        session.ports.exchange.open_round(log, 1, self.peers, shape.numel, shape.chunk_elements, codec)

    # ---- the caller
    def call(self, now: float, op_id: str, cid: bytes, weight: int, vector: Tensor) -> None:
        """This member's script calls. The others hear of it: those who have nothing to add say so at once."""
        self.op_id, self.touched_at = op_id, now
        self.session.ports.exchange.freeze(self.log, 1, cid, vector)
        self.machine.idle = False
        self.machine.contribute(now, cid, weight)

    def withdraw(self, now: float) -> None:
        """The caller waits no longer: take the contribution back unless a plan names it."""
        self.op_id, plan, contribution = None, self.machine.open.plan, self.machine.contribution
        if contribution is None or (plan is not None and any(c.cid == contribution[0] for c in plan.contributors)):
            return
        self.machine.contribution = None
        self.machine.set_idle(now, True)
        self.session.ports.exchange.release(contribution[0])

    def serve(self, cid: bytes | None) -> None:
        """Give the script the result."""
        entry = self.entry
        assert entry is not None
        assert self.op_id is not None
        shares = tuple(Share(c.member.peer, c.weight) for c in entry.contributors)
        counted = cid if any(c.cid == cid for c in entry.contributors) else None
        self.served = True
        self.session.ports.emit(
            ev.OperationDone(
                self.op_id,
                shares,
                counted,
                entry.codec,
                entry.chunk_elements,
                self.results[entry.part_digests],
                self.machine.bulk_s,
                self.decision_s,
            )
        )

    def drop_results(self) -> None:
        """Nobody will ask for the bytes any more."""
        self.results.clear()
        if self.entry is not None:
            self.session.serving.withdraw(self.entry.hash())

    def end(self) -> None:
        """Take no more part."""
        if self.machine.contribution:
            self.session.ports.exchange.release(self.machine.contribution[0])
        self.drop_results()
        self.session.ports.exchange.close_round(self.log, 1)

    # ---- RoundActions
    def send(self, peer: PeerId, log: str, round_: int, body: m.Body) -> None:
        """Send a control message."""
        self.session.actions.send(peer, log, round_, body)

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        """Carry out a plan."""
        self.session.ports.exchange.execute(plan, audience)

    def report(self, plan_id: bytes) -> None:
        """Ask the data plane."""
        self.session.ports.exchange.report(plan_id)

    def resend_parts(self, peer: PeerId, plan_id: bytes, cid: bytes, spans: m.Spans) -> None:
        """Send parts again."""
        self.session.ports.exchange.resend_parts(peer, plan_id, cid, spans)

    def resend_results(self, peer: PeerId, plan_id: bytes, spans: m.Spans) -> None:
        """Send results again."""
        self.session.ports.exchange.resend_results(peer, plan_id, spans)

    def fetch_result(self, entry: Entry, holders: Sequence[PeerId]) -> None:
        """Fetch result bytes."""
        self.session.transfer.fetch_result(self.session.clock(), entry, [peer for peer in holders if peer != self.session.me])

    def keep(self, entry: Entry) -> None:
        """Votes of an operation are volatile."""

    def apply(self, entry: Entry) -> None:
        """Deliver the result."""
        session, data = self.session, self.results.get(entry.part_digests)
        assert data is not None
        self.results = {entry.part_digests: data}  # not those of plans that came to nothing
        now = self.touched_at = session.clock()
        self.entry, self.done, self.decision_s = entry, True, max(0.0, now - self.complete_at)
        contribution = self.machine.contribution
        if self.op_id is not None:
            self.serve(contribution[0] if contribution else None)
        if contribution is not None:
            session.ports.exchange.release(contribution[0])
        self.machine.on_applied(now)
        session.ports.exchange.close_round(self.log, 1)
        session.operations.trim()

    def decided(self, certified: Certified, counted: bool) -> None:
        """Told by `apply` already."""

    def closing(self, round_: int) -> None:
        """Scripts call operations by themselves."""

    def results_from(self) -> int:
        """The one result is kept as long as the operation."""
        return 0

    def suspected(self, peer: PeerId) -> bool:
        """Whether the peer is believed dead."""
        return self.session.actions.suspected(peer)

    def sign(self, payload: bytes) -> bytes:
        """Sign as this peer."""
        return self.session.ports.sign(payload)

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        """Check a signature."""
        return self.session.ports.verify(peer, payload, signature)


class Operations:
    """The operations of one run that this member takes part in, as caller or only as acceptor. Bounded in number, memory and life."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.by_key: dict[str, Operation] = {}
        self._spent: dict[str, None] | None = None  # oldest first

    @property
    def spent(self) -> dict[str, None]:
        """Operations that this member promised or voted in, in this life or an earlier one."""
        if self._spent is None:
            self._spent = dict.fromkeys(self.session.ports.storage.spent()[-MAX_SPENT:])
        return self._spent

    def spend(self, key: str) -> None:
        """Before the first promise or vote."""
        self.session.ports.storage.spend(key)
        self.spent[key] = None
        while len(self.spent) > MAX_SPENT:
            del self.spent[next(iter(self.spent))]

    # ---- the script
    def start(self, now: float, op_id: str, weight: int, vector: Tensor, cid: bytes, codec: str) -> None:
        """Call an operation: ``vector`` float32 (numel,), untouched until OperationDone or `abandon`.

        Raises NotEnoughPeersError while this peer is not a member, LocalProtocolError when it was called already, with another
        length by another member, or when too many are under way.
        """
        main = self.session.machine
        if main is None or not main.is_member:
            raise NotEnoughPeersError("this peer is not a member of the run yet", retryable=True)
        key = operation_key(self.session.run, op_id)
        operation = self.by_key.get(key)
        if operation is None and key not in self.spent:
            operation = self._make(now, log_name(key, vector.numel(), codec, main.config), main.config)
        if operation is None and key not in self.spent:
            raise LocalProtocolError(f"{MAX_OPERATIONS} operations are under way", hint="wait() for some of them first")
        if operation is None or operation.op_id is not None or operation.served or (operation.done and not operation.results):
            raise LocalProtocolError(f"operation {op_id!r} was called already", hint="give every all_reduce its own op_id")
        shape = operation.machine.shape
        if (shape.numel, shape.codec) != (vector.numel(), codec):
            raise LocalProtocolError(f"operation {op_id!r} has {shape.numel} elements at other members, {vector.numel()} here")
        if operation.done:
            operation.op_id = op_id
            operation.serve(None)
        else:
            operation.call(now, op_id, cid, weight, vector)

    def abandon(self, now: float, op_id: str) -> None:
        """The caller no longer waits. The operation goes on without it; its promises and votes hold."""
        for operation in self.by_key.values():
            if operation.op_id == op_id and not operation.done:
                operation.withdraw(now)

    def refuse(self, now: float, cid: bytes) -> None:
        """The own contribution cannot be sent (NaN, infinity)."""
        for operation in self.by_key.values():
            if operation.machine.contribution and operation.machine.contribution[0] == cid:
                operation.machine.open.plan = None  # it names a contribution that never comes
                operation.withdraw(now)

    # ---- inputs
    def on_message(self, now: float, peer: PeerId, envelope: m.Envelope) -> None:
        """A control message of an operation."""
        operation = self._of(now, envelope.log)
        if operation is None:
            return
        body = envelope.body
        proposal = body if isinstance(body, m.Accept) else body.accepted if isinstance(body, m.Promise) else None
        if isinstance(body, m.Join) or (proposal is not None and not proposal.entry.contributors):
            return  # nobody is let into an operation, and it decides a result
        if isinstance(body, m.PlanMessage) or (isinstance(body, m.Ready) and body.cid is not None):
            operation.touched_at = now
        elif isinstance(body, m.Accepted) and peer in operation.peers:
            operation.holders.add(peer)
            if operation.done:
                self.trim()
        operation.machine.on_message(now, peer, envelope.incarnation, envelope.round, body)

    def _of(self, now: float, log: str) -> Operation | None:
        """The operation of a log; made when it is one that this member can take part in."""
        main, fields = self.session.machine, log.split("/")
        if main is None or len(fields) != 5 or fields[0] != "op" or not fields[1].isdigit() or fields[2] not in DEFAULT_CHUNK_ELEMENTS:
            return None
        known = self.by_key.get(fields[3])
        if known is not None:
            return known if known.log == log else None
        if fields[3] in self.spent or not 0 < int(fields[1]) <= MAX_NUMEL:
            return None
        for certified in reversed(main.journal.entries[-RECENT_CONFIGS:]):
            config = certified.entry.next_config
            if main.me in config and log == log_name(fields[3], int(fields[1]), fields[2], config):
                return self._make(now, log, config)
        return None

    def _make(self, now: float, log: str, config: Config) -> Operation | None:
        if len(self.by_key) >= MAX_OPERATIONS:
            over = next((operation for operation in self.by_key.values() if operation.done), None)
            if over is None:
                return None
            self._forget(over)
        operation = Operation(self.session, log, config, now)
        self.by_key[operation.key] = operation
        if self.session.script is None:
            operation.machine.set_idle(now, True)  # nobody here who could call: the others need not wait
        return operation

    def on_result(self, now: float, event: x.ResultComplete) -> bool:
        """Result bytes of a plan; False when it is none of ours."""
        operation = self._planned(event.plan_id)
        if operation is not None:
            operation.results[event.digests] = event.data
            operation.complete_at = now
            operation.machine.on_result(now, event.digests, event.plan_id)
        return operation is not None

    def on_report(self, now: float, event: x.Report) -> bool:
        """What the data plane waits for; False when it is none of ours."""
        operation = self._planned(event.plan_id)
        if operation is not None:
            operation.machine.on_report(now, event.plan_id, event.missing, event.lacking)
        return operation is not None

    def _planned(self, plan_id: bytes) -> Operation | None:
        for operation in self.by_key.values():
            plan = operation.machine.open.plan
            if plan is not None and plan.plan_id == plan_id:
                return operation
        return None

    def result_arrived(self, now: float, entry: Entry, data: memoryview) -> None:
        """Fetched result bytes."""
        operation = self._of(now, entry.log)
        if operation is not None and not operation.done:
            operation.results[entry.part_digests] = data
            operation.complete_at = now
            operation.machine.on_result(now, entry.part_digests)

    def find(self, name: bytes) -> tuple[Entry, memoryview] | None:
        """An operation's entry by hash, with its bytes."""
        for operation in self.by_key.values():
            entry = operation.entry or operation.machine.open.known.get(name)
            if entry is not None and entry.hash() == name and entry.part_digests in operation.results:
                return entry, operation.results[entry.part_digests]
        return None

    # ---- the end
    def trim(self) -> None:
        """Let go of results that everybody has, and of the oldest beyond KEPT_BYTES."""
        kept = 0
        for operation in reversed([operation for operation in self.by_key.values() if operation.done and operation.results]):
            everywhere = operation.served and operation.holders >= set(operation.peers)
            size = sum(len(data) for data in operation.results.values())
            if everywhere or (kept and kept + size > KEPT_BYTES):
                operation.drop_results()
            else:
                kept += size

    def tick(self, now: float) -> None:
        """Repair loss; forget what is over."""
        for operation in list(self.by_key.values()):
            if (operation.done or operation.op_id is None) and now - operation.touched_at > LIFETIME_S:
                self._forget(operation)
            elif not operation.done and (operation.op_id is not None or operation.machine.engaged):
                operation.machine.tick(now)

    def _forget(self, operation: Operation) -> None:
        del self.by_key[operation.key]
        operation.end()

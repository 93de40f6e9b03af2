"""The data plane without I/O: parts in, results out, blobs beside them.

One driver calls it from one thread: the engine with real lanes, the simulator with virtual ones.
For every arriving record the driver calls `destination`, fills the view it gets, and calls
`received`; if it calls anything else before the view is full, it asks for the `place` again. For
sending it pulls `next_record` whenever a lane has room; chunks are encoded at that moment. Nothing
is assumed to have been delivered: the owner of a part and the receiver of a result say what they
lack (`report`), and the sender sends it again (`resend_parts`, `resend_results`).

All commands are idempotent, and those about rounds, plans, peers or blobs no longer known do
nothing. Events are delivered when the outermost call ends, so the receiver of an event may call
commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import cached_property, lru_cache, partial
from typing import Any

from torch import Tensor

from ..codecs.codec import Chunking, EncodedChunk
from ..codecs.encoded import EncodedVector
from ..digest import chunk_hash
from ..errors import ConfigError, LocalProtocolError
from ..group import MAX_MEMBERS, MAX_STAR, Plan
from ..identifiers import PeerId
from ..pace import Lead
from ..reduce import FindReducer, find_reducer, least_of
from ..rows import ROWS
from . import header as wire_header
from .blobs import Blobs, Bounds
from .checking import account_of, disagreement
from .events import (
    ExchangeEvent,
    NonFinite,
    PartGiven,
    PartReduced,
    PeerFault,
    ResultComplete,
)
from .intake import Intake
from .outbox import Outgoing, Sender
from .pool import Pools
from .reduction import NOT_FINITE, ChunkReducer
from .routes import Job
from .slot import FrozenVector, PlanState, RoundSlot, slot_for, unfold


class Exchange:
    """Reduce-scatter and all-gather of many rounds at once, for one peer.

    ``emit`` gets every event. ``result_buffer`` gives the memory for a plan's encoded result:
    writable, flat, at least its encoded length, aligned to 4, a different one for every plan; by
    default it is allocated. ``reducers`` finds those that plans may name. ``eager``: reduce as soon
    as possible, inside the call that made it possible. With False the driver calls `work` in its
    idle time, so that no call takes longer than a few chunks. What a lane took is under way: not
    sent again within ``resend_after_s``. ``lead``: how far contributions may run ahead of results
    (`PlanState.within`). ``beside``: runs what may take a while in another thread, and what that
    returns in the driver's; by default both at once, here.
    """

    def __init__(
        self,
        me: PeerId,
        *,
        emit: Callable[[ExchangeEvent], None],
        result_buffer: Callable[[Plan], memoryview] | None = None,
        reducers: FindReducer = find_reducer,
        eager: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        resend_after_s: Callable[[], float] = lambda: 0.0,
        lead: Callable[[], Lead] = Lead,
        beside: Callable[[Callable[[], Callable[[], None]]], None] | None = None,
    ) -> None:
        self.me = me
        self._emit = emit
        self._result_buffer = result_buffer
        self._find = reducers
        self._eager = eager
        self._clock = clock
        self._pools = Pools()
        self._chunking = lru_cache(8)(partial(Chunking, make=self._pools.codec))
        self._reducer = ChunkReducer()
        self._beside = beside or (lambda work: work()())
        self._slots: dict[bytes, RoundSlot] = {}
        self._lingering: dict[str, RoundSlot] = {}  # by log: closed, still serving slower peers
        self._plans: dict[bytes, PlanState] = {}
        self._frozen: dict[bytes, FrozenVector] = {}
        self._ready: deque[tuple[PlanState, int]] = deque()
        self._events: deque[ExchangeEvent] = deque()
        self._blobs = Blobs(self._plans, self._post)
        self._intake = Intake(
            self._slots,
            self._plans,
            self._blobs,
            self._part_arrived,
            self._result_arrived,
            self._on_statement,
        )
        self._sender = Sender(
            self._frozen,
            self._blobs,
            self._poison,
            self._encoded,
            self._forget_if_served,
            clock,
            resend_after_s,
            lead,
        )
        self._delivering = False

    # ---- rounds

    def open_round(
        self,
        log: str,
        round_: int,
        members: Sequence[PeerId],
        numel: int,
        chunk_elements: int,
        codec: str,
        early: int | None = None,
        most: int = MAX_STAR,
        overflows: bool = False,
        witnesses: int = 0,
    ) -> None:
        """From now on accept parts of (log, round) from these peers. A second call may only change
        the members.

        ``early``: until my contribution is frozen for it, before a plan, no more bytes of parts
        than these are kept (one chunk in any case), no results, and under a plan only what it wants
        from me. ``most``: how many members a run with this plan may have (`bounds`). ``overflows``:
        finite contributions whose result is not are nobody's fault; it is complete, and says so.
        ``witnesses``: so many peers add up each part beside its owner (`witnesses`), of a rule
        that goes chunk by chunk.

        ``log`` must be unique in this exchange: where several runs share it, put the run into the
        name. Raises LocalProtocolError for another chunking or senseless sizes, ConfigError for an
        unknown codec.
        """
        if numel < 1 or not 1 <= chunk_elements <= 1 << 22:
            raise LocalProtocolError(f"round of {numel} elements in chunks of {chunk_elements}")
        if len(members) > most:
            raise LocalProtocolError(
                f"round among {len(members):,} members, where {most:,} is the most",
                why=f"A member of a star, a ring or a gather has at most {MAX_STAR} others to "
                f"exchange with; a run whose plan is a tree, at most {MAX_MEMBERS:,} members.",
            )
        slot = RoundSlot(
            log, round_, members, self._chunking(codec, numel, chunk_elements), self._pools, early
        )
        slot.overflows, slot.witnesses = overflows, witnesses
        known = self._slots.get(slot.id)
        if known is None:
            self._slots[slot.id] = slot
        elif known.chunking != slot.chunking:
            raise LocalProtocolError(f"round {round_} of {log!r} is open in other chunks")
        else:
            known.members = slot.members

    def freeze(self, log: str, round_: int, cid: bytes, vector: Tensor | EncodedVector) -> None:
        """Offer my contribution: float32 (numel,), contiguous, on the CPU; or encoded on the
        round's chunking. Untouched until `release`.

        Nothing is copied or encoded here. Raises LocalProtocolError for another kind of tensor.
        """
        slot, frozen = self._slots.get(wire_header.slot_id(log, round_)), FrozenVector(cid, vector)
        if slot is not None and not frozen.fits(slot):
            raise LocalProtocolError(
                f"contribution of {vector.numel()} elements to a round of "
                f"{slot.numel}, or in other chunks"
            )
        if slot is not None:
            slot.early = None
        known = self._frozen.get(cid)
        if known is None or not known.same(frozen):
            self._frozen[cid] = frozen
        if slot is not None and slot.plan is not None and slot.plan.own_cid == cid:
            self._start(slot.plan)
        self._settle()

    def release(self, cid: bytes) -> None:
        """The vector of ``cid`` may change from now on; nothing of it is sent or used any more."""
        self._frozen.pop(cid, None)

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        """Carry out a plan: send my parts on their ways, reduce mine, send results to my share of
        ``audience`` (all of the configuration).

        A plan with a larger (ballot, revision) replaces the one in force for its round: parts that
        came or were sent stay, an incomplete result is abandoned. A smaller one is ignored. The
        same plan again only adds to the audience. Raises LocalProtocolError when the plan is not
        well formed or its round not open with these chunks, ConfigError for a reducer that cannot
        be run (so).
        """
        slot = slot_for(plan, self._slots)
        old = slot.plan
        if old is not None and old.plan_id == plan.plan_id:
            for peer in old.add_audience(audience):
                self._queue_results(old, (peer,), old.here(range(len(old.hashes)), peer))
            return
        if old is not None and (plan.ballot, plan.revision) <= old.order:
            return
        reducer = self._find(plan.reducer)
        if reducer is None or len(plan.contributors) < least_of(reducer):
            raise ConfigError(
                f"reducer {plan.reducer!r} cannot be run by this exchange", key="reducer"
            )
        if old is not None:
            self._abandon(slot, old)
            # its buffer may be the next one's: two are not held at once, unless somebody was given
            # the first
            del old
        state = PlanState(plan, slot, self.me, reducer, self._result_memory, audience, self._clock)
        if state.own_cid is not None:
            state.take_memory()
        slot.plan = self._plans[state.plan_id] = state
        slot.keep_partials(state.partials())
        self._take_early(state)
        self._start(state)
        self._settle()

    def _result_memory(self, plan: Plan, nbytes: int) -> memoryview:
        data = (
            self._result_buffer(plan)
            if self._result_buffer is not None
            else memoryview(bytearray(nbytes))
        )
        if len(data) < nbytes or data.readonly or data.format != "B":
            raise LocalProtocolError(
                f"result buffer of {len(data)} bytes, {nbytes} writable bytes needed"
            )
        return data[:nbytes]

    def close_round(self, log: str, round_: int, *, linger: bool = True) -> None:
        """The round is decided and its bytes are here: drop cached parts and the plan.

        With ``linger`` the result chunks already queued for peers with a lane are still sent, from
        the buffer that `ResultComplete` handed over, until the next round of this log is closed.
        Without, everything goes at once.
        """
        previous = self._lingering.get(log)
        if previous is not None and previous.round != round_:
            self._forget(previous)
        slot = self._slots.pop(wire_header.slot_id(log, round_), None) or (
            previous if previous and previous.round == round_ else None
        )
        if slot is None:
            return
        slot.closed = True
        self._intake.withdraw(slot)
        self._intake.withdraw(slot.plan)
        slot.release()
        busy = False
        for box in self._sender.boxes.values():
            flow = box.flows.get(slot.id)
            if flow is None:
                continue
            flow.parts.clear()
            if (
                linger
                and box.lanes
                and flow.results
                and slot.plan is not None
                and slot.plan.complete
            ):
                busy = True
            else:
                box.drop(slot.id)
        if busy:
            self._lingering[log] = slot
        else:
            self._forget(slot)

    def resend_parts(
        self, peer: PeerId, plan_id: bytes, cid: bytes, spans: Iterable[tuple[int, int]]
    ) -> None:
        """Answer to Missing: send these chunks of my contribution, or of a partial sum or an
        account of mine, again.
        """
        state = self._plans.get(plan_id)
        if (
            state is None
            or state.slot.closed
            or peer == self.me
            or (cid == state.own_cid and self._usable(state) is None)
        ):
            return
        box = self._sender.box(peer)
        flow = box.flow(state.slot)
        for chunk in unfold(spans, state.slot.chunks):
            if (cid, peer) in state.uploads(chunk) and self._sender.overdue(
                flow.sent.get(cid, {}), chunk
            ):
                flow.parts[cid, chunk] = None
        box.wake(flow)

    def resend_results(
        self, peer: PeerId, plan_id: bytes, spans: Iterable[tuple[int, int]]
    ) -> None:
        """Answer to Need: send these chunks of the result again, as far as they are here and the
        peer gets them from me.
        """
        state = self._plans.get(plan_id)
        if state is None or peer == self.me:
            return
        chunks = state.here(unfold(spans, len(state.hashes)), peer)
        given = self._sender.box(peer).flow(state.slot).given
        self._queue_results(state, (peer,), [c for c in chunks if self._sender.overdue(given, c)])

    def report(self, plan_id: bytes) -> None:
        """Ask what a plan still lacks; answered by a `ReductionReport` event if it is known."""
        if (state := self._plans.get(plan_id)) is not None:
            self._sender.more(state.slot, *state.audience)  # who waited for what does not come
            self._post(state.report(self._usable(state) is not None))
        self._settle()

    # ---- blobs

    def provide(self, name: bytes, data: memoryview, bounds: Bounds) -> None:
        """Keep these bytes for `send_blob` until `withdraw`. They must not change until then."""
        self._blobs.provide(name, data, bounds)

    def withdraw(self, name: bytes) -> None:
        """Forget a provided blob, also what is queued of it."""
        self._blobs.withdraw(name)

    def send_blob(self, peer: PeerId, name: bytes, spans: Iterable[tuple[int, int]]) -> None:
        """Send these chunks of a provided blob; they are behind all rounds in the queue."""
        chunks = self._blobs.chunks(name)
        if chunks and peer != self.me:
            self._sender.box(peer).queue_blob(name, unfold(spans, chunks))

    def want(
        self,
        name: bytes,
        destination: memoryview,
        bounds: Bounds,
        hashes: Sequence[bytes],
        sources: Sequence[PeerId],
    ) -> None:
        """Accept chunks of a blob from ``sources`` into ``destination``. Asking for them is the
        session's business.

        With ``hashes`` (blake3, one a chunk) every chunk is checked as it comes; an empty sequence
        takes them as they come, and `BlobComplete` tells the hashes. Again with the same memory and
        hashes: only the sources change (barred ones come back); nothing, once it is complete, until
        `unwant`.
        """
        self._intake.withdraw(self._blobs.want(name, destination, bounds, hashes, sources))
        self._settle()

    def unwant(self, name: bytes) -> None:
        """Stop accepting a blob; its memory is not written to any more."""
        self._intake.withdraw(self._blobs.unwant(name))

    def report_blob(self, name: bytes) -> None:
        """Ask what a wanted blob lacks; answered by a `BlobProgress` event while it is wanted."""
        self._blobs.report(name)
        self._settle()

    # ---- lanes

    def lanes_up(self, peers: Collection[PeerId]) -> None:
        """There is a lane, number 0, to each of these from the beginning: of thousands, what a lane
        costs is paid for those that something is sent to. Call it before anything else.
        """
        self._sender.reached = peers

    def lane_up(self, peer: PeerId, lane: int = 0) -> None:
        """There is a lane to ``peer``, or one more: each has a number of its own."""
        if self._sender.box(peer).lane_up(lane):
            for state in self._plans.values():
                state.resumed.add(peer)

    def lane_down(self, peer: PeerId, lane: int = 0) -> None:
        """A lane is gone, with whatever was in flight on it. What is queued goes over the others,
        or waits for the next one.
        """
        self._intake.drop(peer, lane)
        if self._sender.box(peer).lane_down(lane):
            for state in self._plans.values():
                state.resumed.add(peer)
            return
        for slot in list(self._lingering.values()):
            self._sender.box(peer).drop(slot.id)
            self._forget_if_served(slot)

    def next_record(self, peer: PeerId, lane: int = 0) -> Outgoing | None:
        """The next thing to send to ``peer`` over a lane with room, encoded now, or None."""
        found = self._sender.next_record(peer, lane)
        if self._events:
            self._settle()
        return found

    def has_more(self, peer: PeerId) -> bool:
        """Whether `next_record`, which had nothing, may have something by now."""
        return self._sender.has_more(peer)

    @property
    def busy(self) -> Set[PeerId]:
        """For whom `next_record` may have something: a driver of many lanes need not ask each."""
        return self._sender.busy

    def destination(
        self, peer: PeerId, header: bytes | bytearray | memoryview, lane: int = 0
    ) -> memoryview | None:
        """Where the payload of an arriving record goes; None: read and discard it. Raises
        RemoteProtocolError for an invalid header.

        The record before it on the same lane, if it was not `received`, is abandoned.
        """
        return self._intake.destination(peer, lane, wire_header.parse(header, peer))

    def place(self, peer: PeerId, lane: int = 0) -> memoryview | None:
        """What `destination` returned for the record that is arriving over a lane; None: it must
        not be written to any more.
        """
        return self._intake.place(peer, lane)

    def received(self, peer: PeerId, header: bytes | bytearray | memoryview, lane: int = 0) -> None:
        """The view that `destination` returned for this record is filled, or was withdrawn."""
        del header
        if self._intake.received(peer, lane) and (self._events or self._eager):
            self._settle()

    def work(self) -> bool:
        """Reduce one chunk that is ready, and copy a few of a blob; True when there may be more to
        do. Only needed when not ``eager``.
        """
        while self._ready:
            state, chunk = self._ready.popleft()
            if (
                state.slot.plan is state
                and not state.slot.closed
                and self._can_reduce(state)
                and self._advance(state, chunk)
            ):
                break
        self._blobs.work()
        if self._events:
            self._deliver()
        return self._blobs.filling or bool(self._ready)

    # ---- arriving records

    def _part_arrived(self, slot: RoundSlot, peer: PeerId, cid: bytes, chunk: int) -> None:
        if (state := slot.plan) is not None:
            self._sender.more(slot, peer)
            if state.part_arrived(peer, cid, chunk) and self._can_reduce(state):
                self._advance(state, chunk)

    @cached_property
    def _first(self) -> Any:
        """The first phase of plans whose reducer weighs whole vectors: a `measuring.FirstPhase`."""
        return ROWS.load("weighing", "FirstPhase", key="[robust]")(
            self.me,
            self._reducer,
            usable=self._usable,
            blame=self._blame,
            spread=self._queue_results,
            weighed=self._weighed,
            beside=self._beside,
        )

    def _on_statement(self, state: PlanState, peer: PeerId, part: int, data: bytes) -> None:
        """What the owner of a part says of it is here."""
        if state.measuring is not None:
            self._first.on_statement(state, peer, part, data)

    def _take_early(self, state: PlanState) -> None:
        for chunk, (peer, wire) in state.slot.take_early(state.plan_id).items():
            if state.givers[chunk] == peer:
                state.view(chunk)[:] = wire.data
                self._result_arrived(state, peer, chunk)
            state.slot.pool(chunk, state.slot.results).give(wire)
        if state.measuring is not None:
            self._first.take_early(state)

    def _result_arrived(self, state: PlanState, peer: PeerId, chunk: int) -> None:
        wire = state.wire(chunk)
        if not state.slot.results.codec(chunk).finite(wire):
            if not state.slot.overflows:
                self._post(PeerFault(peer, f"result of chunk {chunk} is not finite"))
                return
            state.overflowed = True
        state.progress += 1
        state.accept(chunk, chunk_hash(wire.data))
        self._queue_results(state, state.below[state.part_of[chunk]], (chunk,))
        self._sender.more(state.slot, peer)
        self._completed(state)

    # ---- reducing

    def _advance(self, state: PlanState, chunk: int) -> bool:
        """Measure or reduce a chunk, whichever it is ready for, if it is."""
        ready = state.waiting.get(chunk) == 0
        if state.measuring is not None and state.measuring.weighing is None:
            return self._first.measure(state, state.measuring, chunk, ready)
        if ready:
            self._reduce(state, chunk)
        return ready

    def _weighed(self, state: PlanState) -> None:
        if self._plans.get(state.plan_id) is state:
            if self._can_reduce(state):
                self._ready.extend((state, chunk) for chunk in state.ready())
            self._completed(state)
            self._settle()

    def _reduce(self, state: PlanState, chunk: int) -> None:
        job = state.job(chunk)
        if job.owned and self._disputes(state, job, chunk):
            return
        pool = state.slot.pool(chunk, state.slot.results if job.witness else None)
        out = state.wire(chunk) if job.owned else pool.take()
        found = self._reducer.reduce(state, chunk, self._usable(state), out)
        if isinstance(found, tuple):
            if not job.owned:
                pool.give(out)
            self._blame(state, *found, NOT_FINITE)
            return
        if job.witness:
            state.note(chunk, chunk_hash(out.data), found)
            self._gave(state)
            pool.give(out)
            if (seen := state.witnessed(chunk)) is not None:
                self._post(PartReduced(state.plan_id, seen, *state.statement(seen)))
            return
        if not job.owned:
            self._added_up(state, job, chunk, out, found)
            return
        digest = chunk_hash(state.view(chunk))
        if state.slot.witnesses:
            state.note(chunk, digest, found)
            self._gave(state)
        done = state.reduced(chunk, digest)
        self._queue_results(state, state.below[state.part_of[chunk]], (chunk,))
        if done is not None:
            checked = state.slot.witnesses > 0
            stated = state.statement(done) if checked else (state.part_digest(done), ())
            self._post(PartReduced(state.plan_id, done, *stated))
        self._completed(state)

    def _encoded(self, state: PlanState, chunk: int, data: memoryview) -> None:
        """A chunk of my contribution goes out, where each part has witnesses."""
        if chunk not in state.slot.given.get(state.own_cid or b"", ()):
            state.encoded(chunk, chunk_hash(data))
            self._gave(state)

    def _gave(self, state: PlanState) -> None:
        for index, root in state.given():
            self._post(PartGiven(state.plan_id, index, root))

    def _added_up(
        self, state: PlanState, job: Job, chunk: int, out: EncodedChunk, terms: list[EncodedChunk]
    ) -> None:
        """What I add up for others: send it, or what I say of it."""
        if job.account is not None:
            state.slot.accounts.made.setdefault(job.account, {})[chunk] = account_of(out, terms)
        if job.sent is not None:
            state.slot.partials.setdefault(job.sent.cid, {})[chunk] = out
        else:
            state.slot.pool(chunk).give(out)
        del state.waiting[chunk]
        self._queue_parts(state, (chunk,))

    def _disputes(self, state: PlanState, job: Job, chunk: int) -> bool:
        """Whether a partial sum to a chunk of mine is not to be used. Of one that was not, added up
        here, it may show who was wrong.
        """
        slot = state.slot
        found, dispute = disagreement(state.plan_id, slot, job, chunk), slot.dispute
        if found is not None:
            state.blocked, slot.dispute = True, found
        elif dispute is None or dispute.chunk != chunk or dispute.wrong:
            return False
        else:
            out = slot.pool(chunk).take()
            slot.dispute = (
                dispute.settled(
                    {cid: held for _, cid, held in job.sources}, slot.chunking.codec(chunk), out
                )
                or dispute
            )
            slot.pool(chunk).give(out)
            for peer in slot.dispute.wrong:
                self._post(
                    PeerFault(
                        peer,
                        (
                            f"the sum of its site that it states (chunk {chunk}) is not that of "
                            "what its members contribute"
                        ),
                    )
                )
        self._post(state.report(self._usable(state) is not None))
        return found is not None

    def _blame(self, state: PlanState, peer: PeerId, cid: bytes | None, why: str) -> None:
        state.blocked = True
        if peer == self.me and cid is not None:
            return self._poison(cid)
        if cid is not None:
            state.slot.refuse(peer, cid)
        return self._post(PeerFault(peer, why))

    def _poison(self, cid: bytes) -> None:
        frozen = self._frozen.get(cid)
        if frozen is not None and not frozen.poisoned:
            frozen.poisoned = True
            self._post(NonFinite(cid))

    def _completed(self, state: PlanState) -> None:
        if state.complete:
            digests = tuple(state.part_digest(index) for index in range(len(state.plan.parts)))
            slot, weighing = state.slot, state.weighing
            self._post(
                ResultComplete(
                    state.plan_id,
                    digests,
                    state.data,
                    slot.bytes_sent,
                    slot.bytes_received,
                    state.dues.since(),
                    weighing.weights if weighing is not None else (),
                    weighing.spread if weighing is not None else None,
                    state.overflowed,
                )
            )

    def _usable(self, state: PlanState) -> FrozenVector | None:
        """My contribution to a plan, when it can be used."""
        frozen = self._frozen.get(state.own_cid) if state.own_cid is not None else None
        return None if frozen is None or frozen.poisoned or not frozen.fits(state.slot) else frozen

    def _can_reduce(self, state: PlanState) -> bool:
        return not state.blocked and (state.own_cid is None or self._usable(state) is not None)

    # ---- plans

    def _start(self, state: PlanState) -> None:
        """Queue what can be sent, and reduced, now."""
        if self._usable(state) is not None:
            self._gave(state)  # what was sent under an earlier plan
            for part in state.plan.parts:
                self._queue_parts(state, range(part.first, part.stop))
        if self._can_reduce(state):
            self._ready.extend((state, chunk) for chunk in state.ready())
            if state.measuring is not None and state.own_cid is not None:
                self._ready.extend(
                    (state, chunk)
                    for chunk in range(state.slot.chunks)
                    if state.givers[chunk] != self.me
                )

    def _queue_parts(self, state: PlanState, chunks: Sequence[int]) -> None:
        """Chunks of one part: send what I have for it, as far as it was never sent there."""
        for chunk in chunks:
            for cid, to in state.uploads(chunk):
                box = self._sender.box(to)
                flow = box.flow(state.slot)
                if flow.wants_part(cid, chunk):
                    flow.parts[cid, chunk] = None
                    box.wake(flow)

    def _queue_results(
        self, state: PlanState, peers: Iterable[PeerId], chunks: Sequence[int]
    ) -> None:
        for peer in peers:
            box = self._sender.box(peer)
            flow = box.flow(state.slot)
            for chunk in chunks:
                flow.results[chunk] = None
            box.wake(flow)

    def _abandon(self, slot: RoundSlot, state: PlanState) -> None:
        self._intake.withdraw(state)
        slot.abandoned.add(state.plan_id)
        slot.plan = None
        self._plans.pop(state.plan_id, None)
        self._ready = deque(item for item in self._ready if item[0] is not state)
        for box in self._sender.boxes.values():
            flow = box.flows.get(slot.id)
            if flow is not None:
                flow.clear()

    def _forget_if_served(self, slot: RoundSlot) -> None:
        if slot.closed and not any(slot.id in box.flows for box in self._sender.boxes.values()):
            self._forget(slot)

    def _forget(self, slot: RoundSlot) -> None:
        if self._lingering.get(slot.log) is slot:
            del self._lingering[slot.log]
        for box in self._sender.boxes.values():
            box.drop(slot.id)
        if slot.plan is not None:
            self._plans.pop(slot.plan.plan_id, None)
            slot.plan = None

    # ---- events

    def _post(self, event: ExchangeEvent) -> None:
        self._events.append(event)

    def _settle(self) -> None:
        while self._eager and not self._delivering and self.work():
            pass
        self._deliver()

    def _deliver(self) -> None:
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._events:
                self._emit(self._events.popleft())
                while self._eager and self.work():
                    pass
        finally:
            self._delivering = False

"""One open round as the data plane sees it.

`RoundSlot`: its chunking, whose parts are accepted, and the parts that have come, whatever plan
brought them. `PlanState`: the plan in force, what of its result is here, and what of mine can be
reduced. Where the reducer has two phases, what the owner of a part says of it is one more chunk of
the result, behind the others: of number ``chunks`` + index of the part. It is sent, asked for and
waited for like them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..codecs.codec import Chunking, EncodedChunk
from ..codecs.encoded import EncodedVector
from ..digest import chunk_hash, merkle_root, part_digest
from ..errors import AtollError, LocalProtocolError, RemoteProtocolError
from ..group import Plan
from ..identifiers import CID_BYTES, PeerId
from ..pace import Lead
from ..partition import check_plan
from ..reduce import Reducer, Weighing
from . import header as wire_header
from .accounts import Accounts
from .checking import Dispute
from .dues import Dues
from .events import ReductionReport, Spans
from .header import HALF, PART, Header, slot_id
from .pool import Pools, WirePool, Workspace
from .routes import Job, routes_of
from .statements import PlanStatements

LEAST_AHEAD = 3  # chunks: one on its way there, one on its way back, and one between
MAX_SPANS = 4096  # what a control message may carry


class RoundSlot:
    """State of (log, round) from `open_round` to `close_round`.

    Received parts are keyed (peer, cid, chunk), not by plan, so that a revised plan finds what an
    earlier one brought. A peer may have one encoded vector's worth of chunks here, whatever it
    sends: an honest one sends each owner its part only. (Two where a plan has partial sums: then a
    chunk of its contribution and one of a sum may both be here.) Partial sums made here are kept in
    the same way.
    """

    def __init__(
        self,
        log: str,
        round_: int,
        members: Sequence[PeerId],
        chunking: Chunking,
        pools: Pools,
        early: int | None = None,
    ) -> None:
        """``early``: see `Exchange.open_round`; None: no bound."""
        self.log = log
        self.round = round_
        self.id = slot_id(log, round_)
        self.members = frozenset(members)
        self.chunking = chunking
        self.results = chunking.results
        self.numel = chunking.numel
        self.chunks = chunking.chunks
        self.plan: PlanState | None = None
        self.partials: dict[bytes, dict[int, EncodedChunk]] = {}
        self.accounts = Accounts(2 * chunking.chunks)
        self.dispute: Dispute | None = None  # the first partial sum of which accounts differed
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.abandoned: set[bytes] = set()
        self._pools = pools
        self._last_pool: WirePool | None = None
        self._parts: dict[PeerId, dict[bytes, dict[int, EncodedChunk]]] = {}
        self._counts: dict[PeerId, int] = {}
        self.early = early
        self.overflows = False  # whether a result that is not finite is one
        self.witnesses = 0  # of each part
        # Where parts have witnesses: of my contributions, by cid and chunk, the hash as encoded.
        self.given: dict[bytes, dict[int, bytes]] = {}
        self._refused: set[tuple[PeerId, bytes]] = set()
        self._early: dict[bytes, dict[int, tuple[PeerId, EncodedChunk]]] = {}
        self._early_count = 0
        # The last statement on a part before its plan: (plan id, part, bytes).
        self.early_statements: dict[PeerId, tuple[bytes, int, bytes]] = {}

    def pool(self, chunk: int, chunking: Chunking | None = None) -> WirePool:
        """Where buffers for this chunk come from; ``chunking``: that of results."""
        codec = (chunking or self.chunking).codec(chunk)
        elements = self.chunking.elements(chunk)
        pool = self._last_pool
        if pool is None or pool.codec is not codec or pool.elements != elements:
            pool = self._last_pool = self._pools.get(codec, elements)
        return pool

    def check_record(self, peer: PeerId, chunk: int, length: int, chunking: Chunking) -> None:
        """Raises RemoteProtocolError unless a record's chunk exists in the chunking, contributions'
        or results', and has its length.
        """
        if chunk >= self.chunks:
            raise RemoteProtocolError(f"chunk {chunk} of {self.chunks}", peer=peer)
        expected = chunking.wire_bytes(chunk)
        if length != expected:
            raise RemoteProtocolError(
                f"chunk {chunk} of {length} bytes, expected {expected}", peer=peer
            )

    # parts

    def takes_part(self, peer: PeerId, cid: bytes, chunk: int) -> bool:
        """Whether an arriving part is wanted (no duplicate, stranger or refused one). Makes room
        for it where it can.
        """
        if peer not in self.members or self.closed or (peer, cid) in self._refused:
            return False
        if chunk in self._parts.get(peer, {}).get(cid, ()):
            return False
        if self.early is not None and not self._takes_early_part(peer, cid, chunk):
            return False
        limit = self.chunks * (2 if self.plan is not None and self.plan.sums else 1)
        return self._counts.get(peer, 0) < limit or self._make_room(peer, cid)

    def _takes_early_part(self, peer: PeerId, cid: bytes, chunk: int) -> bool:
        assert self.early is not None
        if self.plan is not None:
            return self.plan.wants_part(peer, cid, chunk)
        here = sum(self._counts.values())
        return not here or (here + 1) * self.chunking.wire_bytes(chunk) <= self.early

    def store(self, peer: PeerId, cid: bytes, chunk: int, wire: EncodedChunk) -> None:
        """A part has arrived."""
        self._parts.setdefault(peer, {}).setdefault(cid, {})[chunk] = wire
        self._counts[peer] = self._counts.get(peer, 0) + 1

    def parts_of(self, peer: PeerId, cid: bytes) -> dict[int, EncodedChunk]:
        """The chunks of a contribution that are here (a live view; do not change it)."""
        return self._parts.setdefault(peer, {}).setdefault(cid, {})

    def refuse(self, peer: PeerId, cid: bytes) -> None:
        """Drop a contribution and take no more of it."""
        self._refused.add((peer, cid))
        self._drop(peer, cid)

    def _make_room(self, peer: PeerId, cid: bytes) -> bool:
        """Drop the oldest contribution of a peer that the plan does not use."""
        used = self.plan.cids if self.plan else frozenset[bytes]()
        for other in list(self._parts[peer]):
            if other != cid and other not in used and self._parts[peer][other]:
                self._drop(peer, other)
                return True
        return False

    def _drop(self, peer: PeerId, cid: bytes) -> None:
        chunks = self._parts.get(peer, {}).pop(cid, {})
        self._counts[peer] = self._counts.get(peer, 0) - len(chunks)
        for chunk, wire in chunks.items():
            self.pool(chunk).give(wire)
        chunks.clear()  # a plan may hold this very mapping

    # partial sums made here, and accounts of them

    def keep_partials(self, wanted: Collection[bytes]) -> None:
        """Drop those that are not among these."""
        self.accounts.keep(wanted)
        for cid in [cid for cid in self.partials if cid not in wanted]:
            for chunk, wire in self.partials.pop(cid).items():
                self.pool(chunk).give(wire)

    # results that come before their plan

    def takes_early(self, plan_id: bytes, peer: PeerId, chunk: int) -> bool:
        """Whether a result of a plan not known yet is kept. At most one vector of them is."""
        if (
            peer not in self.members
            or self.closed
            or plan_id in self.abandoned
            or self.early is not None
        ):
            return False
        return self._early_count < self.chunks and chunk not in self._early.get(plan_id, ())

    def store_early(self, plan_id: bytes, peer: PeerId, chunk: int, wire: EncodedChunk) -> None:
        """A result has arrived before its plan."""
        self._early.setdefault(plan_id, {})[chunk] = (peer, wire)
        self._early_count += 1

    def take_early(self, plan_id: bytes) -> dict[int, tuple[PeerId, EncodedChunk]]:
        """The early results of a plan. Hand the wires back to the pool."""
        found = self._early.pop(plan_id, {})
        self._early_count -= len(found)
        return found

    def takes_statement(self, plan_id: bytes, peer: PeerId, length: int) -> bool:
        """Whether what an owner says of a part of a plan that is not known yet is kept: one
        statement a peer, the last.
        """
        # A number for each pair of contributors.
        most = 8 * (len(self.members) * (len(self.members) + 1) // 2)
        return (
            peer in self.members
            and not self.closed
            and plan_id not in self.abandoned
            and length <= most
        )

    def release(self) -> None:
        """Give all buffers back."""
        self.early_statements.clear()
        for peer, cids in self._parts.items():
            for cid in list(cids):
                self._drop(peer, cid)
        self._parts.clear()
        self.keep_partials(())
        for plan_id in list(self._early):
            for chunk, (_, wire) in self.take_early(plan_id).items():
                self.pool(chunk, self.results).give(wire)


class FrozenVector:
    """One of my own contributions, unchanged until released: float32 (numel,), or encoded already.

    Raises LocalProtocolError for another kind of tensor.
    """

    def __init__(self, cid: bytes, vector: Tensor | EncodedVector) -> None:
        if isinstance(vector, Tensor):
            if (
                vector.dtype != torch.float32
                or vector.dim() != 1
                or not vector.is_contiguous()
                or vector.device.type != "cpu"
            ):
                raise LocalProtocolError(
                    "a contribution is a flat contiguous float32 tensor on the CPU"
                )
            vector = vector.detach()
        if len(cid) != CID_BYTES:
            raise LocalProtocolError(f"a cid has {CID_BYTES} bytes")
        self.cid = cid
        self.vector = vector
        self.poisoned = False
        self._data: memoryview | None = None
        self._chunks: dict[int, Sequence[Tensor]] = {}
        self._fitting: Chunking | None = None

    def same(self, other: FrozenVector) -> bool:
        """Whether the other has the same memory."""
        mine, theirs = self.vector, other.vector
        return mine is theirs or (
            isinstance(mine, Tensor)
            and isinstance(theirs, Tensor)
            and mine.data_ptr() == theirs.data_ptr()
        )

    def fits(self, slot: RoundSlot) -> bool:
        """Whether it has the round's length, and its chunking and codec where it is encoded."""
        if self._fitting is slot.chunking:
            return True
        vector = self.vector
        fits = (
            vector.chunking == slot.chunking
            if isinstance(vector, EncodedVector)
            else vector.numel() == slot.numel
        )
        self._fitting = slot.chunking if fits else None
        return fits

    def wire(
        self, slot: RoundSlot, chunk: int, workspace: Workspace, *, look: bool = True
    ) -> tuple[EncodedChunk, bool]:
        """The chunk encoded (as it lies, where that needs no copy, else on ``workspace``), and
        whether all of it is finite. ``look``: False spares the pass that only a look would need,
        and says True."""
        vector, codec = self.vector, slot.chunking.codec(chunk)
        if isinstance(vector, EncodedVector):
            wire = vector.wire(chunk)
            return wire, codec.finite(wire)
        size = slot.chunking.chunk_elements
        views = self._chunks.get(size)
        if views is None:  # made once a chunking
            views = self._chunks[size] = vector.split(size)
        values = views[chunk]
        if not codec.zero_copy:
            wire = workspace.wire(codec, values.shape[0])
            return wire, codec.encode(values, wire)
        if self._data is None:
            self._data = vector.numpy().data.cast("B")
        start = 4 * chunk * size
        wire = codec.wire(self._data[start : start + 4 * values.shape[0]], values.shape[0])
        return wire, not look or codec.finite(wire)


def slot_of(record: Header, slots: Mapping[bytes, RoundSlot]) -> RoundSlot | None:
    """The open round of an arriving part, partial sum or account."""
    if record.kind == PART:
        return slots.get(record.key)
    return next((slot for slot in slots.values() if slot.id[:HALF] == record.key[:HALF]), None)


def spans(chunks: Iterable[int]) -> Spans:
    """Ascending chunk numbers as ranges, at most MAX_SPANS of them."""
    found: list[list[int]] = []
    for chunk in chunks:
        if found and found[-1][1] == chunk:
            found[-1][1] = chunk + 1
        elif len(found) == MAX_SPANS:
            break
        else:
            found.append([chunk, chunk + 1])
    return tuple((first, stop) for first, stop in found)


def unfold(ranges: Iterable[tuple[int, int]], limit: int) -> Iterable[int]:
    """Chunk numbers of ranges, none at or above ``limit``, and not more than ``limit`` of them: who
    names a chunk again and again asks for less.
    """
    left = limit
    for first, stop in ranges:
        part = range(max(0, first), min(stop, limit))[:left]
        yield from part
        left -= len(part)
        if not left:
            return


class PlanState:
    """The plan in force of a round. ``data`` holds the encoded result, chunk after chunk, and gets
    its final bytes in place.

    ``memory`` gives it, of a plan and a number of bytes: at once where I contribute, otherwise with
    the first byte that is to go there. A plan of others alone takes nothing by what it says.
    """

    def __init__(
        self,
        plan: Plan,
        slot: RoundSlot,
        me: PeerId,
        reducer: Reducer,
        memory: Callable[[Plan, int], memoryview],
        audience: Sequence[PeerId],
        clock: Callable[[], float],
    ) -> None:
        self.plan = plan
        self.plan_id = plan.plan_id
        self.slot = slot
        self._memory = memory
        self._data: memoryview | None = None
        self.reducer = reducer
        self.audience = tuple(peer for peer in dict.fromkeys(audience) if peer != me)
        self.own_cid = next((c.cid for c in plan.contributors if c.member.peer == me), None)
        self.partial_key = wire_header.partial_key(slot.id, self.plan_id)
        self.sums = plan.topology.kind != "butterfly"  # whether partial sums travel
        self.routes = routes_of(plan, slot, me, reducer)
        # By part: to whom I send its result.
        self.below = [route.below(me, self.audience) for route in self.routes]
        self.part_of = [
            index for index, part in enumerate(plan.parts) for _ in range(part.first, part.stop)
        ]  # by chunk
        # By chunk: who sends me the result.
        self.givers: list[PeerId] = [self.routes[index].above for index in self.part_of]
        self.measuring = PlanStatements(plan, me, reducer) if reducer.form == "two-phase" else None
        if self.measuring is not None:
            self.part_of += range(len(plan.parts))
            self.givers += [part.owner for part in plan.parts]
        self.cids = frozenset(
            [c.cid for c in plan.contributors]
            + [cid for route in self.routes if route.job for _, cid in route.job.others]
        )
        self.hashes: list[bytes | None] = [None] * len(self.givers)
        self.have = 0
        self._returned = [0] * len(plan.parts)  # results here, by part
        self._others = slot.chunks - sum(
            part.stop - part.first for part in plan.parts if part.owner == me
        )
        self.progress = 0
        self.resumed: set[PeerId] = set()  # whose lanes came up since the last report
        # a contribution turned out to be unusable: nothing more can be reduced under this plan
        self.blocked = False
        self.overflowed = False  # of finite contributions
        # Chunks I add up and have not: how many contributions of others they lack.
        self.waiting: dict[int, int] = {}
        self._left: dict[int, int] = {}  # my parts: chunks still to reduce
        # Parts that I state, as owner or witness, where each has witnesses: by chunk, the hashes of
        # what came of it and of each contribution, in the plan's order.
        self._stated: dict[int, dict[int, tuple[bytes, ...]]] = {}
        # By part: of how many chunks my contribution was not encoded yet; parts of which all was.
        self._ungiven = self._not_encoded()
        self._given = [index for index, left in enumerate(self._ungiven) if not left]
        self._wires: dict[int, EncodedChunk] = {}
        self.me = me
        self.dues = Dues(clock)
        for index, part in enumerate(plan.parts):
            job = self.routes[index].job
            if part.owner == me:
                self._left[index] = part.stop - part.first
            if job is not None and job.sources:
                self._expect(job, range(part.first, part.stop))
        for giver in self.givers:
            if giver != me:
                self.dues.expect("result", giver)
        if not self.sums and self.measuring is None:
            self.dues.begin()

    def _not_encoded(self) -> list[int]:
        known = self.slot.given.get(self.own_cid or b"", {})
        return [
            sum(chunk not in known for chunk in range(part.first, part.stop))
            if known
            else part.stop - part.first
            for part in self.plan.parts
        ]

    def _expect(self, job: Job, chunks: Iterable[int]) -> None:
        slot = self.slot
        done = (
            slot.partials.get(job.sent.cid, {})
            if job.sent is not None
            else slot.accounts.made.get(job.account or b"", {})
        )
        for chunk in chunks:
            if chunk in done:  # added up under an earlier plan
                continue
            lacking = [peer for peer, _, held in job.awaited if chunk not in held]
            self.waiting[chunk] = len(lacking)
            for peer in lacking:
                self.dues.expect("part", peer)

    def take_memory(self) -> None:
        """Have the memory for the result. Raises what ``memory`` does."""
        if self._data is None:
            self._data = self._memory(self.plan, self.slot.results.nbytes)

    @property
    def data(self) -> memoryview:
        """The encoded result. Where there is no memory that can be kept, in memory that cannot:
        this member reduces for the others all the same, and votes once the bytes can be kept."""
        if self._data is None:
            try:
                self.take_memory()
            except AtollError:
                self._data = memoryview(bytearray(self.slot.results.nbytes))
        assert self._data is not None
        return self._data

    def wants_part(self, peer: PeerId, cid: bytes, chunk: int) -> bool:
        """Whether I add this part up."""
        return chunk in self.waiting and (peer, cid) in self.job(chunk).others

    @property
    def order(self) -> tuple[int, int]:
        """Plans of one round replace each other in this order."""
        return (self.plan.ballot, self.plan.revision)

    @property
    def complete(self) -> bool:
        """Whether all result bytes are here, and weighed what they were made with."""
        whole = self.have == len(self.hashes)
        return whole and (self.measuring is None or self.weighing is not None)

    @property
    def weighing(self) -> Weighing | None:
        """With what contributions were weighed, where whole vectors are, once that is known."""
        return self.measuring.weighing if self.measuring is not None else None

    def job(self, chunk: int) -> Job:
        """What I add up for a chunk; it is one of `waiting`."""
        job = self.routes[self.part_of[chunk]].job
        assert job is not None
        return job

    def uploads(self, chunk: int) -> list[tuple[bytes, PeerId]]:
        """(cid, to whom) of what I send for a chunk: my contribution, and a partial sum or an
        account once it is made.
        """
        partials, accounts = self.slot.partials, self.slot.accounts.made
        return [
            (upload.cid, upload.to)
            for upload in self.routes[self.part_of[chunk]].uploads
            if not upload.made
            or chunk in partials.get(upload.cid, ())
            or chunk in accounts.get(upload.cid, ())
        ]

    def partials(self) -> set[bytes]:
        """The names of the partial sums I make, and of the accounts that I give and wait for."""
        jobs = [route.job for route in self.routes if route.job is not None]
        given = {account.cid for job in jobs for check in job.checks for account in check.accounts}
        return given | {
            upload.cid for route in self.routes for upload in route.uploads if upload.made
        }

    def expected(self, peer: PeerId, chunk: int) -> bytes | None:
        """The name of what ``peer`` is to send me for a chunk, if anything."""
        job = self.routes[self.part_of[chunk]].job
        return (
            next((cid for other, cid, _ in job.sources if other == peer), None)
            if job is not None
            else None
        )

    def check_partial(self, peer: PeerId, record: Header) -> None:
        """Raises RemoteProtocolError when a partial sum or an account made for this plan is not the
        one that it wants from the peer.
        """
        if record.key != self.partial_key:
            return
        if record.kind == wire_header.PARTIAL and self.expected(peer, record.chunk) != record.sub:
            raise RemoteProtocolError(
                f"a partial sum of chunk {record.chunk} over another set than the plan's", peer=peer
            )
        job = self.routes[self.part_of[record.chunk]].job
        if record.kind == wire_header.ACCOUNT and (
            job is None or (peer, record.sub) not in job.others
        ):
            raise RemoteProtocolError(
                f"an account of chunk {record.chunk} that the plan does not want", peer=peer
            )

    def wire(self, chunk: int) -> EncodedChunk:
        """Views of a chunk of the result."""
        wire = self._wires.get(chunk)
        if wire is None:
            wire = self._wires[chunk] = self.slot.results.wire(self.view(chunk), chunk)
        return wire

    def view(self, chunk: int) -> memoryview:
        """The bytes of a chunk of the result, or of what is said of a part."""
        if self.measuring is not None and chunk >= self.slot.chunks:
            return self.measuring.view(chunk - self.slot.chunks)
        start, stop = self.slot.results.span(chunk)
        return self.data[start:stop]

    def here_by_hash(self) -> dict[bytes, int]:
        """The chunks of the result that are here."""
        return {
            digest: chunk
            for chunk, digest in enumerate(self.hashes[: self.slot.chunks])
            if digest is not None
        }

    def here(self, chunks: Iterable[int], peer: PeerId) -> list[int]:
        """Those of the chunks whose result is here and which ``peer`` gets from me."""
        mine = [bool(route.below(self.me, (peer,))) for route in self.routes]
        return [
            chunk
            for chunk in chunks
            if mine[self.part_of[chunk]] and self.hashes[chunk] is not None
        ]

    def add_audience(self, peers: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """More receivers of the result; returns the new ones."""
        new = tuple(
            peer for peer in dict.fromkeys(peers) if peer != self.me and peer not in self.audience
        )
        self.audience += new
        self.below = [route.below(self.me, self.audience) for route in self.routes]
        return new

    def within(self, chunk: int, lead: Lead) -> bool:
        """Whether the owner of a chunk can use my contribution to it soon: not far ahead of the
        results that have come back from it.

        Half of what a member sends are contributions; each owner has its share of them, and three
        chunks at least. At half that speed they go in any case: a member to which results come
        slowly must not hold up all others. Without a limit the senders that win the race for an
        owner's downlink run away from the one that loses it, whom all wait for at the end, while
        their own uplinks stand idle. (Credits by the receiver, as in pHost and Homa, arXiv
        1803.09615; a result is one.)
        """
        # No result comes before all contributions have.
        if lead.rate <= 0 or self.sums or self.measuring is not None:
            return True
        part = self.plan.parts[self.part_of[chunk]]
        slot = self.slot
        passing = lead.rate / (slot.chunking.nbytes + slot.results.nbytes) * slot.chunks  # chunks/s
        speed = passing * (part.stop - part.first) / self._others  # to this owner
        back = max(self._returned[self.part_of[chunk]], speed / 2 * self.dues.seconds)
        return chunk - part.first - back < LEAST_AHEAD + speed * lead.seconds

    def ready(self) -> list[int]:
        """The chunks I add up that have all contributions of others."""
        return [chunk for chunk, lacking in self.waiting.items() if lacking == 0]

    def part_arrived(self, peer: PeerId, cid: bytes, chunk: int) -> bool:
        """Count a stored part in; True when its chunk now has all contributions of others."""
        if chunk not in self.waiting or (peer, cid) not in self.job(chunk).others:
            return False
        self.progress += 1
        self.dues.came("part", peer)
        self.waiting[chunk] -= 1
        return self.waiting[chunk] == 0

    def accept(self, chunk: int, digest: bytes) -> None:
        """The final bytes of a chunk are in place."""
        self.hashes[chunk] = digest
        self.have += 1
        self._returned[self.part_of[chunk]] += chunk < self.slot.chunks
        self._wires.pop(chunk, None)
        if self.givers[chunk] != self.me:
            self.dues.came("result", self.givers[chunk])

    def reduced(self, chunk: int, digest: bytes) -> int | None:
        """A chunk of mine is reduced; returns the index of its part when that is complete."""
        self.accept(chunk, digest)
        del self.waiting[chunk]
        part = self.part_of[chunk]
        self._left[part] -= 1
        return None if self._left[part] else part

    def witnessed(self, chunk: int) -> int | None:
        """A chunk of which I am a witness is added up, and noted (`note`); returns the index of its
        part when that is complete.
        """
        del self.waiting[chunk]
        index = self.part_of[chunk]
        part = self.plan.parts[index]
        return index if len(self._stated[index]) == part.stop - part.first else None

    def note(self, chunk: int, result: bytes, terms: Sequence[EncodedChunk]) -> None:
        """The hash of what came of a chunk that I state, and what it was made of."""
        hashes = (result, *(chunk_hash(wire.data) for wire in terms))
        self._stated.setdefault(self.part_of[chunk], {})[chunk] = hashes
        if self.own_cid is not None:
            own = [cid for _, cid, _ in self.job(chunk).sources].index(self.own_cid)
            self.encoded(chunk, hashes[1 + own])

    def encoded(self, chunk: int, digest: bytes) -> None:
        """The hash of my contribution to a chunk, as it is encoded."""
        given, part = self.slot.given.setdefault(self.own_cid or b"", {}), self.part_of[chunk]
        if chunk not in given:
            given[chunk] = digest
            self._ungiven[part] -= 1
            if not self._ungiven[part]:
                self._given.append(part)

    def given(self) -> list[tuple[int, bytes]]:
        """Parts of which all that I contribute was encoded since this was asked last, each with the
        Merkle root of that."""
        hashes, found = self.slot.given.get(self.own_cid or b"", {}), list[tuple[int, bytes]]()
        for index in self._given:
            part = self.plan.parts[index]
            root = merkle_root([hashes[chunk] for chunk in range(part.first, part.stop)])
            found.append((index, root))
        self._given.clear()
        return found

    def statement(self, index: int) -> tuple[bytes, tuple[bytes, ...]]:
        """Of a part that I state: its digest, and by contributor the Merkle root of what it sent
        for the part."""
        part = self.plan.parts[index]
        noted = self._stated[index]
        columns = zip(*(noted[chunk] for chunk in range(part.first, part.stop)), strict=True)
        results, *terms = columns
        return part_digest(self.plan, part, results), tuple(map(merkle_root, terms))

    def part_digest(self, index: int) -> bytes:
        """Digest of a complete part."""
        part = self.plan.parts[index]
        hashes = [digest for digest in self.hashes[part.first : part.stop] if digest is not None]
        assert len(hashes) == part.stop - part.first
        return part_digest(self.plan, part, hashes)

    def report(self, own_usable: bool) -> ReductionReport:
        """What is still lacking."""
        lost: dict[bytes, list[int]] = {}
        for chunk in self.waiting:
            job = self.job(chunk)
            for _, cid, held in job.awaited:
                if chunk not in held:
                    lost.setdefault(cid, []).append(chunk)
            if job.own_cid is not None and not own_usable:
                lost.setdefault(job.own_cid, []).append(chunk)
        lacking: dict[PeerId, list[int]] = {}
        for chunk, digest in enumerate(self.hashes):
            if digest is None and self.givers[chunk] != self.me:
                lacking.setdefault(self.givers[chunk], []).append(chunk)
        resumed, self.resumed = self.resumed, set()
        missing = {cid: spans(chunks) for cid, chunks in lost.items()}
        found = {giver: spans(chunks) for giver, chunks in lacking.items()}
        dispute = self.slot.dispute
        return ReductionReport(
            self.plan_id,
            missing,
            found,
            self.progress,
            frozenset(resumed),
            dispute.report if dispute is not None else None,
        )


def slot_for(plan: Plan, slots: Mapping[bytes, RoundSlot]) -> RoundSlot:
    """The open round of a plan. Raises LocalProtocolError where there is none like it, or the plan
    is not well formed.
    """
    fault = check_plan(plan)
    if fault is not None:
        raise LocalProtocolError(
            f"plan of round {plan.round} of {plan.log!r} is not well formed: {fault}"
        )
    slot = slots.get(wire_header.slot_id(plan.log, plan.round))
    if slot is None:
        raise LocalProtocolError(f"round {plan.round} of {plan.log!r} is not open")
    if slot.chunking.meaning != (plan.codec, plan.numel, plan.chunk_elements):
        raise LocalProtocolError(f"round {plan.round} of {plan.log!r} is open in other chunks")
    return slot

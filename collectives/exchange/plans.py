"""One plan being executed: what of its result is here, and what of mine can be reduced.

Where the reducer has two phases, what the owner of a part says of it is one more chunk of the
result, behind the others: of number ``chunks`` + index of the part. It is sent, asked for and
waited for like them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from ..codec import Wire
from ..digest import part_digest
from ..errors import AtollError, LocalProtocolError, RemoteProtocolError
from ..group import Plan
from ..identifiers import PeerId
from ..pace import Lead
from ..partition import check_plan
from ..reduce import Reducer
from . import header as wire_header
from .events import Report
from .header import Header
from .slot import RoundSlot, spans
from .statements import Measuring
from .ways import Job, ways_of

EVEN_AHEAD, EVEN_S = 3, 0.01  # chunks; of silence
LEAST_AHEAD = 3  # chunks: one on its way there, one on its way back, and one between
Source = tuple[Literal["part", "result"], PeerId]


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
    if slot.grid.meaning != (plan.codec, plan.numel, plan.chunk_elements):
        raise LocalProtocolError(f"round {plan.round} of {plan.log!r} is open with another grid")
    return slot


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
        self.ways = ways_of(plan, slot, me, reducer)
        self.below = [
            way.below(me, self.audience) for way in self.ways
        ]  # by part: to whom I send its result
        self.part_of = [
            index for index, part in enumerate(plan.parts) for _ in range(part.first, part.stop)
        ]  # by chunk
        self.givers: list[PeerId] = [
            self.ways[index].above for index in self.part_of
        ]  # by chunk: who sends me the result
        self.measuring = Measuring(plan, me, reducer) if reducer.form == "two-phase" else None
        if self.measuring is not None:
            self.part_of += range(len(plan.parts))
            self.givers += [part.owner for part in plan.parts]
        self.cids = frozenset(
            [c.cid for c in plan.contributors]
            + [cid for way in self.ways if way.job for _, cid in way.job.others]
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
        self.waiting: dict[
            int, int
        ] = {}  # chunks I add up and have not: how many contributions of others they lack
        self._left: dict[int, int] = {}  # my parts: chunks still to reduce
        self._wires: dict[int, Wire] = {}
        self.me = me
        self._clock = clock
        self._began = clock()
        self._due: dict[Source, int] = {}  # chunks still to come
        self._finished: dict[Source, float] = {}
        for index, part in enumerate(plan.parts):
            job = self.ways[index].job
            if part.owner == me:
                self._left[index] = part.stop - part.first
            if job is not None and job.sources:
                self._expect(job, range(part.first, part.stop))
        for giver in self.givers:
            if giver != me:
                self._due["result", giver] = self._due.get(("result", giver), 0) + 1
        simple = (
            not self.sums and self.measuring is None
        )  # contributions alone go between two members, but for results
        self._incoming = {
            peer: due for (kind, peer), due in self._due.items() if kind == "part" and simple
        }
        self._outgoing: dict[PeerId, int] = {}  # what there was to send when this plan began
        self._heard: dict[PeerId, float] = {}  # when a contribution of a peer came last

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
                self._due["part", peer] = self._due.get(("part", peer), 0) + 1

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
        return self.have == len(self.hashes) and (
            self.measuring is None or self.measuring.weighing is not None
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """See ResultComplete."""
        weighing = self.measuring.weighing if self.measuring is not None else None
        return weighing.weights if weighing is not None else ()

    @property
    def spread(self) -> float | None:
        """See ResultComplete."""
        weighing = self.measuring.weighing if self.measuring is not None else None
        return weighing.spread if weighing is not None else None

    def job(self, chunk: int) -> Job:
        """What I add up for a chunk; it is one of `waiting`."""
        job = self.ways[self.part_of[chunk]].job
        assert job is not None
        return job

    def uploads(self, chunk: int) -> list[tuple[bytes, PeerId]]:
        """(cid, to whom) of what I send for a chunk: my contribution, and a partial sum or an
        account once it is made.
        """
        partials, accounts = self.slot.partials, self.slot.accounts.made
        return [
            (upload.cid, upload.to)
            for upload in self.ways[self.part_of[chunk]].uploads
            if not upload.made
            or chunk in partials.get(upload.cid, ())
            or chunk in accounts.get(upload.cid, ())
        ]

    def partials(self) -> set[bytes]:
        """The names of the partial sums I make, and of the accounts that I give and wait for."""
        jobs = [way.job for way in self.ways if way.job is not None]
        given = {account.cid for job in jobs for check in job.checks for account in check.accounts}
        return given | {upload.cid for way in self.ways for upload in way.uploads if upload.made}

    def expected(self, peer: PeerId, chunk: int) -> bytes | None:
        """The name of what ``peer`` is to send me for a chunk, if anything."""
        job = self.ways[self.part_of[chunk]].job
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
        job = self.ways[self.part_of[record.chunk]].job
        if record.kind == wire_header.ACCOUNT and (
            job is None or (peer, record.sub) not in job.others
        ):
            raise RemoteProtocolError(
                f"an account of chunk {record.chunk} that the plan does not want", peer=peer
            )

    def wire(self, chunk: int) -> Wire:
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
        mine = [bool(way.below(self.me, (peer,))) for way in self.ways]
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
        self.below = [way.below(self.me, self.audience) for way in self.ways]
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
        if (
            lead.rate <= 0 or self.sums or self.measuring is not None
        ):  # no result comes before all contributions have
            return True
        part = self.plan.parts[self.part_of[chunk]]
        slot = self.slot
        passing = lead.rate / (slot.grid.nbytes + slot.results.nbytes) * slot.chunks  # chunks/s
        speed = passing * (part.stop - part.first) / self._others  # to this owner
        back = max(self._returned[self.part_of[chunk]], speed / 2 * (self._clock() - self._began))
        return chunk - part.first - back < LEAST_AHEAD + speed * lead.seconds

    def even(self, peer: PeerId, left: int) -> bool:
        """Whether the exchange of contributions with the only other peer is about even, where I
        have ``left`` chunks for it: else it has other things to do than to take in mine, its own
        for me above all, and who runs ahead has to wait for all it sends at the end.

        Only while they come: a peer from which nothing has come for a while may be waiting for
        mine. And only between two: among more, who waits for one does something for another
        meanwhile.
        """
        incoming, due = self._incoming.get(peer, 0), self._due.get(("part", peer), 0)
        if not incoming or not due or len(self._incoming) > 1:
            return True
        total = self._outgoing.setdefault(peer, left)
        given, got = total - left, incoming - due
        return (
            given * incoming < (got + EVEN_AHEAD) * total
            or self._clock() - self._heard.get(peer, self._began) > EVEN_S
        )

    def ready(self) -> list[int]:
        """The chunks I add up that have all contributions of others."""
        return [chunk for chunk, lacking in self.waiting.items() if lacking == 0]

    def part_arrived(self, peer: PeerId, cid: bytes, chunk: int) -> bool:
        """Count a stored part in; True when its chunk now has all contributions of others."""
        if chunk not in self.waiting or (peer, cid) not in self.job(chunk).others:
            return False
        self.progress += 1
        self._came("part", peer)
        self._heard[peer] = self._clock()
        self.waiting[chunk] -= 1
        return self.waiting[chunk] == 0

    def accept(self, chunk: int, digest: bytes) -> None:
        """The final bytes of a chunk are in place."""
        self.hashes[chunk] = digest
        self.have += 1
        self._returned[self.part_of[chunk]] += chunk < self.slot.chunks
        self._wires.pop(chunk, None)
        if self.givers[chunk] != self.me:
            self._came("result", self.givers[chunk])

    def _came(self, kind: Literal["part", "result"], peer: PeerId) -> None:
        left = self._due[kind, peer] = self._due[kind, peer] - 1
        if not left:
            self._finished[kind, peer] = self._clock()

    def since(self) -> tuple[tuple[Literal["part", "result"], PeerId, float], ...]:
        """See ResultComplete."""
        now = self._clock()
        return tuple((kind, peer, now - at) for (kind, peer), at in self._finished.items())

    def reduced(self, chunk: int, digest: bytes) -> int | None:
        """A chunk of mine is reduced; returns the index of its part when that is complete."""
        self.accept(chunk, digest)
        del self.waiting[chunk]
        part = self.part_of[chunk]
        self._left[part] -= 1
        return None if self._left[part] else part

    def part_digest(self, index: int) -> bytes:
        """Digest of a complete part."""
        part = self.plan.parts[index]
        hashes = [digest for digest in self.hashes[part.first : part.stop] if digest is not None]
        assert len(hashes) == part.stop - part.first
        return part_digest(self.plan, part, hashes)

    def report(self, own_usable: bool) -> Report:
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
        return Report(
            self.plan_id,
            missing,
            found,
            self.progress,
            frozenset(resumed),
            dispute.told if dispute is not None else None,
        )

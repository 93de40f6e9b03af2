"""One plan being executed: what of its result is here, and what of my part can be reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ..codec import Wire
from ..digest import part_digest
from ..group import Plan
from ..identifiers import PeerId
from ..reduce import Factors, Reducer
from .events import Report
from .slot import RoundSlot, spans

Source = tuple[Literal["part", "result"], PeerId]


class PlanState:
    """The plan in force of a round. ``data`` holds the encoded result, chunk after chunk, and gets its final bytes in place."""

    def __init__(
        self, plan: Plan, slot: RoundSlot, me: PeerId, reducer: Reducer, data: memoryview, audience: Sequence[PeerId],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.plan_id = plan.plan_id
        self.slot = slot
        self.data = data[: slot.grid.nbytes]
        self.reducer = reducer
        self.audience = tuple(peer for peer in dict.fromkeys(audience) if peer != me)
        self.cids = frozenset(c.cid for c in plan.contributors)
        counted = plan.contributors if reducer.form != "own" else [c for c in plan.contributors if c.member.peer == me]
        self.weights = tuple(c.weight for c in counted)
        self.factors: Factors | None = reducer.factors(self.weights) if reducer.form == "streaming" else None
        if reducer.form == "own":
            self.factors = Factors((1.0,), 1.0)
        self.owners: list[PeerId] = [part.owner for part in plan.parts for _ in range(part.first, part.stop)]
        self.sources = [(c.member.peer, c.cid, slot.parts_of(c.member.peer, c.cid)) for c in counted]
        self.others = {(peer, cid) for peer, cid, _ in self.sources if peer != me}
        self.own_cid = next((cid for peer, cid, _ in self.sources if peer == me), None)
        self.hashes: list[bytes | None] = [None] * slot.chunks
        self.have = 0
        self.progress = 0
        self.resumed: set[PeerId] = set()  # whose lanes came up since the last report
        self.blocked = False  # a contribution turned out to be unusable: nothing more can be reduced under this plan
        self.waiting: dict[int, int] = {}  # my chunks that are not reduced: how many contributions of others they lack
        self._left: dict[int, int] = {}  # my parts: chunks still to reduce
        self._part_of: dict[int, int] = {}
        self._wires: dict[int, Wire] = {}
        for index, part in enumerate(plan.parts):
            if part.owner == me:
                self._left[index] = part.stop - part.first
                for chunk in range(part.first, part.stop):
                    self._part_of[chunk] = index
                    self.waiting[chunk] = sum(chunk not in held for peer, _, held in self.sources if peer != me)
        self._me = me
        self._clock = clock
        self._due: dict[Source, int] = {}  # chunks still to come
        self._finished: dict[Source, float] = {}
        for peer, _, held in self.sources:
            if peer != me:
                self._due["part", peer] = sum(chunk not in held for chunk in self.waiting)
        for owner in self.owners:
            if owner != me:
                self._due["result", owner] = self._due.get(("result", owner), 0) + 1

    @property
    def order(self) -> tuple[int, int]:
        """Plans of one round replace each other in this order."""
        return (self.plan.ballot, self.plan.revision)

    @property
    def complete(self) -> bool:
        """Whether all result bytes are here."""
        return self.have == self.slot.chunks

    def wire(self, chunk: int) -> Wire:
        """Views of a chunk of the result."""
        wire = self._wires.get(chunk)
        if wire is None:
            wire = self._wires[chunk] = self.slot.grid.wire(self.view(chunk), chunk)
        return wire

    def view(self, chunk: int) -> memoryview:
        """The bytes of a chunk of the result."""
        start, stop = self.slot.grid.span(chunk)
        return self.data[start:stop]

    def mine(self) -> list[int]:
        """The chunks I own."""
        return list(self._part_of)

    def add_audience(self, peers: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """More receivers of the result; returns the new ones."""
        new = tuple(peer for peer in dict.fromkeys(peers) if peer != self._me and peer not in self.audience)
        self.audience += new
        return new

    def ready(self) -> list[int]:
        """My chunks that have all contributions of others and are not reduced."""
        return [chunk for chunk, lacking in self.waiting.items() if lacking == 0]

    def part_arrived(self, peer: PeerId, cid: bytes, chunk: int) -> bool:
        """Count a stored part in; True when its chunk now has all contributions of others."""
        if (peer, cid) not in self.others or chunk not in self.waiting:
            return False
        self.progress += 1
        self._came("part", peer)
        self.waiting[chunk] -= 1
        return self.waiting[chunk] == 0

    def accept(self, chunk: int, digest: bytes) -> None:
        """The final bytes of a chunk are in place."""
        self.hashes[chunk] = digest
        self.have += 1
        self._wires.pop(chunk, None)
        if self.owners[chunk] != self._me:
            self._came("result", self.owners[chunk])

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
        part = self._part_of[chunk]
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
        missing: dict[bytes, tuple[tuple[int, int], ...]] = {}
        for peer, cid, held in self.sources:
            chunks = [c for c in self.waiting if (not own_usable if peer == self._me else c not in held)]
            if chunks:
                missing[cid] = spans(chunks)
        lacking: dict[PeerId, list[int]] = {}
        for chunk, digest in enumerate(self.hashes):
            if digest is None and self.owners[chunk] != self._me:
                lacking.setdefault(self.owners[chunk], []).append(chunk)
        resumed, self.resumed = self.resumed, set()
        found = {owner: spans(chunks) for owner, chunks in lacking.items()}
        return Report(self.plan_id, missing, found, self.progress, frozenset(resumed))

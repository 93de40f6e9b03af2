"""One open round as the data plane sees it: its grid, whose parts are accepted, and the parts that
have come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..codec import Grid, Wire
from ..encoded import EncodedVector
from ..errors import LocalProtocolError, RemoteProtocolError
from ..identifiers import CID_BYTES, PeerId
from .accounts import Accounts
from .events import Spans
from .header import HALF, PART, Header, slot_id
from .pool import Pools, WirePool, Workspace

if TYPE_CHECKING:
    from .checking import Dispute
    from .plans import PlanState

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
        grid: Grid,
        pools: Pools,
        early: int | None = None,
    ) -> None:
        """``early``: see `Exchange.open_round`; None: no bound."""
        self.log = log
        self.round = round_
        self.id = slot_id(log, round_)
        self.members = frozenset(members)
        self.grid = grid
        self.results = grid.results
        self.numel = grid.numel
        self.chunks = grid.chunks
        self.plan: PlanState | None = None
        self.partials: dict[bytes, dict[int, Wire]] = {}
        self.accounts = Accounts(2 * grid.chunks)
        self.dispute: Dispute | None = None  # the first partial sum of which accounts differed
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.abandoned: set[bytes] = set()
        self._pools = pools
        self._last_pool: WirePool | None = None
        self._parts: dict[PeerId, dict[bytes, dict[int, Wire]]] = {}
        self._counts: dict[PeerId, int] = {}
        self.early = early
        self._refused: set[tuple[PeerId, bytes]] = set()
        self._early: dict[bytes, dict[int, tuple[PeerId, Wire]]] = {}
        self._early_count = 0
        self.said: dict[
            PeerId, tuple[bytes, int, bytes]
        ] = {}  # the last statement on a part before its plan: (plan id, part, bytes)

    def pool(self, chunk: int, grid: Grid | None = None) -> WirePool:
        """Where buffers for this chunk come from; ``grid``: that of results."""
        codec, elements, pool = (
            (grid or self.grid).codec(chunk),
            self.grid.elements(chunk),
            self._last_pool,
        )
        if pool is None or pool.codec is not codec or pool.elements != elements:
            pool = self._last_pool = self._pools.get(codec, elements)
        return pool

    def check_record(self, peer: PeerId, chunk: int, length: int, grid: Grid) -> None:
        """Raises RemoteProtocolError unless a record's chunk exists on the grid, contributions' or
        results', and has its length.
        """
        if chunk >= self.chunks:
            raise RemoteProtocolError(f"chunk {chunk} of {self.chunks}", peer=peer)
        expected = grid.wire_bytes(chunk)
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
        return not here or (here + 1) * self.grid.wire_bytes(chunk) <= self.early

    def store(self, peer: PeerId, cid: bytes, chunk: int, wire: Wire) -> None:
        """A part has arrived."""
        self._parts.setdefault(peer, {}).setdefault(cid, {})[chunk] = wire
        self._counts[peer] = self._counts.get(peer, 0) + 1

    def parts_of(self, peer: PeerId, cid: bytes) -> dict[int, Wire]:
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

    def store_early(self, plan_id: bytes, peer: PeerId, chunk: int, wire: Wire) -> None:
        """A result has arrived before its plan."""
        self._early.setdefault(plan_id, {})[chunk] = (peer, wire)
        self._early_count += 1

    def take_early(self, plan_id: bytes) -> dict[int, tuple[PeerId, Wire]]:
        """The early results of a plan. Hand the wires back to the pool."""
        found = self._early.pop(plan_id, {})
        self._early_count -= len(found)
        return found

    def takes_said(self, plan_id: bytes, peer: PeerId, length: int) -> bool:
        """Whether what an owner says of a part of a plan that is not known yet is kept: one
        statement a peer, the last.
        """
        most = 8 * (
            len(self.members) * (len(self.members) + 1) // 2
        )  # a number for each pair of contributors
        return (
            peer in self.members
            and not self.closed
            and plan_id not in self.abandoned
            and length <= most
        )

    def release(self) -> None:
        """Give all buffers back."""
        self.said.clear()
        for peer, cids in self._parts.items():
            for cid in list(cids):
                self._drop(peer, cid)
        self._parts.clear()
        self.keep_partials(())
        for plan_id in list(self._early):
            for chunk, (_, wire) in self.take_early(plan_id).items():
                self.pool(chunk, self.results).give(wire)


class Frozen:
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
        self._fitting: Grid | None = None

    def same(self, other: Frozen) -> bool:
        """Whether the other has the same memory."""
        mine, theirs = self.vector, other.vector
        return mine is theirs or (
            isinstance(mine, Tensor)
            and isinstance(theirs, Tensor)
            and mine.data_ptr() == theirs.data_ptr()
        )

    def fits(self, slot: RoundSlot) -> bool:
        """Whether it has the round's length, and its grid and codec where it is encoded."""
        if self._fitting is slot.grid:
            return True
        vector = self.vector
        fits = (
            vector.grid == slot.grid
            if isinstance(vector, EncodedVector)
            else vector.numel() == slot.numel
        )
        self._fitting = slot.grid if fits else None
        return fits

    def wire(
        self, slot: RoundSlot, chunk: int, workspace: Workspace, *, look: bool = True
    ) -> tuple[Wire, bool]:
        """The chunk encoded (as it lies, where that needs no copy, else on ``workspace``), and
        whether all of it is finite. ``look``: False spares the pass that only a look would need,
        and says True."""
        vector, codec = self.vector, slot.grid.codec(chunk)
        if isinstance(vector, EncodedVector):
            wire = vector.wire(chunk)
            return wire, codec.finite(wire)
        size = slot.grid.chunk_elements
        views = self._chunks.get(size)
        if views is None:  # made once a grid
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

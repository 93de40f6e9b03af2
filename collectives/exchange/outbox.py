"""What each peer is still to be sent, and in which turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..identifiers import PeerId
from . import header as wire_header
from .blobs import Blobs
from .header import HEADER_BYTES
from .pool import Workspace
from .slot import Frozen, RoundSlot


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One record to send: header bytes and plaintext payload.

    The payload stays valid until the next `next_record` for the same peer; copy it, seal it or send it before.
    """

    header: bytes
    payload: memoryview


class Flow:
    """One round towards one peer: its parts of my contribution, and results of my part."""

    __slots__ = ("slot", "parts", "results", "sent", "result_turn", "queued")

    def __init__(self, slot: RoundSlot) -> None:
        self.slot = slot
        self.parts: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # (cid, chunk)
        self.results: OrderedDict[int, None] = OrderedDict()
        self.sent: dict[bytes, set[int]] = {}  # by cid: what this peer was sent already, under whichever plan
        self.result_turn = False
        self.queued = False

    def wants_part(self, cid: bytes, chunk: int) -> bool:
        """Whether a chunk of a contribution was never handed out."""
        return chunk not in self.sent.get(cid, ())

    def mark_sent(self, cid: bytes, chunk: int) -> None:
        """A chunk of a contribution has been handed out."""
        self.sent.setdefault(cid, set()).add(chunk)


class Outbox:
    """Everything queued for one peer. Rounds take turns; within one, parts and results alternate; blobs come last."""

    def __init__(self) -> None:
        self.ring: deque[Flow] = deque()
        self.flows: dict[bytes, Flow] = {}  # by slot id
        self.blobs: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # (name, chunk)
        self.workspace = Workspace()  # where parts are encoded on their way out

    def flow(self, slot: RoundSlot) -> Flow:
        """The flow of a round, made on first use."""
        flow = self.flows.get(slot.id)
        if flow is None:
            flow = self.flows[slot.id] = Flow(slot)
        return flow

    def wake(self, flow: Flow) -> None:
        """Give the flow a turn."""
        if not flow.queued:
            flow.queued = True
            self.ring.append(flow)

    def drop(self, slot_id: bytes) -> None:
        """Forget a round."""
        flow = self.flows.pop(slot_id, None)
        if flow is not None:
            flow.parts.clear()
            flow.results.clear()


class Sender:
    """The outboxes of all peers. Chunks are encoded when they are pulled."""

    def __init__(
        self, frozen: Mapping[bytes, Frozen], blobs: Blobs, poison: Callable[[bytes], None], served: Callable[[RoundSlot], None]
    ) -> None:
        self.boxes: dict[PeerId, Outbox] = {}
        self._frozen = frozen
        self._blobs = blobs
        self._poison = poison  # a contribution is not finite
        self._served = served  # a closed round has nothing more for one peer

    def box(self, peer: PeerId) -> Outbox:
        """The outbox of a peer, made on first use."""
        box = self.boxes.get(peer)
        if box is None:
            box = self.boxes[peer] = Outbox()
        return box

    def next_record(self, peer: PeerId) -> Outgoing | None:
        """The next record for a peer, or None."""
        box = self.boxes.get(peer)
        if box is None:
            return None
        while box.ring:
            flow = box.ring[0]
            found = self._next_of(flow, box)
            if found is not None:
                box.ring.rotate(-1)
                return found
            box.ring.popleft()
            flow.queued = False
            if flow.slot.closed:
                box.drop(flow.slot.id)
                self._served(flow.slot)
        while box.blobs:
            (name, chunk), _ = box.blobs.popitem(last=False)
            record = self._blobs.record(name, chunk)
            if record is not None:
                return Outgoing(*record)
        return None

    def _next_of(self, flow: Flow, box: Outbox) -> Outgoing | None:
        slot, state = flow.slot, flow.slot.plan
        if state is None:
            return None
        while flow.results or flow.parts:
            if flow.results and (flow.result_turn or not flow.parts):
                flow.result_turn = False
                chunk, _ = flow.results.popitem(last=False)
                payload = state.view(chunk)
                head = wire_header.pack(wire_header.RESULT, len(payload), chunk, state.plan_id, slot.id)
            else:
                flow.result_turn = True
                (cid, chunk), _ = flow.parts.popitem(last=False)
                found = self._encode(flow, box, cid, chunk)
                if found is None:
                    continue
                payload = found
                head = wire_header.pack(wire_header.PART, len(payload), chunk, slot.id, cid)
            slot.bytes_sent += HEADER_BYTES + len(payload)
            return Outgoing(head, payload)
        return None

    def _encode(self, flow: Flow, box: Outbox, cid: bytes, chunk: int) -> memoryview | None:
        slot, frozen = flow.slot, self._frozen.get(cid)
        if frozen is None or frozen.poisoned:
            return None
        wire, finite = frozen.wire(slot, chunk, box.workspace)
        if not finite:
            self._poison(cid)
            return None
        flow.mark_sent(cid, chunk)
        return wire.data

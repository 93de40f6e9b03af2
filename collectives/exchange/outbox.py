"""What each peer is still to be sent, and in which turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from ..identifiers import PeerId
from ..pace import Lead
from . import header as wire_header
from .blobs import Blobs
from .header import HEADER_BYTES
from .pool import Workspace
from .slot import FrozenVector, PlanState, RoundSlot

LONG_AGO, NOT_YET = float("-inf"), float("inf")
NEVER = 1 << 63
Handed = tuple[dict[int, float], int]
"""A chunk that was handed out, and where the time of it stands."""


class Outgoing(NamedTuple):
    """One record to send: header bytes and plaintext payload.

    The payload stays valid until the next `next_record` for the same lane, or the next command;
    copy it, encrypt it or send it before.
    """

    header: bytes
    payload: memoryview


class Flow:
    """One round towards one peer: its parts of my contribution and partial sums, and results."""

    __slots__ = ("slot", "parts", "results", "sent", "given", "carried", "result_turn", "queued")

    def __init__(self, slot: RoundSlot) -> None:
        self.slot = slot
        self.parts: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # (cid, chunk)
        self.results: OrderedDict[int, None] = OrderedDict()
        # By cid: what this peer was sent already, under whichever plan, and when.
        self.sent: dict[bytes, dict[int, float]] = {}
        # Results of the present plan this peer was sent, and when.
        self.given: dict[int, float] = {}
        self.carried: dict[int, list[Handed]] = {}  # by lane: what went over it
        self.result_turn = False
        self.queued = False

    def wants_part(self, cid: bytes, chunk: int) -> bool:
        """Whether a chunk of a contribution was never handed out."""
        return chunk not in self.sent.get(cid, ())

    def clear(self) -> None:
        """Nothing that was queued is to be sent, and no result was."""
        self.parts.clear()
        self.results.clear()
        self.given = {}


class Outbox:
    """Everything queued for one peer. Rounds take turns; within one, parts and results alternate;
    blobs come last.
    """

    def __init__(self, peer: PeerId, busy: set[PeerId]) -> None:
        self._peer, self._busy = peer, busy
        self.ring: deque[Flow] = deque()
        self.flows: dict[bytes, Flow] = {}  # by slot id
        self.blobs: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # (name, chunk)
        # By lane: where parts are encoded on their way out.
        self.workspaces: dict[int, Workspace] = {}
        self.lanes: set[int] = set()
        # By lane: the chunk handed out last; the lane has not asked for more since.
        self.in_hand: dict[int, Handed] = {}

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
            self._busy.add(self._peer)

    def queue_blob(self, name: bytes, chunks: Iterable[int]) -> None:
        """Send these chunks of a provided blob when nothing of a round is left to send."""
        self.blobs.update(((name, chunk), None) for chunk in chunks)
        self._busy.add(self._peer)

    def drop(self, slot_id: bytes) -> None:
        """Forget a round."""
        flow = self.flows.pop(slot_id, None)
        if flow is not None:
            flow.clear()

    def lane_up(self, lane: int) -> bool:
        """One more lane. Whether it is the only one: then all that was ever handed out may be sent
        again at once.
        """
        first = not self.lanes
        self.lanes.add(lane)
        self.in_hand.pop(lane, None)  # a new lane has nothing
        if first:
            for flow in self.flows.values():
                for handed in (*flow.sent.values(), flow.given):
                    handed.update(dict.fromkeys(handed, LONG_AGO))
        return first

    def lane_down(self, lane: int) -> bool:
        """A lane is gone: what it had may not have come, and may be sent again at once. Whether
        there are others.
        """
        self.lanes.discard(lane)
        self.in_hand.pop(lane, None)
        self.workspaces.pop(lane, None)
        for flow in self.flows.values():
            for handed, chunk in flow.carried.pop(lane, ()):
                handed[chunk] = LONG_AGO
        return bool(self.lanes)


class Sender:
    """The outboxes of all peers. Chunks are encoded when they are pulled."""

    def __init__(
        self,
        frozen: Mapping[bytes, FrozenVector],
        blobs: Blobs,
        poison: Callable[[bytes], None],
        encoded: Callable[[PlanState, int, memoryview], None],
        served: Callable[[RoundSlot], None],
        clock: Callable[[], float],
        patience_s: Callable[[], float],
        lead: Callable[[], Lead],
    ) -> None:
        self.boxes: dict[PeerId, Outbox] = {}
        self.reached: Collection[PeerId] = ()
        """Peers to which there is lane 0, though their boxes have not been made."""
        self.busy = set[PeerId]()  # for whom `next_record` may have something
        self._frozen = frozen
        self._blobs = blobs
        self._poison = poison  # a contribution is not finite
        self._encoded = encoded  # a chunk of it, where parts have witnesses
        self._served = served  # a closed round has nothing more for one peer
        self._clock, self._patience_s, self._lead = clock, patience_s, lead

    def box(self, peer: PeerId) -> Outbox:
        """The outbox of a peer, made on first use."""
        box = self.boxes.get(peer)
        if box is None:
            box = self.boxes[peer] = Outbox(peer, self.busy)
            if peer in self.reached:
                box.lanes.add(0)
        return box

    def more(self, slot: RoundSlot, *peers: PeerId) -> None:
        """These may have room for more parts of a round: something has come from them, or time has
        passed.
        """
        for peer in peers:
            box = self.boxes.get(peer)
            flow = box.flows.get(slot.id) if box is not None else None
            if box is not None and flow is not None and flow.parts:
                box.wake(flow)

    def overdue(self, handed: Mapping[int, float], chunk: int) -> bool:
        """Whether a chunk, if it was handed out at all, should have come by now: a lane loses
        nothing while it lasts.
        """
        return self._clock() - handed.get(chunk, LONG_AGO) >= self._patience_s()

    def has_more(self, peer: PeerId) -> bool:
        box = self.boxes.get(peer)
        return box is not None and bool(box.ring or box.blobs)

    def next_record(self, peer: PeerId, lane: int) -> Outgoing | None:
        """The next record for a peer over a lane, or None."""
        box = self.boxes.get(peer)
        if box is None:
            return None
        if lane in box.in_hand:
            handed, chunk = box.in_hand.pop(lane)
            handed[chunk] = self._clock()
        while box.ring:
            flow = box.ring[0]
            found = self._next_of(flow, box, peer, lane)
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
        self.busy.discard(peer)
        return None

    def _next_of(self, flow: Flow, box: Outbox, peer: PeerId, lane: int) -> Outgoing | None:
        slot, state = flow.slot, flow.slot.plan
        if state is None:
            return None
        while True:
            part = self._next_part(flow, state, peer)
            if flow.results and (flow.result_turn or part is None):
                flow.result_turn = False
                chunk, _ = flow.results.popitem(last=False)
                payload = state.view(chunk)
                handed = flow.given
                kind, number = (
                    (wire_header.RESULT, chunk)
                    if chunk < slot.chunks
                    else (wire_header.MEASURE, chunk - slot.chunks)
                )
                head = wire_header.pack(kind, len(payload), number, state.plan_id, slot.id)
            elif part is None:
                return None
            else:
                flow.result_turn = True
                cid, chunk = part
                del flow.parts[part]
                found = self._encode(flow, box.workspaces.setdefault(lane, Workspace()), cid, chunk)
                if found is None:
                    continue
                payload, handed = found, flow.sent.setdefault(cid, {})
                kind, key = _kind(state, cid)
                head = wire_header.pack(kind, len(payload), chunk, key, cid)
            handed[chunk] = NOT_YET
            box.in_hand[lane] = handed, chunk
            flow.carried.setdefault(lane, []).append((handed, chunk))
            slot.bytes_sent += HEADER_BYTES + len(payload)
            return Outgoing(head, payload)

    def _next_part(self, flow: Flow, state: PlanState, peer: PeerId) -> tuple[bytes, int] | None:
        """The first part that its owner has room for (`PlanState.within`, `PlanState.even`)."""
        if not flow.parts:
            return None
        lead = self._lead()
        if lead.rate <= 0:  # the usual case on fast links, asked for every record
            return (
                next(iter(flow.parts))
                if not lead.near or state.dues.even(peer, len(flow.parts))
                else None
            )
        # By part of the plan: its first chunk that is too far ahead; those behind it are, too.
        refused: dict[int, int] = {}
        for part in flow.parts:
            chunk, index = part[1], state.part_of[part[1]]
            if chunk < refused.get(index, NEVER):
                if state.within(chunk, lead):
                    return part
                refused[index] = chunk
        return None

    def _encode(
        self, flow: Flow, workspace: Workspace, cid: bytes, chunk: int
    ) -> memoryview | None:
        slot, frozen = flow.slot, self._frozen.get(cid)
        if cid in slot.accounts.made:
            account = slot.accounts.made[cid].get(chunk)
            return None if account is None else memoryview(account)
        if cid in slot.partials:  # copied: the buffer may be needed before the lane is done with it
            found = slot.partials[cid].get(chunk)
            copy = workspace.wire(slot.chunking.codec(chunk), slot.chunking.elements(chunk))
            if found is not None:
                copy.data[:] = found.data
            return None if found is None else copy.data
        if frozen is None or frozen.poisoned:
            return None
        wire, finite = frozen.wire(slot, chunk, workspace)
        if not finite:
            self._poison(cid)
            return None
        if slot.witnesses and slot.plan is not None and slot.plan.own_cid == cid:
            self._encoded(slot.plan, chunk, wire.data)
        return wire.data


def _kind(state: PlanState, cid: bytes) -> tuple[int, bytes]:
    """Kind and key of the record of a contribution, a partial sum or an account."""
    if cid in state.slot.accounts.made:
        return wire_header.ACCOUNT, state.partial_key
    return (
        (wire_header.PARTIAL, state.partial_key)
        if cid in state.slot.partials
        else (wire_header.PART, state.slot.id)
    )

"""Records on their way in: where a payload goes, and for how long it may.

A lane may fill a place in many steps, while plans are replaced, rounds are closed, and the same
chunk comes over another lane. So a place is lent, to one lane, and asked for again at every step
(`place`): None from then on where its memory is needed for something else. What has come in full is
judged again as if it came now. Two lanes never have the same memory: a chunk of a result or of a
blob that comes over a second lane meanwhile goes to memory of its own and is copied; whichever is
here first counts, and the other loses its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import RemoteProtocolError
from ..identifiers import HASH_BYTES, PeerId
from . import header as wire_header
from .blobs import Blobs, Wanted
from .header import HEADER_BYTES, Header
from .slot import PlanState, RoundSlot, slot_of

Owner = RoundSlot | PlanState | Wanted


@dataclass(slots=True, eq=False)
class Loan:
    """One record on its way in. ``shared``: its view is where the chunk stays, which others could
    ask for, too.
    """

    owner: Owner
    chunk: int
    view: memoryview
    shared: bool
    arrived: Callable[[], None]
    dropped: Callable[[], None] | None = None


class Intake:
    """The records that lanes are receiving, one a lane. ``part``, ``result``: a part or an account
    was stored, the bytes of a result are in place; ``statement``: what an owner says of its
    part."""

    def __init__(
        self,
        slots: Mapping[bytes, RoundSlot],
        plans: Mapping[bytes, PlanState],
        blobs: Blobs,
        part: Callable[[RoundSlot, PeerId, bytes, int], None],
        result: Callable[[PlanState, PeerId, int], None],
        statement: Callable[[PlanState, PeerId, int, bytes], None],
    ) -> None:
        self._slots = slots
        self._plans = plans
        self._blobs = blobs
        self._part = part
        self._result = result
        self._statement = statement
        self._lent: dict[tuple[PeerId, int], Loan] = {}

    def destination(self, peer: PeerId, lane: int, record: Header) -> memoryview | None:
        """Where a record's payload goes (`Exchange.destination`)."""
        self.drop(peer, lane)
        if record.kind in (wire_header.PART, wire_header.PARTIAL):
            loan = self._of_part(peer, record)
        elif record.kind == wire_header.ACCOUNT:
            loan = self._of_account(peer, record)
        elif record.kind == wire_header.RESULT:
            loan = self._of_result(peer, record)
        elif record.kind == wire_header.MEASURE:
            loan = self._of_measure(peer, record)
        elif record.kind == wire_header.BLOB:
            loan = self._of_blob(peer, record)
        else:
            raise RemoteProtocolError(f"record kind {record.kind} outside a lane", peer=peer)
        if loan is None:
            return None
        self._lent[peer, lane] = loan
        return loan.view

    def place(self, peer: PeerId, lane: int) -> memoryview | None:
        loan = self._lent.get((peer, lane))
        return None if loan is None else loan.view

    def received(self, peer: PeerId, lane: int) -> bool:
        """The view is filled; False where it was withdrawn."""
        loan = self._lent.pop((peer, lane), None)
        if loan is not None:
            loan.arrived()
        return loan is not None

    def drop(self, peer: PeerId, lane: int) -> None:
        """What a lane was receiving will not come to its end."""
        loan = self._lent.pop((peer, lane), None)
        if loan is not None and loan.dropped is not None:
            loan.dropped()

    def withdraw(self, owner: Owner | None, chunk: int | None = None) -> None:
        """The memory of a round, a plan or a blob is somebody else's from now on. ``chunk``: of
        this one only.
        """
        if self._lent:
            for key, loan in list(self._lent.items()):
                if loan.owner is owner and (chunk is None or (loan.shared and loan.chunk == chunk)):
                    self.drop(*key)

    def _is_lent(self, owner: Owner, chunk: int) -> bool:
        return any(
            lent.shared and lent.chunk == chunk and lent.owner is owner
            for lent in self._lent.values()
        )

    def _of_part(self, peer: PeerId, record: Header) -> Loan | None:
        slot = slot_of(record, self._slots)
        if slot is None:
            return None
        slot.check_record(peer, record.chunk, record.length, slot.chunking)
        if record.kind == wire_header.PARTIAL and slot.plan is not None:
            slot.plan.check_partial(peer, record)
        cid, chunk = record.sub, record.chunk
        if not slot.takes_part(peer, cid, chunk):
            return None
        pool = slot.pool(chunk)
        wire = pool.take()

        def arrived() -> None:
            if not slot.takes_part(peer, cid, chunk):
                pool.give(wire)
                return
            slot.store(peer, cid, chunk, wire)
            slot.bytes_received += HEADER_BYTES + record.length
            self._part(slot, peer, cid, chunk)

        return Loan(slot, chunk, wire.data, False, arrived, lambda: pool.give(wire))

    def _of_account(self, peer: PeerId, record: Header) -> Loan | None:
        """What a member says of a partial sum, also before the plan is known here."""
        slot, name, chunk = slot_of(record, self._slots), record.sub, record.chunk
        if slot is None or peer not in slot.members:
            return None
        if (
            chunk >= slot.chunks
            or record.length % HASH_BYTES
            or not 0 < record.length <= HASH_BYTES * (len(slot.members) + 1)
        ):
            raise RemoteProtocolError(
                f"an account of {record.length} bytes of chunk {chunk} of {slot.chunks}", peer=peer
            )
        if slot.plan is not None:
            slot.plan.check_partial(peer, record)
        if slot.closed or not slot.accounts.takes(peer, name, chunk):
            return None
        data, of = bytearray(record.length), slot

        def arrived() -> None:
            if not of.closed and of.accounts.takes(peer, name, chunk):
                of.accounts.of(peer, name)[chunk] = bytes(data)
                of.bytes_received += HEADER_BYTES + record.length
                self._part(of, peer, name, chunk)

        return Loan(slot, chunk, memoryview(data), False, arrived)

    def _of_result(self, peer: PeerId, record: Header) -> Loan | None:
        state, chunk = self._plans.get(record.key), record.chunk
        if state is None:
            return self._of_early(peer, record)
        slot = state.slot
        slot.check_record(peer, chunk, record.length, slot.results)
        if state.givers[chunk] != peer:
            raise RemoteProtocolError(f"result of chunk {chunk}, which it does not own", peer=peer)
        if not self._lacks(state, peer, chunk):
            return None
        if self._is_lent(state, chunk):
            return self._spare(slot, peer, record)

        def arrived() -> None:
            if self._lacks(state, peer, chunk):
                slot.bytes_received += HEADER_BYTES + record.length
                self._result(state, peer, chunk)

        return Loan(state, chunk, state.view(chunk), True, arrived)

    def _lacks(self, state: PlanState, peer: PeerId, chunk: int) -> bool:
        """Whether a peer's result of a chunk is still of use."""
        return (
            state.slot.plan is state
            and not state.slot.closed
            and state.hashes[chunk] is None
            and state.givers[chunk] == peer
        )

    def _of_measure(self, peer: PeerId, record: Header) -> Loan | None:
        """What an owner says of its part, also before its plan is known here."""
        state, slot = self._plans.get(record.key), self._slots.get(record.sub)
        if state is not None:
            slot, measuring = state.slot, state.measuring
            if (
                measuring is None
                or record.chunk >= len(state.plan.parts)
                or record.length != measuring.nbytes
            ):
                raise RemoteProtocolError(
                    f"a statement of {record.length} bytes on part {record.chunk}", peer=peer
                )
            if state.givers[slot.chunks + record.chunk] != peer:
                raise RemoteProtocolError(
                    f"a statement on part {record.chunk}, which it does not own", peer=peer
                )
            if not self._lacks(state, peer, slot.chunks + record.chunk):
                return None
        elif slot is None or not slot.takes_statement(record.key, peer, record.length):
            return None
        data, of = bytearray(record.length), slot

        def arrived() -> None:
            now = self._plans.get(record.key)
            if now is None and of.takes_statement(record.key, peer, record.length):
                of.early_statements[peer] = (record.key, record.chunk, bytes(data))
            elif now is not None and now.slot is of:
                of.bytes_received += HEADER_BYTES + record.length
                self._statement(now, peer, record.chunk, bytes(data))

        return Loan(slot, record.chunk, memoryview(data), False, arrived)

    def _of_early(self, peer: PeerId, record: Header) -> Loan | None:
        slot = self._slots.get(record.sub)
        if slot is None:
            return None
        slot.check_record(peer, record.chunk, record.length, slot.results)
        return (
            self._spare(slot, peer, record)
            if slot.takes_early(record.key, peer, record.chunk)
            else None
        )

    def _spare(self, slot: RoundSlot, peer: PeerId, record: Header) -> Loan:
        """A result in memory of its own: before its plan, or beside another lane's."""
        chunk = record.chunk
        pool = slot.pool(chunk, slot.results)
        wire = pool.take()

        def arrived() -> None:
            state = self._plans.get(record.key)
            if state is None and slot.takes_early(record.key, peer, chunk):
                slot.bytes_received += HEADER_BYTES + record.length
                slot.store_early(record.key, peer, chunk, wire)
                return
            if state is not None and state.slot is slot and self._lacks(state, peer, chunk):
                slot.bytes_received += HEADER_BYTES + record.length
                self.withdraw(state, chunk)
                state.view(chunk)[:] = wire.data
                self._result(state, peer, chunk)
            pool.give(wire)

        return Loan(slot, chunk, wire.data, False, arrived, lambda: pool.give(wire))

    def _of_blob(self, peer: PeerId, record: Header) -> Loan | None:
        blob = self._blobs.wanted(record.key)
        view = None if blob is None else blob.view(peer, record.chunk, record.length)
        if blob is None or view is None:
            return None
        place = view
        spare = memoryview(bytearray(len(view))) if self._is_lent(blob, record.chunk) else None

        def arrived() -> None:
            if (
                self._blobs.wanted(record.key) is not blob
                or blob.view(peer, record.chunk, record.length) is None
            ):
                return
            if spare is not None:
                self.withdraw(blob, record.chunk)
                place[:] = spare
            self._blobs.arrived(record.key, blob, peer, record.chunk)

        return Loan(blob, record.chunk, view if spare is None else spare, spare is None, arrived)

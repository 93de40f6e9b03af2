"""Free-standing reductions of an attached script: their memory, their deadlines, their results."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

import trio
from torch import Tensor

from ...collectives.codec import get_codec
from ...collectives.errors import LocalProtocolError
from ...collectives.swarm import Outcome
from ..control.service import ReduceBuffers, ScriptEvents
from ..session import events as ev
from ..shared_memory import SharedBuffer
from .run import RunService

FLOAT_BYTES = 4
SPARE_PAIRS = 2  # memory kept for the next reduction of the same length: fresh pages cost as much as the exchange itself


@dataclass(eq=False)
class _Pair:
    """Source and result of one reduction after the other."""

    numel: int
    buffers: ReduceBuffers
    free: threading.Event  # set when the engine has let go of the source


@dataclass(eq=False)
class _Reduction:
    pair: _Pair
    cid: bytes = b""
    started_at: float = 0.0
    running: bool = False
    committed: bool = False
    traffic: tuple[int, int] = (0, 0)
    deadline: trio.CancelScope = field(default_factory=trio.CancelScope)


class Reductions:
    """Those of one script; lives in the node's trio thread."""

    def __init__(self, run: RunService, events: ScriptEvents) -> None:
        self.run, self.events = run, events
        self._open: dict[str, _Reduction] = {}
        self._spare: list[_Pair] = []
        self._made = 0

    def open(self, op_id: str, numel: int) -> ReduceBuffers:
        """Memory for a reduction. Raises StorageError, or LocalProtocolError when ``op_id`` is open already."""
        if op_id in self._open:
            raise LocalProtocolError(f"operation {op_id!r} is open already", hint="give every all_reduce its own op_id")
        pair = next((pair for pair in self._spare if pair.numel == numel and pair.free.is_set()), None)
        if pair is not None:
            self._spare.remove(pair)
        else:
            folder, size = self.run.node.paths.run_dir(self.run.run_id), FLOAT_BYTES * numel
            self._made += 1
            buffers = ReduceBuffers(SharedBuffer(size, folder=folder), SharedBuffer(size, folder=folder), self._made)
            pair = _Pair(numel, buffers, threading.Event())
        self._open[op_id] = _Reduction(pair)
        return pair.buffers

    def start(self, op_id: str, weight: int, deadline_s: float) -> None:
        """The script wrote its source: call the operation."""
        reduction, session = self._open.get(op_id), self.run.session
        if reduction is None or reduction.running or reduction.cid:
            raise LocalProtocolError(f"operation {op_id!r} is not open, or was started already")
        assert session is not None
        now = trio.current_time()
        reduction.cid, reduction.started_at, reduction.running = os.urandom(16), now, True
        reduction.traffic = self.run.traffic()
        try:
            session.operations.start(now, op_id, weight, reduction.pair.buffers.source.tensor(), reduction.cid, session.settings.codec)
        except BaseException:
            reduction.running = False
            raise
        self.run.guard(lambda: session.settle(now))
        self.run.node.nursery.start_soon(self._expire, op_id, reduction, deadline_s)
        self.run.wake()

    async def _expire(self, op_id: str, reduction: _Reduction, deadline_s: float) -> None:
        with reduction.deadline:
            await trio.sleep(deadline_s)
            self.run.guard(lambda: self._abandon(op_id))
            self._end(op_id, reduction, "the deadline passed")

    def _abandon(self, op_id: str) -> None:
        session, now = self.run.session, trio.current_time()
        if session is not None:
            session.operations.abandon(now, op_id)
            session.settle(now)

    def _end(self, op_id: str, reduction: _Reduction, reason: str) -> None:
        """Not committed, as far as this script will know."""
        if reduction.running:
            reduction.running = False
            reduction.deadline.cancel()
            sent, received = self._traffic(reduction)
            elapsed = trio.current_time() - reduction.started_at
            self.events.reduced(op_id, Outcome("open", 0, bytes_sent=sent, bytes_received=received, elapsed_s=elapsed, reason=reason))

    def refused(self, cid: bytes) -> None:
        """A contribution cannot be sent."""
        for op_id, reduction in list(self._open.items()):
            if reduction.cid == cid:
                self._end(op_id, reduction, "the tensor holds NaN or infinity, or a value its codec cannot hold")

    def done(self, event: ev.OperationDone) -> None:
        """An operation is decided: decode its result for the script."""
        reduction = self._open.get(event.op_id)
        if reduction is None or not reduction.running or self.run.ports is None:
            return
        reduction.deadline.cancel()
        target, decided_at = reduction.pair.buffers.result.tensor(), trio.current_time()

        def decoded(now: float, _: None) -> None:
            reduction.running, reduction.committed = False, True
            sent, received = self._traffic(reduction)
            counted, elapsed = event.cid == reduction.cid, now - reduction.started_at
            self.run.note_operation(
                {
                    "op_id": event.op_id, "contributors": {share.peer: share.samples for share in event.contributors}, "counted": counted,
                    "elapsed_s": elapsed, "reduce_s": event.reduce_s, "decision_s": event.decision_s, "decode_s": now - decided_at,
                    "bytes_sent": sent, "bytes_received": received, "at": time.time(),
                }
            )  # fmt: skip
            self.events.reduced(event.op_id, Outcome("committed", 0, event.contributors, counted, (), sent, received, elapsed))

        self.run.ports.offload(lambda: decode_into(event, target), decoded)

    def _traffic(self, reduction: _Reduction) -> tuple[int, int]:
        sent, received = self.run.traffic()
        return sent - reduction.traffic[0], received - reduction.traffic[1]

    def close(self, op_id: str) -> None:
        """The script no longer needs the buffers; a running operation is not disturbed. Idempotent."""
        reduction = self._open.pop(op_id, None)
        if reduction is None:
            return
        pair = reduction.pair
        if not reduction.committed:  # a plan may name the contribution still; the engine keeps the memory as long as it reads it
            pair.buffers.source.close()
            pair.buffers.result.close()
            return
        pair.free.clear()
        self.run.node.engine.notify(pair.free)
        self._spare.append(pair)
        while len(self._spare) > SPARE_PAIRS:
            old = self._spare.pop(0)
            old.buffers.source.close()
            old.buffers.result.close()

    def detached(self) -> None:
        """The script is gone."""
        for op_id in list(self._open):
            self.close(op_id)
        while self._spare:
            pair = self._spare.pop()
            pair.buffers.source.close()
            pair.buffers.result.close()


def decode_into(event: ev.OperationDone, target: Tensor) -> None:
    """Decode an operation's result into float32 (numel,)."""
    codec, at = get_codec(event.codec), 0
    for start in range(0, target.numel(), event.chunk_elements):
        piece = target[start : start + event.chunk_elements]
        size = codec.wire_bytes(piece.numel())
        codec.decode(codec.wire(event.result[at : at + size], piece.numel()), piece)
        at += size

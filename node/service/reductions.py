"""Free-standing reductions of an attached script: their memory, their deadlines, their results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import trio

from ...collectives.codec import DEFAULT_CHUNK_ELEMENTS, Grid
from ...collectives.encoded import EncodedVector
from ...collectives.errors import LocalProtocolError
from ...collectives.swarm import Call, Outcome
from ..control.service import ReduceMemory, ScriptEvents
from ..session import events as ev
from .buffers import BufferPool
from .run import RunService


@dataclass(eq=False)
class _Reduction:
    source: EncodedVector
    result: memoryview | None = None  # lent to the script
    cid: bytes = b""
    started_at: float = 0.0
    running: bool = False
    traffic: tuple[int, int] = (0, 0)
    deadline: trio.CancelScope = field(default_factory=trio.CancelScope)


class Reductions:
    """Those of one script; lives in the node's trio thread."""

    def __init__(self, run: RunService, events: ScriptEvents) -> None:
        self.run, self.events = run, events
        self._open: dict[str, _Reduction] = {}
        self._sources = BufferPool(run.node.paths.run_dir(run.run_id))

    def open(self, op_id: str, numel: int) -> ReduceMemory:
        """Memory for a contribution. Raises StorageError, or LocalProtocolError when ``op_id`` is open already."""
        if op_id in self._open:
            raise LocalProtocolError(f"operation {op_id!r} is open already", hint="give every all_reduce its own op_id")
        session = self.run.session
        assert session is not None
        codec = session.settings.codec
        grid = Grid(codec, numel, DEFAULT_CHUNK_ELEMENTS[codec])
        memory = self._sources.take(grid.nbytes)
        buffer = self._sources.buffer_of(memory)
        assert buffer is not None
        self._open[op_id] = _Reduction(EncodedVector(grid, memory))
        return ReduceMemory(buffer, codec, grid.chunk_elements)

    def start(self, op_id: str, weight: int, deadline_s: float) -> None:
        """The script wrote its contribution: call the operation."""
        reduction, session = self._open.get(op_id), self.run.session
        if reduction is None or reduction.running or reduction.cid:
            raise LocalProtocolError(f"operation {op_id!r} is not open, or was started already")
        assert session is not None
        now = trio.current_time()
        reduction.cid, reduction.started_at, reduction.running = os.urandom(16), now, True
        reduction.traffic = self.run.traffic()
        try:
            session.operations.start(now, Call(op_id, weight=weight), reduction.source.numel(), reduction.source, reduction.cid)
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
        """An operation is decided: the script decodes its result, out of the memory it was received in."""
        reduction = self._open.get(event.op_id)
        if reduction is None or not reduction.running:
            return
        reduction.deadline.cancel()
        reduction.running, reduction.result = False, event.result
        pool, now = self.run.node.results, trio.current_time()
        if pool.buffer_of(reduction.result) is None:  # fetched, into memory of another kind
            reduction.result = pool.take(len(event.result))
            reduction.result[:] = event.result
        buffer = pool.buffer_of(reduction.result)
        assert buffer is not None
        sent, received = self._traffic(reduction)
        counted, elapsed = event.cid == reduction.cid, now - reduction.started_at
        self.run.note_operation(
            {
                "op_id": event.op_id, "contributors": {share.peer: share.samples for share in event.contributors}, "counted": counted,
                "elapsed_s": elapsed, "reduce_s": event.reduce_s, "decision_s": event.decision_s,
                "bytes_sent": sent, "bytes_received": received, "at": time.time(),
            }
        )  # fmt: skip
        self.events.reduced(event.op_id, Outcome("committed", 0, event.contributors, counted, (), sent, received, elapsed), buffer)

    def _traffic(self, reduction: _Reduction) -> tuple[int, int]:
        sent, received = self.run.traffic()
        return sent - reduction.traffic[0], received - reduction.traffic[1]

    def close(self, op_id: str) -> None:
        """The script no longer needs the memory. A running operation is not disturbed: the engine keeps what it reads. Idempotent."""
        self._open.pop(op_id, None)

    def detached(self) -> None:
        """The script is gone, or has lost us: it may still be decoding."""
        for reduction in self._open.values():
            if reduction.result is not None:
                self.run.node.results.abandon(reduction.result)
        self._open.clear()

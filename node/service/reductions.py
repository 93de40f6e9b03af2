"""Free-standing reductions of an attached script: their memory, their deadlines, their results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import trio
from torch import Tensor

from ...collectives.codecs.codec import Chunking
from ...collectives.codecs.encoded import EncodedVector
from ...collectives.errors import LocalProtocolError
from ...collectives.op_names import OWN_NAME
from ...collectives.outcomes import Outcome
from ...collectives.script_swarm import Call
from ..control.requests import ConnectionRequests
from ..control.service import ReduceMemory
from ..control.shared_memory import PooledBuffer
from ..run.events import OperationCommittedEvent, weights_of
from ..session import events as ev
from ..session.calls import calls_of
from .buffers import BufferPool
from .run import RunService

MAX_BUFFERS = 64


@dataclass(eq=False)
class _Reduction:
    call: Call
    numel: int  # of what the script gives
    source: Tensor | EncodedVector
    buffer: int = 0  # where the source lies as it is
    result: memoryview | None = None  # lent to the script
    cid: bytes = b""
    started_at: float = 0.0
    running: bool = False
    traffic: tuple[int, int] = (0, 0)
    deadline: trio.CancelScope = field(default_factory=trio.CancelScope)


class Reductions:
    """Those of one script; lives in the node's trio thread."""

    def __init__(self, run: RunService, events: ConnectionRequests) -> None:
        self.run, self.events = run, events
        self._open: dict[str, _Reduction] = {}
        self._buffers: dict[int, PooledBuffer] = {}
        self._sources = BufferPool(run.node.paths.run_dir(run.run_id))

    def buffer_open(self, numel: int) -> PooledBuffer:
        """Memory for float32 (numel,) that operations read as it lies. Raises StorageError,
        LocalProtocolError.
        """
        if len(self._buffers) >= MAX_BUFFERS:
            raise LocalProtocolError(
                f"the script holds {MAX_BUFFERS} buffers already",
                hint="let go of the tensors of some",
            )
        buffer = PooledBuffer(4 * numel, self.run.node.paths.run_dir(self.run.run_id))
        self._buffers[buffer.number] = buffer
        return buffer

    def buffer_close(self, number: int) -> None:
        """The script does not use it any more; the engine keeps what it reads."""
        self._buffers.pop(number, None)

    def _buffer(self, numel: int, number: int) -> PooledBuffer:
        buffer = self._buffers.get(number)
        if buffer is None or buffer.nbytes != 4 * numel:
            raise LocalProtocolError(f"there is no buffer {number} of {numel} elements")
        if any(
            reduction.buffer == number and reduction.running for reduction in self._open.values()
        ):
            raise LocalProtocolError(f"buffer {number} is in use by another operation")
        return buffer

    def open(self, call: Call, numel: int, buffer: int = 0) -> ReduceMemory:
        """Memory for a contribution, or that of the ``buffer`` (its number) that holds it. Raises
        StorageError, and what `Operations.prepare` raises.
        """
        if call.op_id in self._open:
            raise LocalProtocolError(f"{call.name} is open already", hint=OWN_NAME)
        session = self.run.driven.sessions[0]
        operation = calls_of(session).prepare(trio.current_time(), call, numel)
        self.run.node.lanes.soon(
            trio.current_time(), frozenset(operation.peers) - {self.run.node.identity.peer}
        )
        shape = operation.machine.shape
        if buffer:
            shared = self._buffer(shape.numel, buffer)
            self._open[call.op_id] = _Reduction(call, numel, shared.tensor(), buffer)
            return ReduceMemory(
                shared,
                (shape.codec, shape.chunk_elements, shape.numel),
                tuple(operation.peers),
                held=True,
            )
        chunking = Chunking(shape.codec, shape.numel, shape.chunk_elements)
        memory = self._sources.take(chunking.nbytes)
        source = self._sources.buffer_of(memory)
        assert source is not None
        self._open[call.op_id] = _Reduction(call, numel, EncodedVector(chunking, memory))
        return ReduceMemory(
            source, (shape.codec, shape.chunk_elements, shape.numel), tuple(operation.peers)
        )

    def start(self, op_id: str) -> None:
        """The script wrote its contribution: call the operation."""
        reduction, session = self._open.get(op_id), self.run.driven.sessions[0]
        if reduction is None or reduction.running or reduction.cid:
            raise LocalProtocolError(f"operation {op_id!r} is not open, or was started already")
        now = trio.current_time()
        reduction.cid, reduction.started_at, reduction.running = os.urandom(16), now, True
        reduction.traffic = self.run.traffic()
        try:
            calls_of(session).start(
                now, reduction.call, reduction.numel, reduction.source, reduction.cid
            )
        except BaseException:
            reduction.running = False
            raise
        self.run.guard(lambda: session.settle(now))
        self.run.node.nursery.start_soon(self._expire, op_id, reduction)
        self.run.wake()

    def cancel(self, op_id: str) -> None:
        """The script waits no longer."""
        reduction = self._open.get(op_id)
        if reduction is not None:
            self._give_up(op_id, reduction, "cancelled by its caller")

    async def _expire(self, op_id: str, reduction: _Reduction) -> None:
        with reduction.deadline:
            await trio.sleep(reduction.call.deadline_s)
            self._give_up(op_id, reduction, "the deadline passed")

    def _give_up(self, op_id: str, reduction: _Reduction, reason: str) -> None:
        session, now, says = self.run.session, trio.current_time(), list[str]()

        def abandon() -> None:
            if session is not None:
                says.append(calls_of(session).abandon(now, op_id))
                session.settle(now)

        if reduction.running:
            self.run.guard(abandon)
            self._end(op_id, reduction, ": ".join([reason, *filter(None, says)]))

    def _end(
        self, op_id: str, reduction: _Reduction, reason: str, why: ev.OperationRefused | None = None
    ) -> None:
        """Not committed, as far as this script will know."""
        if reduction.running:
            reduction.running = False
            reduction.deadline.cancel()
            sent, received = self._traffic(reduction)
            elapsed = trio.current_time() - reduction.started_at
            self.events.reduced(
                op_id,
                Outcome(
                    "open",
                    0,
                    bytes_sent=sent,
                    bytes_received=received,
                    elapsed_s=elapsed,
                    reason=reason,
                    differs=why is not None and why.differs,
                    overflows=why is not None and why.overflows,
                ),
            )

    def refused(self, cid: bytes) -> None:
        """A contribution cannot be sent."""
        for op_id, reduction in list(self._open.items()):
            if reduction.cid == cid:
                self._end(
                    op_id,
                    reduction,
                    (
                        "the tensor holds NaN or infinity, or a value too large for its "
                        "codec or for the result"
                    ),
                )

    def hopeless(self, event: ev.OperationRefused) -> None:
        """Others have called something else under this id, or the result overflows."""
        reduction = self._open.get(event.op_id)
        if reduction is not None:
            self._end(event.op_id, reduction, event.reason, event)

    def done(self, event: ev.OperationDone) -> None:
        """An operation is decided: the script decodes its result from the received memory."""
        reduction = self._open.get(event.op_id)
        if reduction is None or not reduction.running:
            return
        reduction.deadline.cancel()
        reduction.running, reduction.result = False, event.result
        now = trio.current_time()
        sent, received = self._traffic(reduction)
        counted, elapsed = event.cid == reduction.cid, now - reduction.started_at
        self.run.node.publish(
            OperationCommittedEvent(
                at=time.time(),
                run=self.run.run_id,
                op_id=event.op_id,
                contributors={share.peer: share.samples for share in event.contributors},
                counted=counted,
                weights=weights_of(event.contributors),
                elapsed_s=elapsed,
                reduce_s=event.reduce_s,
                decision_s=event.decision_s,
                bytes_sent=sent,
                bytes_received=received,
            )
        )
        under = (event.config, event.members)
        outcome = Outcome(
            "committed", 0, event.contributors, counted, (), sent, received, elapsed, "", *under
        )
        self.events.reduced(event.op_id, outcome, self._pooled(reduction))

    def _pooled(self, reduction: _Reduction) -> PooledBuffer:
        pool = self.run.node.results
        assert reduction.result is not None
        if pool.buffer_of(reduction.result) is None:  # fetched, into memory of another kind
            fetched, reduction.result = reduction.result, pool.take(len(reduction.result))
            reduction.result[:] = fetched
        buffer = pool.buffer_of(reduction.result)
        assert buffer is not None
        return buffer

    def _traffic(self, reduction: _Reduction) -> tuple[int, int]:
        sent, received = self.run.traffic()
        return sent - reduction.traffic[0], received - reduction.traffic[1]

    def close(self, op_id: str) -> None:
        """The script no longer needs the memory. A running operation is not disturbed: the engine
        keeps what it reads. Idempotent.
        """
        self._open.pop(op_id, None)

    def detached(self) -> None:
        """The script is gone, or has lost us: it may still be decoding."""
        for op_id, reduction in list(self._open.items()):
            if reduction.result is not None:
                self.run.node.results.abandon(reduction.result)
            self._give_up(op_id, reduction, "the script has ended")
        self._open.clear()
        self._buffers.clear()

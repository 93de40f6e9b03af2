"""The node's implementation of `SessionPorts`: libp2p streams, the engine thread, files and worker
threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from ...collectives.identifiers import PeerId
from ...collectives.pace import Pace
from ...security.identity import verify
from ..run.signing import DOMAIN
from ..session.barrier import Barrier
from ..session.ports import ContentPlane, DataPlane, Storage
from .lanes import LanedContent, LanedPlane

if TYPE_CHECKING:
    from .run import RunService

T = TypeVar("T")
MAX_SERVED = 32
"""Jobs for other peers that may wait."""


class Jobs:
    """Jobs for a thread beside the loop, one at a time and in order."""

    def __init__(self, run: RunService) -> None:
        self._run = run
        self.waiting: deque[tuple[Callable[[], Any], Callable[[float, Any], None]]] = deque()
        self._work = trio.Event()

    def put(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        self.waiting.append((work, done))
        self._work.set()

    async def run(self) -> None:
        """Do them, each in a thread; cancelled, it finishes the one it is at."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self.waiting:
                await self._do(*self.waiting.popleft())

    async def _do(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        # Here, not in `run`: what a job holds is let go of when it is done.
        result = await trio.to_thread.run_sync(work)
        self._run.guard(lambda: done(trio.current_time(), result))
        self._run.wake()


class RunPorts:
    """Ports of one run's session."""

    def __init__(self, run: RunService, storages: Sequence[Storage]) -> None:
        """``storages``: of all fragments; the first is the session's of a run in one piece."""
        self._run = run
        plane, lanes, me = run.node.engine.exchange, run.node.lanes, run.node.identity.peer
        self.exchange: DataPlane = LanedPlane(plane, lanes, me)
        self.content: ContentPlane = LanedContent(plane, lanes, me)
        self.storage = storages[0]
        self._rounds, self._service, self._forcing = Jobs(run), Jobs(run), Jobs(run)
        self._files = Jobs(run)
        self._barrier = Barrier(storages, self.persist)

    def send(self, peer: PeerId, data: bytes) -> None:
        """Queue a control message, after what it depends on is on the medium; nothing goes to a
        peer that is banned.
        """
        if not self._barrier.hold(lambda _: self._send(peer, data)):
            self._send(peer, data)

    def _send(self, peer: PeerId, data: bytes) -> None:
        if peer in self._banned():
            return
        self._run.node.network.send(self._run.run_id, peer, data)

    def _banned(self) -> set[PeerId]:
        membership = self._run.membership
        return membership.banned if membership is not None else set()

    def after_sync(self, act: Callable[[float], None]) -> bool:
        return self._barrier.hold(act)

    def offload(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Queue a job of the session's own: a round waits for it."""
        self._rounds.put(work, done)

    def serve(self, work: Callable[[], T], done: Callable[[float, T], None]) -> bool:
        """Queue a job for another peer. False where as many wait as may."""
        if len(self._service.waiting) >= MAX_SERVED:
            return False
        self._service.put(work, done)
        return True

    def persist(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Queue a job that waits for the disk: a vote must not wait for an outer step, nor for a
        checkpoint.
        """
        self._forcing.put(work, done)

    def work(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Queue a job on a file of the run's base: nothing else waits for it."""
        self._files.put(work, done)

    async def worker(self) -> None:
        """Run jobs one at a time of each queue. What a job raises ends the run: after a sync that
        failed nobody knows what is on the medium.
        """
        async with trio.open_nursery() as nursery:
            for jobs in (self._service, self._forcing, self._rounds, self._files):
                nursery.start_soon(jobs.run)

    def emit(self, event: object) -> None:
        self._run.on_event(event)

    def unread(self, peer: PeerId) -> bool:
        return self._run.node.network.unread(self._run.run_id, peer, self._run.node.engine.rtt_s)

    def pace(self) -> Pace:
        return self._run.node.engine.pace

    def sign(self, payload: bytes) -> bytes:
        return self._run.node.identity.sign(DOMAIN, payload)

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        return verify(peer, DOMAIN, payload, signature)

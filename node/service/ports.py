"""The node's implementation of `SessionPorts`: libp2p streams, the engine thread, files and worker threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from ...collectives.identifiers import PeerId
from ...collectives.pace import Pace
from ...security.identity import verify
from ..session.ports import DataPlane, Storage
from .lanes import LanedPlane

if TYPE_CHECKING:
    from .run import RunService

T = TypeVar("T")
DOMAIN = "atoll/run/1"
MAX_SERVED = 32
"""Jobs for other peers that may wait."""


class Jobs:
    """A queue of jobs, oldest first."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], Any], Callable[[float, Any], None]]] = deque()
        self.some = trio.Event()

    def put(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """One more."""
        self.waiting.append((work, done))
        self.some.set()


class RunPorts:
    """Ports of one run's session."""

    def __init__(self, run: RunService, storage: Storage) -> None:
        self._run = run
        self.exchange: DataPlane = LanedPlane(
            run.node.engine.exchange, run.node.lanes, run.node.identity.peer
        )
        self.storage = storage
        self._rounds, self._service = Jobs(), Jobs()

    def send(self, peer: PeerId, data: bytes) -> None:
        """Queue a control message; nothing goes to a peer that is banned."""
        if peer in self._banned():
            return
        self._run.node.network.send(self._run.run_id, peer, data)

    def _banned(self) -> set[PeerId]:
        return self._run.session.membership.banned if self._run.session is not None else set()

    def offload(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Queue a job of the session's own: a round waits for it."""
        self._rounds.put(work, done)

    def serve(self, work: Callable[[], T], done: Callable[[float, T], None]) -> bool:
        """Queue a job for another peer. False where as many wait as may."""
        if len(self._service.waiting) >= MAX_SERVED:
            return False
        self._service.put(work, done)
        return True

    async def worker(self) -> None:
        """Run jobs one at a time of each queue, each in a thread; cancelled, it finishes those it is at. What a job raises ends the run."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work_off, self._service)
            await self._work_off(self._rounds)

    async def _work_off(self, jobs: Jobs) -> None:
        while True:
            await jobs.some.wait()
            jobs.some = trio.Event()
            while jobs.waiting:
                await self._do(*jobs.waiting.popleft())

    async def _do(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        result = await trio.to_thread.run_sync(
            work
        )  # here, not in `worker`: what a job holds is let go of when it is done
        self._run.guard(lambda: done(trio.current_time(), result))
        self._run.wake()

    def emit(self, event: object) -> None:
        """Tell script and observers."""
        self._run.on_event(event)

    def pace(self) -> Pace:
        """How fast this node's links are."""
        return self._run.node.engine.pace

    def sign(self, payload: bytes) -> bytes:
        """Sign as this node."""
        return self._run.node.identity.sign(DOMAIN, payload)

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        """Check a peer's signature."""
        return verify(peer, DOMAIN, payload, signature)

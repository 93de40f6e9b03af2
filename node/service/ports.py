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


class RunPorts:
    """Ports of one run's session."""

    def __init__(self, run: RunService, storage: Storage) -> None:
        self._run = run
        self.exchange: DataPlane = LanedPlane(
            run.node.engine.exchange, run.node.lanes, run.node.identity.peer
        )
        self.storage = storage
        self._jobs: deque[tuple[Callable[[], Any], Callable[[float, Any], None]]] = deque()
        self._work = trio.Event()

    def send(self, peer: PeerId, data: bytes) -> None:
        """Queue a control message; nothing goes to a peer that is banned."""
        if peer in self._banned():
            return
        self._run.node.network.send(self._run.run_id, peer, data)

    def _banned(self) -> set[PeerId]:
        return self._run.session.membership.banned if self._run.session is not None else set()

    def offload(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Queue a job for the worker."""
        self._jobs.append((work, done))
        self._work.set()

    async def worker(self) -> None:
        """Run jobs one at a time, each in a thread; cancelled, it finishes the one it is at. What a job raises ends the run."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._jobs:
                await self._do(*self._jobs.popleft())

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

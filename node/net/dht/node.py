"""The DHT of a node: put, get, provide, find_providers. Every read really asks the network. This is
the engine's driver over streams.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from ....collectives.errors import NetworkError, RemoteProtocolError
from ....collectives.identifiers import PeerId
from ....security.identity import Identity
from ..transport.faults import Faults
from ..transport.host import Host, NotSpokenError, PeerStream
from ..transport.peerbook import PeerBook
from .channel import Channel
from .engine import QUORUM, REPLICAS, Engine, Operation
from .routing import K, network_of
from .store import PROVIDE_AGAIN_S
from .wire import Located, MessageReader, Rpc, encode
from .work import DhtWork

PROTOCOL = "/atoll/kad/1.0.0"
MAINTAIN_S = 60.0
STREAMS_PER_PEER = 4
IDLE_S = 600.0

T = TypeVar("T")


class Dht:
    """Used from the trio thread only; `run` must be running for everything that asks others."""

    def __init__(
        self,
        identity: Identity,
        host: Host,
        connect: Callable[[PeerId], Awaitable[None]],
        addresses_of: Callable[[PeerId], Sequence[str]],
        book: PeerBook,
        faults: Faults,
        rng: random.Random,
        on: bool = True,
    ) -> None:
        """``connect`` raises NetworkError; ``addresses_of`` reads the peer book, and knows
        ourselves. ``on``: without it nothing is asked, told or answered, and whoever asks us is
        told that we do not speak it."""
        self.on = on
        self._host, self._connect, self._faults, self._rng = host, connect, faults, rng
        self.engine = Engine(identity, addresses_of, book, host.connected, rng)
        self.table = self.engine.table
        self._channels: dict[PeerId, Channel] = {}
        self._serving: dict[PeerId, int] = {}
        self._nursery: trio.Nursery | None = None
        if on:
            host.handle(PROTOCOL, self._serve)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask, refresh, republish and provide again until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            if not self.on:
                await trio.sleep_forever()
            nursery.start_soon(self._provide_again)
            while True:
                await trio.sleep(MAINTAIN_S * self._rng.uniform(0.5, 1.0))
                await self.refresh()
                self._tidy()
                for key, data in self.engine.server.values.due(time.time()):
                    await self._carry_out(self.engine.store_value(key, data))

    def _tidy(self) -> None:
        """Forget whom nobody could reach: it may be nobody, whom somebody has named."""
        self._channels = {
            peer: channel
            for peer, channel in self._channels.items()
            if not channel.idle or self._host.connected(peer)
        }

    def link_changed(self, peer: PeerId, up: bool) -> None:
        """Connected peers are in the table, lost ones are not."""
        if not self.on:
            return
        self.engine.link_changed(peer, up, network_of(self._host.remote_host(peer)) if up else "")
        if not up:
            self._channels.pop(peer, None)

    async def refresh(self) -> None:
        """Fill the table with neighbours."""
        await self._carry_out(self.engine.refresh())

    async def put(
        self, name: str, payload: bytes, life_s: float = 3600.0, replicas: int = REPLICAS
    ) -> int:
        """Store a signed value of ours under our key ``name``; returns how many peers hold it now
        (at least a majority was waited for).

        The sequence is the time in milliseconds: a later put replaces an earlier one.
        """
        return await self._carry_out(self.engine.put(name, payload, life_s, replicas, time.time()))

    async def get(self, owner: PeerId, name: str, quorum: int = QUORUM) -> bytes | None:
        """The newest valid payload; ``quorum`` equal answers of the network end the search. None
        when there is none.
        """
        return await self._carry_out(self.engine.get(owner, name, quorum, time.time()))

    async def provide(self, key: bytes) -> int:
        """Tell the network that we provide ``key``, now and every ten minutes until `withdraw`;
        returns how many peers noted it.
        """
        if not self.on:
            return 0
        return await self._carry_out(
            self.engine.provide(key, self._host.addresses(), trio.current_time())
        )

    def withdraw(self, key: bytes) -> None:
        """No longer renew a provider record; it expires by itself."""
        self.engine.provided.discard(key)

    async def find_providers(
        self, key: bytes, count: int = K, *, exhaustive: bool = True
    ) -> list[Located]:
        """Who provides ``key``, without ourselves: the network is asked until ``count`` are found
        or all near peers were asked.
        """
        if not self.on:
            return []
        return await self._carry_out(
            self.engine.find_providers(key, count, exhaustive, trio.current_time())
        )

    async def _provide_again(self) -> None:
        while True:
            await trio.sleep(PROVIDE_AGAIN_S * self._rng.uniform(0.8, 1.0))
            for key in list(self.engine.provided):
                await self.provide(key)

    # --- asking ---

    async def _carry_out(self, operation: Operation[T]) -> T:
        assert self._nursery is not None, "the DHT is not running"
        while True:
            try:
                work = next(operation)
            except StopIteration as end:
                return end.value
            done = trio.Event()
            # What is left of it goes on when the result is there, or nobody waits any more.
            self._nursery.start_soon(self._drive, work, done)
            await done.wait()

    async def _drive(self, work: DhtWork, done: trio.Event) -> None:
        changed = trio.Event()

        async def ask(peer: PeerId, request: Rpc) -> None:
            await self._ask(work, peer, request)
            changed.set()

        async with trio.open_nursery() as nursery:
            while True:
                for peer, request in work.poll(trio.current_time()):
                    nursery.start_soon(ask, peer, request)
                if work.done:
                    done.set()
                if work.over:
                    return  # requests run out: one that is cancelled breaks its stream
                changed = trio.Event()
                with trio.move_on_at(work.wake()):
                    await changed.wait()

    async def _ask(self, work: DhtWork, peer: PeerId, request: Rpc) -> None:
        asked = trio.current_time()
        try:
            answer = await self._channel(peer).call(request)
        except NetworkError:
            self.engine.failed(peer, trio.current_time())
            work.failed(peer, trio.current_time())
            return
        now = trio.current_time()
        self.engine.answered(peer, answer, now - asked)
        try:
            work.answered(peer, answer, now)
        except ValueError:
            self._faults.count(peer, now)

    def _channel(self, peer: PeerId) -> Channel:
        assert self._nursery is not None
        if peer not in self._channels:
            self._channels[peer] = Channel(
                peer,
                self._open,
                self._nursery,
                self._faults,
                lambda: (self._host.peer, tuple(self._host.addresses())),
            )
        return self._channels[peer]

    async def _open(self, peer: PeerId) -> PeerStream:
        await self._connect(peer)
        try:
            return await self._host.open_stream(peer, PROTOCOL)
        except NotSpokenError:
            self.engine.foreign(peer)
            raise

    # --- answering ---

    async def _serve(self, stream: PeerStream) -> None:
        """Requests of one stream, in order, until it ends."""
        peer = stream.peer
        if self._serving.get(peer, 0) >= STREAMS_PER_PEER or self._faults.shut_out(
            peer, trio.current_time()
        ):
            return
        self._serving[peer] = self._serving.get(peer, 0) + 1
        reader = MessageReader(stream.receive_some, peer)
        try:
            while True:
                request = None
                with trio.move_on_after(IDLE_S):
                    request = await reader.next()
                if request is None:
                    return
                await stream.send_all(
                    encode(
                        self.engine.server.answer(peer, request, trio.current_time(), time.time())
                    )
                )
        except RemoteProtocolError:
            self._faults.count(peer, trio.current_time())
        finally:
            self._serving[peer] -= 1
            if not self._serving[peer]:
                del self._serving[peer]

"""The DHT of a node: put, get, provide, find_providers. Every read really asks the network."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence

import trio

from ....collectives.errors import NetworkError
from ....collectives.identifiers import PeerId
from ....security.identity import Identity, decode_base58
from ..faults import Faults
from ..host import Host, PeerStream
from . import records
from .channel import Channel
from .query import Lookups
from .routing import K, RoutingTable, position
from .server import Server
from .store import PROVIDE_AGAIN_S
from .wire import ADD_PROVIDER, FIND_NODE, GET_PROVIDERS, GET_VALUE, PUT_VALUE, Rpc

PROTOCOL = "/atoll/kad/1.0.0"
REPLICAS = 8
REFRESH_S = 60.0


class Dht:
    """Used from the trio thread only; `run` must be running for everything that asks others."""

    def __init__(
        self,
        identity: Identity,
        host: Host,
        connect: Callable[[PeerId], Awaitable[None]],
        addresses_of: Callable[[PeerId], Sequence[str]],
        heard_of: Callable[[PeerId, Sequence[str]], None],
        faults: Faults,
        rng: random.Random,
    ) -> None:
        """``connect`` raises NetworkError; ``addresses_of`` and ``heard_of`` read and feed the peer book."""
        self._identity, self._host, self._connect, self._faults, self._heard_of = identity, host, connect, faults, heard_of
        self.table = RoutingTable(identity.peer)
        self.server = Server(identity.peer, self.table, addresses_of, heard_of, faults, rng)
        self._rng = rng
        self._channels: dict[PeerId, Channel] = {}
        self._provided: set[bytes] = set()
        self._lookups: Lookups | None = None
        host.handle(PROTOCOL, self.server.serve)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask, refresh and provide again until cancelled."""
        async with trio.open_nursery() as nursery:
            self._lookups = Lookups(self.table, self._ask, self._heard_of, self._host.connected, self._identity.peer, nursery)
            task_status.started()
            nursery.start_soon(self._provide_again)
            while True:
                await trio.sleep(REFRESH_S * self._rng.uniform(0.5, 1.0))
                await self.refresh()

    def link_changed(self, peer: PeerId, up: bool) -> None:
        """Connected peers are in the table, lost ones are not."""
        if up:
            self.table.add(peer)
        else:
            self.table.remove(peer)
            self._channels.pop(peer, None)

    async def refresh(self) -> None:
        """Look up ourselves: fills the table with neighbours."""
        me = decode_base58(self._identity.peer)
        await self._lookup(Rpc(FIND_NODE, me), me, lambda answer: False)

    async def put(self, name: str, payload: bytes, life_s: float = 3600.0, replicas: int = REPLICAS) -> int:
        """Store a signed value of ours under our key ``name``; returns how many peers hold it now (at least a majority was waited for).

        The sequence is the time in milliseconds: a later put replaces an earlier one.
        """
        now = time.time()
        key, data = records.sign(self._identity, name, payload, int(now * 1000), int(now + life_s))
        self.server.values.put(key, data, now)
        near = (await self._lookup(Rpc(FIND_NODE, key), key, lambda answer: False, width=max(replicas, 3)))[:replicas]
        return await self._store(near, Rpc(PUT_VALUE, key, data))

    async def get(self, owner: PeerId, name: str, quorum: int = 2) -> bytes | None:
        """The newest valid payload that up to ``quorum`` answers from the network (or our own store) hold; None when there is none."""
        key = records.owner_key(owner, name)
        found: list[records.SignedValue] = []

        def enough(answer: Rpc) -> bool:
            if answer.value is not None:
                try:
                    found.append(records.check(key, answer.value, time.time()))
                except ValueError:
                    return False
            return len(found) >= quorum

        await self._lookup(Rpc(GET_VALUE, key), key, enough, exhaustive=True)
        mine = self.server.values.get(key, time.time())
        if mine is not None:
            found.append(records.check(key, mine, time.time()))
        return max(found, key=lambda value: value.sequence).payload if found else None

    async def provide(self, key: bytes) -> int:
        """Tell the network that we provide ``key``, now and every ten minutes until `withdraw`; returns how many peers noted it."""
        self._provided.add(key)
        self.server.providers.add(key, self._identity.peer, trio.current_time())
        return await self._provide(key)

    def withdraw(self, key: bytes) -> None:
        """No longer renew a provider record; it expires by itself."""
        self._provided.discard(key)

    async def find_providers(self, key: bytes, count: int = K, *, exhaustive: bool = True) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Who provides ``key``, without ourselves: the network is asked until ``count`` are found or all near peers were asked."""
        found: dict[PeerId, tuple[str, ...]] = dict.fromkeys(self.server.providers.get(key, trio.current_time()), ())

        def enough(answer: Rpc) -> bool:
            for peer, addresses in answer.providers:
                self._heard_of(peer, addresses)
                found[peer] = addresses or found.get(peer, ())
            return len(found) > count

        await self._lookup(Rpc(GET_PROVIDERS, key), key, enough, exhaustive=exhaustive)
        found.pop(self._identity.peer, None)
        return sorted(found.items())

    async def _provide(self, key: bytes) -> int:
        near = (await self._lookup(Rpc(FIND_NODE, key), key, lambda answer: False))[:REPLICAS]
        me = (self._identity.peer, tuple(self._host.addresses()))
        return await self._store(near, Rpc(ADD_PROVIDER, key, providers=(me,)))

    async def _store(self, peers: Sequence[PeerId], request: Rpc) -> int:
        """Send ``request`` to all; return at a majority, the rest goes on in the background."""
        lookups = self._running()
        stored, finished, done = 0, 0, trio.Event()

        async def one(peer: PeerId) -> None:
            nonlocal stored, finished
            try:
                answer = await self._ask(peer, request)
                stored += answer.kind == request.kind and (request.value is None or answer.value == request.value)
            except NetworkError:
                lookups.mark_dead(peer)
            finished += 1
            if 2 * stored > len(peers) or finished == len(peers):
                done.set()

        for peer in peers:
            lookups.nursery.start_soon(one, peer)
        if peers:
            await done.wait()
        return stored

    async def _lookup(
        self, request: Rpc, key: bytes, enough: Callable[[Rpc], bool], *, width: int = K, exhaustive: bool = False
    ) -> list[PeerId]:
        return await self._running().run(request, position(key), enough, width=width, exhaustive=exhaustive)

    async def _ask(self, peer: PeerId, request: Rpc) -> Rpc:
        channel = self._channels.get(peer)
        if channel is None:
            channel = self._channels[peer] = Channel(peer, self._open, self._running().nursery, self._faults)
        return await channel.call(request)

    async def _open(self, peer: PeerId) -> PeerStream:
        await self._connect(peer)
        return await self._host.open_stream(peer, PROTOCOL)

    def _running(self) -> Lookups:
        assert self._lookups is not None, "the DHT is not running"
        return self._lookups

    async def _provide_again(self) -> None:
        while True:
            await trio.sleep(PROVIDE_AGAIN_S * self._rng.uniform(0.8, 1.0))
            for key in list(self._provided):
                await self._provide(key)

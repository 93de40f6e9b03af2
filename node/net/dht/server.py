"""Answers the requests of others. Pure memory: each request costs microseconds, so that no queue is needed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import trio

from ....collectives.errors import RemoteProtocolError
from ....collectives.identifiers import PeerId
from ....security.identity import encode_base58
from ..faults import Faults
from ..host import PeerStream
from .records import MAX_KEY_BYTES
from .routing import K, RoutingTable, position
from .store import ProviderStore, ValueStore
from .wire import ADD_PROVIDER, FIND_NODE, GET_PROVIDERS, GET_VALUE, PING, PUT_VALUE, Located, MessageReader, Rpc, encode

STREAMS_PER_PEER = 4
IDLE_S = 600.0


class Server:
    """Serves ``/atoll/kad/1.0.0``."""

    def __init__(
        self,
        me: PeerId,
        table: RoutingTable,
        addresses_of: Callable[[PeerId], Sequence[str]],
        heard_of: Callable[[PeerId, Sequence[str]], None],
        faults: Faults,
        rng: random.Random,
    ) -> None:
        """``addresses_of`` looks a peer up; ``heard_of`` is told addresses that a peer states for itself."""
        self._me, self._table, self._addresses_of, self._heard_of, self._faults = me, table, addresses_of, heard_of, faults
        self.providers, self.values = ProviderStore(rng), ValueStore()
        self._streams: dict[PeerId, int] = {}

    async def serve(self, stream: PeerStream) -> None:
        """Requests of one stream, in order, until it ends."""
        peer = stream.peer
        if self._streams.get(peer, 0) >= STREAMS_PER_PEER or self._faults.shut_out(peer, trio.current_time()):
            return
        self._streams[peer] = self._streams.get(peer, 0) + 1
        reader = MessageReader(stream.receive_some, peer)
        try:
            while True:
                request = None
                with trio.move_on_after(IDLE_S):
                    request = await reader.next()
                if request is None:
                    return
                await stream.send_all(encode(self.answer(peer, request, trio.current_time(), time.time())))
        except RemoteProtocolError:
            self._faults.count(peer, trio.current_time())
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def answer(self, peer: PeerId, request: Rpc, now: float, unix_s: float) -> Rpc:
        """The answer to ``peer``'s request. Raises RemoteProtocolError on a request that makes no sense."""
        kind, key = request.kind, request.key
        if kind == PING:
            return Rpc(PING)
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise RemoteProtocolError(f"kad key of {len(key)} bytes", peer=peer)
        if kind == FIND_NODE:
            return Rpc(kind, key, closer=self._closer(key, peer))
        if kind == GET_VALUE:
            return Rpc(kind, key, self.values.get(key, unix_s), self._closer(key, peer))
        if kind == GET_PROVIDERS:
            located = tuple(self._located(other) for other in self.providers.get(key, now))
            return Rpc(kind, key, closer=self._closer(key, peer), providers=located)
        if kind == PUT_VALUE:
            return Rpc(kind, key, request.value if self._put(peer, request, unix_s) else None)
        if kind == ADD_PROVIDER:
            for other, addresses in request.providers:
                if other == peer and self.providers.add(key, peer, now):  # for itself only
                    self._heard_of(peer, addresses)
            return Rpc(kind, key)
        raise RemoteProtocolError(f"unknown kad request {kind}", peer=peer)

    def _put(self, peer: PeerId, request: Rpc, unix_s: float) -> bool:
        try:
            return request.value is not None and self.values.put(request.key, request.value, unix_s)
        except ValueError as error:
            raise RemoteProtocolError(f"invalid DHT value: {error}", peer=peer) from None

    def _closer(self, key: bytes, asker: PeerId) -> tuple[Located, ...]:
        """The K nearest peers we know, the key itself included when it is a peer we can name (kad-dht asks for that)."""
        near = [peer for peer in self._table.closest(position(key), K + 1) if peer != asker][:K]
        named = PeerId(encode_base58(key)) if len(key) == 38 else None
        if named is not None and named not in near and self._addresses_of(named):
            near.insert(0, named)
        return tuple(self._located(peer) for peer in near)

    def _located(self, peer: PeerId) -> Located:
        return peer, tuple(self._addresses_of(peer))

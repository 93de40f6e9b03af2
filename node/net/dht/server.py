"""Answers the requests of others, without I/O: each costs microseconds, so that no queue is
needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ....collectives.errors import RemoteProtocolError
from ....collectives.foreign import quoted
from ....collectives.identifiers import PeerId
from ....security.identity import encode_base58
from .records import MAX_KEY_BYTES
from .routing import K, RoutingTable, position, position_of
from .store import ProviderStore, ValueStore
from .wire import ADD_PROVIDER, FIND_NODE, GET_PROVIDERS, GET_VALUE, PING, PUT_VALUE, Located, Rpc


class DhtServer:
    """What this node tells others. ``now``: monotonic seconds; ``unix_s``: wall clock."""

    def __init__(
        self,
        me: PeerId,
        table: RoutingTable,
        addresses_of: Callable[[PeerId], Sequence[str]],
        heard_of: Callable[[PeerId, Sequence[str]], None],
        rng: random.Random,
    ) -> None:
        """``addresses_of`` looks a peer up; ``heard_of`` takes addresses a peer states itself."""
        self._me, self._table, self._addresses_of, self._heard_of = (
            me,
            table,
            addresses_of,
            heard_of,
        )
        self.providers, self.values = ProviderStore(rng), ValueStore(position_of(me))

    def answer(self, peer: PeerId, request: Rpc, now: float, unix_s: float) -> Rpc:
        """The answer to ``peer``'s request. Raises RemoteProtocolError on a senseless one."""
        kind, key = request.kind, request.key
        for other, addresses in request.closer[:1]:
            if other == peer:  # where it is; of others it tells us nothing unasked
                self._heard_of(peer, addresses)
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
            raise RemoteProtocolError(f"invalid DHT value: {quoted(error)}", peer=peer) from None

    def _closer(self, key: bytes, asker: PeerId) -> tuple[Located, ...]:
        """The K nearest peers we know, the key itself included when it is a peer we can name
        (kad-dht asks for that).
        """
        near = [peer for peer in self._table.closest(position(key), K + 1) if peer != asker][:K]
        named = PeerId(encode_base58(key)) if len(key) == 38 else None
        if named is not None and named not in near and self._addresses_of(named):
            near.insert(0, named)
        return tuple(self._located(peer) for peer in near)

    def _located(self, peer: PeerId) -> Located:
        return peer, tuple(self._addresses_of(peer))

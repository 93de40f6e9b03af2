"""What a node does in the DHT, without I/O: put, get, provide, find providers, refresh, republish.

An operation is a generator that yields `DhtWork` for the driver to carry out and returns its
result; `node` is the driver over sockets, the tests have one in virtual time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from ....collectives.identifiers import PeerId
from ....security.identity import Identity, decode_base58
from ..transport.peerbook import PeerBook
from . import records
from .routing import K, RoutingTable, position
from .server import DhtServer
from .wire import ADD_PROVIDER, FIND_NODE, GET_PROVIDERS, GET_VALUE, PUT_VALUE, Located, Rpc
from .work import DhtWork, Lookup, Store

REPLICAS = 5
NEIGHBOURS = 8
"""As many of the peers nearest to ourselves are met at each refresh."""
QUORUM = 3
"""Equal answers that end a get: one from each path."""
HEDGE_MIN_S, HEDGE_MAX_S = 0.05, 0.5
DEAD_FOR_S = 10.0
FAILURES = 3
"""So many failures in a row and a peer leaves the table although it is connected: it may speak
another protocol, or be stopped.
"""
MAX_REMEMBERED = 4096

T = TypeVar("T")
Operation = Generator[DhtWork, None, T]


class Engine:
    """One node's part. ``now``: monotonic seconds; ``unix_s``: wall clock."""

    def __init__(
        self,
        identity: Identity,
        addresses_of: Callable[[PeerId], Sequence[str]],
        book: PeerBook,
        connected: Callable[[PeerId], bool],
        rng: random.Random,
    ) -> None:
        """``addresses_of`` reads the peer book and knows ourselves; news goes into ``book``."""
        self._identity, self._book, self._connected, self._rng = identity, book, connected, rng
        self.me = identity.peer
        self.table = RoutingTable(self.me)
        self.server = DhtServer(self.me, self.table, addresses_of, book.add, rng)
        self.provided: set[bytes] = set()
        self._dead_until: dict[PeerId, float] = {}
        self._failures: Counter[PeerId] = Counter()
        # Sequences we have seen: who answers with an older one replays it.
        self._newest: dict[bytes, int] = {}
        self._answer_s = 0.0

    # --- what the driver reports ---

    def answered(self, peer: PeerId, answer: Rpc, took_s: float) -> None:
        """``peer`` answered a request after ``took_s``."""
        self._failures.pop(peer, None)
        self._dead_until.pop(peer, None)
        self._answer_s += (took_s - self._answer_s) / 8
        self.table.add(peer)
        for other, addresses in (*answer.closer[:K], *answer.providers):
            if other != self.me:
                self._book.hear(other, addresses)

    def failed(self, peer: PeerId, now: float) -> None:
        """``peer`` did not answer. Only one to whom there is no connection counts as dead at once:
        a stream may be reset for many reasons.
        """
        self._failures[peer] += 1
        if not self._connected(peer) or self._failures[peer] >= FAILURES:
            self.table.remove(peer)
            self._dead_until.pop(peer, None)
            self._dead_until[peer] = now + DEAD_FOR_S
            if len(self._dead_until) > MAX_REMEMBERED:
                oldest = next(iter(self._dead_until))
                del self._dead_until[oldest], self._failures[oldest]

    def foreign(self, peer: PeerId) -> None:
        """``peer`` speaks another protocol: once is enough for its failure to count."""
        self._failures[peer] = FAILURES

    def link_changed(self, peer: PeerId, up: bool, network: str = "") -> None:
        """Connected peers are in the table, lost ones not. ``network``: `routing.network_of`."""
        if up:
            self._failures.pop(peer, None)
            self._dead_until.pop(peer, None)
            self.table.add(peer, network)
        else:
            self.table.remove(peer)

    @property
    def hedge_s(self) -> float:
        """After this a request counts as slow: 50 ms, or four usual answers on long ways."""
        return min(max(HEDGE_MIN_S, 4 * self._answer_s), HEDGE_MAX_S)

    # --- operations ---

    def put(
        self, name: str, payload: bytes, life_s: float, replicas: int, unix_s: float
    ) -> Operation[int]:
        """Store a signed value of ours under our key ``name``; how many peers hold it, at least a
        majority of ``replicas`` where it could.
        """
        key, data = records.sign(
            self._identity, name, payload, int(unix_s * 1000), int(unix_s + life_s)
        )
        self.server.values.put(key, data, unix_s)
        return self.store_value(key, data, replicas)

    def store_value(self, key: bytes, data: bytes, replicas: int = REPLICAS) -> Operation[int]:
        """Store a signed value of anybody's at the peers nearest to it."""
        near = yield from self._near(key, replicas)
        store = Store(
            Rpc(PUT_VALUE, key, data),
            near,
            replicas,
            hedge_s=self.hedge_s,
            kept=lambda answer: answer.value == data,
        )
        yield store
        return store.stored

    def get(self, owner: PeerId, name: str, quorum: int, unix_s: float) -> Operation[bytes | None]:
        """The newest valid payload: what ``quorum`` peers agree on, or the newest that all near
        peers and we ourselves have.
        """
        key = records.owner_key(owner, name)
        votes: Counter[tuple[int, bytes]] = Counter()

        def weigh(data: bytes) -> None:
            value = records.check(key, data, unix_s)
            if value.sequence >= self._newest.get(
                key, 0
            ):  # an older one may be an honest peer's that missed the newer
                votes[value.sequence, value.payload] += 1

        def enough(peer: PeerId, answer: Rpc) -> bool:
            if answer.value is not None:
                weigh(answer.value)
            return len(votes) == 1 and votes.most_common(1)[0][1] >= quorum

        yield self._lookup(Rpc(GET_VALUE, key), key, exhaustive=True, enough=enough)
        mine = self.server.values.get(key, unix_s)
        if mine is not None:
            weigh(mine)
        if not votes:
            return None
        sequence, payload = max(votes)
        self._newest.pop(key, None)
        self._newest[key] = sequence
        if len(self._newest) > MAX_REMEMBERED:
            del self._newest[next(iter(self._newest))]
        return payload

    def provide(self, key: bytes, addresses: Sequence[str], now: float) -> Operation[int]:
        """Tell the network that we provide ``key``; how many peers noted it."""
        self.provided.add(key)
        self.server.providers.add(key, self.me, now)
        near = yield from self._near(key, REPLICAS)
        request = Rpc(ADD_PROVIDER, key, providers=((self.me, tuple(addresses)),))
        store = Store(
            request,
            near,
            REPLICAS,
            hedge_s=self.hedge_s,
            kept=lambda answer: answer.kind == ADD_PROVIDER,
        )
        yield store
        return store.stored

    def find_providers(
        self, key: bytes, count: int, exhaustive: bool, now: float
    ) -> Operation[list[Located]]:
        """Others that provide ``key``: ``count`` of them, or all that the near peers name."""
        found: dict[PeerId, tuple[str, ...]] = dict.fromkeys(
            self.server.providers.get(key, now), ()
        )

        def enough(peer: PeerId, answer: Rpc) -> bool:
            for provider, addresses in answer.providers:
                found[provider] = addresses or found.get(provider, ())
            return len(found) > count

        yield self._lookup(Rpc(GET_PROVIDERS, key), key, exhaustive=exhaustive, enough=enough)
        found.pop(self.me, None)
        return sorted(found.items())

    def refresh(self) -> Operation[None]:
        """Look up ourselves and a place at random: fills the table with neighbours, and keeps the
        far buckets fresh.
        """
        me, anywhere = decode_base58(self.me), self._rng.randbytes(32)
        yield self._lookup(Rpc(FIND_NODE, me), me, width=NEIGHBOURS, exhaustive=True)
        yield self._lookup(Rpc(FIND_NODE, anywhere), anywhere)

    # --- inside ---

    def _near(self, key: bytes, replicas: int) -> Operation[list[PeerId]]:
        lookup = self._lookup(Rpc(FIND_NODE, key), key)
        yield lookup
        return lookup.nearest(max(K, 2 * replicas))

    def _lookup(
        self,
        request: Rpc,
        key: bytes,
        *,
        width: int = K,
        exhaustive: bool = False,
        enough: Callable[[PeerId, Rpc], bool] = lambda peer, answer: False,
    ) -> Lookup:
        target = position(key)
        # If all seem dead, that may be our own fault: ask them.
        start = self.table.closest(target) or list(self._dead_until)[-K:]
        return Lookup(
            request,
            target,
            start,
            hedge_s=self.hedge_s,
            width=width,
            exhaustive=exhaustive,
            enough=enough,
            worth_asking=lambda peer, now: (
                peer != self.me and self._dead_until.get(peer, now) <= now
            ),
        )

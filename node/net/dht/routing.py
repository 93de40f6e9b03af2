"""Distances and the routing table: sha-256 of ids, XOR metric, buckets of 20, as in kad-dht."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from ....collectives.identifiers import PeerId
from ....security.identity import decode_base58

K = 20


def position(key: bytes) -> int:
    """Where a key lies in the key space: an integer of 256 bits."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


@lru_cache(maxsize=8192)
def position_of(peer: PeerId) -> int:
    """Where a peer lies in the key space."""
    return position(decode_base58(peer))


def closest(peers: Iterable[PeerId], target: int, count: int) -> list[PeerId]:
    """The ``count`` peers nearest to ``target``, nearest first."""
    return sorted(peers, key=lambda peer: position_of(peer) ^ target)[:count]


class RoutingTable:
    """Peers known to answer, at most 20 per distance. Only connected peers enter; a lost connection removes."""

    def __init__(self, me: PeerId) -> None:
        self._me, self._here = me, position_of(me)
        self._buckets: dict[int, dict[PeerId, None]] = {}

    def add(self, peer: PeerId) -> bool:
        """Whether there was room (or it was there already). Old peers stay: they are the most likely to stay."""
        if peer == self._me:
            return False
        bucket = self._buckets.setdefault((position_of(peer) ^ self._here).bit_length(), {})
        if peer not in bucket and len(bucket) >= K:
            return False
        bucket[peer] = None
        return True

    def remove(self, peer: PeerId) -> None:
        """Idempotent."""
        self._buckets.get((position_of(peer) ^ self._here).bit_length(), {}).pop(peer, None)

    def closest(self, target: int, count: int = K) -> list[PeerId]:
        """The ``count`` peers of the table nearest to ``target``, nearest first."""
        return closest((peer for bucket in self._buckets.values() for peer in bucket), target, count)

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

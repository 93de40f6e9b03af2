"""Distances and the routing table: sha-256 of ids, XOR metric, buckets of 20, as in kad-dht."""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
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


def network_of(host: str) -> str:
    """The network a numeric host belongs to: /16 for IPv4, /32 for IPv6, what one provider hands
    out cheaply; "" where it is unknown.
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return str(ipaddress.ip_network((ip, 16 if ip.version == 4 else 32), strict=False))


class RoutingTable:
    """Peers that can be asked, in buckets of 20 by distance from ourselves.

    Old peers stay: they are the most likely to stay. But a full bucket gives a place to a peer of a
    rarer network, at the cost of the youngest one of the commonest: thousands of identities in one
    data centre cannot fill it.
    """

    def __init__(self, me: PeerId) -> None:
        self._me, self._here = me, position_of(me)
        self._buckets: dict[int, dict[PeerId, str]] = {}

    def add(self, peer: PeerId, network: str = "") -> bool:
        """Whether there was room (or it was there already). ``network``: where it is connected
        from, as `network_of` says.
        """
        if peer == self._me:
            return False
        bucket = self._buckets.setdefault(self._number(peer), {})
        if peer not in bucket and len(bucket) >= K:
            counts = Counter(bucket.values())
            commonest, count = counts.most_common(1)[0]
            if count <= counts[network] + 1:
                return False
            del bucket[[other for other, its in bucket.items() if its == commonest][-1]]
        bucket[peer] = network or bucket.get(peer, "")
        return True

    def remove(self, peer: PeerId) -> None:
        """Idempotent."""
        self._buckets.get(self._number(peer), {}).pop(peer, None)

    def closest(self, target: int, count: int = K) -> list[PeerId]:
        """The ``count`` peers of the table nearest to ``target``, nearest first."""
        return closest(
            (peer for bucket in self._buckets.values() for peer in bucket), target, count
        )

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._buckets.get(self._number(peer), {})

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def _number(self, peer: PeerId) -> int:
        return (position_of(peer) ^ self._here).bit_length()

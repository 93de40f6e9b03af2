"""What a node keeps for others: provider records and values. Bounded per key, per peer and in all;
everything expires.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter

from ....collectives.identifiers import PeerId
from .records import MAX_SKEW_S, SignedValue, check
from .routing import position

PROVIDER_LIFE_S = 1800.0
PROVIDE_AGAIN_S = 600.0
MAX_KEYS = 8192
MAX_KEYS_PER_PEER = 256
MAX_PROVIDERS = 512
ANSWERED_PROVIDERS = 40
"""Providers in one answer, a random choice: enough to find the rest by exchange of lists."""
MAX_VALUES = 4096
MAX_VALUES_PER_OWNER = 64
REPUBLISH_S = 900.0
"""A value that nobody has stored here again for so long is stored at its nearest peers once more:
they may have changed.
"""
REPUBLISHED_AT_ONCE = 64


class ProviderStore:
    """Who said it provides what. ``now``: monotonic seconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._keys: dict[bytes, dict[PeerId, float]] = {}
        self._counts: Counter[PeerId] = Counter()

    def add(self, key: bytes, peer: PeerId, now: float) -> bool:
        """``peer`` says that it provides ``key``; False when there is no room."""
        providers = self._keys.get(key)
        if providers is None or peer not in providers:
            if self._counts[peer] >= MAX_KEYS_PER_PEER or (
                providers is None and len(self._keys) >= MAX_KEYS
            ):
                self.expire(now)
            if self._counts[peer] >= MAX_KEYS_PER_PEER or (
                providers is None and len(self._keys) >= MAX_KEYS
            ):
                return False
            if providers is not None and len(providers) >= MAX_PROVIDERS:
                self._remove(key, min(providers, key=lambda other: providers[other]))
            self._counts[peer] += 1
        self._keys.setdefault(key, {})[peer] = now + PROVIDER_LIFE_S
        return True

    def get(self, key: bytes, now: float) -> list[PeerId]:
        """Live providers of ``key``, at most 40, chosen at random when there are more."""
        for peer in [peer for peer, until in self._keys.get(key, {}).items() if until < now]:
            self._remove(key, peer)
        live = list(self._keys.get(key, {}))
        return (
            live if len(live) <= ANSWERED_PROVIDERS else self._rng.sample(live, ANSWERED_PROVIDERS)
        )

    def expire(self, now: float) -> None:
        for key in list(self._keys):
            self.get(key, now)

    def _remove(self, key: bytes, peer: PeerId) -> None:
        del self._keys[key][peer]
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
        if not self._keys[key]:
            del self._keys[key]


class ValueStore:
    """Owner-bound values. ``unix_s``: wall clock, because expiry is part of what the owner signed.

    When it is full, what lies farthest from ``here`` makes room for what lies nearer: others look
    for the near keys here, and who fills a node with anything must at least search for keys near to
    it.
    """

    def __init__(self, here: int) -> None:
        self._here = here
        self._values: dict[bytes, tuple[SignedValue, bytes]] = {}
        self._ranked: list[tuple[int, bytes]] = []  # by distance
        self._stored_at: dict[bytes, float] = {}  # unix_s
        # Sequences of values that have expired: an older one may live longer than the newer did.
        self._floors: dict[bytes, int] = {}
        self._owners: Counter[bytes] = Counter()

    def put(self, key: bytes, data: bytes, unix_s: float) -> bool:
        """Keep a value; False when a newer one is here or there is no room. Raises ValueError when
        it is invalid.
        """
        value = check(key, data, unix_s)
        known = self._values.get(key)
        if known is not None and known[0].sequence >= value.sequence:
            if known[1] == data:
                self._stored_at[key] = unix_s
            return known[1] == data
        if value.sequence < self._floors.get(key, 0):
            return False
        if known is None:
            if len(self._values) >= MAX_VALUES:
                self.expire(unix_s)
            place = position(key) ^ self._here, key
            full = len(self._values) >= MAX_VALUES
            if self._owners[_owner(key)] >= MAX_VALUES_PER_OWNER or (
                full and place > self._ranked[-1]
            ):
                return False
            if full:
                self._remove(self._ranked[-1][1])
            self._owners[_owner(key)] += 1
            insort(self._ranked, place)
        self._values[key] = (value, data)
        self._stored_at[key] = unix_s
        return True

    def get(self, key: bytes, unix_s: float) -> bytes | None:
        """The stored bytes, while they are valid."""
        known = self._values.get(key)
        if known is None:
            return None
        if known[0].expires_s < unix_s:
            self._remove(key)
            return None
        return known[1]

    def due(self, unix_s: float) -> list[tuple[bytes, bytes]]:
        """Keys and values to be stored at their nearest peers again, at most 64, the longest
        untouched first; from now on they are touched.
        """
        over = unix_s + MAX_SKEW_S  # by the clock of whoever is asked to keep it
        old = [
            key
            for key, at in self._stored_at.items()
            if unix_s - at > REPUBLISH_S and self._values[key][0].expires_s > over
        ]
        chosen = sorted(old, key=lambda key: self._stored_at[key])[:REPUBLISHED_AT_ONCE]
        self._stored_at.update(dict.fromkeys(chosen, unix_s))
        return [(key, self._values[key][1]) for key in chosen]

    def expire(self, unix_s: float) -> None:
        for key in list(self._values):
            self.get(key, unix_s)

    def _remove(self, key: bytes) -> None:
        self._floors.pop(key, None)
        self._floors[key] = self._values[key][0].sequence
        if len(self._floors) > MAX_VALUES:
            del self._floors[next(iter(self._floors))]
        del self._values[key], self._stored_at[key]
        del self._ranked[bisect_left(self._ranked, (position(key) ^ self._here, key))]
        self._owners[_owner(key)] -= 1
        if not self._owners[_owner(key)]:
            del self._owners[_owner(key)]


def _owner(key: bytes) -> bytes:
    return key.split(b"/", 3)[2]

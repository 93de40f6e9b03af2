"""Counts what peers do wrong, and which of them are shut out for a while."""

from __future__ import annotations

from collections import Counter

from ....collectives.identifiers import PeerId

LIMIT = 16
"""Faults within a window before a peer is shut out: an old version or a bug gets some, a flood does
not.
"""
WINDOW_S = 60.0
MAX_PEERS = 4096


class Faults:
    """Sans-IO: the caller passes the time (seconds, any monotonic clock)."""

    def __init__(self) -> None:
        self.total: Counter[PeerId] = Counter()
        self._recent: dict[PeerId, tuple[float, int]] = {}

    def count(self, peer: PeerId, now: float) -> None:
        """One more fault of ``peer``."""
        since, faults = self._recent.get(peer, (now, 0))
        if now - since > WINDOW_S:
            since, faults = now, 0
        self._recent[peer] = (since, faults + 1)
        self.total[peer] += 1
        if len(self._recent) > MAX_PEERS:
            oldest = min(self._recent, key=lambda other: self._recent[other][0])
            del self._recent[oldest], self.total[oldest]

    def shut_out(self, peer: PeerId, now: float) -> bool:
        """Whether ``peer`` has made too many faults within the last minute."""
        since, faults = self._recent.get(peer, (now, 0))
        return faults >= LIMIT and now - since <= WINDOW_S

"""A limit of bytes a second over all lanes of a node: a token bucket without a clock."""

from __future__ import annotations

BURST_S, LEAST_BURST = 0.02, 4096


class Bucket:
    """Holds BURST_S of the rate, in bytes/s, or LEAST_BURST bytes. Rate 0: no limit.

    It gives out what is asked for, or at least half of what it holds: bytes that pass one by one,
    as they become due, would keep the engine's thread so busy that it never looks at its other
    sockets.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._size = max(LEAST_BURST, rate * BURST_S)
        self._tokens = self._size
        self._at = 0.0

    def room(self, now: float, most: int) -> int:
        """How many of ``most`` bytes may pass now."""
        if not self.rate:
            return most
        self._fill(now)
        return min(most, int(self._tokens)) if self._tokens >= min(most, self._size / 2) else 0

    def take(self, count: int) -> None:
        """So many have passed."""
        if self.rate:
            self._tokens -= count

    def wait_s(self, now: float) -> float:
        """How long until half of a burst has room."""
        if not self.rate:
            return 0.0
        self._fill(now)
        return max(0.0, self._size / 2 - self._tokens) / self.rate

    def _fill(self, now: float) -> None:
        self._tokens = min(self._size, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = max(now, self._at)

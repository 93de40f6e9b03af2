"""Which congestion control a lane's connection needs: a state machine without I/O.

Lanes begin with cubic, which keeps a little queue in front of the slowest link; so it stays busy while senders and receivers take turns,
and how much waits there is bounded by `Meter.lead`. Where random losses keep cubic down (1 % at 50 ms leave it a thirtieth) or a deep
buffer would fill and delay everybody in the house, a connection goes over to bbr, and stays with it.
"""

from __future__ import annotations

from .meter import Reading

STRETCH = 400  # segments that are judged together
LOSSY, STRETCHES = 0.005, 2  # so large a share sent again, in so many stretches in a row: more than a queue that was full once
DEEP_S = 0.25  # a queue as long as this


class Path:
    """What one connection has met so far."""

    def __init__(self) -> None:
        self.spoilt = False
        """Whether it needs bbr."""
        self._sent = self._again = self._bad = 0

    def read(self, reading: Reading) -> bool:
        """New counters. True when the path has just turned out to be lossy, or to have a deep queue."""
        if self.spoilt:
            return False
        sent, again = reading.segments - self._sent, reading.again - self._again
        if sent >= STRETCH:
            self._sent, self._again = reading.segments, reading.again
            self._bad = self._bad + 1 if again > LOSSY * sent else 0
        self.spoilt = self._bad >= STRETCHES or reading.rtt_s - reading.least_rtt_s > DEEP_S
        return self.spoilt

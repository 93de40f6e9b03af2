"""Which congestion control a lane's connection needs: a state machine without I/O.

Lanes begin with cubic, which keeps a little queue in front of the slowest link; so it stays busy while senders and receivers take turns,
and how much waits there is bounded by `Meter.lead`. Where random losses keep cubic down (1 % at 50 ms leave it a thirtieth of 100 Mbit/s, 0.1 % a
tenth) or a deep buffer would fill and delay everybody in the house, a connection goes over to bbr, and stays with it.

A queue that runs over is told from losses at random by when that happens: a window that was cut takes thousands of segments to grow back to it.
"""

from __future__ import annotations

from collections import deque

from .meter import Reading

STRETCH = 400  # segments that are judged together
LOSSY, STRETCHES = 0.005, 2  # so large a share sent again, in so many stretches in a row: more than a queue that was full once
SPARSE, OFTEN, WINDOW = 0.0004, 3, 8  # ... or a share like this in so many of the last stretches
DEEP_S = 0.25  # a queue as long as this


class Path:
    """What one connection has met so far."""

    def __init__(self) -> None:
        self.spoilt = False
        """Whether it needs bbr."""
        self._sent = self._again = self._bad = 0
        self._sparse = deque[bool](maxlen=WINDOW)

    def read(self, reading: Reading) -> bool:
        """New counters. True when the path has just turned out to be lossy, or to have a deep queue."""
        if self.spoilt:
            return False
        sent, again = reading.segments - self._sent, reading.again - self._again
        if sent >= STRETCH:
            self._sent, self._again = reading.segments, reading.again
            self._bad = self._bad + 1 if again > LOSSY * sent else 0
            self._sparse.append(again > SPARSE * sent)
        self.spoilt = self._bad >= STRETCHES or sum(self._sparse) >= OFTEN or reading.rtt_s - reading.least_rtt_s > DEEP_S
        return self.spoilt

"""Which congestion control a lane's connection needs: a state machine without I/O.

Lanes begin with cubic, which keeps a little queue in front of the slowest link; so it stays busy
while senders and receivers take turns, and how much waits there is bounded by `Meter.lead`. Where
random losses keep cubic down (1 % at 50 ms leave it a thirtieth of 100 Mbit/s, 0.1 % a tenth) or a
deep buffer would fill and delay everybody in the house, a connection goes over to bbr, and stays
with it.

A queue that runs over is told from losses at random by when that happens, since a window that was
cut takes thousands of segments to grow back to it, and by the round trips, which had become longer:
such losses count half. A lane that goes over for no reason gets less than its share beside others
with cubic, and all wait for it.
"""

from __future__ import annotations

from collections import deque

from .meter import Reading

STRETCH = 400  # segments that are judged together
LOSSY, STRETCHES = (
    0.005,
    2,
    # so large a share sent again, in so many stretches in a row: more than a queue that was full once
)
HEAVY, SLOW_S, LEAST = 0.03, 1.0, 3
"""Where so large a share of the segments is sent again, and at least so many, cubic sends a few a
second and would take a minute for a stretch: there a stretch is over after so many seconds with
bytes under way."""
SPARSE, OFTEN, WINDOW = 0.0004, 3, 8  # ... or a share like this in so many of the last stretches
QUEUE_S, QUEUE = (
    0.01,
    1 / 3,
)  # round trips longer by this, and by this share of the shortest, had a queue on the way
DEEP_S = 0.25  # a queue as long as this


class Path:
    """What one connection has met so far."""

    def __init__(self) -> None:
        self.spoilt = False
        """Whether it needs bbr."""
        self._sent = self._again = 0
        self._busy_s = 0.0
        self._bad = self._longest_s = 0.0
        self._sparse = deque[float](maxlen=WINDOW)

    def read(self, reading: Reading) -> bool:
        """New counters. True when the path has just turned out to be lossy, or to have a deep
        queue.
        """
        if self.spoilt:
            return False
        sent, again = reading.segments - self._sent, reading.again - self._again
        queued_s = reading.rtt_s - reading.least_rtt_s
        self._longest_s = max(self._longest_s, queued_s)
        slow = reading.busy_s - self._busy_s >= SLOW_S and again >= max(LEAST, HEAVY * sent)
        if sent >= STRETCH or slow:
            weight = 0.5 if self._longest_s > max(QUEUE_S, QUEUE * reading.least_rtt_s) else 1.0
            self._sent, self._again = reading.segments, reading.again
            self._busy_s = reading.busy_s
            self._longest_s = queued_s  # what ran over is noticed a round trip later
            self._bad = self._bad + weight if again > LOSSY * sent else 0.0
            self._sparse.append(weight if again > SPARSE * sent else 0.0)
        self.spoilt = self._bad >= STRETCHES or sum(self._sparse) >= OFTEN or queued_s > DEEP_S
        return self.spoilt

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

bbr looks for more by sending a quarter more for a round trip. Where more than a fifth is lost, less
arrives of that than before, so what it takes for the link's rate falls with each look, down to a
few segments a second; it may also take such losses for a limit that somebody has set. At its
beginning it sends almost three times as much each round trip, and finds the rate in spite of the
losses. So there it begins anew about once a second, as long as no queue on the way says that the
link is full.
"""

from __future__ import annotations

from collections import deque

from .meter import LaneCounters

STRETCH = 400  # segments that are judged together
# So large a share sent again, in so many stretches in a row: more than a queue that was full once.
LOSSY, STRETCHES = 0.005, 2
HEAVY, SLOW_S, LEAST = 0.03, 1.0, 3
"""Where so large a share of the segments is sent again, and at least so many, cubic sends a few a
second and would take a minute for a stretch: there a stretch is over after so many seconds with
bytes under way."""
SPARSE, OFTEN, WINDOW = 0.0004, 3, 8  # ... or a share like this in so many of the last stretches
# Round trips longer by this, and by this share of the shortest, had a queue on the way.
QUEUE_S, QUEUE = (
    0.01,
    1 / 3,
)
DEEP_S = 0.25  # a queue as long as this
FALLING = 0.15  # with so large a share sent again, what bbr takes for the rate falls
ANEW_S, ANEW_RTTS = 1.0, 25  # so long, busy, until it begins anew: its beginning takes ten or so


class Path:
    """What one connection has met so far."""

    def __init__(self) -> None:
        self.spoilt = False
        """Whether it needs bbr."""
        self._began: LaneCounters | None = None  # when bbr did
        self._sent = self._again = 0
        self._busy_s = 0.0
        self._bad = self._longest_s = 0.0
        self._sparse = deque[float](maxlen=WINDOW)

    def read(self, reading: LaneCounters) -> bool:
        """New counters. True when bbr is to begin: the path has just turned out to be lossy, or to
        have a deep queue; or it loses so much that bbr has to begin anew.
        """
        if self.spoilt:
            return self._falls(reading)
        sent, again = reading.segments - self._sent, reading.again - self._again
        queued_s = reading.rtt_s - reading.least_rtt_s
        self._longest_s = max(self._longest_s, queued_s)
        slow = reading.busy_s - self._busy_s >= SLOW_S and again >= max(LEAST, HEAVY * sent)
        if sent >= STRETCH or slow:
            weight = 0.5 if self._longest_s > _queue_s(reading) else 1.0
            self._sent, self._again = reading.segments, reading.again
            self._busy_s = reading.busy_s
            self._longest_s = queued_s  # what ran over is noticed a round trip later
            self._bad = self._bad + weight if again > LOSSY * sent else 0.0
            self._sparse.append(weight if again > SPARSE * sent else 0.0)
        self.spoilt = self._bad >= STRETCHES or sum(self._sparse) >= OFTEN or queued_s > DEEP_S
        return self.spoilt

    def _falls(self, reading: LaneCounters) -> bool:
        """Whether bbr sends less and less."""
        began, self._began = self._began, self._began or reading
        if began is None or reading.busy_s - began.busy_s < max(
            ANEW_S, ANEW_RTTS * reading.least_rtt_s
        ):
            return False
        self._began = reading
        sent, again = reading.segments - began.segments, reading.again - began.again
        queued_s = reading.rtt_s - reading.least_rtt_s
        return again >= max(LEAST, FALLING * sent) and queued_s <= _queue_s(reading)


def _queue_s(reading: LaneCounters) -> float:
    """Round trips longer by this had a queue on the way."""
    return max(QUEUE_S, QUEUE * reading.least_rtt_s)

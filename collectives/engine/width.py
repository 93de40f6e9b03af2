"""How many lanes a node wants to a peer: a state machine without I/O.

With bbr one lane fills a link, whatever it loses. Where a system does not let us have bbr, every
random loss halves a connection's window, and several connections carry more: two to begin with,
twice as many (up to eight) while more than LOSSY of the segments are sent again and the network is
the limit. The new ones stay if they make it a fifth faster. If not, the number falls back, and is
not tried again for RETRY_S, unless the share that is lost has changed by CHANGED: it is then
another path.
"""

from __future__ import annotations

from collections.abc import Mapping

from .meter import BUSY, HELD_UP, LEAST_BYTES, PAUSE_S, LaneCounters

FIRST, MOST = 2, 8
LOSSY = 0.0005
WORTH = 1.2
JUDGED_S, SETTLING_S = 3.0, 1.0
"""So long, of time in which the network was the limit, is judged; and so long after a change
nothing is, while new connections speed up.
"""
RETRY_S = 600.0
CHANGED = 2.0


def first(*, bbr: bool) -> int:
    """How many lanes to begin with."""
    return 1 if bbr else FIRST


class Width:
    """The lanes to one peer, none of which has bbr. ``most``: no more than these."""

    def __init__(self, most: int = MOST) -> None:
        self.wanted = min(FIRST, most)
        self._most = most
        self._before: Mapping[int, LaneCounters] = {}
        self._since = 0.0
        self._settling_s = 0.0
        self._bytes, self._seconds, self._sent, self._again = 0, 0.0, 0, 0
        # The rate that the lanes had before there were more of them; 0: nothing was tried.
        self._narrower = 0.0
        # When more lanes were of no use, and how much was lost then.
        self._failed: tuple[float, float] | None = None

    def read(self, now: float, lanes: Mapping[int, LaneCounters]) -> bool:
        """Counters of the lanes that are up, by lane number. True when ``wanted`` has changed."""
        elapsed = now - self._since
        both = [
            (before, lanes[number]) for number, before in self._before.items() if number in lanes
        ]
        self._since, self._before = now, dict(lanes)
        if elapsed > PAUSE_S or not both or len(lanes) < self.wanted:
            return False
        acked = sum(new.acked - old.acked for old, new in both)
        limited = any(
            new.busy_s - old.busy_s >= BUSY * elapsed
            and new.held_up_s - old.held_up_s <= HELD_UP * elapsed
            for old, new in both
        )
        if not limited or acked < LEAST_BYTES * min(1.0, elapsed):
            return False
        if self._settling_s > 0:
            self._settling_s -= elapsed
            return False
        self._bytes, self._seconds = self._bytes + acked, self._seconds + elapsed
        self._sent += sum(new.segments - old.segments for old, new in both)
        self._again += sum(new.again - old.again for old, new in both)
        return self._seconds >= JUDGED_S and self._judge(now)

    def _judge(self, now: float) -> bool:
        rate, lost = self._bytes / self._seconds, self._again / max(1, self._sent)
        self._bytes, self._seconds, self._sent, self._again = 0, 0.0, 0, 0
        if self._narrower and rate < WORTH * self._narrower:
            self._narrower, self._failed = 0.0, (now, lost)
            return self._become(self.wanted // 2)
        self._narrower = 0.0
        if lost <= LOSSY or self.wanted >= self._most or self._useless(now, lost):
            return False
        self._narrower, self._failed = rate, None
        return self._become(min(self._most, 2 * self.wanted))

    def _useless(self, now: float, lost: float) -> bool:
        """Whether more lanes were tried not long ago on a path like this."""
        if self._failed is None:
            return False
        at, then = self._failed
        return now - at < RETRY_S and then / CHANGED < lost < then * CHANGED

    def _become(self, wanted: int) -> bool:
        self.wanted, self._settling_s = wanted, SETTLING_S
        return True

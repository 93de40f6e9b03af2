"""Whether another member's state would be here sooner than the one that is coming.

Two members seldom offer the same state, so chunks of one do not help with the other. Whether a
state comes slowly because of its source or because of one's own link is seen only beside another
source: after `FIRST_S` a rival's state is tried, a chunk at a time, for `TRIAL_S`, while the first
one goes on. The rival takes over where it would be done clearly sooner at the rates of that time.
Over one's own slow link both are slowed alike, the first stays, and the trial has cost a chunk or
two. Later only a state that comes at less than half the rate it had is tried again, each time after
twice as long.

A state of which nothing comes for `SILENT_S`, or for as long as `PAUSE` of its chunks took, is
compared sooner. While nothing comes of either, another rival is tried after a wait that doubles
from `FIRST_S` on, since each costs a chunk over a slow link.
"""

from __future__ import annotations

from .watches import OneSource

FIRST_S = 10.0  # a state that comes within it is not compared with others
TRIAL_S = 2.0  # a trial takes that long, and a chunk of the rival
SILENT_S = 3.0  # a state of which nothing comes for so long is compared at once
PAUSE = 8.0  # chunks of the state that would have come in the time in which none did
CLEARLY = 1.5  # times sooner
ASK_S = 1.0  # how often rivals are asked for while none offers anything


class Race(OneSource):
    """Of one state that is coming. ``have`` is its chunks that are here."""

    def __init__(self, now: float, total: int, have: int = 0, each_s: float = 0.0) -> None:
        """``each_s``: what a chunk of it took in the trial that it won."""
        self.total, self._each_s = total, each_s
        self._mark = (now, have)  # the rate counts from here
        self._look_s = FIRST_S
        self._moved = (now, have)  # when a chunk came last
        # A rival that has brought nothing by then is none, nor has the first.
        self._wait_s = FIRST_S
        self._best = 0.0  # chunks/s at the newest trial
        self.seeking = False  # a rival is wanted
        self.rival_each_s = 0.0  # what a chunk of the rival took at the newest trial
        self._asked_at = -1e9
        self._trial: tuple[float, int] | None = None  # when it began, and ``have`` then

    def wants_rival(self, now: float, have: int) -> bool:
        """Whether a rival should be tried."""
        if have > self._moved[1]:
            self._moved = now, have
        since, had = self._mark
        if not self.seeking and self._pauses(now):
            self.seeking = have < self.total
        elif not self.seeking and now - since >= self._look_s:
            rate = (have - had) / (now - since)
            long = self.total - have > rate * FIRST_S
            self.seeking = long and (not self._best or 2 * rate < self._best)
            if not self.seeking:
                self._mark = now, have
        return self.seeking

    def _pauses(self, now: float) -> bool:
        """Whether a chunk should have come by now, as they came until now."""
        (since, had), (moved, have) = self._mark, self._moved
        each_s = (moved - since) / (have - had) if have > had else self._each_s
        return now - max(since, moved) >= max(SILENT_S, PAUSE * each_s)

    def may_ask(self, now: float) -> bool:
        """Whether to ask for rivals now."""
        if now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        return True

    def begin(self, now: float, have: int) -> None:
        """A rival is tried."""
        self.seeking, self._trial = False, (now, have)

    def won(self, now: float, have: int, rival: int) -> bool | None:
        """Whether the rival, of which ``rival`` chunks are here, takes over; None: not known yet.

        The first one's rate is the lower one of that since the last look and that during the trial,
        in which one chunk more may be on its way.
        """
        assert self._trial is not None
        (began, had), (since, before) = self._trial, self._mark
        took, came = now - began, have - had
        if took < TRIAL_S or (not rival and came < 2 and took < self._wait_s):
            return None
        mean = (have - before) / (now - since)
        rate = min((came + 1) / took, mean)
        if not rival and came < 2:
            self.seeking = True  # it was none: another one is tried at once
            self._wait_s *= 2
            return False
        self._mark, self._best = (now, have), mean
        self._look_s *= 2
        self.rival_each_s = took / max(1, rival)
        return rival * (self.total - have) > CLEARLY * rate * took * (self.total - rival)

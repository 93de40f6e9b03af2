"""Rounds of a federated run, which close when all who take part have done their work: since when
that is under way, how long the slowest took the round before, and until when a round waits.

A round without a limit would wait for ever for a site whose script hangs. One with a fixed limit
would leave out whoever has more data, or an older machine. So the limit follows what work took
before; where nobody knows that, there is none.
"""

from __future__ import annotations

SLOWEST = 8.0  # times the slowest turn of the round before: so long a round is held open
LEAST_S = 120.0  # and for at least so long: a machine that is busy for a minute is no slow one
AWAY_S = 15.0  # a site that is not heard at all is waited for so long: its line may come back


class TurnClock:
    """The turn under way as one member sees it; times in seconds like ``now``. A turn goes on over
    entries that change the configuration only."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.slowest_s: float | None = None  # in the round before; None: not seen here
        self._newest = now  # when somebody was last done

    def done(self, now: float) -> None:
        """Somebody more is done."""
        self._newest = now

    def next(self, now: float) -> None:
        """A round with contributors is over."""
        self.slowest_s = max(0.0, self._newest - self.began)
        self.began = self._newest = now

    @property
    def ends_at(self) -> float | None:
        """Until when all are waited for; None: without a limit."""
        if self.slowest_s is None:
            return None
        return self.began + max(LEAST_S, SLOWEST * self.slowest_s)

    def over(self, now: float) -> bool:
        """Whether those who are done may close the round without the others."""
        return self.ends_at is not None and now >= self.ends_at

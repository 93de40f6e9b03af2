"""Rounds that are planned again as they go on, and members whose steps are too long to be waited
for, in runs that ask for it or allow it.
"""

from __future__ import annotations

from collections.abc import Callable

from .again import Lag, RoundSteps, again
from .pacing import Pacing
from .replica import Replica
from .slow import PATIENCE, TWICE, SlowMember

HOLD_MOST_S = 3600.0


class RunPacing(Pacing):
    """Of one replica."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._lag = Lag() if replica.settings.share is not None else None
        self._slow = SlowMember() if replica.may_stand_aside else None

    @property
    def _plan(self) -> RoundSteps:
        """How long this round is: a plan by the anchor that training started from, so all that did
        have the same.
        """
        return again(self.replica.settings, self.replica.flat.layout.numel, self.replica.base.lag)

    @property
    def steps(self) -> int | None:
        return self._plan.steps if self._lag is not None else super().steps

    @property
    def delay(self) -> int | None:
        return self._plan.delay if self._lag is not None else super().delay

    def _stands_aside(self, slow: SlowMember) -> bool:
        """Whether its steps are so long that nobody should wait for this member."""
        settings, round_ = self.replica.settings, self.replica.base.round
        if settings.sync_every is None or round_ < settings.local_after:
            return False
        full = self._plan.steps if self._lag is not None else settings.sync_every
        return slow.stands_aside(settings.lengths.short(round_) or full)

    def ends_here(self, elapsed_s: float) -> bool:
        slow = self._slow
        return (
            slow is not None and self._stands_aside(slow) and slow.too_late_for_another(elapsed_s)
        )

    def hold_s(self, steps: int, closing: Callable[[], int], finished: Callable[[], bool]) -> float:
        """While rounds are short its step is one, and lasts as long as several; these need not be
        measured: they are in the log.
        """
        slow, base, lengths = self._slow, self.replica.base, self.replica.settings.lengths
        if slow is None:
            return 0.0
        if lengths.growth and lengths.short(base.round) is not None:
            others = lengths.before(closing()) - lengths.before(base.round)
            holds = self._stands_aside(slow) or others > TWICE * max(1, steps)
        else:
            holds = self._stands_aside(slow) and not finished()
        return min(HOLD_MOST_S, PATIENCE * slow.round_s) if holds else 0.0

    def trained(self, steps: int, ahead: int, samples: int, seconds: float) -> None:
        if self._lag is not None:
            self._lag.trained(steps, seconds)
            self.lag = self._lag.steps
        if self._slow is not None:
            self._slow.trained(steps - ahead, samples, seconds)

    def begin(self, now: float) -> None:
        if self._slow is not None:
            base, lengths = self.replica.base, self.replica.settings.lengths
            made, next_ = lengths.before(base.round), lengths.before(base.round + 1)
            self._slow.adopted(now, made, base.samples, next_ - made)

    def decided(self, seconds: float) -> None:
        if self._lag is not None:
            self._lag.decided(seconds)

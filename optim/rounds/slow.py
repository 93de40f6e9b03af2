"""A member whose steps are so long that waiting for it costs the others more than it brings.

It is never waited for in the middle of a step. Where another step would not end before the others
end the round, it offers what it has and waits for them; where it misses a round, its work is in a
later one: so it contributes to every n-th round. Pure: clocks are passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ..planning.waiting import TWICE, costs_more

REMEMBERED = 5  # rounds
FIRST = 2  # steps, before any round was
SPARE = 1.05  # steps are never exactly as long as they were
UNKNOWN_S = 60.0
PATIENCE = 4.0
"""What was offered to a round that others end is announced after so many times as long as rounds
take, though nobody has ended it: the others may be gone."""


@dataclass(slots=True)
class SlowMember:
    """What one member knows of its own steps, and of the run's rounds."""

    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _step_samples: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _round_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _round_samples: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _last: tuple[float, int, int] | None = None

    def trained(self, steps: int, samples: int, seconds: float) -> None:
        """So many steps on so many samples took so long, without what was waited."""
        if steps > 0 and seconds > 0:
            self._step_s.append(seconds / steps)
            self._step_samples.append(samples / steps)

    def adopted(self, now: float, round_: int, samples: int) -> None:
        """Training begins from the anchor of ``round_``, which has so many samples in it."""
        if self._last is None or round_ < self._last[1]:
            self._last = now, round_, samples
            return
        at, before, had = self._last
        if rounds := round_ - before:
            self._round_s.append((now - at) / rounds)
            self._round_samples.append((samples - had) / rounds)
            self._last = now, round_, samples

    @property
    def round_s(self) -> float:
        """How long the run's rounds take; a minute before that is known."""
        return median(self._round_s) if self._round_s else UNKNOWN_S

    @property
    def _fastest_s(self) -> float:
        """The shortest step there was: waits for the run to begin are in others."""
        return min(self._step_s)

    def stands_aside(self, steps: int, fired: int, ended: int, members: int) -> bool:
        """Whether nobody should wait for it.

        Args:
            steps: of a round, by the fastest member.
            fired: that this member has made since its anchor.
            ended: rounds that others have ended since then.
            members: how many there are.
        """
        if not self._round_s:  # its first steps: others made ``steps`` in each round
            few = 0 < fired <= FIRST and ended > 0 and steps > TWICE * fired
            return few and costs_more(ended / fired, steps * members)
        if not self._step_s or not (round_s := self.round_s) > 0:
            return False
        step_s, own = self._fastest_s, median(self._step_samples)
        if not step_s > TWICE * round_s / steps or not own > 0:
            return False
        return costs_more(step_s / round_s, median(self._round_samples) / own)

    def too_late_for_another(self, elapsed_s: float) -> bool:
        """Whether another step, begun now, would end after the others end the round."""
        return bool(self._step_s) and elapsed_s + SPARE * self._fastest_s > self.round_s

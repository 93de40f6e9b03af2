"""A member whose steps are so long that waiting for it costs the others more than it brings.

It is never waited for in the middle of a step. Where another step would not end before the others
end the round, it offers what it has and waits for them; where it misses a round, its work is in a
later one: so it contributes to every n-th round. Pure: clocks are passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

TWICE = 2.0  # as long as the fastest member's steps: members alike come together by themselves
LATE_SHARE = 0.5  # of a step by which the others come after the fastest, on the mean
REMEMBERED = 5  # rounds
READINGS = 2
"""So many rounds are measured before anybody is judged. The first one lasts as long as the last
member takes to come, and its first step as long as the script takes to warm up."""
SPARE = 1.05  # steps are never exactly as long as they were
UNKNOWN_S = 60.0
PATIENCE = 4.0
"""What was offered to a round that others end is announced after so many times as long as rounds
take, though nobody has ended it: the others may be gone."""


def costs_more(step: float, others: float) -> bool:
    """Whether waiting for a member costs more samples than it brings. ``step``: how long its step
    is, in rounds; ``others``: the samples of all in a round over those of one of its steps.

    It brings 1 / step steps a round, and all others wait for half of one on the mean.

    >>> costs_more(1 / 10, others=80), costs_more(1 / 2, others=80)
    (False, True)
    """
    return LATE_SHARE * step * others > 1 / step


@dataclass(slots=True)
class SlowMember:
    """What one member knows of its own steps, and of the run's rounds: these for each step that the
    run's settings give them, since the first ones may be shorter.
    """

    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _step_samples: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _round_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _round_samples: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _last: tuple[float, int, int] | None = None
    _coming: int = 1

    def trained(self, steps: int, samples: int, seconds: float) -> None:
        """So many steps on so many samples took so long, without what was waited."""
        if steps > 0 and seconds > 0:
            self._step_s.append(seconds / steps)
            self._step_samples.append(samples / steps)

    def adopted(self, now: float, made: int, samples: int, coming: int = 1) -> None:
        """Training begins from an anchor whose rounds have ``made`` steps by the settings, with so
        many samples in it; the round that begins has ``coming``.
        """
        self._coming = coming
        if self._last is None or made < self._last[1]:
            self._last = now, made, samples
            return
        at, before, had = self._last
        if steps := made - before:
            self._round_s.append((now - at) / steps)
            self._round_samples.append((samples - had) / steps)
            self._last = now, made, samples

    @property
    def round_s(self) -> float:
        """How long the round takes; a minute before that is known."""
        return median(self._round_s) * self._coming if self._round_s else UNKNOWN_S

    @property
    def _fastest_s(self) -> float:
        """The shortest step there was: waits for the run to begin are in others."""
        return min(self._step_s)

    def stands_aside(self, steps: int) -> bool:
        """Whether nobody should wait for it; ``steps``: of a round, by the fastest member.

        It is judged by its fastest step, over several rounds: what makes a step long now and then
        (an evaluation, another program, a compiler) makes no member slow.
        """
        if min(len(self._step_s), len(self._round_s)) < READINGS:
            return False
        if not (round_s := self.round_s) > 0:
            return False
        step_s, own = self._fastest_s, median(self._step_samples)
        if not step_s > TWICE * round_s / steps or not own > 0:
            return False
        return costs_more(step_s / round_s, median(self._round_samples) * self._coming / own)

    def too_late_for_another(self, elapsed_s: float) -> bool:
        """Whether another step, begun now, would end after the others end the round."""
        return bool(self._step_s) and elapsed_s + SPARE * self._fastest_s > self.round_s

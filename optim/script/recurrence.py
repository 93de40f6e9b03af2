"""Whether changes of the weights between two steps are a habit of the script or an event.

Scripts change weights beside their optimizer and mean to: they clamp, normalise rows, prune, pull
towards an average. Others load an earlier checkpoint, or leave averaged weights in the model. How
long a change is does not tell the two apart: a habit's are up to half of the way, an event's too.
That it recurs does.

A change is given by its length in steps, interval by interval; an interval is what lies between two
optimizer steps. Pure: no clock, no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

SEVERAL = 3
"""Changes in one round that are a habit; rounds running of like ones; changes evenly apart."""
ALIKE = 2.0  # ratio of the longest changes of rounds whose changes are alike
MUCH_LONGER, LONG = 10.0, 5.0
"""Times the usual length, and steps: within a habit, a change that is longer is another one. What
normalises rows does more to an anchor that was adopted than to the work of a step.
"""
ORDINARY = 4  # intervals that a change is held against; before that nothing is unusual
KEPT = 64  # intervals that a habit is looked for in

Kind = Literal["none", "habit", "event"]


class Recurrence:
    """What is usual of one script's changes."""

    def __init__(self) -> None:
        self._seen = 0  # intervals
        self._ordinary = 0  # of them without a change, or with one that is a habit
        self._recent: deque[float] = deque(maxlen=KEPT)
        self._at: deque[int] = deque(maxlen=SEVERAL)  # the newest changes, by interval
        self._longest: deque[float] = deque(maxlen=SEVERAL)  # of each of the newest rounds

    def judge(self, lengths: Sequence[float], harmless: Sequence[bool]) -> tuple[Kind, int]:
        """A round's intervals in order: the length of the change in each, 0.0 for none, and whether
        that change is harmless wherever it comes from. Returns what they are, and the interval of
        the longest change that is no habit (of the longest one, where there is none).
        """
        first, self._seen = self._seen, self._seen + len(lengths)
        changed = [index for index, length in enumerate(lengths) if length > 0]
        self._recent.extend(lengths)
        odd = self._beyond_habit(lengths, changed)
        before = self._ordinary + (odd[0] if odd else len(lengths))
        self._ordinary += len(lengths) - len(odd)
        even = self._evenly(first, odd)
        self._longest.append(max((lengths[index] for index in odd), default=0.0))
        if not changed:
            return "none", 0
        odd = [index for index in odd if not harmless[index]]
        if not odd or len(odd) >= SEVERAL or even or self._alike():
            return "habit", max(changed, key=lambda index: lengths[index])
        worst = max(odd, key=lambda index: lengths[index])
        known = before >= ORDINARY or first + worst == 0  # nothing recurs before the first step
        return "event" if known else "habit", worst

    def _beyond_habit(self, lengths: Sequence[float], changed: list[int]) -> list[int]:
        """Those of the changes that are not like what half of the intervals have."""
        usual = [length for length in self._recent if length > 0]
        often = 2 * len(usual) >= len(self._recent) and len(usual) >= SEVERAL - 1
        if not often and 2 * len(changed) < max(len(lengths), SEVERAL):
            return changed
        limit = max(MUCH_LONGER * median(usual), LONG)
        return [index for index in changed if lengths[index] > limit]

    def _evenly(self, first: int, changed: list[int]) -> bool:
        """Whether the newest changes come at equal distances."""
        even = False
        for index in changed:
            self._at.append(first + index)
            if len(self._at) == SEVERAL:
                gaps = [b - a for a, b in zip(self._at, list(self._at)[1:], strict=False)]
                even = max(gaps) - min(gaps) <= 1
        return even

    def _alike(self) -> bool:
        """Whether each of the newest rounds has a change, and of about the same length."""
        return (
            len(self._longest) == SEVERAL
            and min(self._longest) > 0
            and max(self._longest) <= ALIKE * min(self._longest)
        )

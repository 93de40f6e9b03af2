"""What is done for a peer, or to a machine: so much at once, and so much a second from then on.
Sans-IO.
"""

from __future__ import annotations

SWEEP = 1024  # names that are remembered before those are forgotten whose allowance is whole again


class Allowance:
    """Of each name. ``now``: monotonic seconds."""

    def __init__(self, at_once: float, per_s: float) -> None:
        self._at_once, self._per_s = at_once, per_s
        self._left: dict[str, tuple[float, float]] = {}  # and when it was that much

    def allows(self, who: str, now: float) -> bool:
        """Whether it may be done once more for ``who``; if so it is counted."""
        return self.some(who, now, 1) == 1

    def some(self, who: str, now: float, most: int) -> int:
        """How many times, of ``most``, it may be done for ``who``; they are counted."""
        left = self._of(who, now)
        given = min(most, int(left))
        if given < 1:
            return 0
        if len(self._left) >= SWEEP:
            self._left = {
                each: kept
                for each, kept in self._left.items()
                if self._of(each, now) < self._at_once
            }
        self._left[who] = left - given, now
        return given

    def _of(self, who: str, now: float) -> float:
        left, at = self._left.get(who, (self._at_once, now))
        return min(self._at_once, left + (now - at) * self._per_s)

"""When a lane that goes a roundabout way is tried again for a direct one: a state machine without
I/O.
"""

from __future__ import annotations

import math

ROUNDABOUT = ("relay", "stream")
"""Paths that a direct one is better than."""
RETRY_S = (60.0, 300.0, 900.0)
"""Pauses before the first tries; the last one is that between all others."""
ASKED_S = 10.0
"""Not more often than that, whatever changes and whoever asks."""


class Retry:
    """Of one lane. ``timed``: this end tries by itself, and not only when it is asked."""

    def __init__(self, *, timed: bool) -> None:
        self.at = math.inf
        """When to look at `due` again."""
        self._timed = timed
        self._roundabout = False
        self._tried_at = -math.inf
        self._tries = 0

    def made(self, now: float, path: str) -> None:
        """The lane has been made, by this way."""
        if path not in ROUNDABOUT:
            self.at, self._tries = math.inf, 0
        elif not self._roundabout:
            self._plan(now)
        self._roundabout = path in ROUNDABOUT

    def asked(self, now: float) -> None:
        """There is reason to think that it may work now."""
        if self._roundabout:
            self.at, self._tries = min(self.at, max(now, self._tried_at + ASKED_S)), 0

    def due(self, now: float) -> bool:
        """Whether to try now; if so, it counts as tried."""
        if now < self.at:
            return False
        self._tried_at = now
        self._plan(now)
        return True

    def _plan(self, now: float) -> None:
        self.at = now + RETRY_S[min(self._tries, len(RETRY_S) - 1)] if self._timed else math.inf
        self._tries += 1

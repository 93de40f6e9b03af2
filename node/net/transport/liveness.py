"""Whether the other end of a connection is still there: a state machine without I/O; ``now``:
monotonic seconds.

TCP tells of a peer that ended, not of one whose machine froze, sleeps or has lost its way here, as
long as nothing is sent. So whoever has heard nothing for a while asks for a sign of life, and gives
the connection up when none comes. Whatever arrives is one: a connection that is used is never
asked. Two idle ends ask at different times, and the question of one is the other's sign: about one
question in 15 s for both.
"""

from __future__ import annotations

import random
from typing import Literal

FIRST_S = 0.5
"""The first question is always asked: the time to its answer is the round trip that libp2p's
windows grow by.
"""
SILENT_S = 15.0
JITTER = 0.3
"""So great a part of SILENT_S is added at random."""
ANSWER_S = 15.0
"""Generous: an answer waits behind all else that a slow link has to carry, and a busy machine is
not a dead one.
"""
LATE_S = 5.0
"""Who looks at the clock so late was stopped itself, and has not read what came meanwhile."""

Verdict = Literal["wait", "ask", "dead"]


class Liveness:
    """Of one connection."""

    def __init__(self, now: float, rng: random.Random) -> None:
        self.at = now + FIRST_S
        """When to call `due`."""
        self._rng = rng
        self._heard_at, self._patience_s = now, 0.0
        self._began, self._waits = False, False

    @property
    def heard_at(self) -> float:
        """When something arrived last, or the connection began."""
        return self._heard_at

    def heard(self, now: float) -> None:
        """Something arrived."""
        self._heard_at, self._waits = now, False

    def due(self, now: float) -> Verdict:
        """What to do at ``now``: nothing until `at`, ask for life, or drop the connection."""
        if now < self.at:
            return "wait"
        if self._waits and now < self.at + LATE_S:
            return "dead"
        quiet_until = self._heard_at + self._patience_s
        if self._began and now < quiet_until:
            self.at = quiet_until
            return "wait"
        self._began, self._waits = True, True
        self._patience_s = SILENT_S * self._rng.uniform(1.0, 1.0 + JITTER)
        self.at = now + ANSWER_S
        return "ask"

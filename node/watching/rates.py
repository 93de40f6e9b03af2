"""How fast bulk bytes went to and came from each peer of late, for `atoll peers`. Sans-IO."""

from __future__ import annotations

from collections import deque

from ...collectives.identifiers import PeerId
from .timings import Lanes

STEP_S = 5.0
SPAN_S = 60.0
"""Rounds are bursts with minutes of training between them: what is shown is the mean of so long."""


class Rates:
    """Of the lanes of a node; counters of a lane begin at zero."""

    def __init__(self) -> None:
        self._last: Lanes = {}
        self._sums: dict[PeerId, tuple[int, int]] = {}
        self._past: deque[tuple[float, dict[PeerId, tuple[int, int]]]] = deque()

    def sample(self, now: float, lanes: Lanes) -> None:
        """What the counters say at ``now``, in seconds; at least every STEP_S."""
        sums = dict[PeerId, tuple[int, int]]()
        for peer, count in lanes.items():
            was = self._last.get(peer, (0, 0))
            if count[0] < was[0] or count[1] < was[1]:
                was = 0, 0  # another lane
            known = self._sums.get(peer, (0, 0))
            sums[peer] = known[0] + count[0] - was[0], known[1] + count[1] - was[1]
        self._last, self._sums = dict(lanes), sums
        self._past.append((now, sums))
        while len(self._past) > 2 and now - self._past[1][0] >= SPAN_S:
            self._past.popleft()

    def of(self, peer: PeerId) -> tuple[int, int] | None:
        """Bytes a second (to it, from it); None where there is no lane, or nothing is known yet."""
        since = next(((at, sums[peer]) for at, sums in self._past if peer in sums), None)
        if since is None or peer not in self._sums or self._past[-1][0] <= since[0]:
            return None
        span_s, now = self._past[-1][0] - since[0], self._sums[peer]
        return round((now[0] - since[1][0]) / span_s), round((now[1] - since[1][1]) / span_s)

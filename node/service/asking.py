"""Whom a newcomer asks for a run's manifest, and when: a few members at a time, so that a large run
is not flooded. Sans I/O.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from ...collectives.identifiers import PeerId
from ..net.transport.backoff import Backoff

AT_ONCE = 3
FIRST_S, LONGEST_S = 0.25, 4.0


class Asking:
    """In each period every member is asked at most once, and no more than AT_ONCE are waited for.
    Periods grow once somebody was asked.
    """

    def __init__(self, rng: random.Random) -> None:
        self.again_at = -math.inf
        """When to call `whom` at the latest: the end of this period."""
        self._rng, self._periods = rng, Backoff(FIRST_S, LONGEST_S, rng)
        self._times = Counter[PeerId]()
        self._asked: set[PeerId] = set()  # in this period
        self._waiting: set[PeerId] = set()

    def whom(self, now: float, members: Sequence[PeerId]) -> list[PeerId]:
        """Whom to ask now, those first who were asked least. To be called at ``again_at``, and when
        a member becomes known or refuses.
        """
        if now >= self.again_at:
            if not self._asked:
                self._periods.reset()
            self._asked.clear()
            self._waiting.clear()
            self.again_at = now + self._periods.next_s()
        left = [peer for peer in members if peer not in self._asked]
        left.sort(key=lambda peer: (self._times[peer], self._rng.random()))
        chosen = left[: AT_ONCE - len(self._waiting)]
        self._asked.update(chosen)
        self._waiting.update(chosen)
        self._times.update(chosen)
        return chosen

    def refused(self, peer: PeerId) -> None:
        """This one will not answer: another may be asked in its place."""
        self._waiting.discard(peer)

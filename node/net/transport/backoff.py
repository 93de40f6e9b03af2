"""Retry delays that grow, with jitter, so that many peers that failed together do not try again
together.
"""

from __future__ import annotations

import random


class Backoff:
    """Delays ``first_s``, ``first_s * factor``, … up to ``max_s``, each multiplied by a random
    number in [0.75, 1.25].
    """

    def __init__(
        self, first_s: float, max_s: float, rng: random.Random, factor: float = 1.6
    ) -> None:
        self._first_s, self.max_s, self._factor, self._rng = first_s, max_s, factor, rng
        self._next_s = first_s

    def next_s(self) -> float:
        """The delay before the next attempt, in seconds."""
        delay = self._next_s
        self._next_s = min(self.max_s, delay * self._factor)
        return delay * self._rng.uniform(0.75, 1.25)

    def reset(self) -> None:
        """It worked: the next failure starts small again."""
        self._next_s = self._first_s

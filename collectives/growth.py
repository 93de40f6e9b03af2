"""How many inner steps a round has, by its place in the log: where a run asks for that, its first
rounds are shorter than ``sync_every``.

``local_after = N``: the first N rounds have one step each (post-local SGD, arXiv 1808.07217).
``growth = n``: the steps of the first n rounds of ``sync_every`` are made in shorter rounds, of one
step at first, then of more and more, so that members are never far apart while the model changes
fast. A round that begins after t steps has t // n, at least one, and ends at a multiple of
``sync_every`` at the latest. So after n·sync_every steps rounds have their full length, and about
n·(1 + ln sync_every) were made in place of n.

All of it follows from the number of rounds that are committed, which members that train from one
anchor have in common: whoever comes late, or again, makes rounds as long as the others'.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

MOST_GROWTH = 1000


@lru_cache(maxsize=64)
def growing(sync_every: int, growth: int) -> tuple[int, ...]:
    """Steps of each of the rounds that make up the first ``growth`` of ``sync_every``.

    >>> growing(6, 2)
    (1, 1, 1, 1, 2, 3, 3)
    >>> len(growing(20, 10)), sum(growing(20, 10))
    (51, 200)
    """
    steps, now, end = list[int](), 0, growth * sync_every
    while now < end:
        steps.append(min(max(1, now // growth), sync_every - now % sync_every))
        now += steps[-1]
    return tuple(steps)


@lru_cache(maxsize=64)
def _ends(sync_every: int, growth: int) -> tuple[int, ...]:
    return tuple(accumulate(growing(sync_every, growth)))


class RoundLengths(NamedTuple):
    """Inner steps of a run's rounds. ``sync_every``: of those of full length; None: they end
    otherwise.
    """

    sync_every: int | None
    growth: int = 0
    local_after: int = 0

    @property
    def short_rounds(self) -> int:
        """How many rounds come before those of full length."""
        if self.growth and self.sync_every is not None:
            return len(growing(self.sync_every, self.growth))
        return self.local_after

    def short(self, round_: int) -> int | None:
        """Steps of the round that follows ``round_`` committed ones; None: it has full length.

        >>> [RoundLengths(6, growth=2).short(done) for done in range(8)]
        [1, 1, 1, 1, 2, 3, 3, None]
        """
        if round_ >= self.short_rounds:
            return None
        if not self.growth:
            return 1
        assert self.sync_every is not None
        return growing(self.sync_every, self.growth)[max(0, round_)]

    def before(self, round_: int) -> int:
        """Steps of the first ``round_`` rounds, in a run whose rounds end by steps.

        >>> [RoundLengths(6, growth=2).before(done) for done in (0, 1, 6, 7, 8)]
        [0, 1, 9, 12, 18]
        >>> [RoundLengths(6, local_after=2).before(done) for done in (0, 1, 2, 3)]
        [0, 1, 2, 8]
        """
        assert self.sync_every is not None
        short = max(0, min(round_, self.short_rounds))
        made = short
        if self.growth:
            made = _ends(self.sync_every, self.growth)[short - 1] if short else 0
        return made + max(0, round_ - short) * self.sync_every

    def rounds_for(self, rounds: int) -> int:
        """How many rounds it takes, growing ones among them, until ``rounds`` times ``sync_every``
        steps are made.

        >>> [RoundLengths(6, growth=2).rounds_for(rounds) for rounds in (1, 2, 3)]
        [5, 7, 8]
        """
        assert self.sync_every is not None
        if rounds > self.growth:
            return self.short_rounds + rounds - self.growth
        return bisect_left(_ends(self.sync_every, self.growth), rounds * self.sync_every) + 1

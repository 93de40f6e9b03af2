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


COLD_STEPS = range(10, 101)
"""Inner steps a round with which "cold" was measured, and never above a member alone."""
COLD_ROUNDS, COLD_LEAST = 10, 300  # rounds of full length, or steps, of the shortest runs
COLD_CODECS = ("fp32", "bf16", "int8", "int8_dither")
"""fp32 and int8 were measured. bf16 lies between the two; int8_dither is taken to be like int8: it
loses 1.4 % of a round in place of 1 %."""
GROWTH = 20
"""Of how many rounds "cold" makes the steps in shorter ones: all of a run that has fewer. In the
sweep each doubling gained again: with 4 members, 1,000 steps and the plain mean ``grow=5``, 10 and
20 have 1.081, 1.078 and 1.050 times the loss of one machine with H = 10, 1.122, 1.109 and 1.071
with 20, 1.175, 1.137 and 1.077 with 50, 1.202, 1.143 and 1.082 with 100. More was not tried."""


def measured_cold(sync_every: int | None, codec: str, rounds: int | None) -> bool:
    """Whether "cold" was measured with rounds like these, for which members wait: of so many steps,
    in this codec, and so many of full length (None: nobody says).

    >>> measured_cold(20, "int8", 50), measured_cold(20, "int4", 50), measured_cold(200, "int8", 50)
    (True, False, False)
    >>> measured_cold(20, "int8", 5), measured_cold(100, "int8", 5)
    (False, True)
    """
    if sync_every is None or sync_every not in COLD_STEPS or codec not in COLD_CODECS:
        return False
    if rounds is None or rounds >= COLD_ROUNDS:
        return True
    return rounds * sync_every >= COLD_LEAST

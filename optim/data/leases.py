"""Which positions of the sample sequence are whose: a function of the certified log, so that all
members compute the same.

Positions 0, 1, 2, … go on for ever (`order` makes samples of them). After any entry of the log,
each member of the configuration has a
**stream**: first what it *keeps*, then its turns at what nobody has: the pool is dealt in blocks,
one to each member in turn, without end. So streams of one entry never meet, and a member that
trains for hours without hearing of anybody does not run out.

An entry says how many samples of each contributor it counts. These are the first of its stream, and
are done. Of what follows the contributor keeps as much as it may have begun by the time it hears of
the entry: twice its largest contribution, which is forgotten by an eighth with each later one, and
with each entry once many in a row count none of it (a slow machine is in every n-th). All else
returns to the pool, also what a member kept that is no longer in the configuration. So

* where nobody trains on more than it keeps before it hears of an entry, no sample is counted twice
  and none is left out;
* samples of work that was not counted (its member is gone, or dropped it) are read again, by
  whoever gets them;
* who trained further than that, cut off from the others, has read samples that others were given
  meanwhile, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ...collectives.group import Member
from ...collectives.outcomes import Tally
from .spans import Cursor, Span, united, without

END = 1 << 256  # never reached, whatever members claim
MARGIN = 2
"""Contributions a member may have begun since the last one counted: one that is under way, one that
is trained.
"""
AWAY = 32  # entries without a contribution of a member, from which on it is forgotten
MAX_BLOCKS = 1 << 12
"""Blocks that one contribution uses up at most: a bound for members that count something else than
samples.
"""


class Leases:
    """After an entry of the log; `decided` goes on to the next."""

    def __init__(self, first: int) -> None:
        """``first``: positions a member keeps and blocks hold while no contribution is known."""
        self.entry = -1
        self.members: tuple[Member, ...] = ()
        self._first = self._block = max(1, first)
        self._pool: list[Span] = []  # before the frontier: done by nobody and kept by nobody
        self._frontier = 0
        self._kept: dict[Member, list[Span]] = {}
        self._keep: dict[Member, int] = {}  # how many
        self._away: dict[Member, int] = {}  # entries since the last that counts it

    def stream(self, member: Member | None) -> Cursor:
        """The positions of a member. Of one that has none, those of the first: what it reads is
        displaced once it is a member again.
        """
        if member is None or member not in self.members:
            return Cursor(self._turns(0))
        return Cursor(chain(self._kept.get(member, []), self._turns(self.members.index(member))))

    def decided(self, tally: Tally) -> None:
        """The next entry, or the first that is known."""
        shares = {
            member: min(samples, MAX_BLOCKS * self._block) for member, samples in tally.shares
        }
        keep = self._keep_after(shares, tally.members)
        done, kept = list[Span](), dict[Member, list[Span]]()
        for member in self.members:
            cursor = self.stream(member)
            done += cursor.take(shares.get(member, 0))
            if member in keep:
                kept[member] = cursor.take(keep[member])
        taken = united(chain(done, *kept.values()))
        frontier = max(self._frontier, taken[-1][1]) if taken else self._frontier
        ahead = [(self._frontier, frontier)] if frontier > self._frontier else []
        self._pool = without(united(chain(self._pool, ahead, *self._kept.values())), taken)
        self._frontier, self._kept, self._keep = frontier, kept, keep
        self._block = max([1, *keep.values()])
        self.entry, self.members = tally.entry, tally.members

    def _keep_after(
        self, shares: dict[Member, int], members: tuple[Member, ...]
    ) -> dict[Member, int]:
        """How many positions each member keeps: a newcomer as many as the one that keeps most."""
        self._away = {
            member: 0 if member in shares else self._away.get(member, 0) + bool(shares)
            for member in members
        }
        keep = {
            member: count - (-(-count // 8) if self._forgets(member, shares) else 0)
            for member, count in self._keep.items()
        }
        for member, samples in shares.items():
            keep[member] = max(MARGIN * samples, keep.get(member, 0))
        most = max(keep.values(), default=self._first)
        return {member: keep.get(member, most) for member in members}

    def _forgets(self, member: Member, shares: dict[Member, int]) -> bool:
        return member in shares or (bool(shares) and self._away.get(member, AWAY + 1) > AWAY)

    def _turns(self, turn: int) -> Iterator[Span]:
        """A member's blocks of the pool."""
        passed, block, count = 0, self._block, max(1, len(self.members))
        for start, stop in chain(self._pool, ((self._frontier, END),)):
            number = passed // block
            number += (turn - number) % count
            while (first := start + number * block - passed) < stop:
                if (last := min(first + block, stop)) > start:
                    yield max(first, start), last
                number += count
            passed += stop - start

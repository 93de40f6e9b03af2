"""Relays: on which ways the news of a round goes in a large configuration (a `Dissemination`).

In a small one everybody tells everybody: a round costs each of n members n votes and n Readys. In a
large one members sit on a grid, whose order is that of the round's conveners, so that it is another
one in each round:

* That a contribution is there (Ready) is told to the members of the own row; who hears it first
  from there tells those of its column (RoundCloses). So two steps reach everybody, as long as all
  of a row live, and each member sends about 2 √n messages. A row is at most one shorter than
  others, and deals those of the column that it lacks among its members.
* Votes of ballot 0 go to its convener. The decision, which is the votes of a quorum and needs no
  trust, goes from there to one member of each row, its relay, and from that to the row.

A relay that is dead or says nothing costs its row a time of patience, never safety: who does not
hear of the decision repeats its vote, and is answered. Ballots after the first do without relays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isqrt

from ..identifiers import PeerId
from ..round.dissemination import Dissemination

RELAYED_ABOVE = 32
"""Members of a configuration with relays: up to here a round's votes and Readys together are fewer
bytes than one entry, and a decision is learnt two steps sooner without them."""


class RelayGrid:
    """Members in rows of about √n, some perhaps one shorter than others.

    >>> grid = RelayGrid([PeerId(name) for name in "abcdefgh"])
    >>> grid.row("e"), grid.column("e")
    (['d', 'f'], ['b', 'h'])
    >>> grid.row("g"), grid.column("g")
    (['h'], ['a', 'd', 'c'])
    >>> grid.relays("a", lambda peer: peer == "d")
    ['b', 'c', 'e', 'g']
    """

    def __init__(self, order: Sequence[PeerId]) -> None:
        self.order = tuple(order)
        count = len(self.order)
        rows = max(1, -(-count // (isqrt(max(1, count) - 1) + 1)))
        ends = [-(-count * number // rows) for number in range(rows + 1)]
        self._rows = [self.order[first:end] for first, end in pairwise(ends)]
        self._place = {
            peer: (row, column)
            for row, members in enumerate(self._rows)
            for column, peer in enumerate(members)
        }

    def row(self, peer: PeerId) -> list[PeerId]:
        """The others of its row."""
        return [other for other in self._rows[self._place[peer][0]] if other != peer]

    def column(self, peer: PeerId) -> list[PeerId]:
        """Whom it tells what its row hears: the others of its column. Members of a shorter row
        tell those of the column that it has no place in, too, each about one of them.
        """
        row, column = self._place[peer]
        length = len(self._rows[row])
        own = [other[column] for other in self._rows if len(other) > column]
        beyond = [other[length] for other in self._rows if len(other) > length]
        return [other for other in own if other != peer] + beyond[column::length]

    def relays(self, peer: PeerId, silent: Callable[[PeerId], bool]) -> list[PeerId]:
        """Whom ``peer`` tells what all are to hear: the others of its own row, and of each other
        row the first that is not ``silent``, or its first if all are."""
        found = self.row(peer)
        for number, row in enumerate(self._rows):
            if number != self._place[peer][0]:
                found.append(next((other for other in row if not silent(other)), row[0]))
        return found


class RelayedDissemination(Dissemination):
    """Of one round in a large configuration. ``order``: its conveners, this member among them."""

    is_large = True
    may_pass_decision = True

    def __init__(self, me: PeerId, order: Callable[[], Sequence[PeerId]]) -> None:
        self._me, self._order = me, order
        self._grid: RelayGrid | None = None
        self._passed_contribution = False
        self._voted_at: float | None = None

    @property
    def grid(self) -> RelayGrid:
        """Laid out when it is first needed: a round without news needs none."""
        if self._grid is None:
            self._grid = RelayGrid(self._order())
        return self._grid

    def is_relayed(self, ballot: int) -> bool:
        """In ballot 0: those that follow it repair what relays may have held up."""
        return ballot == 0

    def announce_to(self, others: Sequence[PeerId], ballot: int) -> Sequence[PeerId]:
        """The own row."""
        return self.grid.row(self._me) if self.is_relayed(ballot) else others

    def pass_contribution_to(self, ballot: int) -> Sequence[PeerId]:
        """The own column."""
        if not self.is_relayed(ballot) or self._passed_contribution:
            return ()
        self._passed_contribution = True
        return self.grid.column(self._me)

    def is_vote_due(self, now: float, ballot: int, late_s: float) -> bool:
        """Over relays the decision takes longer, so a vote is not repeated at each tick."""
        if not self.is_relayed(ballot):
            return True
        if self._voted_at is None:
            self._voted_at = now  # about then
        if now - self._voted_at < late_s:
            return False
        self._voted_at = now
        return True

    def announce_decision_to(
        self, silent: Callable[[PeerId], bool]
    ) -> Sequence[tuple[PeerId, bool]]:
        """The own row, and a relay of each other one, which passes the decision on."""
        row = self.grid.row(self._me)
        return [(peer, peer not in row) for peer in self.grid.relays(self._me, silent)]

    def pass_decision_to(self) -> Sequence[PeerId]:
        """The own row."""
        self.may_pass_decision = False
        return self.grid.row(self._me)

    def late_after_s(self, once_s: float) -> float:
        """A decision takes a step more."""
        return 2 * once_s


def relayed(me: PeerId, members: int, order: Callable[[], Sequence[PeerId]]) -> Dissemination:
    """Make what a configuration of this size needs (a `DisseminationMaker`)."""
    return RelayedDissemination(me, order) if members > RELAYED_ABOVE else Dissemination()

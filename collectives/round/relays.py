"""Relays: on which ways the news of a round goes in a large configuration. Pure functions.

In a small one everybody tells everybody: a round costs each of n members n votes and n Readys. In a
large one members sit on a grid, whose order is that of the round's conveners, so that it is another
one in each round:

* That a contribution is there (Ready) is told to the members of the own row; who hears it first
  from there tells those of its column (RoundCloses). So two steps reach everybody, as long as any
  of a row lives for each column, and each member sends about 2 √n messages.
* Votes of ballot 0 go to its convener. The decision, which is the votes of a quorum and needs no
  trust, goes from there to one member of each row, its relay, and from that to the row.

A relay that is dead or says nothing costs its row a time of patience, never safety: who does not
hear of the decision repeats its vote, and is answered. Ballots after the first do without relays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt

from ..identifiers import PeerId

RELAYED_ABOVE = 32
"""Members of a configuration with relays: up to here a round's votes and Readys together are fewer
bytes than one entry, and a decision is learnt two steps sooner without them."""


class RelayGrid:
    """Members in rows of ⌈√n⌉, the last row perhaps shorter.

    >>> grid = RelayGrid([PeerId(name) for name in "abcdefgh"])
    >>> grid.row("e"), grid.column("e")
    (['d', 'f'], ['b', 'h'])
    >>> grid.relays("a", lambda peer: peer == "d")
    ['b', 'c', 'e', 'g']
    """

    def __init__(self, order: Sequence[PeerId]) -> None:
        self.order = tuple(order)
        self.width = isqrt(max(1, len(order)) - 1) + 1
        self._place = {peer: at for at, peer in enumerate(self.order)}

    def row(self, peer: PeerId) -> list[PeerId]:
        """The others of its row."""
        first = self._place[peer] - self._place[peer] % self.width
        return [other for other in self.order[first : first + self.width] if other != peer]

    def column(self, peer: PeerId) -> list[PeerId]:
        """The others of its column."""
        return [
            other
            for other in self.order[self._place[peer] % self.width :: self.width]
            if other != peer
        ]

    def relays(self, peer: PeerId, silent: Callable[[PeerId], bool]) -> list[PeerId]:
        """Whom ``peer`` tells what all are to hear: the others of its own row, and of each other
        row the first that is not ``silent``, or its first if all are."""
        found = self.row(peer)
        own = self._place[peer] // self.width
        for first in range(0, len(self.order), self.width):
            if first // self.width != own:
                row = self.order[first : first + self.width]
                found.append(next((other for other in row if not silent(other)), row[0]))
        return found

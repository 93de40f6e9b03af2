"""Who beats to whom in a large run: rows and columns of a mesh over the configuration. Pure.

The members stand in rows of ⌈√n⌉, in the order of their names. A member's partners are those of its
row and of its column, about 2√n. Of any two members that are none, exactly two others are partners
of both: where the row of one meets the column of the other, and the other way round. So each of
them hears of the other from two that hear it themselves, and no word travels further than that.

Where the last row is not full, the members above its gaps stand in these as well. A configuration
determines its mesh, so all who know it agree without a word; members of different configurations
see by the mesh's name that they speak of different ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from blake3 import blake3

from ...collectives.identifiers import PeerId
from .membership_records import NAME_BYTES


class PartnerMesh:
    """Of these members, each named once.

    >>> mesh = mesh_of(tuple(PeerId(f"p{number}") for number in range(9)))
    >>> mesh.partners(PeerId("p0"))
    ('p1', 'p2', 'p3', 'p6')
    >>> mesh.between(PeerId("p0"), PeerId("p4"))
    ('p1', 'p3')
    """

    def __init__(self, peers: Sequence[PeerId]) -> None:
        self.peers = tuple(sorted(peers))
        self._place = {peer: number for number, peer in enumerate(self.peers)}
        self._width = math.isqrt(len(self.peers) - 1) + 1 if self.peers else 1
        self._rows = -(-len(self.peers) // self._width)
        self.name = blake3("\0".join(self.peers).encode()).digest(NAME_BYTES)
        self._partners: dict[PeerId, tuple[PeerId, ...]] = {}
        self._bits: dict[PeerId, dict[PeerId, int]] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._place

    def partners(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Whom a member beats to, in the order of its bits."""
        found = self._partners.get(peer)
        if found is None:
            row, column = divmod(self._place[peer], self._width)
            rows = [row]
            if row == self._rows - 2 and self._gap(column):
                rows.append(row + 1)
            beside = [self._at(each, other) for each in rows for other in range(self._width)]
            below = [self._at(each, column) for each in range(self._rows)]
            found = tuple(other for other in dict.fromkeys([*beside, *below]) if other != peer)
            self._partners[peer] = found
        return found

    def bits(self, peer: PeerId) -> Mapping[PeerId, int]:
        """Which bit of what a member has heard stands for which of its partners."""
        found = self._bits.get(peer)
        if found is None:
            found = {other: bit for bit, other in enumerate(self.partners(peer))}
            self._bits[peer] = found
        return found

    def between(self, one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
        """The partners of both, of two that are none of each other."""
        row, column = divmod(self._place[one], self._width)
        other_row, other_column = divmod(self._place[other], self._width)
        return self._at(row, other_column), self._at(other_row, column)

    def beside(self, stranger: PeerId) -> tuple[PeerId, ...]:
        """Whom one beats to that is no member: a row and a column that its name chooses."""
        drawn = int.from_bytes(blake3(stranger.encode()).digest(8), "big") % len(self.peers)
        return (self.peers[drawn], *self.partners(self.peers[drawn]))

    def _gap(self, column: int) -> bool:
        return (self._rows - 1) * self._width + column >= len(self.peers)

    def _at(self, row: int, column: int) -> PeerId:
        """Who stands there."""
        if row == self._rows - 1 and row and self._gap(column):
            row -= 1
        return self.peers[row * self._width + column]


@lru_cache(maxsize=8)
def mesh_of(peers: tuple[PeerId, ...]) -> PartnerMesh:
    """The mesh of these members, the same object for all who ask in one process."""
    return PartnerMesh(peers)

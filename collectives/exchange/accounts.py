"""Accounts of partial sums (`checking`) in one open round: those that others gave, and those made
here.
"""

from __future__ import annotations

from collections.abc import Collection

from ..identifiers import PeerId


class Accounts:
    """By name and chunk. A peer may have ``most`` of them here, whatever it sends."""

    def __init__(self, most: int) -> None:
        self.made: dict[bytes, dict[int, bytes]] = {}
        self._most = most
        self._given: dict[PeerId, dict[bytes, dict[int, bytes]]] = {}

    def of(self, peer: PeerId, name: bytes) -> dict[int, bytes]:
        """The chunks of one account that are here (a live view)."""
        return self._given.setdefault(peer, {}).setdefault(name, {})

    def takes(self, peer: PeerId, name: bytes, chunk: int) -> bool:
        """Whether an arriving one is wanted."""
        given = self._given.get(peer, {})
        return chunk not in given.get(name, ()) and sum(map(len, given.values())) < self._most

    def keep(self, wanted: Collection[bytes]) -> None:
        """Forget all but these."""
        for name in [name for name in self.made if name not in wanted]:
            del self.made[name]
        for given in self._given.values():
            for name in [name for name in given if name not in wanted]:
                del given[name]

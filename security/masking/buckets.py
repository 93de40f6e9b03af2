"""Buckets: members whose vectors are added up apart from the others', so that a robust rule can
compare the buckets' means.

Buckets before a rule: Karimireddy, He and Jaggi 2022, arXiv 2006.09365. Masks are agreed on within
a bucket only, shares are dealt to everybody, and a bucket of which too few vectors are there is not
unmasked at all: neither share of any of its members is revealed. f hostile members spoil f buckets
at most. Who is in which bucket follows from what all members have said before anybody masks;
whoever speaks last can choose among a few deals, which does not help against the rule, but may
bring accomplices into a victim's bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ...collectives.identifiers import PeerId


@dataclass(frozen=True, slots=True)
class Buckets:
    """``members``: of each bucket; nobody is in two. ``least``: how many vectors of a bucket must
    be there.
    """

    members: tuple[frozenset[PeerId], ...]
    least: int

    @classmethod
    def one(cls, peers: Iterable[PeerId]) -> Buckets:
        """Everybody together; the binding's threshold is all that is asked."""
        return cls((frozenset(peers),), 0)

    @classmethod
    def dealt(cls, seed: bytes, peers: Collection[PeerId], most: int, least: int) -> Buckets:
        """``peers`` dealt at random, the same wherever ``seed`` is the same: as many buckets as
        ``most`` and ``least`` allow, one at least, equally large but for one member."""
        count = max(1, min(most, len(peers) // least))
        order = sorted(
            peers,
            key=lambda peer: hashlib.sha256(
                b"atoll/masking/buckets/1\0" + seed + peer.encode()
            ).digest(),
        )
        return cls(tuple(frozenset(order[index::count]) for index in range(count)), least)

    def of(self, peer: PeerId) -> int:
        """The bucket that it is in; -1: in none."""
        return next((index for index, members in enumerate(self.members) if peer in members), -1)

    def open(self, survivors: Collection[PeerId]) -> tuple[int, ...]:
        """The buckets of which enough vectors are there."""
        return tuple(
            index
            for index, members in enumerate(self.members)
            if len(members & set(survivors)) >= self.least
        )

    def hidden(self, survivors: Collection[PeerId]) -> frozenset[PeerId]:
        """Members, also such as dropped out, of the others: nothing of theirs is revealed."""
        opened = set(self.open(survivors))
        return frozenset(
            peer
            for index, members in enumerate(self.members)
            if index not in opened
            for peer in members
        )

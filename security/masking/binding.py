"""What a masking is for: everything that is signed, and every key that is derived, is bound to it
and worth nothing elsewhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from ...collectives.errors import ConfigError, NotEnoughPeersError, RemoteProtocolError
from ...collectives.identifiers import PeerId, RunId

LEAST_MEMBERS = 3  # of two, each would know the other's vector from the sum
MOST_MEMBERS = 1024


@dataclass(frozen=True)
class Binding:
    """One masking of one vector a member: ``numel`` elements modulo 2^``bits``. Raises ConfigError
    for values that protect nothing.

    ``roster``: the members, ascending; a member's index in it is its number. ``threshold``: how
    many must be there to unmask, above half of the members. As everybody unmasks once, two sets of
    survivors are unmasked only if 2 * threshold - members of them tell both; a member less may
    collude with an owner (`colluding`).
    """

    run: RunId
    round: int
    attempt: int
    roster: tuple[PeerId, ...]
    threshold: int
    numel: int
    bits: Literal[32, 64]

    def __post_init__(self) -> None:
        n = len(self.roster)
        if not LEAST_MEMBERS <= n <= MOST_MEMBERS:
            raise ConfigError(
                f"secure aggregation of {n} members",
                why=f"{LEAST_MEMBERS} to {MOST_MEMBERS} members can hide in a sum",
            )
        if self.roster != tuple(sorted(set(self.roster))):
            raise ConfigError(
                "secure aggregation: the members are not in order, or one is there twice"
            )
        if not n < 2 * self.threshold <= 2 * n:
            raise ConfigError(
                f"secure aggregation: threshold {self.threshold} of {n}",
                key="threshold",
                why="more than half, at most all",
            )
        if self.bits not in (32, 64) or self.numel < 1 or self.round < 0 or self.attempt < 0:
            raise ConfigError(
                f"secure aggregation of {self.numel} elements of {self.bits} bits",
                why="elements of 32 or 64 bits",
            )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it."""
        fields = (
            self.run,
            self.round,
            self.attempt,
            self.roster,
            self.threshold,
            self.numel,
            self.bits,
        )
        return hashlib.sha256(b"atoll/masking/1\0" + msgspec.msgpack.encode(fields)).digest()

    @cached_property
    def _numbers(self) -> dict[PeerId, int]:
        return {peer: number for number, peer in enumerate(self.roster)}

    @property
    def colluding(self) -> int:
        """How many members may betray all to an owner before it unmasks two sets of survivors."""
        return 2 * self.threshold - len(self.roster) - 1

    def number(self, peer: PeerId) -> int:
        """Its index in the roster. Raises RemoteProtocolError for a peer that is not in it."""
        if peer not in self._numbers:
            raise RemoteProtocolError(
                f"{peer} is not among those whose vectors are masked", peer=peer
            )
        return self._numbers[peer]

    def enough(self, peers: int, what: str) -> None:
        """Raises NotEnoughPeersError below the threshold: then nothing is unmasked."""
        if peers < self.threshold:
            raise NotEnoughPeersError(
                f"secure aggregation: {what} of {peers} members, the threshold is {self.threshold}",
                why="below it a sum would say too much about single members",
                hint="the round is tried again with fresh masks",
            )

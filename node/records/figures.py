"""What comes of looking at kept contributions: values that commands show."""

from __future__ import annotations

import msgspec

from ...collectives.identifiers import PeerId


class Leaner(msgspec.Struct, frozen=True):
    """One member's figures: `security.rules.leaning.Lean`."""

    peer: PeerId
    constancy: float
    against: float
    rounds: int
    leans: tuple[str, ...]


class Leans(msgspec.Struct, frozen=True):
    """Of one log. ``rounds``: the entries that were looked at; ``elements``: of each contribution;
    ``f``: how many may be hostile.

    ``chance``: how likely it is at most that ranks alone name any member, where the data of all are
    alike. ``members``: whoever leans most first.
    """

    log: str
    rounds: tuple[int, ...]
    elements: int
    f: int
    chance: float
    members: tuple[Leaner, ...]


class Split(msgspec.Struct, frozen=True):
    """``clusters``: members of each, the largest first; ``unseen``: members whose contributions in
    one of the halves of the rounds are none, or zero.

    ``agree``: adjusted Rand index of the clusterings by the two halves; 1: the same. ``within``,
    ``between``: mean cosine of two members' updates in the newer half, in one cluster and in
    different ones; None where there are no such two. ``rounds``: the entries that were looked at.
    """

    clusters: tuple[tuple[PeerId, ...], ...]
    unseen: tuple[PeerId, ...]
    agree: float
    within: float | None
    between: float | None
    rounds: tuple[int, ...]

    @property
    def stable(self) -> bool:
        """Whether both halves say the same."""
        return self.agree == 1.0

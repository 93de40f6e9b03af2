"""Which members a configuration can lose."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .group import Member, is_quorum, least_members
from .identifiers import PeerId


class Reach(msgspec.Struct, frozen=True):
    """How many of the open round's members can be reached, and how many it needs to be decided: a
    quorum, and what a robust rule needs.
    """

    reachable: int
    members: int
    needed: int

    @property
    def quorum(self) -> bool:
        """Whether those that can be reached decide."""
        return self.reachable >= self.needed

    def __str__(self) -> str:
        seen = f"{self.reachable} of {self.members} members reachable"
        return (
            seen
            if self.quorum
            else (
                f"{'no quorum' if self.needed <= self.members else 'too few'}: {seen}; the open "
                f"round waits for {self.needed}"
            )
        )


def reach(
    members: Mapping[PeerId, bool], organiser: PeerId | None, least: int = 0, tolerated: int = 0
) -> Reach:
    """What ``members`` (peer -> whether it can be reached) mean for the open round, whose reducer
    needs ``least`` contributors.

    ``needed`` is the size of the smallest quorum that those reachable now contain or, with others,
    complete; and not below ``least``. Where too few are members to bear ``tolerated`` that lie it
    is `least_members`.
    """
    if tolerated and len(members) < least_members(tolerated):
        return Reach(sum(members.values()), len(members), least_members(tolerated))
    config = tuple(Member(peer, 0) for peer in members)
    order = sorted(
        config, key=lambda member: (not members[member.peer], member.peer != organiser, member)
    )
    sizes = range((len(order) + 1) // 2, len(order) + 1)
    needed = next(
        (size for size in sizes if is_quorum(config, set(order[:size]), organiser, tolerated)), 0
    )
    return Reach(sum(members.values()), len(config), max(needed, least))

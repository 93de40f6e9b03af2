"""The door at which a mode changes how the news of a round travels among its members.

A round has three pieces of news: a member has a contribution (Ready), a member votes (Accepted),
and the round is decided. In a small configuration each member sends the first two to all others
and counts the votes itself, so that nobody need announce the third. The other implementation is
`atoll.collectives.modes.relays`. A mode decides only whom to tell, and when to repeat: certificates
are checked by whoever receives them, so no implementation can make a round unsafe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..identifiers import PeerId


class Dissemination:
    """Everybody tells everybody. One object serves one open round and holds what it needs of it:
    peers in, peers out. It sends nothing itself.
    """

    is_large = False
    """True if the configuration has so many members that nobody talks to all of them without
    need."""
    may_pass_decision = False
    """True until this member has passed on the decision, if it may have to."""

    def is_relayed(self, ballot: int) -> bool:
        """True if votes of this ballot go to its convener alone, which announces the decision."""
        return False

    def announce_to(self, others: Sequence[PeerId], ballot: int) -> Sequence[PeerId]:
        """Whom of the ``others`` a member tells that it contributes, besides the convener. Asked
        only if no member but the convener counts contributions.
        """
        return others

    def pass_contribution_to(self, ballot: int) -> Sequence[PeerId]:
        """Whom to tell that a contribution is there, when this member first learns it. Each peer is
        returned once. Asked under the condition of `announce_to`.
        """
        return ()

    def is_vote_due(self, now: float, ballot: int, late_s: float) -> bool:
        """True if this member's vote is to be sent again. ``late_s``: seconds after which a
        decision should have come.
        """
        return True

    def announce_decision_to(
        self, silent: Callable[[PeerId], bool]
    ) -> Sequence[tuple[PeerId, bool]]:
        """Whom a convener that has collected a quorum's votes sends them, and whether the receiver
        is to pass them on. ``silent``: peers that are not relied on.
        """
        return ()

    def pass_decision_to(self) -> Sequence[PeerId]:
        """Whom to send a decision that came with the request to pass it on. Afterwards
        ``may_pass_decision`` is False.
        """
        return ()

    def late_after_s(self, once_s: float) -> float:
        """Seconds after which a decision should have come everywhere. ``once_s``: for a message and
        its answer.
        """
        return once_s


DisseminationMaker = Callable[[PeerId, int, Callable[[], Sequence[PeerId]]], Dissemination]
"""What a log is given: makes the `Dissemination` of each round as it opens. Arguments: this member,
the number of members of the configuration, and what returns all of them, this one among them, in
the order of the round's conveners (calculated when called).
"""


def everybody(me: PeerId, members: int, order: Callable[[], Sequence[PeerId]]) -> Dissemination:
    """Make the dissemination of a small configuration, whatever its size."""
    return Dissemination()

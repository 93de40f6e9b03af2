"""The door at which a mode has members make results themselves, of copies of one vector."""

from __future__ import annotations

from collections.abc import Collection

from ..group import Entry, Plan
from ..identifiers import PeerId


class OwnResults:
    """The result of the open round, as its vector is at this member: nothing, where the data plane
    reduces contributions.
    """

    def execute(self, plan: Plan) -> bool:
        """A plan of the log; whether its result is made here, without the data plane."""
        return False

    def on_result(self, plan: Plan, digests: tuple[bytes, ...]) -> bool:
        """The owners of a plan's parts have stated its result; whether it is not needed, as it is
        made here.
        """
        return False

    def may_fetch(self, entry: Entry) -> bool:
        """Whether result bytes may be fetched before the decision, to vote for the entry."""
        return True

    def contradicts(self, entry: Entry) -> bool | None:
        """Whether an entry is not what this member has made itself; None: it is looked into."""
        return False

    def may_vote(self, entry: Entry, voters: Collection[PeerId]) -> bool:
        """Whether this member votes for an entry whose bytes are here, and for which these others
        have voted.
        """
        return True

    def on_false(self, entry: Entry, convener: PeerId, ballot: int) -> None:
        """A convener proposes an entry that contradicts this member's own result."""


NO_RESULTS = OwnResults()

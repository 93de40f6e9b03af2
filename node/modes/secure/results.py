"""The result of a secure round at one member: the mean that was unmasked."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ....collectives.group import Entry, Plan
from ....collectives.identifiers import PeerId
from ....collectives.round.own_results import OwnResults
from ...session import events as ev
from ...session.copies import Copies

if TYPE_CHECKING:
    from ...session.session import Session

FOLLOWED_S = 30.0  # how long a member waits for a second voter where it has no mean of its own
ENOUGH_VOTERS = 2  # whom a member follows that has no mean of its own: one of them does not lie


class MaskedResults(OwnResults):
    """Who has the mean makes its bytes, and votes for no others; who has none (it sat out, or began
    again) follows those who have.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.copies = Copies(session)  # of the mean
        self._following: tuple[bytes, float] | None = None  # an entry that others made, since when

    def forget(self) -> None:
        """The round is decided."""
        self.copies.forget()
        self._following = None

    def execute(self, plan: Plan) -> bool:
        """Who has the mean makes the result itself; it travels only where a member has none."""
        self.copies.look(plan)
        members = set(self.session.config_peers())
        return self.copies.are(plan) and members <= {c.member.peer for c in plan.contributors}

    def may_fetch(self, entry: Entry) -> bool:
        """Of the mean that is here, nothing but what is made here."""
        machine = self.session.machine
        if machine is not None and machine.open.decided is not None:
            return True
        if self.copies.are(entry):
            self.copies.look(entry)
            return False
        return True

    def contradicts(self, entry: Entry) -> bool | None:
        return self.copies.contradict(entry)

    def may_vote(self, entry: Entry, voters: Collection[PeerId]) -> bool:
        """For the mean that is here; who has none (it sat out, or began again) goes by members who
        have, and one may lie. Where nobody else is left who could vote, too, it follows a single
        one after a while: else the round would never end.
        """
        if self.copies.are(entry):
            return self.copies.digests(entry) == entry.part_digests
        digest, now = entry.hash(), self.session.clock()
        if self._following is None or self._following[0] != digest:
            self._following = (digest, now)
        patient = bool(voters) and now - self._following[1] > FOLLOWED_S
        return len(voters) >= ENOUGH_VOTERS or patient

    def on_false(self, entry: Entry, convener: PeerId, ballot: int) -> None:
        """In a later ballot it may have been made to adopt what another has voted for."""
        if ballot == 0 and any(convener == c.member.peer for c in entry.contributors):
            self._name(convener, "it proposes another mean than was unmasked")

    def on_result(self, plan: Plan, digests: tuple[bytes, ...]) -> bool:
        for owner in self.copies.otherwise(plan, digests):
            self._name(owner, "its part of the result is not of the mean that was unmasked")
        return self.copies.are(plan)

    def _name(self, peer: PeerId, what: str) -> None:
        """It signed nothing of that, so this is no proof; and left out of sums it would cost the
        others more time than its ballots do.
        """
        self.session.ports.emit(ev.PeerMisbehaved(peer, what))

"""The result of a step at one peer: the aggregate that it has come to, as plans and entries say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....collectives.group import Entry, Plan
from ....collectives.round.own_results import OwnResults
from ...session.copies import Copies

if TYPE_CHECKING:
    from ...session.session import Session


class StepResults(OwnResults):
    """All peers come to the same aggregate, so no bytes of it travel again."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.copies = Copies(session)

    def execute(self, plan: Plan) -> bool:
        """What the plan is about is here already."""
        self.copies.look(plan)
        return True

    def may_fetch(self, entry: Entry) -> bool:
        """Nobody votes for a result that its own step has not come to."""
        machine = self.session.machine
        if (
            machine is not None
            and machine.open.decided is not None
            and machine.open.decided.entry == entry
        ):
            return True
        self.copies.look(entry)  # its plan was not heard of, perhaps
        return False

    def contradicts(self, entry: Entry) -> bool | None:
        return self.copies.contradict(entry)

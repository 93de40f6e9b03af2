"""The door at which a mode changes which faults of members a round bears.

The log is safe whichever members crash. The other implementation is
`atoll.collectives.modes.byzantine`: there some may do anything. A model makes the roles of each
round as it opens, and remembers over rounds what it has found out of members.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from ..group import Member, Plan
from ..identifiers import PeerId
from .acceptor import Acceptor
from .convener import Convener

if TYPE_CHECKING:
    from .machine import RoundMachine


class FaultModel:
    """Members crash, and nothing worse. One object serves one log at one member."""

    tolerated = 0
    """Members of a configuration that may do anything."""

    def make_roles(self, view: RoundMachine) -> tuple[Acceptor, Convener]:
        """The acceptor and the convener of the view's open round."""
        acceptor = Acceptor(view)
        return acceptor, Convener(view, acceptor)

    def note_revision(
        self, round_: int, before: Plan, after: Plan, silent: Callable[[Member], bool]
    ) -> None:
        """The convener of a ballot has revised its plan. ``silent``: members that do not answer."""

    def note_late_owners(self, round_: int, owners: Set[PeerId]) -> None:
        """An entry is proposed, and results of these owners are still not here."""


FaultModelMaker = Callable[[], FaultModel]
"""What a log is given: makes the model of that log."""

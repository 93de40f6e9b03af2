"""The fault model of a log some of whose members may do anything."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from ...group import Member, Plan
from ...identifiers import PeerId
from ...round.faults import FaultModel
from .acceptor import ByzantineAcceptor
from .blame import Blame
from .convener import ByzantineConvener

if TYPE_CHECKING:
    from ...round.machine import RoundMachine


class Byzantine(FaultModel):
    """``tolerated`` members of a configuration may do anything."""

    def __init__(self, tolerated: int) -> None:
        self.tolerated = tolerated
        self.blamed = Blame()

    def make_roles(self, view: RoundMachine) -> tuple[ByzantineAcceptor, ByzantineConvener]:
        """The roles that show, and ask to be shown, why a proposal may be made."""
        acceptor = ByzantineAcceptor(view)
        convener = ByzantineConvener(view, acceptor, self.blamed)
        acceptor.convener = convener
        return acceptor, convener

    def note_revision(
        self, round_: int, before: Plan, after: Plan, silent: Callable[[Member], bool]
    ) -> None:
        """What the convener of a ballot found out, each member need not find out anew at a second
        an entry: whose contribution it leaves out though it lives, and that a tree does not come
        on. Its word is enough: who is doubted falsely loses nothing while its link is as it says.
        """
        kept = {c.cid for c in after.contributors}
        for c in before.contributors:
            if c.cid not in kept and not silent(c.member):
                self.blamed.doubted.strike(c.member.peer, round_)
        if before.topology.kind != "butterfly" and after.topology.kind == "butterfly":
            self.blamed.fell(round_)

    def note_late_owners(self, round_: int, owners: Set[PeerId]) -> None:
        """They own nothing in the next plans: the others own less than they could, no more."""
        for owner in owners:
            self.blamed.owners.strike(owner, round_)

"""The acceptor's side of one open round where members crash, and nothing worse.

The protocol itself (promise, accept, vote) is in `machine.RoundMachine`. This class is the seam at
which another fault model changes it: `modes.byzantine.acceptor` overrides every method.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from .. import messages as m
from ..group import Contributor, Entry, Member, Plan
from ..identifiers import PeerId

if TYPE_CHECKING:
    from .machine import RoundMachine


class Acceptor:
    """Crash faults: messages are trusted, so a vote needs no echo and an offer no signature."""

    def __init__(self, view: RoundMachine) -> None:
        self.view = view

    # ---- what others may ask
    @property
    def founding(self) -> bool:
        """Whether there are too few members for a round with contributors."""
        return False

    @property
    def urged(self) -> bool:
        """Whether others report that the round is under way, although nothing is known here."""
        return False

    @property
    def ahead(self) -> bool:
        """Whether others must come to the present ballot before it has had its time."""
        return False

    def follows(self, plan: Plan) -> bool:
        """Whether to carry out a plan of the owner of its ballot."""
        return True

    def awaits(self, member: Member) -> bool:
        """Whether a member has yet to announce what it contributes."""
        return member not in self.view.open.ready

    def vouched(self, offers: list[Contributor]) -> list[Contributor]:
        """Of these offers those that can be proved to others."""
        return offers

    def overdue(self, now: float, patience: float) -> bool:
        """Whether the present ballot has had its time, whatever goes on in it."""
        return False

    # ---- what happens
    def part_reduced(
        self, now: float, plan: Plan, index: int, digest: bytes, inputs: tuple[bytes, ...] = ()
    ) -> None:
        """A part of this member is reduced under the plan in force."""

    def part_given(self, now: float, plan: Plan, index: int, root: bytes) -> None:
        """All that this member contributes to a part of the plan in force is encoded."""

    def ungiven(self, now: float) -> set[bytes]:
        """Contributions that came here for parts of this member, and whose members have not signed
        what came."""
        return set()

    def lacks_given(self, who: PeerId, cids: Collection[bytes]) -> None:
        """A member reports these contributions missing: perhaps what was signed of them."""

    def claim(self, now: float) -> None:
        """Announce what can be proved to others, where that changed."""

    def entered(self, now: float) -> None:
        """The machine has moved on to another ballot."""

    def on_message(self, now: float, who: Member, body: m.Body) -> None:
        """A message to an acceptor. Raises RemoteProtocolError, StorageError."""
        self.view.on_acceptor_message(now, who, body)

    def step(self, now: float) -> None:
        """Vote for what is pending, if its bytes and the state before it are here."""
        self.view.vote_pending(now)

    def cast(self, now: float, ballot: int, entry: Entry) -> None:
        """Vote for an entry whose bytes and base state are stored here."""
        self.view.cast_vote(ballot, entry)

    def tick(self, now: float) -> None:
        """Repair loss of votes."""
        self.view.repeat_votes(now)

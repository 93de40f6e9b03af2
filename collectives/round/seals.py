"""The door at which a mode ends a round that a quorum will never end: somebody's word stands for
its votes. The other implementation is `atoll.collectives.modes.sealing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from .. import messages as m
from ..group import Member

if TYPE_CHECKING:
    from .machine import RoundMachine


class RoundSeal:
    """None: a round ends by votes alone. One object serves one open round."""

    def __init__(self, view: RoundMachine) -> None:
        self.view = view

    @property
    def active(self) -> bool:
        """Whether the open round is sealed here: this member votes no more in it."""
        return False

    def shuns(self, who: Member) -> bool:
        """Whether nothing that this member says counts any more: its life was removed."""
        removed = self.view.removed
        return bool(removed) and gone(who, removed)

    def tick(self, now: float) -> bool:
        """Call about every ``pull_s``. Whether the open round is sealed."""
        return False

    def on_seal(self, now: float, who: Member, round_: int, body: m.Seal) -> None:
        """Somebody seals a round. Raises RemoteProtocolError, StorageError."""

    def on_sealed(self, who: Member, body: m.Sealed) -> None:
        """What it has accepted in the sealed round. Raises RemoteProtocolError."""


SealMaker = Callable[["RoundMachine"], RoundSeal]
"""What a log is given: makes the seal of each round as it opens."""


def gone(who: Member, removed: Collection[Member]) -> bool:
    """Whether this life of a peer was removed, or a later one."""
    return any(
        member.peer == who.peer and member.incarnation >= who.incarnation for member in removed
    )

"""The door at which a mode changes which faults of members a round bears.

The log is safe whichever members crash. The other implementation is
`atoll.collectives.modes.byzantine`: there some may do anything. A model makes the roles of each
round as it opens, and remembers over rounds what it has found out of members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from .. import messages as m
from ..group import Entry, Member, Plan
from ..identifiers import PeerId
from .acceptor import Acceptor
from .convener import Convener

if TYPE_CHECKING:
    from .machine import RoundMachine

Voice = tuple[PeerId, m.PartDigests, m.Inputs, bytes, bytes]
"""What a member has stated of parts: their digests, the inputs, the digest of its receipts, and its
signature under these.
"""


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


class Proofs:
    """What becomes of proofs that members say false things: nothing, where they only crash."""

    def caught(self, peer: PeerId, one: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> None:
        """A member signed two payloads (each with its signature) for one slot."""

    def relabelled(
        self, peer: PeerId, proposal: tuple[bytes, bytes], entry: Entry, plan: Plan, index: int
    ) -> None:
        """A member has proposed (payload, signature) an entry whose part ``index`` has the digest
        of a part of ``plan``, which is another result. The bytes of the plan are here."""

    def disputed(self, peers: Sequence[PeerId]) -> None:
        """These state different sums of a part, and others state it anew: one of them lies, or one
        whose contribution they were sent."""

    def refuted(self, meaning: bytes, part: int, voices: Sequence[Voice]) -> None:
        """The first of these has stated a sum of a part that the others prove to be wrong."""

    def unfounded(
        self,
        peer: PeerId,
        parts: m.PartDigests,
        account: m.Account,
        preimage: bytes,
        index: int,
    ) -> None:
        """A member has stated the sum of a part (``index``) of inputs of which one is not what its
        contributor has signed; ``preimage``: of what it states (`digest.meaning_preimage`)."""

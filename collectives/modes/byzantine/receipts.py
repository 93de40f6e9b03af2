"""What members have signed of what they contribute, where parts have witnesses
(`messages.Contributed`).

Who states a sum shows of each of its inputs that its contributor has signed it. So nobody can state
others, and a member that contributes two things has signed both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import messages as m
from ...errors import RemoteProtocolError
from ...group import Contributor, Member, Part
from ...identifiers import PeerId
from .signed import given_payload

if TYPE_CHECKING:
    from ...round.machine import RoundMachine

# of one member that are kept: a member is sent one for each part that it states, and again for
# those of a revised plan
RECEIPTS = 64

Range = tuple[bytes, int, int]
"""A contribution's cid and the chunks of a part."""


class Receipts:
    """Of the open round of a view."""

    def __init__(self, view: RoundMachine) -> None:
        self._view = view
        self._known: dict[PeerId, dict[Range, tuple[bytes, bytes]]] = {}

    def payload(self, cid: bytes, part: Part, root: bytes) -> bytes:
        """What is signed of a contribution to a part."""
        return given_payload(*self._view.slot, cid, part.first, part.stop, root)

    def sign(self, cid: bytes, part: Part, root: bytes) -> m.Contributed:
        """This member's own."""
        signature = self._view.actions.sign(self.payload(cid, part, root))
        return m.Contributed(cid, part.first, part.stop, root, signature)

    def note(self, who: Member, body: m.Contributed) -> None:
        """A member says what it contributes to a part. Raises RemoteProtocolError where it has not
        signed that."""
        kept = self._known.setdefault(who.peer, {})
        of = body.cid, body.first, body.stop
        before = kept.get(of)
        if before is not None and before[0] == body.root:
            return
        part = Part(who.peer, body.first, body.stop)
        if who != self._view.me and not self.signed(
            who.peer, body.cid, part, body.root, body.signature
        ):
            raise RemoteProtocolError("a receipt that is not its sender's", peer=who.peer)
        if before is not None:
            return self.differ(who, body.cid, part, before, (body.root, body.signature))
        if len(kept) >= RECEIPTS:
            del kept[next(iter(kept))]
        kept[of] = body.root, body.signature
        return None

    def of(self, contributor: Contributor, part: Part) -> tuple[bytes, bytes] | None:
        """The root that a contributor has signed of what it contributes to a part, and its
        signature."""
        known = self._known.get(contributor.member.peer, {})
        return known.get((contributor.cid, part.first, part.stop))

    def signed(self, who: PeerId, cid: bytes, part: Part, root: bytes, signature: bytes) -> bool:
        """Whether a member has signed that it contributes this."""
        return self._view.actions.verify(who, self.payload(cid, part, root), signature)

    def differ(
        self,
        who: Member,
        cid: bytes,
        part: Part,
        one: tuple[bytes, bytes],
        two: tuple[bytes, bytes],
    ) -> None:
        """A member has signed two roots of one contribution: it lies."""
        if self._view.convict(who):
            first, second = ((self.payload(cid, part, root), by) for root, by in (one, two))
            self._view.actions.proofs.caught(who.peer, first, second)

"""The part of `RoundActions` that is the same for every free-standing operation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ....collectives import messages as m
from ....collectives.group import Entry, Member
from ....collectives.identifiers import PeerId
from ....collectives.pace import Pace
from ....collectives.round.faults import Proofs
from ....collectives.round.own_results import NO_RESULTS

if TYPE_CHECKING:
    from ...session.session import Session


class BesideRun:
    """What the log of an operation asks of the session."""

    session: Session
    own_results, proofs = NO_RESULTS, Proofs()

    def report(self, plan_id: bytes) -> None:
        self.session.ports.exchange.report(plan_id)

    def resend_parts(self, peer: PeerId, plan_id: bytes, cid: bytes, spans: m.Spans) -> None:
        self.session.ports.exchange.resend_parts(peer, plan_id, cid, spans)

    def resend_results(self, peer: PeerId, plan_id: bytes, spans: m.Spans) -> None:
        self.session.ports.exchange.resend_results(peer, plan_id, spans)

    def fetch_result(self, entry: Entry, holders: Sequence[PeerId]) -> None:
        self.session.transfer.fetch_result(
            self.session.clock(), entry, [peer for peer in holders if peer != self.session.me]
        )

    def keep(self, entry: Entry) -> None:
        """Votes are volatile."""

    def nodes(self) -> Collection[PeerId]:
        """Nobody seals such a log."""
        return ()

    def suspected(self, peer: PeerId) -> bool:
        return self.session.actions.suspected(peer)

    def excluded(self, peer: PeerId) -> bool:
        return self.session.actions.excluded(peer)

    def deaf_to(self, peer: PeerId) -> bool:
        """Whether this member does not listen to the peer for now."""
        return self.session.actions.deaf_to(peer)

    def unread(self, peer: PeerId) -> bool:
        """Whether the peer does not read what it is told."""
        return self.session.actions.unread(peer)

    def let_in(self, joiners: Sequence[Member]) -> list[Member]:
        """Whoever asks; nobody does."""
        return list(joiners)

    def helps(self, peer: PeerId) -> bool:
        """Nobody: an operation is of those who call it."""
        return False

    def pace(self) -> Pace:
        return self.session.ports.pace()

    def sign(self, payload: bytes) -> bytes:
        return self.session.ports.sign(payload)

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        return self.session.ports.verify(peer, payload, signature)

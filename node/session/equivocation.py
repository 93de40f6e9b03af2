"""Sees who votes for two values of one ballot, and keeps the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...collectives import messages as m
from ...collectives.errors import RemoteProtocolError
from ...collectives.identifiers import PeerId
from ...collectives.round.certificate import vote_payload
from ..run.proof import twice
from . import events as ev
from .watches import VoteWatch

if TYPE_CHECKING:
    from .session import Session

# of one member that are remembered: of the newest, the others are of no use to a liar any more
BALLOTS = 4


class EquivocationWatch(VoteWatch):
    """Of the open round of one log."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._round = -1
        # By ballot: what was voted for, and the signature.
        self._votes: dict[PeerId, dict[int, tuple[bytes, bytes]]] = {}

    def heard(self, peer: PeerId, round_: int, vote: m.Accepted) -> None:
        """A vote has come from ``peer`` itself. Raises RemoteProtocolError where it is not signed,
        and another for this ballot is known.
        """
        session = self._session
        if (
            session.machine is None
            or round_ != session.machine.round
            or peer == session.me
            or not session.in_config(peer)
        ):
            return
        if round_ != self._round:
            self._round, self._votes = round_, {}
        ballots = self._votes.setdefault(peer, {})
        known = ballots.setdefault(vote.ballot, (vote.entry_hash, vote.signature))
        while len(ballots) > BALLOTS:
            del ballots[min(ballots)]
        if known[0] == vote.entry_hash:
            return
        both = [
            (vote_payload(*session.machine.slot, vote.ballot, hash_), signature)
            for hash_, signature in (known, (vote.entry_hash, vote.signature))
        ]
        genuine = [session.ports.verify(peer, payload, signature) for payload, signature in both]
        if all(genuine):
            session.ports.emit(ev.Equivocated(peer, twice(peer, both[0], both[1]).encode()))
        elif genuine[1]:
            # What was there before is nothing.
            ballots[vote.ballot] = (
                vote.entry_hash,
                vote.signature,
            )
        else:
            raise RemoteProtocolError("a vote that it has not signed", peer=peer)

"""Whoever lags asks for decided entries, and others answer.

Bounded in rate: a peer is asked, and a peer's question answered, once in half a pull. What is
answered is verified here; the machine keeps it (`RoundMachine.ahead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .. import messages as m
from ..group import Certified, Member
from ..identifiers import PeerId
from . import patience
from .certificate import check_log

if TYPE_CHECKING:
    from .machine import RoundMachine

CATCH_ENTRIES = 16  # entries in one Catch, where they are small
ASKED_OF_MANY = 8  # members of a large configuration of whom one is asked what was decided
REMEMBERED_ANSWERS = 64  # beyond, those are forgotten that are old enough to be given again


class CatchingUp:
    """When this member asked others for entries, and gave them some."""

    def __init__(self, view: RoundMachine, now: float) -> None:
        self.view = view
        # of the round before: who voted in it, or echoed, after it was decided here
        self._late_votes: set[tuple[PeerId, str]] = set()
        self._answered_at: dict[tuple[PeerId, int], float] = {}
        self._asked_at: dict[PeerId, float] = {}
        self._asked_around_at = now

    def open(self) -> None:
        """Another round opens."""
        self._late_votes.clear()

    def tell_decision(self, now: float, peer: PeerId) -> None:
        """It repeats its vote longer than a relay takes: it has not heard of the decision."""
        decided, key = self.view.open.decided, (peer, self.view.round)
        told_at = max(self.view.open.decided_at, self._answered_at.get(key, -1e9))
        if decided is None or now - told_at <= self.late_after_s:
            return
        self._answered_at[key] = now
        self.view.tell(peer, m.QuorumVotes(decided.entry.hash(), decided.votes, False))

    def answer(self, now: float, peer: PeerId, round_: int, anew: int = 0) -> None:
        """The peer is at ``round_``, which is decided: send entries from there on. ``anew``: it
        asks what it was heard to say, too, and the round need not be decided."""
        key, again_s = (peer, -1 if anew else round_), self.view.timing.pull_s / 2
        if peer == self.view.me.peer or now - self._answered_at.get(key, -1e9) < again_s:
            return
        if len(self._answered_at) > REMEMBERED_ANSWERS:
            self._answered_at = {
                key: at for key, at in self._answered_at.items() if now - at < again_s
            }
        self._answered_at[key] = now
        entries, size = list[Certified](), 0
        for certified in self.view.journal.entries[round_ : round_ + CATCH_ENTRIES]:
            size += len(msgspec.msgpack.encode(certified))
            if entries and size > m.MAX_MESSAGE_BYTES // 2:
                break  # one of thousands of members is large
            entries.append(certified)
        heard = self.view.recovery.heard_of.of(peer) if anew else None
        catch = m.Catch(
            tuple(entries), self.view.round, self.view.actions.results_from(), anew, heard
        )
        self.view.actions.send(peer, self.view.log, round_, catch)

    def is_under_way(self, now: float, who: Member, round_: int, vote: m.Accepted | m.Echo) -> bool:
        """Whether a vote of a decided round tells nothing of its sender but that it has voted: it
        comes after those of a quorum, and its sender has these, too. Else each round would be
        answered with its entry, which names all members, by everybody to everybody else. A member
        that lags repeats its vote every ``pull_s`` for longer than a message and its answer take.
        """
        if round_ < max(1, self.view.round - 1):
            return False
        key = (who.peer, type(vote).__name__)
        if key in self._late_votes:
            return now - self.view.open.born < self.late_after_s
        if who in self.view.journal.entries[round_ - 1].entry.next_config:
            self._late_votes.add(key)
            return True
        return False

    @property
    def late_after_s(self) -> float:
        """A vote that comes so long after the decision is one of a member that has not heard of
        it.
        """
        once_s = max(self.view.timing.pull_s, patience.rtt_s(self.view.actions.pace()))
        return self.view.dissemination.late_after_s(once_s)

    def fetch(self, now: float, peer: PeerId, *, more: bool = False) -> None:
        """The peer seems to be ahead: ask for what follows the newest entry known. ``more``: it
        has just answered, and has more.
        """
        if more:
            self._asked_at.pop(peer, None)
        if (
            not self.view.open.applying
            and now - self._asked_at.get(peer, -1e9) >= self.view.timing.pull_s / 2
        ):
            self._asked_at[peer] = now
            self._ask(peer)

    def ask_around(self, now: float, every_s: float) -> None:
        """Nothing comes on here: ask somebody of the newest configuration, now and then."""
        if now - self._asked_around_at <= every_s:
            return
        self._asked_around_at = now
        known = [
            member.peer
            for member in self.view.tail.entry.next_config
            if member.peer != self.view.me.peer
        ]
        if len(known) > ASKED_OF_MANY and self.view.dissemination.is_large:
            known = self.view.rng.sample(known, ASKED_OF_MANY)
        targets = [
            peer
            for peer in known
            if not self.view.actions.suspected(peer) and not self.view.actions.deaf_to(peer)
        ] or known
        if targets:
            self._ask(self.view.rng.choice(targets))

    def _ask(self, peer: PeerId) -> None:
        self.view.actions.send(peer, self.view.log, self.view.tail.entry.round + 1, m.Fetch())

    def verified(self, peer: PeerId, body: m.Catch) -> list[Certified]:
        """The entries of an answer that follow the newest one known, verified; none where they do
        not. Raises RemoteProtocolError.
        """
        last = self.view.tail.entry
        fresh = [certified for certified in body.entries if certified.entry.round > last.round]
        if not fresh or fresh[0].entry.round != last.round + 1:
            return []
        return check_log(
            fresh,
            run=self.view.run,
            log=self.view.log,
            base=last.hash(),
            config=last.next_config,
            organiser=self.view.organiser,
            verify=self.view.actions.verify,
            peer=peer,
            tolerated=self.view.tolerated,
        )

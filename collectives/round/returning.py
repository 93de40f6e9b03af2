"""What a process may have forgotten that begins with what an earlier one left, and who can tell.

A home from a backup votes as a life that has said more than the copy knows, and its journal does
not show it. Where it lags, certificates may: but they hold the votes of one quorum, and a promise
was heard by one convener. So each member notes the newest that it *heard* every other one say
(`LastSaid`), and a member whose process has just begun says nothing in a round before it has asked
(`CopyCheck`, for `recovery.Recovery`): members that are a quorum together with it must have
answered, and it must have reached the entries that they had by then. Who was heard to say more than
its journal knows has lost votes: it goes on as another life (`RoundMachine.renew`), which asks in
its turn. Who answers need not have asked itself, so a run whose members all start at once goes on
after one round trip. What this proves, and what is assumed, is in
docs/internals/protocol/liveness.md (assumption 2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .. import messages as m
from ..group import MAX_MEMBERS, Certified, Member
from ..identifiers import PeerId

MOST_LIVES = 1 << 12
"""Lives that a copy of a home may be behind. Each is one more than the one before, so a word of
more is false; taken up, it would use up the numbers that there are (2^48).
"""
MOST_HEARD = 2 * MAX_MEMBERS  # beyond, those are forgotten that are members no more


class LastSaid:
    """The newest that each peer was heard to say, in messages or in certificates. It is volatile,
    but for what the certificates of ``entries`` tell.
    """

    def __init__(self, entries: Iterable[Certified], *, at_once: bool) -> None:
        """``at_once``: a contribution goes to the round that counts it, not an earlier one."""
        self._at_once = at_once
        self._newest: dict[PeerId, m.Said] = {}
        for certified in entries:
            self.entry(certified)

    def of(self, peer: PeerId) -> m.Said | None:
        """The newest that this peer was heard to say."""
        return self._newest.get(peer)

    def message(self, who: Member, round_: int, body: m.Body) -> None:
        """A member speaks in a round: it has all entries before it on its medium. In the messages
        that name a ballot it says that it has promised that.
        """
        match body:
            case m.Promise() | m.Accepted() | m.Pledge() | m.Echo():
                self._note(who, round_, body.ballot)
            case m.Ready():
                self._note(who, round_, -1)
            case _:
                pass

    def entry(self, certified: Certified) -> None:
        """What a certificate tells; nothing, where the organiser's word stands for it."""
        entry = certified.entry
        if len(self._newest) > MOST_HEARD:
            inside = {member.peer for member in entry.next_config}
            self._newest = {who: said for who, said in self._newest.items() if who in inside}
        if certified.removed:
            return
        for vote in certified.votes:
            self._note(vote.member, entry.round, vote.ballot)
        for contributor in entry.contributors if self._at_once else ():
            self._note(contributor.member, entry.round, -1)

    def _note(self, who: Member, round_: int, ballot: int) -> None:
        said, known = m.Said(who.incarnation, round_, ballot), self._newest.get(who.peer)
        if known is None or known < said:
            self._newest[who.peer] = said


class CopyCheck:
    """What a process asks that has just begun, and the answers. ``left``: what the journal of the
    earlier one knows to have been said. ``nonce``, from 1, tells answers to this process.
    """

    def __init__(self, left: m.Said, nonce: int, tolerated: int) -> None:
        self.nonce = nonce
        self.waits = True  # not enough have answered yet
        self.peers: set[PeerId] = set()  # who was asked: nobody else's word counts
        self._heads: dict[Member, int] = {}  # how many entries each had when it answered first
        self._left, self._lying = left, tolerated
        self._heard: dict[PeerId, m.Said] = {}

    def on_answer(self, who: Member, head: int, heard: m.Said | None) -> None:
        """A member that has ``head`` entries tells the newest that it heard the asking one say."""
        self._heads.setdefault(who, head)
        if heard is not None and heard.incarnation <= self._left.incarnation + MOST_LIVES:
            self._heard[who.peer] = heard

    def later_life(self, counted: Collection[PeerId], said: m.Said | None) -> int:
        """The incarnation to go on under, where more was heard than is known; 0 where not.
        ``counted``: whose word counts. ``said``: what this process itself may have said since.
        Where members may lie, as many more as may lie must have heard it.
        """
        told = [heard for peer, heard in self._heard.items() if peer in counted]
        found = sorted(told, reverse=True)[self._lying :]
        known = self._left if said is None else max(self._left, said)
        return found[0].incarnation + 1 if found and found[0] > known else 0

    def answered(self, round_: int) -> list[Member]:
        """Who has answered, and had no entry by then that this member, in ``round_``, lacks."""
        return [who for who, head in self._heads.items() if head <= round_]

    def lacking(self, members: Collection[Member]) -> list[PeerId]:
        """Who of them has not answered yet, as this life."""
        return [who.peer for who in members if who not in self._heads]

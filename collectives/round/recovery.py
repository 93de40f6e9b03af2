"""What a process must find out before it votes, because it begins with what an earlier one left.

The home may be an old copy, whose life has said more than its journal knows. So the process asks
the others what they heard it say (`ask_first`, `ask_again`), votes in no round until a quorum has
answered (``waits``), and learns from their answers, and from certified entries that it did not know
(`on_entries`), whether the life that it began with has forgotten anything. If so, ``forgotten`` is
the incarnation under which to go on; the machine takes it up (`RoundMachine.renew`). The whole
life of this state is in this file. Who heard what, and when enough have answered, are values of
`returning`; the proof is in docs/internals/protocol/liveness.md (assumption 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import messages as m
from ..errors import RemoteProtocolError
from ..group import Certified, Member
from ..identifiers import PeerId
from .log import RECENT
from .returning import CopyCheck, LastSaid

if TYPE_CHECKING:
    from .machine import RoundMachine

ALONE_FIRST_S = 10.0
"""A member that decides alone waits this long for the others after its start."""
ASK_FIRST_S = 3.0
"""A process that was started again asks all members for at least so many seconds: one that heard of
a later life may be among those that answer late."""
ASKED_AT_ONCE = 256
"""Members asked in one message round; in a larger run others follow in the next."""


class Recovery:
    """The questions of one process at the start of its life. It never decides on its own to speak
    or to vote: `RoundMachine.may_act` asks it.
    """

    def __init__(self, view: RoundMachine, now: float) -> None:
        self.view = view
        entries = view.journal.entries[-RECENT:]
        self.heard_of = LastSaid(entries, at_once=not view.policy.waits_for_some)
        # The incarnation to go on under: acts of this member are known that its journal does not.
        self.forgotten = 0
        self.check: CopyCheck | None = None
        # Members that have to answer, each for itself, because this one decides alone.
        self.unasked: set[PeerId] = set()
        self._beyond: set[PeerId] = set()  # of them, who knows of later entries
        self._since = now
        self._asked_at = -1e9

    @property
    def waits(self) -> bool:
        """True if too few have answered for this member to say anything in a round."""
        return self.check is not None and self.check.waits

    def ask_first(self, now: float) -> None:
        """This process begins with what an earlier one has left. Where this member decides alone,
        though its configuration has others, nobody else would keep it from deciding again what it
        has forgotten. So it takes part only once each of the others has answered that it knows of
        no later entry, or was not heard for ``ALONE_FIRST_S``.
        """
        view = self.view
        self._ask(now, m.Said(view.me.incarnation, view.round, view.journal.promised))
        others = {member.peer for member in view.config if member.peer != view.me.peer}
        if others and not view.tolerated and view.me in view.config and view.quorum([view.me]):
            self.unasked = others
        self._consider_answers()

    def ask_again(self, now: float) -> None:
        """This member has gone on under ``forgotten``: that life may have been renewed, too."""
        self.forgotten = 0
        self._ask(now, m.Said(self.view.me.incarnation, 0, -1))

    def _ask(self, now: float, left: m.Said) -> None:
        """``left``: the newest that this member is known here to have said."""
        self.check = CopyCheck(left, 1 + self.view.rng.getrandbits(47), self.view.tolerated)
        self.unasked, self._beyond = set(), set()
        self._since, self._asked_at = now, -1e9

    def tick(self, now: float) -> None:
        """Ask every other member of the newest configuration that has not answered, until enough
        have, and for some seconds more.
        """
        view, check = self.view, self.check
        if check is None:
            return
        if now > self._since + ALONE_FIRST_S:
            self.unasked &= self._beyond
        self._consider_answers()
        if not check.waits and now - self._since >= ASK_FIRST_S:
            self.check = None
        elif now - self._asked_at >= view.timing.fetch_s:
            self._asked_at = now
            others = [who for who in view.tail.entry.next_config if who.peer != view.me.peer]
            lacking = sorted(self.unasked.union(check.lacking(others)))
            if len(lacking) > ASKED_AT_ONCE:
                lacking = view.rng.sample(lacking, ASKED_AT_ONCE)
            for peer in lacking:
                check.peers.add(peer)
                fetch = m.Fetch(check.nonce)
                view.actions.send(peer, view.log, view.tail.entry.round + 1, fetch)

    def on_answer(self, who: Member, round_: int, body: m.Catch) -> None:
        """A member that was asked from ``round_`` on tells how many entries it has, and what it
        heard this one say. One that has shown more than this member has is waited for, however
        long, where this one decides alone: entries are decided that it does not know. The number
        alone is nobody's reason to wait: whoever has an entry shows it with it, certified. Raises
        RemoteProtocolError.
        """
        check, view = self.check, self.view
        if check is None or body.anew != check.nonce or who.peer not in check.peers:
            return
        if body.head > round_ and not body.entries:
            raise RemoteProtocolError(
                f"says that it has {body.head:,} entries, and shows none from {round_:,} on",
                peer=who.peer,
            )
        check.on_answer(who, body.head, body.heard)
        if body.head <= view.round:
            self.unasked.discard(who.peer)
        elif view.frontier:
            self._beyond |= self.unasked & {who.peer}
        else:
            self._beyond.discard(who.peer)
        self._consider_answers()

    def _consider_answers(self) -> None:
        """More heard than the journal knows is an old copy; once this member speaks again, more
        than its present standing.
        """
        view, check = self.view, self.check
        if check is None:
            return
        said = m.Said(view.me.incarnation, view.round, view.journal.promised)
        counted = {who.peer for who in view.config} if view.tolerated else check.peers
        later = check.later_life(counted, None if check.waits else said)
        if view.me in view.config or later == view.me.incarnation + 1:
            self.forgotten = max(self.forgotten, later)  # else it is known to be an older life
        if check.waits and not self.unasked and not self.forgotten:
            check.waits = not view.quorum([view.me, *check.answered(view.round)])

    def on_entries(self, entries: Sequence[Certified]) -> None:
        """Certified entries that were not known here. Where they hold a vote or a contribution of
        this member that its journal cannot know of, or a later life of it, the journal is an old
        copy. What else this member has promised is unknown, so it must not vote as this one again.
        """
        view = self.view
        for certified in entries:
            entry = certified.entry
            later = [each.incarnation for each in entry.next_config if each.peer == view.me.peer]
            voted = [vote.ballot for vote in certified.votes if vote.member == view.me]
            accepted = view.journal.accepted if entry.round == view.round else None
            known = accepted[0] if accepted is not None else -1
            newest = max((view.me.incarnation, *later))
            gave = (
                entry.round > view.round  # nobody contributes to a round that is not open to it
                and not view.policy.waits_for_some
                and any(contributor.member == view.me for contributor in entry.contributors)
            )
            acted = not certified.removed and (gave or max(voted, default=-1) > known)
            if acted or newest > view.me.incarnation:
                self.forgotten = max(self.forgotten, newest + 1)

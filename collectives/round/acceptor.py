"""The acceptor's side of one open round: promises, and votes once all bytes are held. Sans I/O;
owned by a RoundMachine.

What was promised and voted is in the journal; the rest is volatile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import messages as m
from ..group import Contributor, Entry, Member, Plan
from ..identifiers import PeerId
from .certificate import vote_payload
from .pulling import on_the_way
from .readiness import my_ready, ready_fits

if TYPE_CHECKING:
    from .machine import RoundMachine


class Acceptor:
    """Of members that crash, and do not lie; `round.lying` has the other."""

    def __init__(self, machine: RoundMachine) -> None:
        self.machine = machine

    # ---- what others may ask
    @property
    def founding(self) -> bool:
        """Whether there are too few members for a round with contributors."""
        return False

    @property
    def urged(self) -> bool:
        """Whether the round is under way by what others say, although nothing is known here."""
        return False

    def follows(self, plan: Plan) -> bool:
        """Whether a plan of the owner of its ballot is to be carried out."""
        return True

    def awaits(self, member: Member) -> bool:
        """Whether a member has yet to say what it contributes."""
        return member not in self.machine.open.ready

    def vouched(self, offers: list[Contributor]) -> list[Contributor]:
        """Of these offers those that can be shown to others."""
        return offers

    def part_reduced(self, now: float, plan: Plan, index: int, digest: bytes) -> None:
        """A part of this member is reduced under the plan in force."""

    def claim(self, now: float) -> None:
        """Say what can be shown to others, where that changed."""

    def overdue(self, now: float, patience: float) -> bool:
        """Whether the present ballot has had its time, whatever goes on in it."""
        return False

    def entered(self, now: float) -> None:
        """The machine has moved on to another ballot."""

    # ---- inputs
    def on_message(self, now: float, who: Member, body: m.Body) -> None:
        """What an acceptor is asked and told. Raises RemoteProtocolError, StorageError."""
        machine = self.machine
        match body:
            case m.Prepare():
                self._on_prepare(now, who, body.ballot)
            case m.Promise():
                if body.ready and ready_fits(machine, body.ready):
                    machine.open.ready[who] = body.ready
                    if body.ready.cid is not None and machine.open.first_ready_at is None:
                        machine.open.first_ready_at = now
                if body.accepted is None or machine.entry_fits(body.accepted.entry):
                    machine.convening.on_promise(now, who, body)
            case m.Accept():
                self._on_accept(now, who, body.ballot, body.entry)
            case m.Accepted():
                machine.count_vote(now, who, body)
            case _:
                pass

    def _on_prepare(self, now: float, who: Member, ballot: int) -> None:
        machine = self.machine
        if ballot < 1 or machine.convener_of(ballot) != who:
            return
        if ballot < machine.journal.promised:
            if (
                machine.actions.tip() is not None
            ):  # else a quorum of others would decide without the branch
                machine.tell(who.peer, m.Promise(machine.journal.promised, None, None, None))
            return
        if ballot > machine.journal.promised:
            machine.progress(now)
            machine.journal.promise(ballot)
        machine.ballot = max(machine.ballot, ballot)
        accepted = machine.journal.accepted
        promise = m.Promise(
            ballot,
            m.Accepted1(*accepted) if accepted else None,
            my_ready(machine),
            machine.actions.tip(),
        )
        machine.tell(who.peer, promise)

    def _on_accept(self, now: float, who: Member, ballot: int, entry: Entry) -> None:
        machine = self.machine
        if (
            ballot < machine.journal.promised
            or machine.convener_of(ballot) != who
            or not machine.entry_fits(entry)
            or (machine.objection(entry) and not self._chosen_perhaps(ballot, who, entry))
        ):
            return
        machine.ballot = max(machine.ballot, ballot)
        machine.open.known[entry.hash()] = entry
        accepted = machine.journal.accepted
        if accepted and accepted[0] == ballot:
            return
        if not machine.open.pending or machine.open.pending[0] < ballot:
            machine.progress(now)
            machine.open.pending = (ballot, entry, who.peer)
        self.step(now)

    def _chosen_perhaps(self, ballot: int, convener: Member, entry: Entry) -> bool:
        """Whether another than this convener has voted for the entry in an earlier ballot: then it
        may be decided, and whatever is held against it comes too late."""
        return any(
            at < ballot and digest == entry.hash() and not {*votes} <= {convener}
            for (at, digest), votes in self.machine.open.votes.items()
        )

    # ---- votes
    def step(self, now: float) -> None:
        """Vote for what is pending, if its bytes and the state before it are here."""
        pending = self.machine.open.pending
        if pending is None:
            return
        ballot, entry, sender = pending
        if ballot < self.machine.journal.promised:
            self.machine.open.pending = None
        elif self.machine.actions.contradicts(entry):
            self.machine.open.pending = None
            self.machine.actions.on_false(entry, sender, ballot)
            if ballot == self.machine.ballot and sender != self.machine.me.peer:
                self.machine.next_ballot(now)  # of this one nothing comes
        elif (
            self.machine.draw.allows(ballot, entry)
            and self.holds(now, entry, [sender])
            and self.may_vote(ballot, entry)
        ):
            self.machine.open.pending = None
            self.cast(now, ballot, entry)

    def may_vote(self, ballot: int, entry: Entry) -> bool:
        """Whether the session lets this member vote for an entry: where members make results
        themselves, who has not goes by the others' votes.
        """
        votes = self.machine.open.votes.get((ballot, entry.hash()), {})
        voters = {who.peer for who in votes} - {self.machine.me.peer}
        return not entry.contributors or self.machine.actions.may_vote(entry, voters)

    def holds(self, now: float, entry: Entry, holders: Sequence[PeerId]) -> bool:
        """Whether all bytes of an entry and the state before it are stored here; missing bytes are
        fetched from ``holders``.
        """
        machine = self.machine
        if machine.root is None or machine.root != entry.base_state:
            return False
        if not machine.has_bytes(entry):
            if not on_the_way(machine, now, entry):
                machine.actions.fetch_result(entry, holders)
            return False
        return True

    def cast(self, now: float, ballot: int, entry: Entry) -> None:
        """Vote: all bytes of the entry and the state before it are stored here."""
        self.machine.actions.keep(entry)  # first the bytes, then the vote, then the answer
        self.machine.journal.accept(ballot, entry)
        self.machine.open.known[entry.hash()] = entry
        self._send_vote(ballot, entry)

    def _send_vote(self, ballot: int, entry: Entry) -> None:
        machine, digest = self.machine, entry.hash()
        payload = vote_payload(*machine.slot, ballot, digest)
        self.broadcast(m.Accepted(ballot, digest, machine.actions.sign(payload)))

    def broadcast(self, body: m.Body) -> None:
        """To all of the configuration, this member last."""
        for peer in (*self.machine.others, self.machine.me.peer):
            self.machine.tell(peer, body)

    def tick(self, now: float) -> None:
        """Repair loss: a vote is repeated from the journal, never from a fresh reduction, until the
        round is decided. Where others vote for an entry that did not come here, one of them may
        know it as decided by now."""
        machine, opened = self.machine, self.machine.open
        if opened.decided:
            return
        if machine.journal.accepted:
            self._send_vote(*machine.journal.accepted)
        for (_, entry_hash), votes in opened.votes.items():
            if entry_hash not in opened.known:
                machine.catching.fetch(now, machine.rng.choice(sorted(votes)).peer)

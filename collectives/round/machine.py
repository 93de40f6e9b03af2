"""One member of a replicated log: acceptor, learner and contributor of the open round. Sans I/O.

The log decides one entry a round by single-decree Paxos; ballots are attempts, each owned by one
convener (`convener.py`). Acceptors of entry r are exactly the configuration decided by entry r-1. A
vote says "I hold state r-1 and all bytes of r". The data plane (`atoll.collectives.exchange`)
yields bytes for a plan and safety does not depend on it. Specified in docs/protocol/round.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from random import Random

from .. import messages as m
from ..errors import RemoteProtocolError
from ..group import (
    LAST_BALLOT,
    NO_READING,
    Admitted,
    Certified,
    Config,
    Contributor,
    Entry,
    Member,
    Plan,
    Reading,
    Vote,
    conveners,
    is_quorum,
)
from ..identifiers import PeerId
from ..partition import check_plan
from ..trees import senders_of
from .acceptor import Acceptor
from .catching import Catching
from .convener import Convening
from .entering import OPEN, Doors, crowded
from .gathering import look, waits
from .grouping import Grouping
from .journal import Journal
from .lying import Blame, sides
from .merging import adopts
from .patience import rtt_s, silence_s, stuck_s
from .pulling import ask_again, on_missing, on_the_way, tell_dispute
from .readiness import close_round, on_ready, repeat_ready, send_ready
from .sampling import Draw
from .sealing import Sealing
from .state import OpenRound, RoundActions, Shape
from .timing import Timing

MAX_JOINERS = 1024  # remembered at a time: whoever is admitted to the run may ask
ALONE_FIRST_S = 10.0  # whoever decides alone waits so long for the others after its start
ASK_FIRST_S = (
    3.0  # for so long a process that was started again asks all members what it has missed
)
EARLY_MESSAGES = 512  # messages of the next round kept while this one is being applied


class RoundMachine:
    """The state machine of one log at one member. One driver calls it; every input carries ``now``
    in seconds.
    """

    def __init__(
        self,
        *,
        run: str,
        log: str,
        me: Member,
        organiser: PeerId | None,
        journal: Journal,
        shape: Shape,
        timing: Timing,
        actions: RoundActions,
        rng: Random,
        now: float,
        site: str = "",
        merges: bool = False,
        lying: int = 0,
        unix_offset_s: float = 0.0,
        doors: Doors = OPEN,
    ) -> None:
        """``site``: the label by which members near each other know that they are. ``merges``: an
        entry of this log may adopt a branch. ``lying``: how many members of a configuration may do
        anything (`round.lying`). ``unix_offset_s``: wall clock minus ``now``; it only numbers
        claims, so that those of a process that was started again have greater numbers. ``doors``:
        by what peers enter."""
        self.doors = doors
        self.site, self.merges, self.lying = site, merges, lying
        self.unix_offset_s = unix_offset_s
        self.caught = set[PeerId]()  # who has proved to lie
        self.blamed = Blame()  # owners that held up reductions, where members may lie
        self.apart: dict[
            PeerId, tuple[PeerId, int]
        ] = {}  # who disagreed on a partial sum: with which owner, and in which round
        self.run, self.log, self.me, self.organiser = run, log, me, organiser
        self.journal, self.shape, self.timing, self.actions, self.rng = (
            journal,
            shape,
            timing,
            actions,
            rng,
        )
        self.root: bytes | None = (
            None  # Merkle root of the state before the open round; None while it is being hashed
        )
        self.contribution: tuple[bytes, int, Reading] | None = None
        self.leaving = self.idle = False
        # a script waits for the open round, whatever it decides: so ends what an earlier life
        # offered
        self.unsettled = False
        # the entries are known but the state is still being fetched: nothing can be applied or
        # voted on
        self.stateless = False
        self.unasked: set[PeerId] = set()  # who has not answered yet: see `ask_first`
        self._beyond: set[PeerId] = set()  # of them, who knows of later entries
        self._ask_until = now
        # the incarnation to go on under: the log knows acts of this member that the journal does
        # not
        self.forgotten = 0
        self.renewed = False  # it has gone on as another member, and nobody was told yet
        self.joiners: dict[Member, tuple[int, float]] = {}
        self._spoke: dict[
            PeerId, int
        ] = {}  # the newest incarnation that a peer was heard under since it was suspected
        self.ahead: list[Certified] = []  # verified entries beyond the open round
        self.round_s: float | None = None  # how long the last round took
        self.bulk_s = 0.0  # how long the last reduction took
        self.catching = Catching(self, now)
        self._began_at = now
        self.voted = 0  # the newest round in which others were heard to vote
        groups = shape.arrivals.groups if shape.arrivals is not None else None
        self.grouping = Grouping(groups, journal.entries) if groups is not None else None
        self._early: list[tuple[PeerId, int, int, m.Body]] = []
        self._conveners: tuple[int, list[Member]] | None = (
            None  # of which round, and in the order of its ballots
        )
        self._open(now)

    # ---- views
    @property
    def round(self) -> int:
        """The open round: the number of applied entries (the genesis is entry 0)."""
        return self.journal.entries.length

    @property
    def slot(self) -> tuple[str, str, int, bytes]:
        """What signatures of the open round are bound to: run, log, round, and the hash of the
        entry before.
        """
        return self.run, self.log, self.round, self.base

    @property
    def config(self) -> Config:
        """The acceptors of the open round."""
        return self.journal.entries.config

    @property
    def removed(self) -> Set[Member]:
        """Whom the organiser has removed: they never vote again."""
        return self.journal.entries.removed

    @property
    def is_member(self) -> bool:
        """Whether this member, in this incarnation, is an acceptor of the open round."""
        return (
            self.me in self.config
            and self.me not in self.removed
            and not self.forgotten
            and not self.unasked
        )

    def ask_first(self, now: float) -> None:
        """This process begins with what an earlier one has left. Where this member decides alone,
        though its configuration has others, nobody else would keep it from deciding again what it
        has forgotten, if its journal is an old copy: so it takes part only once each of the others
        has answered that it knows of no later entry, or was not heard for ``ALONE_FIRST_S``."""
        others = {member.peer for member in self.config if member.peer != self.me.peer}
        if others and not self.lying and self.me in self.config and self.quorum([self.me]):
            self.unasked, self._ask_until = others, now + ALONE_FIRST_S

    def _answered(self, peer: PeerId, round_: int) -> None:
        """The peer's open round is ``round_``. Who is beyond ours is waited for, however long:
        entries are decided that this member does not know.
        """
        if round_ <= self.round:
            self.unasked.discard(peer)
        else:
            self._beyond.add(peer)

    def _ask_unasked(self, now: float) -> None:
        if now > self._ask_until:
            self.unasked &= self._beyond
        for peer in sorted(self.unasked):
            self.catching.ask_again(now, peer)

    def look_for_another_past(self, entries: Sequence[Certified]) -> None:
        """Certified entries that were not known here. Where they hold a vote or a contribution of
        this member that its journal cannot know of, or a later life of it, the journal is an old
        copy: what else this member has promised is unknown, so it must not vote as this one again.
        """
        for certified in entries:
            entry = certified.entry
            later = [m.incarnation for m in entry.next_config if m.peer == self.me.peer]
            voted = [vote.ballot for vote in certified.votes if vote.member == self.me]
            accepted = self.journal.accepted if entry.round == self.round else None
            known = accepted[0] if accepted is not None else -1
            newest = max((self.me.incarnation, *later))
            gave = (
                entry.round > self.round  # nobody contributes to a round that is not open to it
                and self.shape.arrivals is None
                and any(contributor.member == self.me for contributor in entry.contributors)
            )
            acted = not certified.removed and (gave or max(voted, default=-1) > known)
            if acted or newest > self.me.incarnation:
                self.forgotten = max(self.forgotten, newest + 1)

    def renew(self) -> None:
        """Go on as another member, which has voted for nothing yet. Raises StorageError: then it is
        tried again.
        """
        self.journal.renew(self.forgotten)
        self.me = Member(self.me.peer, self.forgotten)
        self.forgotten, self.renewed = 0, True
        self.open.pending = None
        self.convening.stop()

    def silent(self, member: Member) -> bool:
        """Whether nobody here need wait for a member: it is `lost`, or this member does not listen
        to it for now.
        """
        return self.lost(member) or self.actions.deaf_to(member.peer)

    def lost(self, member: Member) -> bool:
        """Whether a member will not answer, or is not to be counted on: its peer is suspected, it
        lost its journal and lives on as another member, or it has lied."""
        return (
            self.ended(member) or member.peer in self.caught or self.actions.suspected(member.peer)
        )

    def ended(self, member: Member) -> bool:
        """Whether its peer has spoken as a later life: this one never votes again."""
        return self._spoke.get(member.peer, 0) > member.incarnation

    def heard(self, member: Member) -> bool:
        """Whether it spoke as this member: a sign of life of its peer's is none of one that lost
        its journal.
        """
        return member == self.me or (
            self._spoke.get(member.peer) == member.incarnation
            and not self.actions.suspected(member.peer)
        )

    def heard_votes_for(self, entry: Entry) -> bool:
        """Whether this process heard a member, perhaps itself, vote for an entry of the open round:
        who votes does not know it as decided.
        """
        return any(digest == entry.hash() for _, digest in self.open.votes)

    @property
    def frontier(self) -> list[Certified]:
        """Decided entries that are verified but not yet applied here, oldest first."""
        decided = self.open.decided
        if decided is None:
            return list(self.ahead)
        return [
            decided,
            *(c for c in self.ahead if c.entry.round > decided.entry.round),
        ]  # votes may decide what a Catch brought, too

    @property
    def tail(self) -> Certified:
        """The newest entry known."""
        decided, newest = self.open.decided, self.ahead[-1] if self.ahead else None
        if newest is not None and (decided is None or newest.entry.round > decided.entry.round):
            return newest
        return decided or self.journal.entries[-1]

    @property
    def others(self) -> list[PeerId]:
        """The other acceptors."""
        return [member.peer for member in self.config if member != self.me]

    def convener_of(self, ballot: int) -> Member:
        """The owner of a ballot of the open round."""
        if self._conveners is None or self._conveners[0] != self.round:
            self._conveners = (self.round, conveners(self.run, self.log, self.round, self.config))
        order = self._conveners[1]
        return order[ballot % len(order)]

    def near(self, round_: int) -> bool:
        """Whether a joiner that holds the state before ``round_`` is close enough: results it lacks
        are still kept here.
        """
        return round_ >= self.round - self.timing.keep_rounds // 2

    def has_bytes(self, entry: Entry) -> bool:
        """Whether all result bytes of the entry are stored here, and are those of its contributors."""
        return not entry.contributors or self.open.holds(entry)

    def quorum(self, voters: Sequence[Member]) -> bool:
        """Whether these acceptors decide the open round."""
        return is_quorum(self.config, set(voters), self.organiser, self.lying)

    # ---- inputs
    def contribute(
        self, now: float, cid: bytes, weight: int, reading: Reading = NO_READING
    ) -> None:
        """Offer a frozen contribution: it must stay untouched until `decided` has told whether it
        was counted.
        """
        self.contribution = (cid, weight, reading)
        if self.open.plan is None:
            self.open.progress_at = now
        close_round(self)
        self.acceptor.claim(now)
        self.convening.step(now)

    def set_idle(self, now: float, idle: bool) -> None:
        """Say whether a contribution may come at all; an idle member is not waited for."""
        self.idle = idle
        if idle:
            send_ready(self)

    def set_unsettled(self, now: float, unsettled: bool) -> None:
        """Say whether a script waits to hear what became of an earlier life's contribution: any
        entry tells, one without contributors, too.
        """
        self.unsettled = unsettled
        if unsettled:
            self.progress(now)
            send_ready(self)

    def on_message(
        self, now: float, peer: PeerId, incarnation: int, round_: int, body: m.Body
    ) -> None:
        """A control message of this log. Raises RemoteProtocolError when it breaks a rule."""
        who = Member(peer, incarnation)
        if (
            round_ > 0
            and incarnation > self._spoke.get(peer, -1)
            and len(self._spoke) < MAX_JOINERS
        ):  # of round 0 asks who has no log
            self._spoke[peer] = incarnation
        if self.sealing.shuns(who):
            return self.catching.answer(now, peer, round_) if round_ < self.round else None
        if peer in self.unasked and isinstance(body, (m.Catch, m.Fetch)):
            self._answered(peer, body.head if isinstance(body, m.Catch) else round_)
        if isinstance(body, m.Catch):
            self.catching.on_catch(now, peer, body)
            return self._advance(now)
        if isinstance(body, m.Join) and who not in self.config:
            self._asks(now, who, round_)
        if round_ < self.round:
            return self.catching.answer(now, peer, round_)
        if isinstance(body, (m.Accept, m.Accepted)):
            self.voted = max(self.voted, round_)
        if isinstance(body, m.Seal) and not self.lying:
            return self.sealing.on_seal(now, who, round_, body)
        if isinstance(body, (m.Fetch, m.Join)):
            if round_ > self.round:
                self.catching.fetch(now, peer)
            return None
        if round_ > self.round:
            if (
                round_ == self.round + 1
                and self.open.applying
                and len(self._early) < EARLY_MESSAGES
            ):
                self._early.append((peer, incarnation, round_, body))
                return None
            return self.catching.fetch(now, peer)
        if isinstance(body, m.Sealed):
            return self.sealing.on_sealed(who, body)
        if who in self.config and self.is_member and not self.sealing.active:
            self._dispatch(now, who, body)
        return None

    def _asks(self, now: float, who: Member, round_: int) -> None:
        """Somebody asks to be let in, under its newest life: a peer that asked under many could
        keep others from being heard.
        """
        lives = [other for other in self.joiners if other.peer == who.peer]
        if any(other.incarnation > who.incarnation for other in lives):
            return
        for other in lives:
            del self.joiners[other]
        if len(self.joiners) < MAX_JOINERS:
            self.joiners[who] = (round_, now)

    def _dispatch(self, now: float, who: Member, body: m.Body) -> None:
        match body:
            case m.Ready():
                on_ready(self, now, who, body)
            case m.PlanMessage():
                self._on_plan(now, who, body.plan)
            case m.Missing():
                on_missing(self, now, who, body)
            case m.Disputed():
                self.convening.on_disputed(now, who, body)
            case m.Need():
                self.actions.resend_results(who.peer, body.plan_id, body.chunks)
            case _:
                self.acceptor.on_message(now, who, body)

    def on_result(self, now: float, bound: Plan | Entry, digests: tuple[bytes, ...]) -> None:
        """All result bytes with these part digests are stored here: reduced by a plan, or fetched
        and checked for an entry.
        """
        opened = self.open
        opened.hold(bound, digests)
        if opened.plan is not None and opened.plan == bound:
            opened.reduced = (opened.plan, digests)
            self.bulk_s = now - opened.planned_at
            self.progress(now)
        self._bytes_arrived(now)

    def on_part(self, now: float, plan_id: bytes, index: int, digest: bytes) -> None:
        """My part of a plan is reduced; its digest binds bytes and what they are the result of."""
        if self.open.plan is not None and self.open.plan.plan_id == plan_id:
            self.acceptor.part_reduced(now, self.open.plan, index, digest)

    def on_report(
        self,
        now: float,
        plan_id: bytes,
        missing: dict[bytes, m.Spans],
        lacking: dict[PeerId, m.Spans],
        resumed: Collection[PeerId] = (),
        disputed: m.Disputed | None = None,
    ) -> None:
        """What the data plane waits for: contributions missing in my part, result chunks by owner;
        whose lane is a new one; what it did not use.
        """
        if self.open.plan is not None and self.open.plan.plan_id == plan_id:
            tell_dispute(self, disputed)
            ask_again(self, now, self.open.plan, missing, lacking, resumed)

    def on_applied(self, now: float) -> None:
        """The decided entry's outer step is done (its state root follows by `on_root`): the next
        round opens.
        """
        decided = self.open.decided
        assert decided is not None
        assert self.open.applying
        self.journal.append(
            decided
        )  # may raise StorageError: nothing has changed then, and it may be called again
        self.round_s = now - self.open.born
        self._note(decided)
        self.root = None
        self._open(now)

    def resume(self, now: float) -> list[RemoteProtocolError]:
        """Take up what came early; what of it broke a rule. To be called after `on_applied` or
        `adopt_snapshot`, once the data plane has opened the new round."""
        early, self._early = self._early, []
        breaches: list[RemoteProtocolError] = []
        for peer, incarnation, round_, body in early:
            try:
                self.on_message(now, peer, incarnation, round_, body)
            except RemoteProtocolError as error:
                breaches.append(error)
        self._advance(now)
        return breaches

    def on_root(self, now: float, round_: int, root: bytes) -> None:
        """Merkle root of the state before round ``round_``."""
        if round_ == self.round:
            self.root = root
            self._bytes_arrived(now)

    def adopt_snapshot(self, now: float, skipped: Sequence[Certified], root: bytes) -> None:
        """The state after the last of ``skipped`` was installed: take over the entries; they tell
        which cids were counted.
        """
        for certified in skipped:
            self.journal.append(
                certified
            )  # may raise StorageError: call it again then, with those that are left
            self._note(certified)
        self.ahead = [c for c in self.frontier if c.entry.round >= self.round]
        self.root, self.stateless = root, False
        self._open(now)

    def tick(self, now: float) -> None:
        """Call about every ``timing.pull_s`` seconds."""
        if self.forgotten and not self.open.applying:
            self.renew()
        opened, known = self.open, {member.peer for member in self.config}
        self._spoke = {
            who: life
            for who, life in self._spoke.items()
            if who in known and not self.actions.suspected(who)
        }
        if opened.decided and not opened.applying:
            self._try_apply(now)
        if opened.applying:
            return
        if self.sealing.tick(now):
            return
        if self.journal.restarted and now - self._began_at < ASK_FIRST_S:
            self.catching.ask_all(
                now
            )  # what an old copy of a journal lacks is known before anything is voted on
        if self.unasked:
            self._ask_unasked(now)
        stale = now - opened.progress_at > self.timing.takeover_s / 2
        if not self.is_member or (stale and (self.engaged or self.voted >= self.round)):
            self.catching.ask_around(now, self.timing.fetch_s)
        elif (
            now - opened.progress_at > self.timing.quiet_s
        ):  # what was decided without us leaves no trace here
            self.catching.ask_around(now, self.timing.quiet_s)
        if not self.is_member:
            return
        self.acceptor.step(now)
        look(self, now)
        plan = opened.plan
        if plan is None or (
            self.contribution and all(c.cid != self.contribution[0] for c in plan.contributors)
        ):
            repeat_ready(self, now)
        if plan is not None and opened.lacking != 0:
            self.actions.report(plan.plan_id)
        self.acceptor.tick(now)
        self.convening.step(now)
        self.convening.repeat(now)
        self._consider_takeover(now)

    def _on_plan(self, now: float, who: Member, plan: Plan) -> None:
        current = self.open.plan
        owned = self.convener_of(plan.ballot) == who and self.acceptor.follows(plan)
        if (
            self.stateless
            or not owned
            or plan.ballot < self.journal.promised
            or not self._plan_fits(plan)
        ):
            return
        self.ballot = max(self.ballot, plan.ballot)
        if current and (plan.ballot, plan.revision) <= (current.ballot, current.revision):
            return
        self.progress(now)
        self.open.plan, self.open.plan_sender, self.open.lacking, self.open.planned_at = (
            plan,
            who.peer,
            None,
            now,
        )
        self.open.senders, self.open.cut = senders_of(plan, self.me.peer), set()
        self.actions.execute(plan, [member.peer for member in self.config])

    def _plan_fits(self, plan: Plan) -> bool:
        same = (plan.log, plan.round, plan.base) == (
            self.log,
            self.round,
            self.base,
        ) and self.shape.fits(plan)
        owners = {part.owner for part in plan.parts} <= {member.peer for member in self.config}
        drawn = {c.member for c in plan.contributors} <= set(self.draw.members)
        return same and owners and drawn and check_plan(plan) is None

    def entry_fits(self, entry: Entry) -> bool:
        """Whether an entry may be one of the open round."""
        same = (entry.log, entry.round, entry.base) == (self.log, self.round, self.base) and (
            adopts(entry, self.shape)
            if self.merges and entry.reducer != self.shape.reducer
            else self.shape.fits(entry)
        )
        same = same and (
            self.shape.sample is None
            or {c.member for c in entry.contributors} <= set(self.draw.members)
        )
        same = same and (entry.elapsed_s is None or self.grouping is not None)
        same = same and bool(entry.next_config) and len(entry.part_digests) == len(entry.parts)
        return same and self._admits(entry)

    # ---- who enters
    def entering(self, config: Config) -> tuple[tuple[Admitted, ...], bytes]:
        """What an entry with this configuration next says of who is new in it, and the hash of the
        tally after it.
        """
        found = [self.doors.warrant(peer) for peer in sorted(self._new(config))]
        admitted = tuple(each for each in found if each is not None and each.certificate)
        tally = self.journal.entries.tally
        return admitted, (tally.after(admitted) or tally).hash

    def welcome(self, joiners: Sequence[Member]) -> list[Member]:
        """Those of ``joiners`` that an entry of this member's could let in: what they have shown is
        known here, and their invites have a use left.
        """
        entries, found, words = self.journal.entries, list[Member](), list[Admitted]()
        inside, new, tally = {each.peer for each in self.config}, self._new(joiners), entries.tally
        for joiner in joiners:
            if joiner.peer in new:
                warrant = self.doors.warrant(joiner.peer)
                if warrant is None or crowded(entries.came, inside, [*words, warrant]):
                    continue
                after = tally.after([warrant])
                if after is None:
                    continue
                tally = after
                words.append(warrant)
            found.append(joiner)
        return found

    def objection(self, entry: Entry) -> str:
        """What this member has against who enters by an entry, as far as it knows; others may know
        otherwise.
        """
        new = self._new(entry.next_config)
        return self.doors.objection(new, entry.admitted) if new else ""

    def _admits(self, entry: Entry) -> bool:
        """Whether an entry proves that who is new in it may enter, and counts it: the same at every
        member.
        """
        new, after = self._new(entry.next_config), self.journal.entries.tally.after(entry.admitted)
        named = [each.peer for each in entry.admitted]
        return (
            after is not None
            and entry.tally == after.hash
            and named == sorted({*named} & new)
            and not crowded(
                self.journal.entries.came, [each.peer for each in entry.next_config], entry.admitted
            )
            and self.doors.valid(new, entry.admitted)
        )

    def _new(self, config: Sequence[Member]) -> set[PeerId]:
        return {member.peer for member in config} - {member.peer for member in self.config}

    # ---- learner
    def count_vote(self, now: float, who: Member, body: m.Accepted) -> None:
        """A vote of an acceptor; a quorum of them under one ballot decides."""
        votes = self.open.votes.setdefault((body.ballot, body.entry_hash), {})
        if who not in votes:
            self.progress(now)
            votes[who] = body.signature
        if self.open.decided is None and self.quorum(list(votes)):
            entry = self.open.known.get(body.entry_hash)
            if entry is None:
                return self.catching.fetch(now, who.peer)
            certificate = tuple(
                Vote(member, body.ballot, signature) for member, signature in sorted(votes.items())
            )
            self.open.decided = Certified(entry, certificate)
            self._try_apply(now)
        return None

    def _try_apply(self, now: float) -> None:
        decided = self.open.decided
        if decided is None or self.open.applying or self.stateless:
            return
        if self.has_bytes(decided.entry):
            self.open.applying = True
            self.actions.apply(decided.entry)
        elif not on_the_way(self, now, decided.entry):
            holders = [
                *(vote.member.peer for vote in decided.votes),
                *(member.peer for member in self.tail.entry.next_config),
            ]
            self.actions.fetch_result(
                decided.entry, [peer for peer in dict.fromkeys(holders) if peer != self.me.peer]
            )

    def _bytes_arrived(self, now: float) -> None:
        self.acceptor.step(now)
        self._try_apply(now)
        self.convening.step(now)

    def _note(self, certified: Certified) -> None:
        """Tell the session about a decided entry and whether the own frozen contribution is counted
        in it.
        """
        counted = self.contribution is not None and certified.entry.counts(
            self.me.peer, self.contribution[0]
        )
        self.unsettled = False
        self.actions.decided(certified, counted)
        if (
            certified.entry.contributors
        ):  # counted or not, its round is over: the script re-bases what was not counted
            # (where only the configuration changed, it stands on the same anchor: offered again)
            self.contribution = None

    def _advance(self, now: float) -> None:
        while self.ahead and self.ahead[0].entry.round < self.round:
            self.ahead.pop(0)
        if self.ahead and not self.open.decided:
            return self.learn(now, self.ahead.pop(0))
        return self._try_apply(now)

    def learn(self, now: float, certified: Certified) -> None:
        """A verified certificate of the open round."""
        self.open.decided = certified
        self.open.known[certified.entry.hash()] = certified.entry
        self._try_apply(now)

    # ---- ballots
    def _open(self, now: float) -> None:
        self.open = OpenRound(born=now, progress_at=now)
        self.base = self.journal.entries[-1].entry.hash()
        self.draw = Draw(self, getattr(self, "draw", None))
        if self.grouping is not None:
            self.grouping.follow(now)
        self.ballot = max(0, self.journal.promised)
        self.acceptor, self.convening = (
            sides(self) if self.lying else (Acceptor(self), Convening(self))
        )
        self.sealing = Sealing(self)
        self.joiners = {
            who: seen
            for who, seen in self.joiners.items()
            if self.near(seen[0]) and who not in self.config
        }
        close_round(self)

    def offers(self) -> list[Contributor]:
        """The contributions that a plan can be made of."""
        return [
            offer
            for offer in self.offered()
            if self.grouping is None or offer.member.peer in self.open.due
        ]

    def offered(self) -> list[Contributor]:
        """Those that are there for the round, or for a later one; where two call one theirs, one of
        them lies: the first is taken.
        """
        found = self.acceptor.vouched(self.open.offers(self.draw.members, self.shape.kin))
        cids = [offer.cid for offer in found]
        return [offer for at, offer in enumerate(found) if offer.cid not in cids[:at]]

    def enough(self, offers: Sequence[Contributor]) -> bool:
        """Whether a plan can be made of these offers: there are some, and where the reducer needs
        several, as many from members that live.
        """
        least = self.shape.least
        return (
            bool(offers)
            if least == 1
            else sum(not self.silent(offer.member) for offer in offers) >= least
        )

    @property
    def waits_for_offers(self) -> bool:
        """Whether there is a contribution of this member, no plan yet, and too few others are known
        here for one.
        """
        if self.contribution is None or self.open.plan is not None:
            return False
        if self.shape.arrivals is not None:
            return waits(self)
        if self.shape.least == 1 and not self.acceptor.founding:
            return False
        if self.acceptor.founding:
            return True
        others = [
            offer
            for offer in self.offers()
            if offer.member != self.me and not self.silent(offer.member)
        ]
        return len(others) + 1 < self.shape.least

    @property
    def engaged(self) -> bool:
        """Whether the open round is under way as far as this member knows; a merely training swarm
        is not stuck.
        """
        opened, said, waits = (
            self.open,
            self.journal.accepted or self.journal.promised >= 0,
            self.unsettled or self.draw.again,
        )
        under_way = (
            self.contribution
            or waits
            or self.actions.tip()
            or said
            or opened.plan
            or opened.pending
            or opened.decided
        )
        return bool(under_way) or self.acceptor.urged

    def _consider_takeover(self, now: float) -> None:
        spent = (
            self.ballot == 0 and self.journal.restarted and self.convener_of(0) == self.me
        )  # nobody else can use this ballot
        if self.open.decided:
            return
        if not self.engaged:
            if spent and self.convening.wants_entry(
                now
            ):  # nobody else has anything to say: this member's own next one
                self.enter(now, len(self.config))
            return
        patience = self.timing.takeover_s * min(8.0, 1 + self.ballot / 2) * (
            2 if self.convening.active else 1
        ) + max(4 * rtt_s(self), silence_s(self, self.others))
        if spent:
            patience = 0.0
        elif self.open.plan is not None:
            patience += 2 * self.bulk_s + stuck_s(self) - self.timing.revise_s
        elif self.ballot == 0:
            patience += self.timing.grace(self.round_s)
        suspected = self.convener_of(self.ballot) != self.me and self.silent(
            self.convener_of(self.ballot)
        )
        since = max(self.open.progress_at, self.open.ripe_at or self.open.progress_at)
        if now - since <= patience and not suspected and not self.acceptor.overdue(now, patience):
            return
        if self.waits_for_offers and not suspected and not self.convening.wants_entry(now):
            return  # another convener could do no more
        self.next_ballot(now)

    def next_ballot(self, now: float, *, aside: bool = False) -> None:
        """Move on to the next ballot whose owner is not suspected; to the own next one where the
        present owner is only not listened to here, since then nobody else need give it up.
        ``aside``: the own contribution is not offered in it."""
        ballot = max(self.ballot, self.journal.promised) + 1
        convener = self.convener_of(self.ballot)
        alone = not self.lying and self.silent(convener) and not self.lost(convener)
        for _ in self.config:
            owner = self.convener_of(ballot)
            if owner == self.me or not (alone or self.silent(owner)):
                break
            ballot += 1
        if (
            ballot <= LAST_BALLOT
        ):  # others drove us here; what cannot be said would be refused in this member's name
            self.enter(now, ballot, aside=aside)

    def enter(self, now: float, ballot: int, *, aside: bool = False) -> None:
        """Be in this ballot from now on."""
        self.ballot = ballot
        self.open.progress_at = now
        if self.convener_of(ballot) == self.me:
            self.convening.begin(now, ballot)
        else:
            self.convening.stop()
            self.open.aside = ballot if aside else -1
            send_ready(self)
        self.acceptor.entered(now)

    def progress(self, now: float) -> None:
        """Something came that brings the round on."""
        self.open.progress_at = now

    def tell(self, peer: PeerId, body: m.Body) -> None:
        """Send within the open round; a message to oneself is delivered by the session like any
        other.
        """
        self.actions.send(peer, self.log, self.round, body)

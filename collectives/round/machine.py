"""RoundMachine: one member of a replicated log, as acceptor, learner and contributor of the open
round. Sans I/O.

The log decides one entry a round by single-decree Paxos. A *ballot* is an attempt, owned by one
convener (`convener.Convener`). The acceptors of entry r are exactly the configuration that entry
r-1 decided. A *vote* says "I hold state r-1 and all bytes of r". The data plane
(`atoll.collectives.exchange`) yields bytes for a plan; safety does not depend on it. The protocol
is specified in docs/internals/protocol/round.md.

**The life of a round**, which is the order of this file:

1. *Open.* `_open` clears the volatile state (`state.OpenRound`) and creates the round's roles: an
   acceptor, a convener, a seal.
2. *Contribute.* The session offers a frozen contribution (`contribute`); Ready messages announce
   it.
3. *Gather.* `look` notes whether the contributions are there that the round waits for.
4. *Plan.* The ballot's convener sends a plan (`_on_plan`); the data plane carries it out
   (`actions.execute`). `on_report` asks again for what does not come.
5. *Vote.* Promise, Accept, Accepted: `_on_prepare`, `_on_accept`, `vote_pending`, `cast_vote`.
6. *Learn and apply.* A quorum of votes decides (`count_vote`); the session applies the entry
   (`actions.apply`) and calls `on_applied`, which opens the next round.
7. *Take over.* Where nothing comes on, `_consider_takeover` moves to the next ballot.
8. *Catch up.* Whoever lags asks for decided entries, and others answer (`catching_up`).

**Inputs**, with ``now`` in seconds where they let the round come on: `on_message`, `tick`,
`contribute`, `withdraw`, `on_silent`, `on_result`, `on_part`, `on_report`, `on_kept`, `on_applied`,
`on_not_applied`, `on_root`, `adopt_snapshot`, `resume`, `leave`, `set_idle`, `set_unsettled`,
`keep_unsettled`, `set_waiting`, `set_clock`, `take_renewed`. Nobody else writes a field of the
machine or of its open round. **Outputs** are calls of `state.RoundActions`; none of them blocks,
and answers come back as inputs. One driver (a session's log) calls everything, so there are no
locks. For example, a member that alone decides its log takes one round like this::

    machine = RoundMachine(run="r", log="main", me=me, actions=actions, ...)
    machine.on_root(0.0, 1, root)             # the state before round 1 is hashed
    machine.contribute(0.0, cid, weight=32)   # -> actions.send(me, Ready)
    ...                                       # the driver delivers what is sent to oneself
    machine.tick(0.1)                         # -> Plan, actions.execute(plan)
    machine.on_result(0.2, plan, digests)     # -> Accept, Accepted, actions.apply(entry)
    machine.on_applied(0.3)                   # -> actions.decided(...); round 2 is open
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence, Set
from math import inf, isqrt
from random import Random
from statistics import median

import msgspec

from .. import messages as m
from ..bounds import entry_fault
from ..errors import RemoteProtocolError
from ..group import (
    LAST_BALLOT,
    NO_READING,
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
from ..terms import senders_of
from . import patience
from .arrival_policy import RoundArrivals
from .catching_up import CatchingUp
from .certificate import vote_payload
from .entering import OPEN, Doors
from .entrance import MAX_JOINERS, Entrance
from .journal import Journal
from .log_modes import LogModes
from .raises import Raises
from .recovery import Recovery
from .routes import Disputes, broken_by
from .sampling import Draw, draw_members
from .state import VOTES_KEPT, OpenRound, RoundActions, Shape
from .thin import FEWEST, ThinLinks
from .timing import Timing
from .turns import AWAY_S, TurnClock

MOST_RUSH_AMONG = 3  # members from which on a majority can tell that one is too fast
EARLY_MESSAGES = 512  # messages of the next round kept while this one is being applied
FAR_BALLOTS = 1 << 20  # beyond the own one; no clock brings a round so far
MOST_NEWS = 32  # of one kind, by one member, at once; beyond, one in a `Timing.takeover_s`
MISSING_SPANS = 256  # of one contribution in one message; the rest is asked for next time
# a source that sent nothing for so many pulls is asked again: what is under way would come twice
PATIENCE_PULLS = 7.5


class RoundMachine:
    """The state machine of one log at one member; see the top of the file."""

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
        modes: LogModes,
        site: str = "",
        unix_offset_s: float = 0.0,
        doors: Doors = OPEN,
        root: bytes | None = None,
        stateless: bool = False,
        idle: bool = False,
    ) -> None:
        """``site``: the label by which members near each other recognise that. ``modes``: what
        stands at the log's doors. ``unix_offset_s``: wall clock minus ``now``; it only numbers
        claims, so that those of a process that was started again have greater numbers. ``doors``:
        what lets peers enter. ``root``, ``stateless``, ``idle``: as the attributes, from the start.
        """
        self.run, self.log, self.me, self.organiser = run, log, me, organiser
        self.journal, self.shape, self.timing = journal, shape, timing
        self.actions, self.rng = actions, rng
        self.site = site
        self.faults = modes.faults()
        self.tolerated = self.faults.tolerated
        self.policy = modes.policy(journal.entries)
        self.unix_offset_s = unix_offset_s
        self._modes = modes

        # ---- what other members are known for
        self.caught = set[PeerId]()  # peers that are proved to lie
        self.disputes = Disputes()  # peers that disagreed on a partial sum
        self.leavers = set[Member]()  # who has announced that it leaves: it is not lost
        # the newest incarnation that a peer was heard under since it was suspected
        self._spoke: dict[PeerId, int] = {}
        self._swept_at, self._sweeps = -1e9, 0
        self.voted = 0  # the newest round in which others were heard to vote

        # ---- the own contribution and script
        self.contribution: tuple[bytes, int, Reading] | None = None
        self.leaving = False
        self.idle = False  # no contribution will come
        # a script waits for the open round, whatever it decides: that ends what an earlier life
        # offered
        self.unsettled = False

        # ---- state and entries
        # Merkle root of the state before the open round; None while it is being hashed
        self.root: bytes | None = None
        # entries are known, the state is still being fetched: nothing can be applied or voted on
        self.stateless = False
        self.ahead: list[Certified] = []  # verified entries beyond the open round
        self.round_s: float | None = None  # how long the last round took
        self.bulk_s = 0.0  # how long the last reduction took
        self.thin = ThinLinks(shape.spare)
        self.raises = Raises()
        self._exchanges = deque[float](maxlen=8)  # how long they took lately, plan to new state
        self.turns = TurnClock(now)
        self._away: dict[Member, float] = {}  # who is not heard, since when
        self._lost: dict[Member, float] = {}  # who is `lost`, since when
        self._early: list[tuple[PeerId, int, int, m.Body]] = []
        # of which round, and in the order of its ballots
        self._conveners: tuple[int, list[Member]] | None = None

        # ---- a start from what an earlier process left
        self.recovery = Recovery(self, now)
        self.renewed = False  # it has gone on as another member, and nobody was told yet

        self.catching_up = CatchingUp(self, now)
        self.entrance = Entrance(self, doors, modes.sites)
        self._open(now)
        # others are told of an idle member in the course of the round, not by its opening
        self.root, self.stateless, self.idle = root, stateless, idle

    # ---- views -----------------------------------------------------------------------------------

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
    def others(self) -> list[PeerId]:
        return [member.peer for member in self.config if member != self.me]

    @property
    def removed(self) -> Set[Member]:
        """Members that the organiser has removed: they never vote again."""
        return self.journal.entries.removed

    @property
    def sealed(self) -> bool:
        """Whether the open round is sealed here: this member votes no more in it."""
        return self.sealing.active

    @property
    def is_member(self) -> bool:
        """Whether this member, in this incarnation, is an acceptor of the open round."""
        return (
            self.me in self.journal.entries.members
            and self.me not in self.removed
            and not self.recovery.forgotten
            and not self.recovery.unasked
        )

    @property
    def may_act(self) -> bool:
        """Whether this member may speak in the open round: it is an acceptor, and what it may have
        forgotten was asked for.
        """
        return self.is_member and not self.recovery.waits

    @property
    def frontier(self) -> list[Certified]:
        """Decided entries that are verified but not yet applied here, oldest first."""
        decided = self.open.decided
        if decided is None:
            return list(self.ahead)
        # votes may decide what a Catch brought, too
        return [decided, *(c for c in self.ahead if c.entry.round > decided.entry.round)]

    @property
    def tail(self) -> Certified:
        """The newest entry known."""
        decided, newest = self.open.decided, self.ahead[-1] if self.ahead else None
        if newest is not None and (decided is None or newest.entry.round > decided.entry.round):
            return newest
        return decided or self.journal.entries[-1]

    @property
    def engaged(self) -> bool:
        """Whether the open round is under way as far as this member knows. A swarm that merely
        trains is not stuck.
        """
        opened = self.open
        promised = self.journal.accepted or self.journal.promised >= 0
        redraw = self.draw.waiting and self.hopeless
        under_way = (
            self.contribution
            or self.unsettled
            or redraw
            or promised
            or opened.plan
            or opened.pending
            or opened.decided
        )
        return bool(under_way) or self.acceptor.urged

    def convener_of(self, ballot: int) -> Member:
        """The owner of a ballot of the open round."""
        order = self._convener_order()
        return order[ballot % len(order)]

    def _convener_order(self) -> list[Member]:
        """All members, in the order in which they own the ballots of the open round."""
        if self._conveners is None or self._conveners[0] != self.round:
            self._conveners = (self.round, conveners(self.run, self.log, self.round, self.config))
        return self._conveners[1]

    def next_conveners(self, rounds: int) -> list[PeerId]:
        """Who writes the entries of so many rounds from the open one on, if all goes well and
        nobody comes or goes meanwhile.
        """
        return [
            conveners(self.run, self.log, round_, self.config)[0].peer
            for round_ in range(self.round, self.round + rounds)
        ]

    def quorum(self, voters: Sequence[Member]) -> bool:
        """Whether these acceptors decide the open round."""
        return is_quorum(self.config, set(voters), self.organiser, self.tolerated)

    def has_bytes(self, entry: Entry) -> bool:
        """Whether all result bytes of the entry are here, and of its contributors."""
        return not entry.contributors or self.open.holds(entry)

    # ---- what members are known for

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

    def evictable(self, now: float, member: Member) -> bool:
        """Whether the next configuration may do without a member: it is `lost`, for as long as may
        pass until it is back, or will not be back as this one.
        """
        peer = member.peer
        final = self.ended(member) or peer in self.caught or self.actions.excluded(peer)
        since = self._lost.get(member, now)
        return self.lost(member) and (final or now - since >= self.timing.evict_s)

    def ended(self, member: Member) -> bool:
        """Whether its peer has spoken as a later incarnation: this one never votes again."""
        return self._spoke.get(member.peer, 0) > member.incarnation

    def heard(self, member: Member) -> bool:
        """Whether it spoke as this member. A living peer may yet have lost its journal."""
        return member == self.me or (
            self._spoke.get(member.peer) == member.incarnation
            and not self.actions.suspected(member.peer)
        )

    def heard_votes_for(self, entry: Entry) -> bool:
        """Whether this process heard a member, perhaps itself, vote for an entry of the open round:
        who votes does not know it as decided.
        """
        return any(digest == entry.hash() for _, digest in self.open.votes)

    def convict(self, who: Member) -> bool:
        """A member is proved to lie. Whether that is news, and of another one."""
        if who.peer in self.caught or who == self.me:
            return False
        self.caught.add(who.peer)
        return True

    # ---- how long things may take

    @property
    def _chunk_bytes(self) -> tuple[int, int]:
        contribution, result = patience.chunk_bytes(self.shape)
        return round(self.timing.weight * contribution), round(self.timing.weight * result)

    @property
    def _gap_s(self) -> float:
        rates = [
            patience.rate(self.actions.pace()),
            *(patience.rate(ready) for ready in self.open.ready.values() if ready.cid is not None),
        ]
        if self.open.slowest:
            rates.append(max(patience.SLOWEST, self.open.slowest))
        return patience.gap_s(rates, len(self.config), max(self._chunk_bytes))

    def silence_s(self, peers: Collection[PeerId]) -> float:
        """How long these peers may be silent though they live, where packets are lost."""
        return patience.silence_s(self.actions.pace(), peers)

    def stuck_s(self) -> float:
        """A reduction is stuck when no new chunk came for this long."""
        return patience.stuck_s(
            self.timing,
            self._gap_s,
            patience.rtt_s(self.actions.pace()),
            self.silence_s(self.others),
        )

    def silent_s(self, pulls: float) -> float:
        """A source that sent nothing for this long is asked again."""
        rtt_s = patience.rtt_s(self.actions.pace())
        return patience.silent_s(self.timing, pulls, self._gap_s, rtt_s)

    def does_without(self, offers: Sequence[Contributor]) -> bool:
        """Whether the open round can do without members with thin links: others offer enough, and
        can decide it."""
        out = self.thin.out
        if not out:
            return False
        rest = [offer for offer in offers if offer.member not in out]
        voters = [member for member in self.config if member not in out]
        return len(rest) >= FEWEST and self.enough(rest) and self.quorum(voters)

    def transfer_s(self, plan: Plan) -> float:
        """How long the bytes of a plan take at the announced rates."""
        ready = {member.peer: offer for member, offer in self.open.ready.items()}
        return patience.transfer_s(
            plan, ready, len(self.config), self._chunk_bytes, self.shape.witnesses
        )

    # ---- inputs: messages and time ---------------------------------------------------------------

    def on_message(
        self, now: float, peer: PeerId, incarnation: int, round_: int, body: m.Body
    ) -> None:
        """A control message of this log. Raises RemoteProtocolError when it breaks a rule."""
        who = Member(peer, incarnation)
        if (
            round_ > 0  # of round 0 asks who has no log
            and incarnation > self._spoke.get(peer, -1)
            and len(self._spoke) < MAX_JOINERS
        ):
            self._spoke[peer] = incarnation
        if self.sealing.shuns(who):
            return self.catching_up.answer(now, peer, round_) if round_ < self.round else None
        if who in self.journal.entries.members or self.recovery.heard_of.of(peer) is not None:
            self.recovery.heard_of.message(who, round_, body)
        if isinstance(body, m.Catch):
            self._on_catch(now, peer, body)
            self.recovery.on_answer(who, round_, body)
            return self._advance(now)
        if isinstance(body, m.Fetch) and body.anew:
            if round_ > self.round:
                self.catching_up.fetch(now, peer)
            return self.catching_up.answer(now, peer, round_, body.anew)
        if isinstance(body, m.Join) and who not in self.journal.entries.members:
            self.entrance.on_join(now, who, round_, holds=body.holds)
        if round_ < self.round:
            if isinstance(body, m.QuorumVotes):
                return None  # its sender knows the decision, too
            if isinstance(body, (m.Accepted, m.Echo)) and self.catching_up.is_under_way(
                now, who, round_, body
            ):
                return None
            return self.catching_up.answer(now, peer, round_)
        if isinstance(body, (m.Accept, m.Accepted, m.QuorumVotes)):
            self.voted = max(self.voted, round_)
        if isinstance(body, m.Seal) and not self.tolerated:
            return self.sealing.on_seal(now, who, round_, body)
        if isinstance(body, (m.Fetch, m.Join)):
            if round_ > self.round:
                self.catching_up.fetch(now, peer)
            return None
        if round_ > self.round:
            if (
                round_ == self.round + 1
                and self.open.applying
                and len(self._early) < EARLY_MESSAGES
            ):
                self._early.append((peer, incarnation, round_, body))
                return None
            return self.catching_up.fetch(now, peer)
        if isinstance(body, m.Sealed):
            return self.sealing.on_sealed(who, body)
        if who in self.journal.entries.members and self.may_act and not self.sealing.active:
            self._dispatch(now, who, body)
        return None

    def _forget_silent(self, now: float) -> None:
        """Whoever is suspected, or no member, speaks anew. Of hundreds some are looked at each
        time; but for the organiser nobody asks whether it spoke as the member that it is
        (`heard`).
        """
        timing, some = self.timing, list(self._spoke)
        if len(self.config) > timing.sparse_above:
            if now - self._swept_at < timing.detect_s:
                return
            if some:
                count, at = isqrt(len(some)) + 1, self._sweeps % len(some)
                some = some[at : at + count]
                if self.organiser is not None:
                    some.append(self.organiser)
                self._sweeps = at + count
        self._swept_at, known = now, {member.peer for member in self.config}
        for who in some:
            if who not in known or self.actions.suspected(who):
                self._spoke.pop(who, None)

    def _dispatch(self, now: float, who: Member, body: m.Body) -> None:
        """A message of another acceptor, or an own one, within the open round."""
        match body:
            case m.Ready():
                self._on_ready(now, who, body)
            case m.PlanMessage():
                self._on_plan(now, who, body.plan)
            case m.PacedPlan():
                if self.convener_of(body.plan.ballot) == who:
                    self.open.slowest = body.slowest
                self._on_plan(now, who, body.plan)
            case m.RoundCloses():
                if body.base != self.base:
                    raise RemoteProtocolError(
                        f"RoundCloses for round {self.round} on another base", peer=who.peer
                    )
                self._closes(now)
            case m.QuorumVotes():
                self._on_decided(now, who, body)
            case m.Missing():
                self._on_missing(now, who, body)
            case m.Disputed():
                self.convening.on_disputed(now, who, body)
            case m.Need():
                self.actions.resend_results(who.peer, body.plan_id, body.chunks)
            case _:
                self.acceptor.on_message(now, who, body)

    def tick(self, now: float) -> None:
        """Repair loss, and take over where nothing comes on. Call about every ``timing.pull_s``
        seconds.
        """
        if self.recovery.forgotten and not self.open.applying:
            self.renew(now)
        opened = self.open
        self._forget_silent(now)
        self._lost = {who: self._lost.get(who, now) for who in self.config if self.lost(who)}
        self.entrance.tick(now)
        if opened.decided and not opened.applying:
            self._try_apply(now)
        if opened.applying:
            return
        if self.sealing.tick(now):
            return
        self.recovery.tick(now)
        stale = now - opened.progress_at > self.timing.takeover_s / 2
        stale = stale and not (self.shape.whole and self.gathering)
        if not self.is_member or (stale and (self.engaged or self.voted >= self.round)):
            self.catching_up.ask_around(now, self.timing.fetch_s)
        elif now - opened.progress_at > self.timing.quiet_s:
            # a decision that was taken without this member leaves no other trace here
            self.catching_up.ask_around(now, self.timing.quiet_s)
        if not self.may_act:
            return
        self._consider_closing(now)
        self.acceptor.step(now)
        self.look(now)
        plan = opened.plan
        if plan is None or (
            self.contribution and all(c.cid != self.contribution[0] for c in plan.contributors)
        ):
            self._repeat_ready(now)
        if plan is not None and opened.lacking != 0:
            self.actions.report(plan.plan_id)
        self.acceptor.tick(now)
        self.convening.step(now)
        self.convening.repeat(now)
        self._consider_takeover(now)

    def resume(self, now: float) -> list[RemoteProtocolError]:
        """Take up what came early; the answer is what of it broke a rule. Call it after
        `on_applied` or `adopt_snapshot`, once the data plane has opened the new round."""
        early, self._early = self._early, []
        breaches: list[RemoteProtocolError] = []
        for peer, incarnation, round_, body in early:
            try:
                self.on_message(now, peer, incarnation, round_, body)
            except RemoteProtocolError as error:
                breaches.append(error)
        self._advance(now)
        return breaches

    # ---- 1. a round opens ------------------------------------------------------------------------

    def _open(self, now: float, before: Draw | None = None) -> None:
        """Open the round after the newest entry. ``before``: the draw of the round before, None
        where this member has just been started.
        """
        self.open = OpenRound(born=now, progress_at=now)
        self.catching_up.open()
        self.base = self.journal.entries[-1].entry.hash()
        self.draw = self._drawn(before)
        self.policy.follow(now)
        self.ballot = max(0, self.journal.promised)
        self.dissemination = self._modes.dissemination(
            self.me.peer,
            len(self.config),
            lambda: [member.peer for member in self._convener_order()],
        )
        self.acceptor, self.convening = self.faults.make_roles(self)
        self.sealing = self._modes.seal(self)
        self.entrance.open()
        self._close_round()

    def _drawn(self, before: Draw | None) -> Draw:
        sample = self.shape.sample
        members = draw_members(self.run, self.base, self.config, sample)
        return Draw(
            members,
            whole=len(members) == len(self.config),
            least=max(self.shape.least, sample.least if sample is not None else 1),
            last_s=self.round_s or 0.0,
            counted=bool(self.journal.entries[-1].entry.contributors),
            redraw_s=self.timing.redraw_s,
            before=before,
        )

    def progress(self, now: float) -> None:
        """Note that the round has come on."""
        self.open.progress_at = now

    def tell(self, peer: PeerId, body: m.Body) -> None:
        """Send within the open round; the session delivers a message to oneself like any other."""
        self.actions.send(peer, self.log, self.round, body)

    def broadcast(self, body: m.Body) -> None:
        """Send to all of the configuration, this member last."""
        for peer in (*self.others, self.me.peer):
            self.tell(peer, body)

    # ---- 2. members contribute -------------------------------------------------------------------

    def contribute(
        self, now: float, cid: bytes, weight: int, reading: Reading = NO_READING
    ) -> None:
        """Offer a frozen contribution: it must stay untouched until `decided` has told whether it
        was counted.
        """
        if self.contribution is None and self.shape.whole:
            self.turns.done(now)
        self.contribution = (cid, weight, reading)
        if self.open.plan is None:
            self.open.progress_at = now
        self._close_round()
        if self.may_act:
            self.acceptor.claim(now)
        self.convening.step(now)

    def withdraw(self) -> None:
        """Take the own contribution back: what already names it, goes on without it."""
        self.contribution = None

    def on_silent(self, now: float, who: Member) -> None:
        """A member is known to contribute nothing to the open round, though it has not said so."""
        self.open.ready[who] = m.Ready(self.base, None, 0, False)
        self.convening.step(now)

    def leave(self) -> None:
        """Leave the configuration with the next entry."""
        self.leaving = True

    def set_idle(self, now: float, idle: bool) -> None:
        """Set whether a contribution may come at all; nobody waits for an idle member."""
        self.idle = idle
        if idle:
            self._send_ready()

    def set_clock(self, unix_offset_s: float) -> None:
        """Set the wall clock minus ``now``: it may be corrected while this process runs."""
        self.unix_offset_s = unix_offset_s

    def set_unsettled(self, now: float, unsettled: bool) -> None:
        """Set whether a script waits to hear what became of an earlier life's contribution: any
        entry tells, also one without contributors.
        """
        self.unsettled = unsettled
        if unsettled:
            self.progress(now)
            self._send_ready()

    def keep_unsettled(self) -> None:
        """The entry that is being applied does not tell it (`decided`): the script waits on."""
        self.unsettled = True

    def set_waiting(self, waiting: bool) -> None:
        """Set whether a script waits for the end of a round in which this member, not sampled,
        takes no part.
        """
        self.draw.waiting = waiting
        if waiting:
            self._send_ready()

    @property
    def steps(self) -> int:
        """How many inner steps this member's script makes now, where each member has its number; 0
        where none has, or where it is late for its group."""
        return self.policy.steps(self.me.peer)

    @property
    def takes_part(self) -> bool:
        """Whether this member is sampled. In a run without a sample everybody is, member or not."""
        return self.shape.sample is None or self.me in self.draw.members

    @property
    def _declines(self) -> bool:
        """Whether this member was sampled, others were not, and it has offered nothing: if it will
        not, all are told.
        """
        return not self.draw.whole and self.me in self.draw.members and self.contribution is None

    def my_ready(self) -> m.Ready | None:
        """The own contribution, or that none will come; None if there is no news yet."""
        aside = self.open.aside == self.ballot
        # a contribution that is not offered is kept: a later draw may want it
        if self.contribution and not aside and self.takes_part:
            pace, (cid, weight, reading) = self.actions.pace(), self.contribution
            return m.Ready(
                self.base,
                cid,
                weight,
                self.leaving,
                site=self.site,
                up=pace.up,
                down=pace.down,
                proven=pace.proven,
                reading=reading,
                ballot=self.ballot,
            )
        # before the first Ready a script may still attach and contribute to this round
        closing = self.open.first_ready_at is not None
        settle = self.unsettled or self.draw.waiting
        none_comes = (
            self.leaving
            or settle
            or aside
            or (self.idle and (closing or self.shape.sample is not None))
        )
        return (
            m.Ready(self.base, None, 0, self.leaving, settle, ballot=self.ballot)
            if none_comes
            else None
        )

    def note_ready(self, now: float, who: Member, ready: m.Ready) -> None:
        """What a member contributes. Raises RemoteProtocolError for ever other things."""
        known = self.open.ready.get(who)
        if known is None or known.cid != ready.cid:
            self._note_news(now, who, self.open.renewed, "contributions")
        self.open.ready[who] = ready

    def ready_fits(self, ready: m.Ready) -> bool:
        """Whether a Ready is of the open round."""
        return ready.base == self.base and (ready.cid is None or ready.weight >= 1)

    def _send_ready(self) -> None:
        """Tell the convener what this member contributes; all, where it leaves, so that nobody
        takes it for lost.
        """
        ready = self.my_ready()
        if ready and self.may_act and not self.open.decided:
            convener = self.convener_of(self.ballot).peer
            self.tell(convener, ready)
            for peer in self.others if self.leaving else ():
                if peer != convener:
                    self.tell(peer, ready)

    def _repeat_ready(self, now: float) -> None:
        """Tell the convener again. Where a plan needs more contributions than are known here, or
        fewer than were sampled give any, tell all others now and then: each counts them."""
        opened = self.open
        if not self.gathering:
            self._send_ready()
        if (
            self.waits_for_offers or self._declines
        ) and now - opened.announced_at > self.timing.detect_s:
            opened.announced_at = now
            self._close_round()

    def _close_round(self) -> None:
        """Announce to all that a contribution is there: whoever has something contributes it now.
        A sampled member that has none announces that.
        """
        self._send_ready()
        ready = self.my_ready()
        if ready and (self.contribution or self._declines) and self.may_act:
            alone = self._convener_counts_alone
            news = self.dissemination
            for peer in news.announce_to(self.others, self.ballot) if alone else self.others:
                self.tell(peer, ready)
            if self.open.first_ready_at is None:
                self._pass_contribution_on()

    @property
    def _convener_counts_alone(self) -> bool:
        """True if nobody but the convener counts contributions: the others need only know that
        there is one.
        """
        shape = self.shape
        plain = not self.policy.waits_for_some and shape.sample is None and not shape.whole
        return shape.least == 1 and plain

    def _pass_contribution_on(self) -> None:
        """Tell others, once, that a contribution is there."""
        if self._convener_counts_alone:
            for peer in self.dissemination.pass_contribution_to(self.ballot):
                self.tell(peer, m.RoundCloses(self.base))

    def _closes(self, now: float) -> None:
        """A contribution is known to be there: the first one closes the round."""
        if self.open.first_ready_at is None:
            self.open.first_ready_at = now
            self.open.closes = True
            self._consider_closing(now)
            if self.idle:
                self._send_ready()

    def _consider_closing(self, now: float) -> None:
        """Ask the own script for what it has, once the round may end."""
        opened = self.open
        if opened.closes and opened.closing_at is None and self.turn_is_over(now):
            opened.closing_at = now
            self.actions.closing(self.round)

    def turn_is_over(self, now: float, contributions: int = 0) -> bool:
        """Whether the round may end by this member's own clock, as an entry of so many
        ``contributions``, or as the one that is known to be offered.

        A member that offers something as soon as each round opens would otherwise end everybody's
        turn after one step, and how long its own turn was is only its word. So a round of fewer
        than half of those that train lasts for `Timing.least_turn` exchanges, unless the own turn
        is over. Of two, nobody can tell who is too fast and who is slow.
        """
        least, shape = self.timing.least_turn, self.shape
        if not (least and self._exchanges) or len(self.config) < MOST_RUSH_AMONG:
            return True
        if self.contribution is not None or shape.sample is not None:
            return True
        if self.policy.waits_for_some:
            return True
        if shape.whole:  # a turn is what the manifest says
            return True
        mine = set[Member]() if self.idle else {self.me}
        train = len({*self._awaited(set()), *mine})
        offered = max(contributions, len(self.offered()))
        return offered >= train or now - self.open.born >= least * median(self._exchanges)

    def _on_ready(self, now: float, who: Member, ready: m.Ready) -> None:
        """A member has a contribution, or will have none. Raises RemoteProtocolError when it is of
        another round.
        """
        opened = self.open
        if not self.ready_fits(ready):
            raise RemoteProtocolError(
                f"Ready for round {self.round} on another base", peer=who.peer
            )
        if ready.cid is not None and who not in self.draw.members:
            raise RemoteProtocolError(
                f"{who.peer} contributes to round {self.round}, for which it was not sampled",
                peer=who.peer,
            )
        if ready.cid is not None and opened.first_ready_at is None:
            self._pass_contribution_on()
            self._closes(now)
        known = opened.ready.get(who)
        fresh = known is None or known.cid is None
        self.note_ready(now, who, ready)
        if self.shape.whole and ready.cid is not None and fresh:
            self.turns.done(now)
        self.heard_leave(who, ready.leave)
        self.convening.on_ready(who)
        if ready.ballot > self.ballot and who == self.convener_of(self.ballot):
            return self.next_ballot(now)  # it has given its ballot up: nobody need find that out
        return self.convening.step(now)

    # ---- 3. the round gathers what it waits for --------------------------------------------------

    def offers(self) -> list[Contributor]:
        """The contributions that a plan can be made of."""
        return [
            offer
            for offer in self.offered()
            if not self.policy.in_groups or offer.member.peer in self.open.due
        ]

    def offered(self) -> list[Contributor]:
        """The contributions that are there for the round, or for a later one. Where two members
        claim one cid, one of them lies: the first is taken.
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
        if self.policy.waits_for_some or self.shape.whole:
            return self.gathering
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
    def gathering(self) -> bool:
        """Whether the round still waits for the contributions that its arrival policy wants, or for
        the work of all who take part, as far as this member knows; never where whoever is first
        closes it.
        """
        patient = self.policy.waits_for_some or self.shape.whole
        return patient and self.open.ripe_at is None

    def look(self, now: float) -> None:
        """Note whether the open round has what it waits for (`OpenRound.ripe_at`; nothing, where it
        waits for all), and whether the sampled members had their time."""
        self.draw.look(now - self.open.born)
        if self.shape.whole:
            return self._look_at_work(now)
        policy, opened = self.policy, self.open
        if not policy.waits_for_some or (opened.ripe_at is not None and not policy.in_groups):
            return
        # the convener's plan is made of what it was told, also by itself
        convenes = self.convener_of(self.ballot) == self.me
        mine = {self.me} if self.contribution is not None and not convenes else set[Member]()
        there = mine | {offer.member for offer in self.offered() if not self.silent(offer.member)}
        if not policy.in_groups:
            if not there:
                return
            if opened.first_ready_at is None:
                opened.first_ready_at = now
        said = [offer.reading.lag for offer in self.offered() if offer.member in there]
        if mine and self.contribution is not None:
            said.append(self.contribution[2].lag)
        found = policy.look(
            now,
            RoundArrivals(
                opened.born,
                opened.first_ready_at,
                opened.enough_at,
                opened.ripe_at,
                {member.peer for member in there},
                [member.peer for member in self._awaited(there if policy.in_groups else mine)],
                said,
            ),
        )
        opened.ripe_at, opened.enough_at, opened.due = found.ripe_at, found.enough_at, found.due

    def _look_at_work(self, now: float) -> None:
        """All who take part are done, or had their time. Somebody who comes in the meantime, or is
        heard again, is waited for, too.
        """
        self._away = {
            who: self._away.get(who, now) for who in self.config if self.actions.suspected(who.peer)
        }
        opened = self.open
        if opened.plan is not None:
            return
        ripe = not self.at_work(now) or self.turns.over(now)
        opened.ripe_at = (now if opened.ripe_at is None else opened.ripe_at) if ripe else None

    def at_work(self, now: float) -> list[Member]:
        """Those who take part in the open round, and have not said what they contribute; but for
        who is not heard for so long that it may be gone."""
        # the convener's plan is made of what it was told, also by itself
        done = self.contribution is not None and self.convener_of(self.ballot) != self.me
        return [
            who
            for who in self.draw.members
            if not (who == self.me and done)
            and self.acceptor.awaits(who)
            and not self.ended(who)
            and who.peer not in self.caught
            and not self.actions.deaf_to(who.peer)
            and now - self._away.get(who, now) < AWAY_S
        ]

    def away_s(self, now: float, who: Member) -> float:
        """For how long a member is not heard; 0: it is."""
        return now - self._away.get(who, now)

    def _awaited(self, mine: Set[Member]) -> list[Member]:
        """Living members that have not announced what they contribute."""
        return [
            who
            for who in self.config
            if who not in mine and self.acceptor.awaits(who) and not self.silent(who)
        ]

    def elapsed_s(self, now: float) -> float | None:
        """Seconds since the last entry, for the proposed one; None if the log needs no time."""
        return self.policy.elapsed_s(now)

    # ---- the draw

    @property
    def hopeless(self) -> bool:
        """Whether too few of the sampled members can still contribute, or have done so in time."""
        return not self.draw.whole and self.draw.is_hopeless(self._drawn_offers, self.draw.elapsed)

    @property
    def _drawn_offers(self) -> list[m.Ready | None]:
        return [
            self.my_ready() if who == self.me else self.open.ready.get(who)
            for who in self.draw.members
            if not self.silent(who)
        ]

    def may_end(self, ballot: int, entry: Entry) -> bool:
        """Whether this member may vote for an entry that perhaps does nothing but end the round,
        and so draw again: only if it sees why. Whoever convenes the ballot votes last, so that an
        entry that the others refuse binds no later convener. What was voted for before is voted for
        again: later conveners must adopt it, and nothing else could be decided."""
        voted = self.journal.accepted
        if (
            entry.contributors
            or entry.next_config != self.config
            or entry.admitted
            or self.draw.whole
            or (voted is not None and voted[1] == entry)
        ):
            return True
        if not self.draw.is_hopeless(self._drawn_offers, 2 * self.draw.elapsed):  # clocks differ
            return False
        others = self.open.votes.get((ballot, entry.hash()), {})
        return (
            bool(self.tolerated)
            or self.convener_of(ballot) != self.me
            or self.quorum([*others, self.me])
        )

    # ---- 4. a plan is carried out ----------------------------------------------------------------

    def _on_plan(self, now: float, who: Member, plan: Plan) -> None:
        current = self.open.plan
        owned = self.convener_of(plan.ballot) == who and self.acceptor.follows(plan)
        if (
            self.stateless
            or not owned
            or not self._heeds(now, who, plan.ballot)
            or not self._plan_fits(plan)
        ):
            return
        self.ballot = max(self.ballot, plan.ballot)
        if current and (plan.ballot, plan.revision) <= (current.ballot, current.revision):
            return
        self.progress(now)
        opened = self.open
        if current and current.ballot == plan.ballot:
            self.faults.note_revision(self.round, current, plan, self.silent)
        opened.plan, opened.plan_sender, opened.lacking = plan, who.peer, None
        opened.planned_at = now
        opened.senders, opened.cut = senders_of(plan, self.me.peer), set()
        self.actions.execute(plan, [member.peer for member in self.config])

    def _plan_fits(self, plan: Plan) -> bool:
        same = (plan.log, plan.round, plan.base) == (self.log, self.round, self.base)
        same = same and self.shape.fits(plan)
        owners = {part.owner for part in plan.parts} <= {member.peer for member in self.config}
        contributors = {c.member for c in plan.contributors} <= set(self.draw.members)
        return same and owners and contributors and check_plan(plan) is None

    def on_part(
        self, now: float, plan_id: bytes, index: int, digest: bytes, inputs: tuple[bytes, ...] = ()
    ) -> None:
        """A part of this member is reduced under a plan, or one of which it is a witness; its
        digest binds bytes and what they are the result of. ``inputs``: see `PartReduced`."""
        if self.open.plan is not None and self.open.plan.plan_id == plan_id:
            self.acceptor.part_reduced(now, self.open.plan, index, digest, inputs)

    def on_given(self, now: float, plan_id: bytes, index: int, root: bytes) -> None:
        """What this member contributes to a part of a plan is encoded; ``root``: see
        `PartGiven`."""
        if self.open.plan is not None and self.open.plan.plan_id == plan_id:
            self.acceptor.part_given(now, self.open.plan, index, root)

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

    def on_kept(self, entry: Entry) -> None:
        """An earlier life kept the bytes of an entry that it voted for: they are stored here."""
        self.open.hold(entry, entry.part_digests)

    def drop_plan(self) -> None:
        """The plan in force cannot be carried out: it names what will never come."""
        self.open.plan = None

    def drop_reduced(self) -> None:
        """Nobody would vote for an entry that proposes the newest result."""
        self.open.reduced = None

    def _bytes_arrived(self, now: float) -> None:
        self.acceptor.step(now)
        self._try_apply(now)
        self.convening.step(now)

    # ---- what does not come is pulled

    def on_report(
        self,
        now: float,
        plan_id: bytes,
        missing: dict[bytes, m.Spans],
        lacking: dict[PeerId, m.Spans],
        resumed: Collection[PeerId] = (),
        disputed: m.Disputed | None = None,
    ) -> None:
        """What the data plane waits for under a plan. ``missing``: contributions to the own part,
        by cid; ``lacking``: result chunks, by owner; ``resumed``: peers whose lane is a new one;
        ``disputed``: a partial sum that it did not use.
        """
        if self.open.plan is not None and self.open.plan.plan_id == plan_id:
            self._tell_dispute(self.open.plan, disputed)
            self._ask_for_missing(now, self.open.plan, missing, lacking, resumed)

    def _ask_for_missing(
        self,
        now: float,
        plan: Plan,
        missing: dict[bytes, m.Spans],
        lacking: dict[PeerId, m.Spans],
        resumed: Collection[PeerId],
    ) -> None:
        """Ask contributors for ``missing`` parts (telling the convener) and owners for ``lacking``
        results. Less than before is progress.

        Lanes lose nothing while they last, so only sources that have fallen silent are asked, and
        at once those with a new lane.
        """
        opened, senders = self.open, self.open.senders
        opened.lacking_owners = frozenset(lacking)
        left = sum(map(_count, missing.values())) + sum(map(_count, lacking.values()))
        if opened.lacking is None or left < opened.lacking:
            opened.lacking = left
            opened.progress_at = now
            opened.bulk_at = now
            self.convening.bulk_progress(now)
        missing = {**dict.fromkeys(self.acceptor.ungiven(now), ()), **missing}
        self.convening.on_own_report(missing)
        opened.cut.update(resumed)
        for peer in resumed:
            via_peer = (cid for cid, peers in senders.items() if peer in peers)
            for source in (peer.encode(), *via_peer):
                opened.waiting[plan.plan_id, source] = (0, float("-inf"))
        silent = {
            cid: spans
            for cid, spans in missing.items()
            if self._has_stalled(now, plan, cid, _count(spans))
        }
        me = self.me.peer
        if missing or (
            lacking
            and (plan.topology.kind != "butterfly" or any(part.owner == me for part in plan.parts))
        ):
            body = m.Missing(
                plan.plan_id, tuple((cid, silent.get(cid, ())[:MISSING_SPANS]) for cid in missing)
            )
            for peer in sorted(
                {opened.plan_sender or me}.union(*(senders.get(cid, ()) for cid in silent)) - {me}
            ):
                self.tell(peer, body)
        for owner, spans in lacking.items():
            if owner != me and self._has_stalled(now, plan, owner.encode(), _count(spans)):
                self.tell(owner, m.Need(plan.plan_id, spans[: m.MAX_CHUNK_LIST]))

    def _has_stalled(self, now: float, plan: Plan, source: bytes, left: int) -> bool:
        """Whether a source's count of chunks outstanding has stood still for a while; True at most
        once in that while.
        """
        known = self.open.waiting.get((plan.plan_id, source))
        if (
            known is not None
            and left >= known[0]
            and now - known[1] < self.silent_s(PATIENCE_PULLS)
        ):
            return False
        self.open.waiting[plan.plan_id, source] = (left, now)
        return known is not None and left >= known[0]

    def _tell_dispute(self, plan: Plan, disputed: m.Disputed | None) -> None:
        """Tell all why a partial sum is not used, until another plan is in force; and once who was
        wrong, if that turns out.
        """
        if disputed is None or not (
            disputed.plan_id == plan.plan_id
            or (disputed.wrong and disputed != self.open.announced_dispute)
        ):
            return
        self.open.announced_dispute = disputed
        for member in self.config:
            self.tell(member.peer, disputed)

    def _on_missing(self, now: float, who: Member, body: m.Missing) -> None:
        """An owner, or a node on the way to one, lacks contributions: send again what goes to it
        from here.
        """
        self.convening.on_missing(now, who, body)
        if self.open.plan and body.plan_id == self.open.plan.plan_id:
            self.acceptor.lacks_given(who.peer, [cid for cid, _ in body.lacking])
            for cid, spans in body.lacking:
                if spans and self.me.peer in self.open.senders.get(cid, ()):
                    self.actions.resend_parts(who.peer, body.plan_id, cid, spans)

    def _on_the_way(self, now: float, entry: Entry) -> bool:
        """Whether the plan under way still brings the bytes of an entry, so that fetching them from
        others would bring them twice.

        A member that knows the decision has closed the round: it sends what was queued for a lane
        that lasts, and nothing again over a new one. Where members may lie, an entry is proposed
        only once all owners have signed their results; an owner whose results are late then is
        remembered.
        """
        opened, plan = self.open, self.open.plan
        if plan is None or (plan.contributors, plan.parts, plan.topology) != (
            entry.contributors,
            entry.parts,
            entry.topology,
        ):
            return False
        if (
            opened.decided is not None
            and opened.lacking_owners
            and opened.lacking_owners <= opened.cut
        ):
            return False
        if broken_by(plan, opened, self.actions.suspected):
            return False
        patience_s = self.silent_s(patience.PULLS_ALL_BUT) if self.tolerated else self.stuck_s()
        if now - max(opened.bulk_at, opened.planned_at) <= patience_s:
            return True
        if plan.topology.kind == "butterfly":
            self.faults.note_late_owners(self.round, opened.lacking_owners - {self.me.peer})
        return False

    def heard_leave(self, who: Member, leaves: bool) -> None:
        """A member has announced that it leaves, or that it does not."""
        if leaves:
            self.leavers.add(who)
        else:
            self.leavers.discard(who)

    # ---- 5. acceptors promise and vote -----------------------------------------------------------
    # Another fault model's acceptor takes the messages itself; it uses the same votes.

    def on_acceptor_message(self, now: float, who: Member, body: m.Body) -> None:
        """Prepare, Promise, Accept or Accepted, as acceptors that only crash take them. Raises
        RemoteProtocolError, StorageError.
        """
        match body:
            case m.Prepare():
                self._on_prepare(now, who, body.ballot)
            case m.Promise():
                if body.ready and self.ready_fits(body.ready):
                    self.note_ready(now, who, body.ready)
                    if body.ready.cid is not None and self.open.first_ready_at is None:
                        self.open.first_ready_at = now
                if body.accepted is None or self.entry_fits(body.accepted.entry):
                    self.convening.on_promise(now, who, body)
            case m.Accept():
                self._on_accept(now, who, body.ballot, body.entry)
            case m.Accepted():
                self.count_vote(now, who, body)
            case _:
                pass

    def _on_prepare(self, now: float, who: Member, ballot: int) -> None:
        if ballot < 1 or self.convener_of(ballot) != who or not self._heeds(now, who, ballot):
            return
        if ballot > self.journal.promised:
            if not self.raises.restless(who):
                self.progress(now)
            self.journal.promise(ballot)
        self.ballot = max(self.ballot, ballot)
        accepted = self.journal.accepted
        promise = m.Promise(
            ballot,
            m.Accepted1(*accepted) if accepted else None,
            self.my_ready(),
        )
        self.tell(who.peer, promise)

    def _on_accept(self, now: float, who: Member, ballot: int, entry: Entry) -> None:
        if self.convener_of(ballot) != who or not self._heeds(now, who, ballot):
            return
        if fault := entry_fault(entry, self.config, self.shape.topology):
            raise RemoteProtocolError(fault, peer=who.peer)
        if not self.entry_fits(entry) or (
            self.entrance.objection(entry) and not self._perhaps_chosen(ballot, who, entry)
        ):
            return
        self.ballot = max(self.ballot, ballot)
        self.remember(entry)
        accepted, decided = self.journal.accepted, self.open.decided
        needed = {accepted[1].hash()} if accepted else set[bytes]()
        needed |= {decided.entry.hash()} if decided else set()
        self.open.note_proposal(who, entry, needed)
        if accepted and accepted[0] == ballot:
            return
        self.await_bytes(now, ballot, entry, who.peer)
        self.acceptor.step(now)

    def remember(self, entry: Entry) -> None:
        """An entry that the open round may decide: votes name it by its hash."""
        self.open.known[entry.hash()] = entry

    def await_bytes(self, now: float, ballot: int, entry: Entry, sender: PeerId) -> None:
        """The convener of a ballot proposes an entry: vote for it once its bytes are here, unless
        one of a later ballot is pending.
        """
        if not self.open.pending or self.open.pending[0] < ballot:
            self.progress(now)
            self.open.pending = (ballot, entry, sender)

    def _perhaps_chosen(self, ballot: int, convener: Member, entry: Entry) -> bool:
        """Whether another member than this convener has voted for the entry in an earlier ballot:
        then it may be decided, and an objection to it comes too late."""
        return any(
            at < ballot and digest == entry.hash() and not {*votes} <= {convener}
            for (at, digest), votes in self.open.votes.items()
        )

    def entry_fits(self, entry: Entry) -> bool:
        """Whether an entry may be one of the open round."""
        same = (entry.log, entry.round, entry.base) == (self.log, self.round, self.base)
        same = same and self.shape.fits(entry)
        same = same and (
            self.shape.sample is None
            or {c.member for c in entry.contributors} <= set(self.draw.members)
        )
        same = same and (entry.elapsed_s is None or self.policy.in_groups)
        same = same and bool(entry.next_config) and len(entry.part_digests) == len(entry.parts)
        same = same and entry_fault(entry, self.config, self.shape.topology) is None
        return same and self.entrance.admits(entry)

    def vote_pending(self, now: float) -> None:
        """Cast what is pending, if its bytes and the state before it are here."""
        pending = self.open.pending
        if pending is None:
            return
        ballot, entry, sender = pending
        if ballot < self.journal.promised:
            self.open.pending = None
        elif self.actions.own_results.contradicts(entry):
            self.open.pending = None
            self.actions.own_results.on_false(entry, sender, ballot)
            if ballot == self.ballot and sender != self.me.peer:
                self.next_ballot(now)  # nothing comes of this one
        elif (
            self.may_end(ballot, entry)
            and (not entry.contributors or self.turn_is_over(now, len(entry.contributors)))
            and self.holds(now, entry, [sender])
            and self.may_vote(ballot, entry)
        ):
            self.open.pending = None
            self.acceptor.cast(now, ballot, entry)

    def may_vote(self, ballot: int, entry: Entry) -> bool:
        """Whether the session lets this member vote for an entry. Where members make results
        themselves, one that has not goes by the others' votes.
        """
        votes = self.open.votes.get((ballot, entry.hash()), {})
        voters = {who.peer for who in votes} - {self.me.peer}
        return not entry.contributors or self.actions.own_results.may_vote(entry, voters)

    def holds(self, now: float, entry: Entry, holders: Sequence[PeerId]) -> bool:
        """Whether all bytes of an entry and the state before it are stored here; missing bytes are
        fetched from ``holders``.
        """
        if self.root is None or self.root != entry.base_state:
            return False
        if not self.has_bytes(entry):
            if not self._on_the_way(now, entry):
                self.actions.fetch_result(entry, holders)
            return False
        return True

    def cast_vote(self, ballot: int, entry: Entry) -> None:
        """Vote: all bytes of the entry and the state before it are stored here."""
        self.actions.keep(entry)  # first the bytes, then the vote, then the answer
        self.journal.accept(ballot, entry)
        self.remember(entry)
        self.send_vote(ballot, entry)

    def send_vote(self, ballot: int, entry: Entry) -> None:
        """Send a vote that the journal has."""
        digest = entry.hash()
        payload = vote_payload(*self.slot, ballot, digest)
        vote = m.Accepted(ballot, digest, self.actions.sign(payload))
        # a vote of ballot 0 that is sent again in a later ballot goes to all, too
        if not self.dissemination.is_relayed(max(ballot, self.ballot)):
            return self.broadcast(vote)
        for peer in dict.fromkeys([self.convener_of(0).peer, self.me.peer]):
            self.tell(peer, vote)
        return None

    def repeat_votes(self, now: float) -> None:
        """Repair loss: a vote is repeated from the journal, never from a fresh reduction, until the
        round is decided. Where others vote for an entry that did not come here, one of them may
        know it as decided by now."""
        opened = self.open
        if opened.decided:
            return
        accepted, news = self.journal.accepted, self.dissemination
        if accepted and news.is_vote_due(now, self.ballot, self.catching_up.late_after_s):
            self.send_vote(*accepted)
        for (_, entry_hash), votes in opened.votes.items():
            if entry_hash not in opened.known:
                self.catching_up.fetch(now, self.rng.choice(sorted(votes)).peer)

    # ---- 6. a decision is learnt and applied -----------------------------------------------------

    def count_vote(self, now: float, who: Member, body: m.Accepted) -> None:
        """A vote of an acceptor; a quorum of them under one ballot decides."""
        votes = self.open.votes.get((body.ballot, body.entry_hash), {})
        relayed = self.dissemination.is_relayed(max(body.ballot, self.ballot))
        collects = relayed and self.convener_of(0) == self.me
        if who not in votes:
            if who != self.me and not self.tolerated:  # there the judge has looked at it
                entry = self.open.known.get(body.entry_hash)
                if entry is not None and entry.base == self.base:
                    self._check_vote(who, who.peer, body, body.entry_hash)
                else:  # perhaps of another history: nobody can say yet whether it is signed
                    self.open.unverified.add((body.ballot, body.entry_hash, who))
            if len(self.open.voted.get(who, ())) < VOTES_KEPT:  # else one could hold up a take-over
                self.progress(now)
            self.open.note_vote(who, body.ballot, body.entry_hash, body.signature)
            votes = self.open.votes[body.ballot, body.entry_hash]
        elif collects and self.open.decided is not None:
            self.catching_up.tell_decision(now, who.peer)
        if self.open.decided is None and self.quorum(list(votes)):
            entry = self.open.known.get(body.entry_hash)
            if entry is None:
                return self.catching_up.fetch(now, who.peer)
            self._drop_unsigned(body, votes)
            if not self.quorum(list(votes)):
                return None
            certificate = tuple(
                Vote(member, body.ballot, signature) for member, signature in sorted(votes.items())
            )
            self.open.decided, self.open.decided_at = Certified(entry, certificate), now
            if collects:
                self._announce(m.QuorumVotes(body.entry_hash, certificate, True))
            self._try_apply(now)
        return None

    def _announce(self, decision: m.QuorumVotes) -> None:
        """Send the votes of a quorum to whoever passes them on, and to whom nobody else does."""
        for peer, pass_on in self.dissemination.announce_decision_to(self._unheard):
            self.tell(peer, msgspec.structs.replace(decision, pass_on=pass_on))

    def _unheard(self, peer: PeerId) -> bool:
        return self.actions.suspected(peer) or self.actions.deaf_to(peer)

    def _drop_unsigned(self, body: m.Accepted, votes: dict[Member, bytes]) -> None:
        """Of votes for one entry that came before it was known, those count that are signed."""
        payload = vote_payload(*self.slot, body.ballot, body.entry_hash)
        for who in list(votes):
            key = (body.ballot, body.entry_hash, who)
            if key in self.open.unverified:
                self.open.unverified.remove(key)
                if not self.actions.verify(who.peer, payload, votes[who]):
                    del votes[who]

    def _check_vote(
        self, who: Member, sender: PeerId, vote: m.Accepted | Vote, digest: bytes
    ) -> None:
        """Raise RemoteProtocolError, of ``sender``, unless a member has signed its vote. What makes
        a certificate for others must be true."""
        payload = vote_payload(*self.slot, vote.ballot, digest)
        if not self.actions.verify(who.peer, payload, vote.signature):
            raise RemoteProtocolError(f"a vote that {who.peer} has not signed", peer=sender)

    def _on_decided(self, now: float, who: Member, body: m.QuorumVotes) -> None:
        """The votes of a quorum, perhaps by a relay: it can withhold them, and forge none. Raises
        RemoteProtocolError.
        """
        passes = body.pass_on and self.dissemination.may_pass_decision
        if self.open.decided is not None and not passes:
            return
        voters, ballots = [vote.member for vote in body.votes], {vote.ballot for vote in body.votes}
        if len({*voters}) < len(voters) or len(ballots) != 1 or not self.quorum(voters):
            raise RemoteProtocolError("a decision without a quorum", peer=who.peer)
        for vote in body.votes:
            if vote.member not in self.journal.entries.members:
                raise RemoteProtocolError("a vote of no member", peer=who.peer)
            self._check_vote(vote.member, who.peer, vote, body.entry_hash)
        if passes:
            for peer in self.dissemination.pass_decision_to():
                if peer != who.peer:
                    self.tell(peer, msgspec.structs.replace(body, pass_on=False))
        if self.open.decided is not None:
            return
        entry = self.open.known.get(body.entry_hash)
        if entry is None:
            return self.catching_up.fetch(now, who.peer)
        self.learn(now, Certified(entry, body.votes))

    def void_votes(self) -> None:
        """The open round is sealed: what those who are removed voted for, decides nothing."""
        self.open.decided = self.open.pending = None
        self.open.votes.clear()
        self.open.voted.clear()
        self.convening.stop()

    def learn(self, now: float, certified: Certified) -> None:
        """A verified certificate of the open round."""
        ballot = certified.votes[0].ballot if certified.votes else 0
        self.raises.decided(
            certified.entry.next_config, self.convener_of(ballot) if ballot else None
        )
        self.open.decided = certified
        self.remember(certified.entry)
        self._try_apply(now)

    def _try_apply(self, now: float) -> None:
        decided = self.open.decided
        if decided is None or self.open.applying or self.stateless:
            return
        if self.has_bytes(decided.entry):
            self.open.applying = True
            self.actions.apply(decided.entry)
        elif not self._on_the_way(now, decided.entry):
            holders = [
                *(vote.member.peer for vote in decided.votes),
                *(member.peer for member in self.tail.entry.next_config),
            ]
            self.actions.fetch_result(
                decided.entry, [peer for peer in dict.fromkeys(holders) if peer != self.me.peer]
            )

    def on_applied(self, now: float) -> None:
        """The decided entry's outer step is done (its state root follows by `on_root`): the next
        round opens. Raises StorageError: then nothing has changed, and it may be called again.
        """
        decided = self.open.decided
        assert decided is not None
        assert self.open.applying
        self.journal.append(decided)
        self.round_s = now - self.open.born
        if decided.entry.contributors:
            self.turns.next(now)
        if self.open.plan is not None:
            # what stragglers took is no part of it; the last step of those who come is
            waited = self._awaited({self.me}) or self.open.closing_at is None
            since = self.open.planned_at if waited else self.open.closing_at
            self._exchanges.append(now - (since or now))
        self._note(decided)
        self.root = None
        self._open(now, self.draw)

    def on_not_applied(self) -> None:
        """The decided entry could not be applied now: `tick` asks for it again."""
        self.open.applying = False

    def on_root(self, now: float, round_: int, root: bytes) -> None:
        """Merkle root of the state before round ``round_``."""
        if round_ == self.round:
            self.root = root
            self._bytes_arrived(now)

    def adopt_snapshot(self, now: float, skipped: Sequence[Certified], root: bytes) -> None:
        """The state after the last of ``skipped`` was installed: take over the entries; they tell
        which cids were counted. Raises StorageError: call it again then, with those that are left.
        """
        for certified in skipped:
            self.journal.append(certified)
            self._note(certified)
        self.ahead = [c for c in self.frontier if c.entry.round >= self.round]
        self.root, self.stateless = root, False
        self._open(now, self.draw)

    def _note(self, certified: Certified) -> None:
        """Tell the session about a decided entry and whether the own frozen contribution is counted
        in it.
        """
        counted = self.contribution is not None and certified.entry.counts(
            self.me.peer, self.contribution[0]
        )
        self.unsettled = False
        self.recovery.heard_of.entry(certified)
        each = self.shape.numel / self.shape.chunk_elements
        nbytes = (each * self._chunk_bytes[0], each * self._chunk_bytes[1])
        self.thin.decided(certified.entry, self.open.ready, nbytes, self.round_s)
        self.actions.decided(certified, counted)
        self.leavers &= set(certified.entry.next_config)
        if certified.entry.contributors:
            # counted or not, the contribution's round is over: the script re-bases what was not
            # counted. Where only the configuration changed, it stands on the same anchor and is
            # offered again.
            self.contribution = None

    def _advance(self, now: float) -> None:
        """Go on with verified entries that follow the open round."""
        while self.ahead and self.ahead[0].entry.round < self.round:
            self.ahead.pop(0)
        if self.ahead and not self.open.decided:
            return self.learn(now, self.ahead.pop(0))
        return self._try_apply(now)

    def drop_ahead(self, from_round: int) -> None:
        """Forget verified entries that are not applied, from this round on."""
        self.ahead = [c for c in self.ahead if c.entry.round < from_round]

    # ---- 7. another ballot is tried --------------------------------------------------------------

    def convene(self, now: float) -> None:
        """Let the convener go on: something that it waits for may have come."""
        self.convening.step(now)

    def _consider_takeover(self, now: float) -> None:
        # nobody else can use ballot 0 where its owner has forgotten what it did in it
        spent = self.ballot == 0 and self.journal.restarted and self.convener_of(0) == self.me
        if self.open.decided or self.acceptor.ahead:
            return
        owner = self.convener_of(self.ballot)
        suspected = owner != self.me and self.silent(owner)
        if not self.engaged:
            if (spent or suspected) and self.convening.wants_entry(now):
                if spent:
                    # nobody else has anything to do: the own next one
                    self.enter(now, len(self.config))
                else:
                    # one that lives has been asked itself, and may have a reason to refuse
                    self.next_ballot(now)
            return
        patience_s = self.timing.takeover_s * min(8.0, 1 + self.ballot / 2) * (
            2 if self.convening.active else 1
        ) + max(4 * patience.rtt_s(self.actions.pace()), self.silence_s(self.others))
        if spent:
            patience_s = 0.0
        elif self.open.plan is not None:
            patience_s += 2 * self.bulk_s + self.stuck_s() - self.timing.revise_s
        elif self.ballot == 0:
            patience_s += self.timing.grace(self.round_s, open_s=self.open.first_after_s)
        if self.raises.restless(owner) and owner != self.me:
            patience_s = min(patience_s, self._still_s)
        since = max(self.open.progress_at, self.open.ripe_at or self.open.progress_at)
        if (
            now - since <= patience_s
            and not suspected
            and not self.acceptor.overdue(now, patience_s)
        ):
            return
        waits = self.waits_for_offers or (self.shape.whole and self.gathering)
        if waits and not suspected and not self.convening.wants_entry(now):
            return  # another convener could do no more
        self.next_ballot(now)

    def next_ballot(self, now: float, *, aside: bool = False) -> None:
        """Move on to the next ballot whose owner is not suspected. Where the present owner lives
        and only this member does not listen to it, move on to the own next ballot, since nobody
        else need give up the present one. ``aside``: the own contribution is not offered in it."""
        ballot = max(self.ballot, self.journal.promised) + 1
        convener = self.convener_of(self.ballot)
        alone = not self.tolerated and self.silent(convener) and not self.lost(convener)
        for _ in self.config:
            owner = self.convener_of(ballot)
            if owner == self.me or not (alone or self.silent(owner)):
                break
            ballot += 1
        # peers can push the ballot number up; beyond LAST_BALLOT our messages would be invalid
        if ballot <= LAST_BALLOT:
            self.enter(now, ballot, aside=aside)

    def _heeds(self, now: float, who: Member, ballot: int) -> bool:
        """Whether to follow a member into a ballot that it owns: none before a promised one, and
        none that no honest member can have come to, or there were no ballots left. Raises
        RemoteProtocolError for raises that are faster than any clock.
        """
        newest = max(self.ballot, self.journal.promised)
        if ballot > newest + FAR_BALLOTS:
            return False
        if ballot <= newest or who == self.me:
            return ballot >= self.journal.promised
        if ballot > self.open.begun.get(who, 0):
            self.open.begun[who] = ballot
            self._note_news(now, who, self.open.raised, "ballots")
        if self.raises.restless(who) and not self._stands_still(now):
            return False
        self.raises.note(who)
        return True

    def _stands_still(self, now: float) -> bool:
        """Whether nothing has come of the present ballot for a while that is shorter than what
        ballots have, or its convener is not heard."""
        if self.silent(self.convener_of(self.ballot)):
            return True
        return self.engaged and now - self.open.progress_at > self._still_s

    @property
    def _still_s(self) -> float:
        moves_s = self.stuck_s() if self.open.plan is not None else 0.0
        return max(self.timing.takeover_s, moves_s)

    def _note_news(self, now: float, who: Member, used: dict[Member, float], kind: str) -> None:
        """Raises RemoteProtocolError where a member says other things than before, of one kind,
        faster than honest ones come to any."""
        takes_s = self.timing.takeover_s
        since = max(used.get(who, -inf), now - MOST_NEWS * takes_s)
        if since > now:
            raise RemoteProtocolError(f"{kind} faster than any clock", peer=who.peer)
        used[who] = since + takes_s

    def enter(self, now: float, ballot: int, *, aside: bool = False) -> None:
        """Be in this ballot from now on."""
        self.ballot = ballot
        self.open.progress_at = now
        if self.convener_of(ballot) == self.me:
            self.convening.begin(now, ballot)
        else:
            self.convening.stop()
            self.open.aside = ballot if aside else -1
            self._send_ready()
        self.acceptor.entered(now)

    # ---- 8. catching up --------------------------------------------------------------------------

    def _on_catch(self, now: float, peer: PeerId, body: m.Catch) -> None:
        """Entries that follow the newest one known are verified and kept; more of them are asked
        for. Raises RemoteProtocolError.
        """
        fresh = self.catching_up.verified(peer, body)
        if fresh:
            self.recovery.on_entries(fresh)
            self.ahead.extend(fresh)
            if body.head > fresh[-1].entry.round + 1:
                self.catching_up.fetch(now, peer, more=True)

    # ---- a start from what an earlier process left -----------------------------------------------

    def renew(self, now: float) -> None:
        """Go on as another member, which has voted for nothing yet, unless the life that is
        forgotten was renewed, too: others are asked again. Raises StorageError: then it is tried
        again.
        """
        incarnation = self.recovery.forgotten
        self.journal.renew(incarnation)
        self.me, self.renewed = Member(self.me.peer, incarnation), True
        self.recovery.ask_again(now)
        self.open.pending = None
        self.convening.stop()

    def take_renewed(self) -> bool:
        """Whether it has gone on as another member since this was last asked."""
        renewed, self.renewed = self.renewed, False
        return renewed


def _count(spans: m.Spans) -> int:
    return sum(stop - first for first, stop in spans)

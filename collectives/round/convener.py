"""The convener's side of one open round: collect, plan, revise, propose. Sans I/O; owned by a
RoundMachine.

A ballot has one owner whatever anybody thinks of its health. What the convener voted is the only
thing it may send in its ballot.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from .. import messages as m
from ..bounds import owners_for
from ..group import (
    BUTTERFLY,
    MAX_STAR,
    Config,
    Contributor,
    Entry,
    Member,
    Part,
    Plan,
)
from ..identifiers import PeerId
from ..partition import comparable, parts_for, single, slots_for
from ..terms import SumTree
from .acceptor import Acceptor
from .patience import rate
from .routes import broken_by, held_up_by, plan_trees, topology_of

if TYPE_CHECKING:
    from .machine import RoundMachine

JOINS_KNOCKS = 2  # times `Timing.fetch_s`: all who ask to be let in have asked within it
REPEAT_S = 0.5  # how often everybody hears the plan again
LATE = 2.0  # times the transfer at the announced rates: then somebody is slower than it said


class Phase(Enum):
    """What the convener of a ballot waits for."""

    OFF = "not convening"
    PREPARE = "promises of a quorum"
    ADOPT = "the bytes of a value accepted in an earlier ballot"
    READY = "contributions"
    REDUCE = "the reduced bytes of the plan"
    ACCEPT = "votes"


class Convener:
    """Convener state of the open round, volatile: after a restart it resends its vote or never uses
    that ballot again.
    """

    def __init__(self, view: RoundMachine, acceptor: Acceptor) -> None:
        self.view, self.acceptor = view, acceptor
        self.phase = Phase.OFF
        self.ballot = 0
        self.revision = self.before = -1  # the newest, and that before the present ballot
        self.promises: dict[Member, m.Promise] = {}
        self.entry: Entry | None = None
        self._joins_at: float | None = None  # since when somebody asks to be let in
        self.plan: Plan | None = None
        self.began_at = self.planned_at = 0.0
        self.lost: set[bytes] = set()  # cids that owners could not get
        self.slow: set[PeerId] = set()  # who lives, but is given no part
        # Members that live, and of which one contribution did not come; and those of which two did.
        self.owing, self.barred = set[Member](), set[Member]()
        self.due_at = 0.0  # when all bytes of the plan should be here
        self.stalls = 0  # how often a plan was late and nobody to blame
        self.asking: set[Member] = set()  # who said Ready since the plan was last sent
        self.repeated_at = 0.0  # when the plan was last sent to all
        self.trees: tuple[SumTree, ...] = ()  # of the plan, where it has partial sums
        self.star = False  # a tree was held up and nobody was to blame: the next plan has none
        # Cids of the plan whose members were silent at the last look.
        self.silent: set[bytes] = set()
        # Owner (or who else adds up) -> cids it reports missing under the present plan.
        self.missing: dict[PeerId, set[bytes]] = {}
        self.reported_at: dict[PeerId, float] = {}

    @property
    def active(self) -> bool:
        """Whether this member convenes a ballot."""
        return self.phase is not Phase.OFF

    def begin(self, now: float, ballot: int) -> None:
        """Convene a ballot that this member owns."""
        view, accepted = self.view, self.view.journal.accepted
        self.stop()
        self.ballot, self.began_at, self.before = ballot, now, self.revision
        if accepted and accepted[0] == ballot:
            self.phase, self.entry = Phase.ACCEPT, accepted[1]
        elif ballot >= view.journal.promised:
            self.phase, self.promises = (Phase.READY if ballot == 0 else Phase.PREPARE), {}
            self.repeat(now)

    def stop(self) -> None:
        """Convene no more; a later ballot may."""
        self.phase, self.plan, self.entry = Phase.OFF, None, None
        self.lost, self.slow, self.silent = set(), set(), set()
        self.owing, self.barred = set(), set()
        self.missing, self.reported_at = {}, {}
        self.trees, self.star, self.stalls = (), False, 0

    def step(self, now: float) -> None:
        """Go on as far as what is known allows."""
        view = self.view
        if view.open.decided or not view.may_act or view.sealed:
            return
        if not self.active:
            fresh = view.ballot == 0 and view.journal.promised <= 0 and not view.journal.restarted
            if fresh and view.journal.accepted is None and view.convener_of(0) == view.me:
                self.begin(now, 0)
        elif view.journal.promised > self.ballot:
            return self.stop()
        if self.phase is Phase.PREPARE:
            self._collect_promises(now)
        # a vote says: I hold the state before
        if self.phase is Phase.ADOPT and self.entry is not None and view.root is not None:
            if view.has_bytes(self.entry):
                self._propose(now, self.entry)
            else:
                view.actions.fetch_result(self.entry, self._holders(self.entry))
        if self.phase is Phase.READY:
            self._consider_plan(now)
        if self.phase is Phase.REDUCE:
            self._consider_proposal(now)
        return None

    def repeat(self, now: float) -> None:
        """Repair loss: say again what the others may not have heard, and revise a plan that does
        not come on.
        """
        view = self.view
        if self.phase is Phase.PREPARE:
            for member in view.config:
                if member not in self.promises:
                    self._tell(member.peer, m.Prepare(self.ballot))
        elif self.phase is Phase.REDUCE and self.plan:
            self._consider_revision(now)
            if self.plan and self.phase is Phase.REDUCE:
                self._repeat_plan(now, self.plan)
        elif self.phase is Phase.ACCEPT and self.entry:
            self._repeat_accept(now, self.entry)

    @property
    def _is_relayed(self) -> bool:
        """True if all votes of the present ballot come here, and to nobody else."""
        return self.view.dissemination.is_relayed(self.view.ballot)

    def _repeat_accept(self, now: float, entry: Entry) -> None:
        """Where there are relays all votes come here: who has voted need not hear it again."""
        if not self._is_relayed:
            return self._broadcast(m.Accept(self.ballot, entry))
        if now - self.repeated_at < REPEAT_S:
            return None
        self.repeated_at = now
        voted = self.view.open.votes.get((self.ballot, entry.hash()), {})
        for member in self.view.config:
            if member not in voted:
                self._tell(member.peer, m.Accept(self.ballot, entry))
        return None

    def _repeat_plan(self, now: float, plan: Plan) -> None:
        """To those who show that they may not have it, and now and then to all. Whoever has a
        contribution and no plan says so again and again.
        """
        due = now - self.repeated_at >= REPEAT_S
        if self._is_relayed and not due:
            return  # of many, too many ask while the plan is still on its way
        # an older plan leaves its holder silent
        everybody = due or (plan.ballot, plan.revision) != (0, 0)
        for who in self.view.config:
            if everybody or who in self.asking or who not in self.view.open.ready:
                self._tell(who.peer, self._told(plan))
        self.asking.clear()
        if everybody:
            self.repeated_at = now

    # ---- inputs
    def on_ready(self, who: Member) -> None:
        """A member says Ready, perhaps since it knows no plan."""
        self.asking.add(who)

    def on_promise(self, now: float, who: Member, promise: m.Promise) -> None:
        """An acceptor's answer to Prepare."""
        if self.phase is Phase.PREPARE and promise.ballot == self.ballot:
            if promise.accepted:
                self.view.remember(promise.accepted.entry)
            self.promises[who] = promise
        self.step(now)

    def on_missing(self, now: float, who: Member, body: m.Missing) -> None:
        """An owner lives, and these cids have not fully arrived there."""
        if self.plan and body.plan_id == self.plan.plan_id:
            self.reported_at[who.peer] = now
            self.missing[who.peer] = {cid for cid, _ in body.lacking}
            current = (
                self.phase is Phase.REDUCE
                and not self.view.open.decided
                and self.view.journal.promised <= self.ballot
            )
            if current and not self.silent.isdisjoint(self.missing[who.peer]):
                self._consider_revision(now)

    def on_disputed(self, now: float, who: Member, body: m.Disputed) -> None:
        """An owner does not use a partial sum: contributions come to it one by one, under a plan
        without any.
        """
        if (
            self.view.disputes.note(who.peer, body, self.view.open.plan, self.view.round)
            and self.phase is Phase.REDUCE
            and self.plan
            and self.plan.plan_id == body.plan_id
        ):
            self.star = True
            self._new_plan(now, list(self.plan.contributors))

    def on_own_report(self, missing: dict[bytes, m.Spans]) -> None:
        """What this member itself, as an owner, still misses."""
        if self.plan:
            self.missing[self.view.me.peer] = set(missing)

    def bulk_progress(self, now: float) -> None:
        """New bytes of the plan arrived: it is not stuck."""
        self.planned_at = now

    # ---- prepare
    def _collect_promises(self, now: float) -> None:
        view = self.view
        if not view.quorum(list(self.promises)):
            return
        awaited = [who for who in view.config if who not in self.promises and not view.silent(who)]
        accepted = [p.accepted for p in self.promises.values() if p.accepted]
        false = [view.actions.own_results.contradicts(each.entry) for each in accepted]
        if None in false:
            return None  # what they have voted for is made here meanwhile
        accepted = [each for each, wrong in zip(accepted, false, strict=True) if not wrong]
        newest = max(accepted, key=lambda a: a.ballot).entry if accepted else None
        if newest is not None and view.entrance.objection(newest):
            if self._never_chosen(newest):
                newest = None
            elif awaited and now - self.began_at < view.timing.detect_s:
                return None  # they may tell that it was not
        if newest is not None:
            self.phase, self.entry = Phase.ADOPT, newest
        else:
            self.phase, self.began_at = Phase.READY, now

    def _never_chosen(self, newest: Entry) -> bool:
        """Whether the entry that was accepted under the highest ballot is decided nowhere: those
        who may have voted for it, having said so or nothing, are no quorum. Then nothing is
        decided, and this convener is free."""
        return not self.view.quorum(
            [
                who
                for who in self.view.config
                if (promise := self.promises.get(who)) is None
                or (promise.accepted is not None and promise.accepted.entry == newest)
            ]
        )

    def _holders(self, entry: Entry) -> list[PeerId]:
        return [
            who.peer
            for who, promise in self.promises.items()
            if promise.accepted is not None
            and promise.accepted.entry == entry
            and who != self.view.me
        ]

    # ---- plan
    def _consider_plan(self, now: float) -> None:
        view = self.view
        if self.ballot > 0 and view.open.reduced:
            # An earlier plan's bytes are all here: as honest as new ones.
            return self._propose_reduced(now, *view.open.reduced)
        view.look(now)
        offers = self._reading(view.offers())
        out = view.thin.out if view.does_without(offers) else frozenset[Member]()
        if self.ballot == 0 and view.me in out:
            # the result comes over a thin link, and a convener votes first
            return view.next_ballot(now, aside=True)
        awaited = [
            member
            for member in view.draw.members
            if self.acceptor.awaits(member) and not view.silent(member) and member not in out
        ]
        in_vain = self.ballot > 0 and view.hopeless  # they were planned, and do not come
        if not view.enough(offers) or view.gathering or in_vain:
            # nobody waits for a round to be let in or out, or to learn the end of what was lost
            if self.wants_entry(now) and not self._gathers_joiners(now):
                self._propose_empty(now)
            return None
        if (
            not awaited
            or view.open.ripe_at is not None
            or (
                view.turn_is_over(now)
                and self._grace_is_over(now, view.silence_s([member.peer for member in awaited]))
            )
        ):
            self._new_plan(now, offers)
        return None

    def _reading(self, offers: list[Contributor]) -> list[Contributor]:
        """Without those whose members would not read the plan in time, or have thin links and are
        not due, unless too few are left.
        Where members may lie, what was shown to all is left out by what all can see only."""
        view = self.view
        reading = [offer for offer in offers if not view.actions.unread(offer.member.peer)]
        if view.tolerated or not view.enough(reading):
            return offers
        if view.does_without(reading):
            return [offer for offer in reading if offer.member not in view.thin.out]
        return reading

    def _grace_is_over(self, now: float, lossy_s: float) -> bool:
        """Whether those that have said nothing yet were waited for: in ballot 0, or where its
        convener was given up before it could. ``lossy_s``: for so long they may be silent for lost
        packets."""
        timing, opened = self.view.timing, self.view.open
        first = opened.closing_at or opened.first_ready_at
        again = max(timing.grace(self.view.round_s, self.ballot), lossy_s)
        # what was offered in ballot 0, only its convener knows
        if self.view.dissemination.is_large:
            again = max(again, self.view.silent_s(2))
        if self.ballot > 0 and now - self.began_at <= again:
            return False
        waited = self.ballot > 0 and (opened.plan is not None or first is None)
        if waited or first is None:
            return waited
        grace = max(timing.grace(self.view.round_s, open_s=opened.first_after_s), lossy_s)
        return now - first > grace

    def _new_plan(self, now: float, offers: list[Contributor]) -> None:
        view, shape = self.view, self.view.shape
        self.revision += 1
        ready = view.open.ready
        able = [c.member for c in offers] + self._helpers()
        rates = comparable([(ready[member].up, ready[member].down) for member in able])
        rates = owners_for(rates, view.round)
        owners = [
            (member.peer, 0.0 if member.peer in self.slow else rate)
            for member, rate in zip(able, rates, strict=True)
        ]
        if shape.single:
            owners = single(owners, view.organiser)
        chunks = -(-shape.numel // shape.chunk_elements)
        slots = (
            slots_for(chunks, [m.peer for m in view.config], [c.member.peer for c in offers])
            if shape.reducer == "gather"
            else None
        )
        plan = Plan(
            view.log,
            view.round,
            self.ballot,
            self.revision,
            view.base,
            tuple(offers),
            slots
            or parts_for(
                shape.numel / shape.chunk_elements, owners, self._fair_share(chunks, len(offers))
            ),
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            shape.reducer,
            BUTTERFLY
            if self.star
            else topology_of(shape.topology, offers, ready, view.disputes.peers(view.round)),
        )
        self._carry_out(now, plan)

    def _carry_out(self, now: float, plan: Plan) -> None:
        """A plan of the newest revision, from now on."""
        self.plan, self.trees = plan, plan_trees(plan)
        self.phase, self.planned_at = Phase.REDUCE, now
        self.due_at = now + self.view.stuck_s() + LATE * self.view.transfer_s(plan)
        self.missing, self.reported_at = {}, {}
        self.asking, self.repeated_at = set(), now
        self._broadcast(self._told(plan))

    def _fair_share(self, chunks: int, contributors: int) -> int | None:
        """How many chunks one member may own; None where any number."""
        return None

    def _told(self, plan: Plan) -> m.PlanMessage | m.PacedPlan:
        ready = self.view.open.ready
        if not self._is_relayed:
            return m.PlanMessage(plan)
        offers = [ready[c.member] for c in plan.contributors if c.member in ready]
        return m.PacedPlan(plan, min(map(rate, offers), default=0))

    def _helpers(self) -> list[Member]:
        """Members that own parts though they contribute nothing: of a star, since other trees go by
        contributors.
        """
        view, shape = self.view, self.view.shape
        if shape.single or shape.reducer == "gather" or shape.topology != "butterfly":
            return []
        there = [
            member
            for member, ready in view.open.ready.items()
            if ready.cid is None and member in view.journal.entries.members
        ]
        return sorted(
            member
            for member in there
            if view.actions.helps(member.peer) and not view.silent(member)
        )

    def _consider_revision(self, now: float) -> None:
        """Only the convener changes the set, and always for all parts."""
        plan, view = self.plan, self.view
        assert plan is not None
        if view.open.reduced and view.open.reduced[0] == plan:
            return
        self.silent = silent = {c.cid for c in plan.contributors if view.lost(c.member)}
        own = {view.contribution[0]} if view.contribution else set[bytes]()
        # It held NaN, say: it will never come.
        refused = {c.cid for c in plan.contributors if c.member == view.me} - own
        gone = silent & set[bytes]().union(*held_up_by(plan, self.trees, self._waiting()).values())
        cut = broken_by(plan, view.open, view.actions.suspected)
        late = now > self.due_at or now - self.planned_at > (1 + self.stalls) * view.stuck_s()
        if not (gone or refused or cut or late):
            return
        # of others that are silent all has come so far: they may be but slow to be heard
        if (gone or cut) and not self.trees:
            silent = gone | {c.cid for c in plan.contributors if c.member.peer in cut}
        self._revise(now, plan, silent | refused, late)

    def _revise(self, now: float, plan: Plan, lost: set[bytes], late: bool) -> None:
        view = self.view
        self.lost |= lost
        before = self.lost.copy()
        if late and self._blame(now, plan):  # else what is missing of the living is on its way
            mine = view.contribution[0] if view.contribution else b""
            return view.next_ballot(now, aside=mine in self.lost)
        # who keeps back what it announced may announce another thing each time
        owe = {c.member for c in plan.contributors if c.cid in self.lost - before} - {view.me}
        self.barred, self.owing = self.barred | (owe & self.owing), self.owing | owe
        offers = [
            c for c in view.offers() if c.cid not in self.lost and c.member not in self.barred
        ]
        keep = self._reading(offers)
        self.slow |= {part.owner for part in plan.parts if view.actions.suspected(part.owner)}
        if (
            not view.enough(keep)
            or self.revision - self.before > len(view.config) + 2
            or self.stalls > len(view.config)
        ):
            return view.next_ballot(now)
        if tuple(keep) == plan.contributors and not self.slow & {part.owner for part in plan.parts}:
            self.planned_at, self.stalls = now, self.stalls + 1
            self.due_at = now + (1 + self.stalls) * (view.stuck_s() + view.transfer_s(plan))
            if not self.trees:
                return None
            if len(keep) > MAX_STAR:  # no star bears so many
                return view.next_ballot(now)
            self.star = True
        return self._new_plan(now, keep)

    def _blame(self, now: float, plan: Plan) -> bool:
        """Leave out who holds up the others, though it lives. True when that is us: most have what
        they need, and it does not come here.

        An owner that misses most contributions is slow itself: it is replaced, and the
        contributions stay. Where all are behind alike, nobody is to blame. A contribution that has
        not come is left out, and its member owns nothing any more; where it is ours, the next
        ballot is planned without it. What an owner lacked that has not been heard for a while, and
        may be dying, is held against nobody.
        """
        view, me = self.view, self.view.me.peer
        owners = {part.owner for part in plan.parts if not view.actions.suspected(part.owner)}
        since = now - view.timing.detect_s / 2
        waiting = {
            peer: cids
            for peer, cids in self._waiting().items()
            if peer == me or self.reported_at.get(peer, -1e9) > since
        }
        others = {
            owner: {c.cid for c in plan.contributors if c.member.peer != owner} for owner in owners
        }
        behind = {owner: waiting.get(owner, set()) & cids for owner, cids in others.items()}
        short = {owner for owner, cids in behind.items() if 2 * len(cids) > len(others[owner])}
        silent = {
            part.owner
            for part in plan.parts
            if part.owner in owners - {me}
            and now - self.reported_at.get(part.owner, -1e9) > view.timing.detect_s
            and self._part_lacks(part)
        }
        if self.trees:
            late = set[bytes]().union(*held_up_by(plan, self.trees, self._waiting()).values())
            late |= {c.cid for c in plan.contributors if c.member.peer in silent}
            self.lost |= late if 2 * len(late) <= len(plan.contributors) else set()
            return False
        if len(silent) > 1 and 2 * len(silent) > len(owners - {me}):
            return True
        if short and short | silent == owners:
            return False
        late = {cid for owner, cids in behind.items() if owner not in short for cid in cids}
        self.lost |= late
        self.slow |= short | silent | {c.member.peer for c in plan.contributors if c.cid in late}
        if view.contribution and view.contribution[0] in late:
            return True  # nor would the results come here
        if not owners - self.slow:
            self.lost |= {c.cid for c in plan.contributors if c.member.peer in silent}
        return False

    def _waiting(self) -> dict[PeerId, set[bytes]]:
        """By owner of parts, the contributions that it lacked by its last report. Nobody waits for
        what a dead member lacked, nor for what one lacked that is not listened to: it may have
        come to all others."""
        return {
            peer: cids
            for peer, cids in self.missing.items()
            if not self.view.actions.suspected(peer) and not self.view.actions.deaf_to(peer)
        }

    def _part_lacks(self, part: Part) -> bool:
        return self.view.open.lacking_of(part.owner)

    # ---- propose
    def _consider_proposal(self, now: float) -> None:
        reduced = self.view.open.reduced
        if reduced and reduced[0] == self.plan:
            self._propose_reduced(now, *reduced)

    def _propose_reduced(self, now: float, plan: Plan, digests: tuple[bytes, ...]) -> None:
        view = self.view
        if view.root is None:
            return  # the state root is still being hashed (`on_root` steps again)
        config = self._next_config(now, {c.member for c in plan.contributors})
        admitted, tally = view.entrance.stated(now, config)
        entry = Entry(
            view.log,
            view.round,
            view.base,
            view.root,
            plan.contributors,
            plan.parts,
            digests,
            plan.numel,
            plan.chunk_elements,
            plan.codec,
            plan.reducer,
            config,
            plan.topology,
            view.elapsed_s(now),
            admitted,
            tally,
            view.entrance.spent_words(),
        )
        self._propose(now, entry)

    def _propose_empty(self, now: float) -> None:
        """An entry without contributors: it changes the configuration, if anything."""
        view, shape = self.view, self.view.shape
        if view.root is None:
            return
        config = self._next_config(now, set())
        admitted, tally = view.entrance.stated(now, config)
        entry = Entry(
            view.log,
            view.round,
            view.base,
            view.root,
            (),
            (),
            (),
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            shape.reducer,
            config,
            elapsed_s=view.elapsed_s(now),
            admitted=admitted,
            tally=tally,
            spent=view.entrance.spent_words(),
        )
        self._propose(now, entry)

    def _propose(self, now: float, entry: Entry) -> None:
        view = self.view
        if self.ballot < view.journal.promised or view.root != entry.base_state:
            return self.stop()
        if (self.phase is Phase.ADOPT or view.may_end(self.ballot, entry)) and view.may_vote(
            self.ballot, entry
        ):
            # The convener votes first, but for another draw that is not adopted.
            self.acceptor.cast(now, self.ballot, entry)
        self.phase, self.entry, self.repeated_at = Phase.ACCEPT, entry, now
        self._broadcast(m.Accept(self.ballot, entry))
        return None

    # ---- the next configuration
    def _joiners(self, now: float) -> list[Member]:
        """Peers that the next configuration may have besides those that stay."""
        return self.view.entrance.to_admit(now)

    def wants_entry(self, now: float) -> bool:
        """Whether an entry only to change the configuration is wanted, as far as is known."""
        view, ready = self.view, self.view.open.ready
        leaves = len(view.config) > 1 and any(offer.leave for offer in ready.values())
        settle = (view.draw.whole or view.hopeless) and any(
            offer.settle for offer in ready.values()
        )
        asked = bool(self._joiners(now) or view.entrance.guests(now))
        return leaves or settle or asked or view.entrance.ends_by_words or self._may_evict(now)

    def _may_evict(self, now: float) -> bool:
        """Whether an entry is worth its while only because it does without members that stay away:
        where few entries come, nothing else would, and one more that dies takes the majority along.
        Without a quorum of those who live it would stay open, and wait for the same members.
        """
        view = self.view
        if not view.timing.evict_s or not any(view.evictable(now, who) for who in view.config):
            return False
        if not view.quorum([who for who in view.config if not view.lost(who)]):
            return False
        return len(self._without_lost(now, view.config, set())) < len(view.config)

    def _gathers_joiners(self, now: float) -> bool:
        """Whether others that ask to be let in are waited for: where one does, many may, and an
        entry of a large configuration costs each of its members a message that names them all.
        """
        asked = self._joiners(now) or self.view.entrance.guests(now)
        if not self.view.dissemination.is_large or not asked:
            return False
        self._joins_at = now if self._joins_at is None else self._joins_at
        return now - self._joins_at < JOINS_KNOCKS * self.view.timing.fetch_s

    def _next_config(self, now: float, contributing: set[Member]) -> Config:
        """Leavers go, the silent are evicted, joiners come: at most max(1, staying - 1), so that
        those who know the log decide.
        """
        view = self.view
        leaving = {who for who, ready in view.open.ready.items() if ready.leave} | view.removed
        staying = [member for member in view.config if member not in leaving] or self._last_one()
        staying = self._without_lost(now, staying, contributing)
        joiners = self._joiners(now)
        retired = view.entrance.retired_by(joiners)
        replaced = [member for member in staying if member.peer in retired]
        staying = [member for member in staying if member.peer not in retired]
        room = max(1, len(staying) - 1) + len(replaced)
        for joiner in joiners:
            older = [member for member in staying if member.peer == joiner.peer]
            if older and older[0].incarnation > joiner.incarnation:
                continue
            if older:
                staying.remove(older[0])  # a new incarnation replaces the old one and takes no room
            elif room == 0:
                continue
            else:
                room -= 1
            staying.append(joiner)
        return tuple(sorted(staying))

    def _without_lost(
        self, now: float, members: Sequence[Member], contributing: set[Member]
    ) -> list[Member]:
        """These members but those who are evicted now: never below three, unless the organiser's
        is one of those that stay.
        """
        view, staying = self.view, list(members)
        organiser_stays = any(who.peer == view.organiser and view.heard(who) for who in staying)
        floor = 1 if organiser_stays else 3
        for member in members:
            others = member not in contributing and member != view.me
            if others and view.evictable(now, member) and len(staying) > floor:
                staying.remove(member)
        return staying

    def _last_one(self) -> list[Member]:
        """Where all leave, one keeps the log: the organiser's member, else the convener."""
        organiser = [member for member in self.view.config if member.peer == self.view.organiser]
        return organiser or [self.view.me]

    def _broadcast(self, body: m.Body) -> None:
        for member in self.view.config:
            self._tell(member.peer, body)

    def _tell(self, peer: PeerId, body: m.Body) -> None:
        self.view.actions.send(peer, self.view.log, self.view.round, body)

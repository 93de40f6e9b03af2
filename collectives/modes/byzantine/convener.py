"""The convener's side of a round under members that lie: docs/internals/protocol/byzantine.md. It
shows why its proposal is one that it may make.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from ... import messages as m
from ...digest import meaning
from ...group import Cid, Config, Contributor, Entry, Member, Plan, Vote
from ...identifiers import PeerId
from ...partition import fair_share
from ...round.convener import Convener, Phase
from ...round.patience import PULLS_ALL_BUT
from ...witnesses import stated_by
from .acceptor import ByzantineAcceptor
from .blame import Blame
from .missums import SumDispute, dispute, disputed_parts, owned_by_others
from .signed import slot_payload

if TYPE_CHECKING:
    from ...round.machine import RoundMachine

# times detect_s: so long the bytes of a pledged value may take, where the other pledges are a
# quorum
PUT_ASIDE = 2.0


class ByzantineConvener(Convener):
    """Volatile: an honest convener echoes what it proposes first, and that is in its journal. After
    a restart it never uses that ballot again.
    """

    def __init__(self, view: RoundMachine, acceptor: ByzantineAcceptor, blamed: Blame) -> None:
        """``blamed``: of the log, over rounds."""
        super().__init__(view, acceptor)
        self.blamed = blamed
        self.voter, self.judge = acceptor, acceptor.judge
        self.pledges: dict[Member, tuple[m.Pledged, m.Pledge]] = {}
        self._reasons: tuple[tuple[m.Pledged, ...], tuple[Vote, ...]] = (), ()
        self._proposal: m.Propose | None = None
        self._adopting_since = 0.0
        self._accused: dict[Cid, set[PeerId]] = {}  # who has reported a contribution missing

    # ---- a ballot
    def begin(self, now: float, ballot: int) -> None:
        """Convene a ballot that this member owns."""
        self.stop()
        self.ballot, self.began_at, self.before = ballot, now, self.revision
        self.pledges, self._reasons, self._proposal = {}, ((), ()), None
        self._accused = {}
        echoed = self.view.journal.echoed
        if ballot >= self.view.journal.promised and (echoed is None or echoed[0] < ballot):
            self.phase = Phase.READY if ballot == 0 else Phase.PREPARE
            self.repeat(now)

    def step(self, now: float) -> None:
        """Go on as far as what is known allows."""
        aside = (
            self.phase is Phase.ADOPT
            and now - self._adopting_since > PUT_ASIDE * self.view.timing.detect_s
        )
        if aside and self.entry is not None and not self.view.has_bytes(self.entry):
            rest = {
                who: pledge
                for who, pledge in self.pledges.items()
                if pledge[0].entry_hash != self.entry.hash()
            }
            if self.view.quorum(list(rest)):
                self.phase, self.pledges = Phase.PREPARE, rest
        super().step(now)

    def repeat(self, now: float) -> None:
        """Repair loss: say again what the others may not have heard."""
        if self.phase is Phase.PREPARE:
            for member in self.view.config:
                if member not in self.pledges:
                    self._tell(member.peer, m.Prepare(self.ballot))
        elif self.phase is Phase.ACCEPT and self._proposal is not None:
            echoed = self.voter.echoes.get((self.ballot, self._proposal.entry.hash()), {})
            for member in self.view.config:
                if member not in echoed:
                    self._tell(member.peer, self._proposal)
        else:
            super().repeat(now)

    def on_pledge(self, now: float, pledged: m.Pledged, body: m.Pledge) -> None:
        """A verified answer to Prepare."""
        if self.phase is Phase.PREPARE and body.ballot == self.ballot:
            self.pledges[pledged.member] = (pledged, body)
        self.step(now)

    def _collect_promises(self, now: float) -> None:
        if not self.view.quorum(list(self.pledges)):
            return
        shown = [pledged for pledged, _ in self.pledges.values()]
        _, body = max(
            self.pledges.values(), key=lambda pledge: (pledge[0].ballot, pledge[0].entry_hash)
        )
        if body.accepted is None:
            self._reasons = tuple(shown), ()
            self.phase, self.began_at = Phase.READY, now
            return
        self._reasons, self._adopting_since = (tuple(shown), body.proof), now
        self.view.remember(body.accepted.entry)
        self.phase, self.entry = Phase.ADOPT, body.accepted.entry

    def _holders(self, entry: Entry) -> list[PeerId]:
        digest = entry.hash()
        named = [
            who.peer for who, (pledged, _) in self.pledges.items() if pledged.entry_hash == digest
        ]
        return [
            peer for peer in dict.fromkeys((*named, *self.view.others)) if peer != self.view.me.peer
        ]

    # ---- plans
    def _new_plan(self, now: float, offers: list[Contributor]) -> None:
        """Peers that have held up reductions of this log before own no part. Contributions of those
        that kept theirs back are not planned, where others are enough; where a tree was held up,
        there is none.
        """
        view = self.view
        self.slow |= self.blamed.owners.shunned(view.round, view.tolerated)
        self.star |= self.blamed.no_tree(view.round)
        shunned = self.blamed.givers.shunned(view.round, view.tolerated) - {view.me.peer}
        rest = [c for c in offers if c.member.peer not in shunned]
        if view.enough(rest):
            self.lost |= {c.cid for c in offers if c not in rest}
            offers = rest
        super()._new_plan(now, offers)

    def _fair_share(self, chunks: int, contributors: int) -> int | None:
        if not self.judge.shares_parts:
            return None
        return fair_share(chunks, contributors, self.view.tolerated)

    def _blame(self, now: float, plan: Plan) -> bool:
        """A plan is late: an owner that may be to blame loses its part first. A contribution is
        left out only if it has not come to this member, or if more owners than may lie report it
        missing.

        An owner whose results have not come here, and one that reports contributions of living
        members missing, own nothing in the next plan and are remembered. So is an honest owner to
        which a liar does not send, unless that is why the contribution is left out; then who made
        it is remembered. A tree has no such owner: the next plans are stars.
        """
        view, me = self.view, self.view.me.peer
        if self.trees:
            self.blamed.fell(view.round)
            self.star = True
            return False
        owners = {part.owner for part in plan.parts if not view.actions.suspected(part.owner)}
        since = now - view.timing.detect_s
        waiting = {peer: cids for peer, cids in self._waiting().items() if peer in owners}
        own = {c.cid: c.member.peer for c in plan.contributors}
        for peer, cids in waiting.items():
            for cid in cids:
                self._accused.setdefault(cid, set()).add(peer)
        known = {cid: voices for cid, voices in self._accused.items() if cid in own}
        late = {cid for cid, of in known.items() if me in of or len(of) > view.tolerated}
        held = {
            owner
            for owner in owners - {me}
            if view.open.lacking_of(owner) and self.reported_at.get(owner, -1e9) <= since
        }
        to_blame = held | {peer for peer, cids in waiting.items() if cids - late and peer != me}
        if len(held) > view.tolerated and 2 * len(held) > len(owners - {me}):
            return True  # nothing comes here, by whose fault ever
        if 2 * len(late & waiting.get(me, set())) > len(own):
            self.slow.add(me)  # much has not come here, and may have to others
            late -= waiting.get(me, set())
        self.lost |= late
        self.slow |= to_blame | {own[cid] for cid in late}
        for peer in to_blame:
            self.blamed.owners.strike(peer, view.round)
        self._remember_givers(plan, late)
        return bool(view.contribution) and view.contribution[0] in late

    # ---- the proposal
    def _propose_reduced(self, now: float, plan: Plan, digests: tuple[bytes, ...]) -> None:
        if len(self.voter.vouched(list(plan.contributors))) < len(plan.contributors):
            self.view.drop_reduced()  # another's plan, over what cannot be shown
            return
        if self._unstated(plan, digests):
            by = stated_by(plan, self.view.shape.witnesses)
            found = self.voter.examine(plan, digests)
            if found := found or dispute(plan, digests, self.voter.statements, by):
                return self._settle(now, plan, digests, found)
            if plan != self.plan and now - self.began_at > self.view.timing.revise_s:
                self.view.drop_reduced()  # another's plan, whose owners do not tell
            return
        super()._propose_reduced(now, plan, digests)

    def _settle(
        self, now: float, plan: Plan, digests: tuple[bytes, ...], found: SumDispute
    ) -> None:
        """Sums of a part differ: others own the parts of those who state them, and are their
        witnesses, over the same contributions, so that what they state shows who was wrong. Of whom
        it is proven that it has sent two different things, the contribution is left out.

        The ranges stay, and what was reduced with them, as far as the others can own them; those of
        another convener's plan, too, where it is over the contributions that this one would plan.
        """
        view = self.view
        makers = {c.member.peer for c in plan.contributors if c.cid in found.cids}
        view.actions.proofs.disputed(sorted(found.members | makers))
        self.voter.doubt(found.members)
        mine = {view.contribution[0]} if view.contribution else set[Cid]()
        self.lost |= found.cids - mine
        owners = found.members - {view.me.peer} if len(found.members) > 1 else found.members
        self._discharge(plan, owners)
        offers = [c for c in view.offers() if c.cid not in self.lost]
        settled = not owners - self.slow  # they own nothing, and there is a difference still
        disputed = () if settled else disputed_parts(meaning(plan), digests, self.voter.statements)
        parts = owned_by_others(plan, owners, view.tolerated, self.slow, disputed)
        spent = self.revision - self.before > len(view.config) + 2
        if spent or parts is None or tuple(offers) != plan.contributors:
            view.drop_reduced()
            return self._replace(now, owners)
        self.slow |= owners
        for peer in owners:
            self.blamed.owners.strike(peer, view.round)
        self.revision += 1
        again = msgspec.structs.replace(
            plan, ballot=self.ballot, revision=self.revision, parts=parts
        )
        return self._carry_out(now, again)

    def _discharge(self, plan: Plan, peers: set[PeerId]) -> None:
        """Witnesses that own nothing, as contributors of a vector of few chunks, are drawn by the
        round, whatever the next plan: they are rid of it where what they contribute is left out.
        """
        beside = peers - {part.owner for part in plan.parts}
        self.lost |= {c.cid for c in plan.contributors if c.member.peer in beside}

    def _unstated(self, plan: Plan, digests: tuple[bytes, ...]) -> set[PeerId]:
        """Who states parts, and has not signed what has come of them: nobody would echo it."""
        if self.view.shape.kin:
            return set()
        return set(self.judge.stated_by(plan)) - set(self.voter.stated(plan, digests))

    def _consider_revision(self, now: float) -> None:
        """All bytes are here, but an owner denies them: it owns nothing in the next plan."""
        reduced, plan, view = self.view.open.reduced, self.plan, self.view
        if plan is not None and (reduced is None or reduced[0] != plan):
            kept, withheld = self._withheld(now, plan)
            if kept or withheld:
                self.lost |= kept
                self._remember_givers(plan, kept)
                self._doubt_givers(plan, withheld)
                return self._replace(now, withheld)
            return super()._consider_revision(now)
        if reduced is None or plan is None:
            return None
        if now - self.planned_at > view.stuck_s() and (unstated := self._unstated(*reduced)):
            self._replace_unstated(now, plan, unstated)
        return None

    def _replace_unstated(self, now: float, plan: Plan, unstated: set[PeerId]) -> None:
        """What these state does not come. Where they say that a contributor has not signed what it
        sent them, it is left out if this member says so, too, or more of them than may lie.
        """
        me, waiting = self.view.me.peer, {**self._waiting()}
        if mine := self.voter.ungiven(now):
            waiting[me] = waiting.get(me, set()) | mine
        voices: dict[Cid, set[PeerId]] = {}
        for peer in unstated:
            for cid in waiting.get(peer, ()):
                voices.setdefault(cid, set(self._accused.get(cid, ()))).add(peer)
        kept = {
            c.cid
            for c in plan.contributors
            if me in (by := voices.get(c.cid, set())) or len(by) > self.view.tolerated
        }
        excused = {peer for peer in unstated if waiting.get(peer) and waiting[peer] <= kept}
        if me in unstated - excused:
            return
        self.lost |= kept
        self._remember_givers(plan, kept)
        self._doubt_givers(plan, unstated - excused)
        self._discharge(plan, unstated - excused)
        self._replace(now, unstated - excused)

    def _withheld(self, now: float, plan: Plan) -> tuple[set[Cid], set[PeerId]]:
        """Contributions and owners that a plan waits for, where they are of at most as many members
        as may lie and had twice the time of all the others.

        A contribution is left out so early only if its member is remembered for one that did not
        come, and its link was to have brought it long ago; and, as ever, if it has not come here or
        if more owners than may lie report it missing.
        """
        view, opened = self.view, self.view.open
        lacking, me = set(opened.lacking_owners), view.me.peer
        reported = opened.plan == plan and opened.lacking is not None
        others = max(0.0, opened.bulk_at - opened.planned_at)
        since = now - max(opened.bulk_at, opened.planned_at)
        if self.trees or not reported or since <= others + view.silent_s(PULLS_ALL_BUT):
            return set(), set()
        kept = self._kept_back(now, plan) if now > self.due_at - view.stuck_s() else set[Cid]()
        excused = {peer for peer, cids in self._waiting().items() if cids and cids <= kept}
        owners = lacking - excused
        makers = {c.member.peer for c in plan.contributors if c.cid in kept}
        if me in owners or len(owners | makers) > view.tolerated:
            return set(), set()
        return kept, owners

    def _kept_back(self, now: float, plan: Plan) -> set[Cid]:
        """Contributions of members remembered for such that have not come here, or not to more
        owners than may lie, under this plan or one before it.
        """
        view, me = self.view, self.view.me.peer
        blamed, everybody = self.blamed, len(view.config)
        known = blamed.givers.shunned(view.round, everybody)
        known |= blamed.doubted.shunned(view.round, everybody)
        lately = now - view.timing.detect_s / 2
        lacks = {
            peer: cids
            for peer, cids in self._waiting().items()
            if peer == me or self.reported_at.get(peer, -1e9) > lately
        }
        found = set[Cid]()
        for c in plan.contributors:
            voices = {peer for peer, cids in lacks.items() if c.cid in cids}
            if c.member.peer in known and voices:
                voices |= self._accused.get(c.cid, set())
                found |= {c.cid} if me in voices or len(voices) > view.tolerated else set()
        return found

    def _doubt_givers(self, plan: Plan, owners: set[PeerId]) -> None:
        """These owners are replaced; what they lacked may have been kept from them."""
        waiting = self._waiting()
        for c in plan.contributors:
            if voices := {peer for peer in owners if c.cid in waiting.get(peer, set())}:
                self._accused.setdefault(c.cid, set()).update(voices)
                self.blamed.doubted.strike(c.member.peer, self.view.round)

    def _remember_givers(self, plan: Plan, late: set[Cid]) -> None:
        """These are left out; whose members live, and are not this one, kept them back."""
        for c in plan.contributors:
            if c.cid in late and c.member != self.view.me and not self.view.silent(c.member):
                self.blamed.givers.strike(c.member.peer, self.view.round)
                self.slow.add(c.member.peer)

    def _replace(self, now: float, owners: set[PeerId]) -> None:
        """What is left of the contributions, under a plan in which these own nothing."""
        view = self.view
        self.slow |= owners
        for peer in owners:
            self.blamed.owners.strike(peer, view.round)
        offers = [c for c in view.offers() if c.cid not in self.lost]
        if self.revision - self.before > len(view.config) + 2 or not view.enough(offers):
            return view.next_ballot(now)
        return self._new_plan(now, offers)

    def _propose(self, now: float, entry: Entry) -> None:
        view, journal = self.view, self.view.journal
        spent = journal.echoed is not None and journal.echoed[0] >= self.ballot
        if spent or self.ballot < journal.promised or view.root != entry.base_state:
            return self.stop()
        pledges, proof = self._reasons
        self.phase, self.entry = Phase.ACCEPT, entry
        self.voter.cast(now, self.ballot, entry)  # on disk before anybody sees it
        digest = entry.hash()
        signature = view.actions.sign(slot_payload("propose", *view.slot, self.ballot, digest))
        claims = () if any(pledge.ballot >= 0 for pledge in pledges) else tuple(self._shown(entry))
        reduced = view.open.reduced
        by = (
            {}
            if reduced is None or not claims or not entry.contributors
            else self.voter.stated(*reduced)
        )
        self._proposal = m.Propose(
            self.ballot, entry, claims, pledges, proof, signature, tuple(by.items())
        )
        self._broadcast(self._proposal)
        return None

    def _shown(self, entry: Entry) -> Iterable[tuple[Member, m.Claim]]:
        """The claims that an entry stands on."""
        known = [self.voter.offered[contributor.cid] for contributor in entry.contributors]
        newest = self.voter.claims.items() if entry.next_config != self.view.config else ()
        return dict.fromkeys((*known, *newest))

    # ---- the next configuration
    def _joiners(self, now: float) -> list[Member]:
        return self.view.entrance.welcome(
            sorted(self.judge.wishes(tuple(self.voter.claims.items()))[2])
        )

    def wants_entry(self, now: float) -> bool:
        """Whether an entry without contributors is wanted, and late enough: it changes the
        configuration, or tells scripts what became of what was lost."""
        view = self.view
        settle = (view.draw.whole or view.hopeless) and any(
            ready.settle for ready in view.open.ready.values()
        )
        config = self._next_config(now, set(view.config))
        wanted = settle or config != view.config or bool(view.entrance.guests(now))
        return wanted and now - view.open.born > self.judge.empty_after_s(config)

    def _next_config(self, now: float, contributing: set[Member]) -> Config:
        """What the claims of members come to, as `Judge` sees it, never below the floor."""
        view, judge = self.view, self.judge
        claims = tuple(self.voter.claims.items())
        leaving, _, joining = judge.wishes(claims)
        silent = judge.evictable(claims)
        staying = list(view.config)
        going = [
            *sorted(leaving),
            *(who for who in sorted(silent - leaving) if who not in contributing),
        ]
        for member in going:
            founder = judge.founding and member.peer == view.organiser
            if member in staying and len(staying) > judge.floor and not founder:
                staying.remove(member)
        room = max(1, len(staying) - 1)
        for joiner in self.view.entrance.welcome(sorted(joining)):
            older = [member for member in staying if member.peer == joiner.peer]
            if older and older[0].incarnation > joiner.incarnation:
                continue
            if older:
                staying.remove(older[0])
            elif room == 0:
                continue
            else:
                room -= 1
            staying.append(joiner)
        return tuple(sorted(staying))

"""The acceptor's side of a round under members that lie: docs/internals/protocol/byzantine.md. An
echo comes before each vote, and nothing is taken on trust but what this member has just signed
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from ... import messages as m
from ...digest import meaning, meaning_preimage, part_meaning
from ...errors import RemoteProtocolError
from ...group import Cid, Contributor, Entry, Member, Plan, Vote
from ...identifiers import PeerId
from ...round.acceptor import Acceptor
from .judge import Judge
from .missums import SumDispute, SumStatement, disputed_parts, refuted
from .receipts import Receipts
from .signed import (
    Kind,
    account_payload,
    claim_payload,
    pledge_payload,
    receipts_digest,
    reduced_payload,
    slot_payload,
)

if TYPE_CHECKING:
    from ...round.machine import RoundMachine
    from .convener import ByzantineConvener

LENGTHS = 4.0  # a ballot has so many times what it should take, and that again in each later one
REPEAT_S = 0.5  # how often what changes seldom is said again
STATED = 4  # statements of one owner that are kept
DOUBTFUL = 32  # statements of members in dispute that are kept
OFFERS = 4  # claims of one member that are kept for what they offer
# of one member in a round: then it is heard no more in it, since it costs time to see that
# signatures are wrong
FAULTS = 16
REFUSED = 4  # proposals that are kept until the bytes are here that may prove them false
# of the time that an honest convener waits before an entry without contributors: rounds open a
# little later here, perhaps
SOONER = 0.75
AHEAD = 2  # times the members: ballots that far beyond the present one are counted


class ByzantineAcceptor(Acceptor):
    """Volatile but for what the journal has: promise, echo, vote, and the vote's proof."""

    def __init__(self, view: RoundMachine) -> None:
        super().__init__(view)
        self.judge = Judge(view)
        self.convener: ByzantineConvener | None = None  # set by `byzantine_roles`
        self.claims: dict[Member, m.Claim] = {}  # the newest of each member
        # By contribution: also earlier ones, which plans may name.
        self.offered: dict[Cid, tuple[Member, m.Claim]] = {}
        self.turns: dict[Member, int] = {}
        self.echoes: dict[tuple[int, bytes], dict[Member, bytes]] = {}
        # By ballot: what its convener has signed.
        self.proposed: dict[int, tuple[bytes, bytes]] = {}
        self._first_signed: dict[tuple[Kind, Member, int], tuple[bytes, bytes]] = {}
        self._mine: m.Claim | None = None
        # Parts of the newest plan that I state, with what went into them, and since when all.
        self._reduced: tuple[Plan | None, dict[int, tuple[bytes, tuple[bytes, ...]]]] = None, {}
        self._reduced_at = self._asked_at = 0.0
        self._statement: m.Reduced | None = None
        self.receipts = Receipts(view)
        self._given: dict[tuple[bytes, int, int], m.Contributed] = {}  # of mine
        self.reduced: dict[tuple[PeerId, bytes, m.PartDigests], bytes] = {}
        """What owners have signed: by owner, meaning and parts, its signature. Of each owner the
        newest few.
        """
        self.accounts: dict[tuple[PeerId, bytes, m.PartDigests], m.Account] = {}
        """How they came to it, where parts have witnesses."""
        self._doubtful: list[SumStatement] = []  # of members in dispute: they may not push it out
        # Hashes of entries proposed here because an earlier ballot has proof of them.
        self._adopted = set[bytes]()
        self._refused = list[tuple[Member, int, Entry]]()  # proposals, by whom, in which ballot
        self._faults = Counter[Member]()
        self._announced_at = self._turned_at = -1e9
        self._entered_at = view.open.born
        for kept in (view.journal.echoed, view.journal.accepted):
            if kept is not None:
                view.remember(kept[1])

    # ---- what the machine asks
    @property
    def founding(self) -> bool:
        """Fewer than bear so many liars."""
        return self.judge.founding

    @property
    def urged(self) -> bool:
        """Whether others have something to decide here, or are past the first ballot: nobody gets
        on alone.
        """
        view = self.view
        return view.may_act and (any(self.turns.values()) or view.enough(view.offers()))

    @property
    def ahead(self) -> bool:
        """Fewer than a quorum are in this ballot or beyond. None of the others need follow one
        member, and nobody comes back: a member that went on, each time its patience is over, could
        stay ahead of the others for ever.
        """
        view = self.view
        there = [
            who for who in view.config if who == view.me or self.turns.get(who, 0) >= view.ballot
        ]
        return view.ballot > 0 and not self.judge.founding and not view.quorum(there)

    def follows(self, plan: Plan) -> bool:
        """Not into a ballot that nobody else is in, nor with another weight than this member has
        claimed for what it contributes, nor where an owner has more than its fair share; and
        nothing is reduced before the run is founded."""
        view, mine = self.view, self.view.contribution
        true = mine is None or all(
            c == Contributor(view.me, *mine) for c in plan.contributors if c.cid == mine[0]
        )
        fair = self.judge.fair(plan)
        return plan.ballot <= view.ballot and not self.judge.founding and true and fair

    def awaits(self, member: Member) -> bool:
        """Also whose offer nobody could be shown."""
        ready = self.view.open.ready.get(member)
        return ready is None or (
            ready.cid is not None and self.offered.get(ready.cid, (None,))[0] != member
        )

    def vouched(self, offers: list[Contributor]) -> list[Contributor]:
        """Those that their members have claimed, in these words."""
        found = [(offer, self.offered.get(offer.cid)) for offer in offers]
        return [
            offer
            for offer, known in found
            if known
            and offer == Contributor(known[0], offer.cid, known[1].weight, known[1].reading)
            and not self.judge.founding
        ]

    def overdue(self, now: float, patience: float) -> bool:
        """A lying convener can let bytes and plans trickle for ever: no ballot is that long."""
        view = self.view
        plan = view.open.plan
        whole = patience + (2 * view.transfer_s(plan) if plan is not None else 0.0)
        return now - self._entered_at > LENGTHS * whole * (1 + view.ballot) and view.engaged

    def entered(self, now: float) -> None:
        """Tell the others, so that they follow."""
        self._entered_at = now
        self._turn(now)

    def _turn(self, now: float) -> None:
        self._turned_at = now
        for peer in self.view.others:
            self.view.tell(peer, m.Turn(self.view.ballot))

    def tick(self, now: float) -> None:
        """Repair loss: say again what is in the journal, the claim, and the ballot."""
        view = self.view
        if not view.engaged:
            self._entered_at = now
        if view.open.decided:
            return
        self.claim(now)
        if view.ballot > 0 and now - self._turned_at > REPEAT_S:
            self._turn(now)
        if view.journal.echoed:
            self._send_echo(*view.journal.echoed)
        elif view.open.plan is not None:
            self._state()
            self._ask_for_given(now, view.open.plan)
        super().tick(now)

    # ---- what is reduced
    def part_reduced(
        self, now: float, plan: Plan, index: int, digest: bytes, inputs: tuple[bytes, ...] = ()
    ) -> None:
        """Once all parts are there that this member states, it signs them and their origin."""
        known = self._reduced[0]
        if known is None or known.plan_id != plan.plan_id:
            self._reduced = plan, {}
        done = self._reduced[1]
        done[index] = digest, inputs
        if len(done) == len(self.judge.stated_by(plan)[self.view.me.peer]):
            self._reduced_at = now
            self._sign(plan, done)

    def _sign(self, plan: Plan, done: dict[int, tuple[bytes, tuple[bytes, ...]]]) -> None:
        """State the parts, once each of their inputs is what its contributor has signed."""
        view, of = self.view, meaning(plan)
        if self._unsigned():
            return
        parts = tuple((at, done[at][0]) for at in sorted(done))
        payload = reduced_payload(view.run, view.me.peer, of, parts)
        self._statement = m.Reduced(
            of, parts, view.actions.sign(payload), self._account(plan, of, parts)
        )
        self._reduced = None, {}
        self._state()

    def _account(self, plan: Plan, of: bytes, parts: m.PartDigests) -> m.Account | None:
        view = self.view
        if not view.shape.witnesses:
            return None
        inputs = tuple(self._reduced[1][at][1] for at, _ in parts)
        known = [
            [self.receipts.of(c, plan.parts[at]) for c in plan.contributors] for at, _ in parts
        ]
        receipts = tuple(tuple(by for _, by in filter(None, row)) for row in known)
        digest = receipts_digest(receipts)
        payload = account_payload(view.run, view.me.peer, of, parts, inputs, digest)
        return m.Account(inputs, receipts, view.actions.sign(payload))

    # ---- what went into it
    def part_given(self, now: float, plan: Plan, index: int, root: bytes) -> None:
        """Sign it, for all that state the part."""
        part, me = plan.parts[index], self.view.me.peer
        cid = next(c.cid for c in plan.contributors if c.member.peer == me)
        body = self._given[cid, part.first, part.stop] = self.receipts.sign(cid, part, root)
        for peer, parts in self.judge.stated_by(plan).items():
            if index in parts:
                self.view.tell(peer, body)

    def lacks_given(self, who: PeerId, cids: Collection[bytes]) -> None:
        """Say it again to who states parts and has not heard it."""
        plan = self.view.open.plan
        mine = {cid for cid, *_ in self._given}.intersection(cids)
        if plan is None or not mine or not self.view.shape.witnesses:
            return
        for index in self.judge.stated_by(plan).get(who, ()):
            part = plan.parts[index]
            for cid in mine:
                if (body := self._given.get((cid, part.first, part.stop))) is not None:
                    self.view.tell(who, body)

    def ungiven(self, now: float) -> set[Cid]:
        """Those of which this member waits for what was signed, or was signed another thing than
        came: it states no sum of them."""
        return self._unsigned() if now - self._reduced_at > REPEAT_S else set()

    def _unsigned(self) -> set[Cid]:
        """Of the parts that are all reduced here, and not stated."""
        plan, done = self._reduced
        states = self.judge.stated_by(plan).get(self.view.me.peer, []) if plan is not None else []
        if plan is None or not self.view.shape.witnesses or len(done) < len(states):
            return set()
        return {
            c.cid
            for index, (_, inputs) in done.items()
            for c, root in zip(plan.contributors, inputs, strict=True)
            if (self.receipts.of(c, plan.parts[index]) or (b"",))[0] != root
        }

    def _ask_for_given(self, now: float, plan: Plan) -> None:
        """Tell the convener, and ask whose they are, now and then."""
        if now - self._asked_at <= REPEAT_S or not (lacking := self.ungiven(now)):
            return
        self._asked_at = now
        body = m.Missing(plan.plan_id, tuple((cid, ()) for cid in sorted(lacking)))
        givers = {c.member.peer for c in plan.contributors if c.cid in lacking}
        for peer in sorted({*givers, self.view.convener_of(plan.ballot).peer}):
            if peer != self.view.me.peer:
                self.view.tell(peer, body)

    def _on_given(self, who: Member, body: m.Contributed) -> None:
        self.receipts.note(who, body)
        plan, done = self._reduced
        if plan is not None and len(done) == len(self.judge.stated_by(plan)[self.view.me.peer]):
            self._sign(plan, done)

    def examine(self, plan: Plan, digests: Sequence[bytes]) -> SumDispute | None:
        """Who of those that state a part in dispute, of the plan's meaning, shows for an input what
        its contributor has not signed; and contributions of which members have signed two things.
        Both are proved to lie. None where it is neither.
        """
        found, of = SumDispute(set(), set()), meaning(plan)
        parts = disputed_parts(of, digests, self.statements)
        first: dict[tuple[int, Cid], tuple[bytes, bytes]] = {}
        for each in [said for said in self.statements if said.meaning == of]:
            account = each.account
            for (index, _), inputs, receipts in zip(
                each.parts, account.inputs, account.receipts, strict=True
            ):
                if index not in parts:
                    continue
                shown = list(zip(plan.contributors, inputs, receipts, strict=False))
                true = len(inputs) == len(receipts) == len(plan.contributors) and all(
                    self.receipts.of(c, plan.parts[index]) == (root, by)
                    or self.receipts.signed(c.member.peer, c.cid, plan.parts[index], root, by)
                    for c, root, by in shown
                )
                if not true:
                    found.members.add(each.peer)
                    self._unfounded(plan, each, index)
                    break
                for c, root, by in shown:
                    before = first.setdefault((index, c.cid), (root, by))
                    if before[0] != root:
                        found.cids.add(c.cid)
                        part = plan.parts[index]
                        self.receipts.differ(c.member, c.cid, part, before, (root, by))
        return found if found.members or found.cids else None

    def _unfounded(self, plan: Plan, wrong: SumStatement, index: int) -> None:
        """What it has stated counts for nothing, and it is not heard again in this round."""
        key = wrong.peer, wrong.meaning, wrong.parts
        self.reduced.pop(key, None)
        self.accounts.pop(key, None)
        for member in self.view.config:
            if member.peer == wrong.peer:
                self._faults[member] = FAULTS
                if self.view.convict(member):
                    preimage = meaning_preimage(plan)
                    self.view.actions.proofs.unfounded(
                        wrong.peer, wrong.parts, wrong.account, preimage, index
                    )

    def _state(self) -> None:
        if self._statement is not None:
            convener = self.view.convener_of(self.view.ballot).peer
            self.view.tell(convener, self._statement)

    def _on_reduced(self, now: float, who: Member, body: m.Reduced) -> None:
        key = (who.peer, body.meaning, body.parts)
        if key in self.reduced:
            return
        if who != self.view.me and not (
            self.judge.reduced(who.peer, body.meaning, body.parts, body.signature)
            and self.judge.accounted(who.peer, body)
        ):
            raise RemoteProtocolError("a reduction that is not its sender's", peer=who.peer)
        earlier = [known for known in self.reduced if known[0] == who.peer]
        for known in earlier[: max(0, len(earlier) - STATED + 1)]:
            del self.reduced[known]
            self.accounts.pop(known, None)
        self.reduced[key] = body.signature
        if body.account is not None:
            self.accounts[key] = body.account
            self._refute()
        self.view.convene(now)

    @property
    def statements(self) -> list[SumStatement]:
        """What owners and witnesses have stated, with how they came to it."""
        return [SumStatement(*key, account) for key, account in self.accounts.items()]

    def doubt(self, peers: Collection[PeerId]) -> None:
        """What these have stated may be proved to be wrong by what others are going to state."""
        doubtful = [each for each in self.statements if each.peer in peers]
        self._doubtful = [*self._doubtful, *doubtful][-DOUBTFUL:]

    def _refute(self) -> None:
        """A member that states another sum of the same inputs than more others than may lie."""
        if not self._doubtful:
            return
        found = refuted([*self._doubtful, *self.statements], self.view.tolerated)
        members = {member.peer: member for member in self.view.config}
        if found is not None and found.wrong.peer in members:
            self._doubtful = [each for each in self._doubtful if each.peer != found.wrong.peer]
            if self.view.convict(members[found.wrong.peer]):
                self.view.actions.proofs.refuted(*found.proof)

    def stated(self, plan: Plan, digests: Sequence[bytes]) -> dict[PeerId, bytes]:
        """Of those who state a plan's parts, who has signed these digests of them, and how."""
        of = meaning(plan)
        signed = {
            who: self.reduced.get((who, of, tuple((index, digests[index]) for index in parts)))
            for who, parts in self.judge.stated_by(plan).items()
        }
        return {who: by for who, by in signed.items() if by is not None}

    # ---- claims
    def claim(self, now: float) -> None:
        """Tell everybody what this member has and whom it would have, when that changes; and the
        convener now and then.
        """
        view = self.view
        ready = view.my_ready()
        offer = ready if ready is not None and ready.cid is not None else None
        blank = m.Claim(
            view.base,
            offer.cid if offer else None,
            offer.weight if offer else 0,
            offer.reading if offer else m.NO_READING,
            view.leaving,
            tuple(view.entrance.to_admit(now)),
            tuple(who for who in view.config if who != view.me and view.lost(who)),
        )
        last = self._mine
        if last is None or msgspec.structs.replace(last, number=0, signature=b"") != blank:
            least = last.number + 1 if last is not None else 0
            number = max(least, int((now + view.unix_offset_s) * 1000))
            blank = msgspec.structs.replace(blank, number=number)
            payload = claim_payload(view.run, view.log, view.round, view.me, blank)
            first, self._mine = (
                self._mine is None,
                msgspec.structs.replace(blank, signature=view.actions.sign(payload)),
            )
            if not first or blank.cid or blank.leave or blank.admits or blank.suspects:
                self._announced_at = now
                self.view.broadcast(self._mine)
        elif now - self._announced_at > REPEAT_S or (blank.cid and view.open.plan is None):
            self._announced_at = now
            view.tell(view.convener_of(view.ballot).peer, last)

    def _on_claim(self, now: float, who: Member, claim: m.Claim) -> None:
        if self.claims.get(who) == claim:
            return
        if who != self.view.me and not self.judge.claimed(who, claim):
            raise RemoteProtocolError(
                "a claim that is not its sender's, or of another round", peer=who.peer
            )
        if who not in self.claims or self.claims[who].number < claim.number:
            self.claims[who] = claim
            self.view.heard_leave(who, claim.leave)
        if claim.cid is not None and claim.weight and claim.cid not in self.offered:
            earlier = [cid for cid, (of, _) in self.offered.items() if of == who]
            for cid in earlier[: max(0, len(earlier) - OFFERS + 1)]:
                del self.offered[cid]
            self.offered[claim.cid] = (who, claim)
        self.view.convene(now)

    # ---- inputs
    def on_message(self, now: float, who: Member, body: m.Body) -> None:
        """What an acceptor is asked and told. Raises RemoteProtocolError, StorageError."""
        if self._faults[who] >= FAULTS:
            return
        try:
            self._take(now, who, body)
        except RemoteProtocolError:
            self._faults[who] += 1
            raise

    def _take(self, now: float, who: Member, body: m.Body) -> None:
        ballot = getattr(body, "ballot", 0)
        if ballot and isinstance(body, m.Turn | m.Prepare | m.Propose | m.Echo | m.Accepted):
            self._turned(now, who, ballot)
        match body:
            case m.Claim():
                self._on_claim(now, who, body)
            case m.Reduced():
                self._on_reduced(now, who, body)
            case m.Contributed():
                self._on_given(who, body)
            case m.Prepare():
                self._on_prepare(now, who, body.ballot)
            case m.Pledge():
                self._on_pledge(now, who, body)
            case m.Propose():
                self._on_propose(now, who, body)
            case m.Echo():
                self._on_echo(now, who, body)
            case m.Accepted():
                if self._first(who, "vote", body.ballot, body.entry_hash, body.signature):
                    self.view.count_vote(now, who, body)
            case _:
                pass

    def _turned(self, now: float, who: Member, ballot: int) -> None:
        """A ballot is entered once more members are in it than may lie. Its time begins when a
        quorum has come.
        """
        view, ahead = self.view, self.ahead
        self.turns[who] = max(ballot, self.turns.get(who, 0))
        if ahead and not self.ahead:
            view.progress(now)
            self._entered_at = now
        where = [self.turns.get(member, 0) for member in view.config if member != view.me]
        level = sorted((*where, view.ballot), reverse=True)[min(view.tolerated, len(where))]
        if level > view.ballot and not view.open.decided and not self.judge.founding:
            view.enter(now, level)

    def _on_prepare(self, now: float, who: Member, ballot: int) -> None:
        view, journal = self.view, self.view.journal
        if not max(1, journal.promised) <= ballot <= view.ballot or view.convener_of(ballot) != who:
            return
        accepted = journal.accepted
        if accepted is not None and accepted[0] >= ballot:
            return
        if ballot > journal.promised:
            view.progress(now)
            journal.promise(ballot)
        at, digest = (accepted[0], accepted[1].hash()) if accepted is not None else (-1, b"")
        signature = view.actions.sign(pledge_payload(*view.slot, ballot, at, digest))
        view.tell(
            who.peer,
            m.Pledge(
                ballot,
                m.Accepted1(*accepted) if accepted else None,
                journal.proof,
                view.my_ready(),
                signature,
            ),
        )

    def _on_pledge(self, now: float, who: Member, body: m.Pledge) -> None:
        view, accepted = self.view, body.accepted
        at, digest = (accepted.ballot, accepted.entry.hash()) if accepted is not None else (-1, b"")
        pledged = m.Pledged(who, at, digest, body.signature)
        proved = accepted is None or (
            view.entry_fits(accepted.entry) and self.judge.proved(at, digest, body.proof)
        )
        if not proved or not self.judge.pledged(body.ballot, pledged):
            raise RemoteProtocolError(
                "a pledge that is not its sender's, or names what was not accepted", peer=who.peer
            )
        if body.ready and view.ready_fits(body.ready):
            view.note_ready(now, who, body.ready)
        if self.convener is not None:
            self.convener.on_pledge(now, pledged, body)

    def _on_propose(self, now: float, who: Member, body: m.Propose) -> None:
        view, ballot, digest = self.view, body.ballot, body.entry.hash()
        known = self.proposed.get(ballot)
        if view.convener_of(ballot) != who or (known is not None and known[0] == digest):
            return self.step(now)
        self._first(who, "propose", ballot, digest, body.signature)
        # an echo may have brought it before
        signed = self._first_signed.get(("propose", who, ballot))
        if (
            known is not None
            or signed is None
            or signed[0] != digest
            or ballot < view.journal.promised
        ):
            return None
        if wrong := self.judge.why_not(body, self.claims.items()):
            self._refused = [*self._refused[1 - REFUSED :], (who, ballot, body.entry)]
            self._prove()
            raise RemoteProtocolError(f"a proposal with {wrong}", peer=who.peer)
        if self.judge.taken_back(body, self.claims):
            return None  # an honest convener may not know it yet, so nobody is accused
        adopted = any(pledge.ballot >= 0 for pledge in body.pledges)
        if not adopted and view.entrance.objection(body.entry):
            # one that a quorum has echoed may be decided already: then this comes too late
            return None
        self.proposed[ballot] = signed
        if adopted:
            self._adopted.add(digest)
        view.remember(body.entry)
        if ballot > view.ballot:
            view.enter(now, ballot)  # honest members have pledged themselves to it
        view.await_bytes(now, ballot, body.entry, who.peer)
        return self.step(now)

    def _on_echo(self, now: float, who: Member, body: m.Echo) -> None:
        view = self.view
        owner = view.convener_of(body.ballot)
        if body.proposed and self._first_signed.get(("propose", owner, body.ballot)) != (
            body.entry_hash,
            body.proposed,
        ):
            self._first(owner, "propose", body.ballot, body.entry_hash, body.proposed, teller=who)
        if self._first(who, "echo", body.ballot, body.entry_hash, body.signature):
            view.progress(now)
            self.echoes.setdefault((body.ballot, body.entry_hash), {})[who] = body.signature
            self.step(now)

    def _first(
        self,
        who: Member,
        kind: Kind,
        ballot: int,
        digest: bytes,
        signature: bytes,
        teller: Member | None = None,
    ) -> bool:
        """Whether a member says this for the first time. What it says beside is proof that it lies.
        Raises RemoteProtocolError.
        """
        view = self.view
        key: tuple[Kind, Member, int] = (kind, who, ballot)
        before = self._first_signed.get(key)
        if before is not None and before[0] == digest:
            return False
        if before is None and ballot > view.ballot + AHEAD * len(view.config):
            # it would fill memory; whoever lags is told the ballot by the turns of others
            return False
        own = who == view.me and teller is None
        if not own and not self.judge.signed(kind, who, ballot, digest, signature):
            raise RemoteProtocolError(
                f"a signature of a {kind} that is not {who.peer}'s", peer=(teller or who).peer
            )
        if before is None:
            self._first_signed[key] = (digest, signature)
            return True
        if view.convict(who):
            one, other = (
                slot_payload(kind, *view.slot, ballot, hash_) for hash_ in (before[0], digest)
            )
            view.actions.proofs.caught(who.peer, (one, before[1]), (other, signature))
        return False

    def _prove(self) -> None:
        """What was refused may be another name for bytes that are here: the digest of a part binds
        what they are the result of, so the convener is proved to lie by its signature and by what
        the digest was made of. Honest conveners propose digests that they have made themselves."""
        view, reduced = self.view, self.view.open.reduced
        if reduced is None:
            return
        (plan, digests), refused = reduced, self._refused
        for who, ballot, entry in refused:
            # A proof names one slot, which a liar's entry need not be of.
            of_slot = (view.run, entry.log, entry.round, entry.base) == view.slot
            index = relabelled(plan, digests, entry) if of_slot else None
            if index is not None and view.convict(who):
                payload = slot_payload("propose", *view.slot, ballot, entry.hash())
                signature = self._first_signed["propose", who, ballot][1]
                view.actions.proofs.relabelled(who.peer, (payload, signature), entry, plan, index)
        self._refused = []

    # ---- echoes and votes
    def step(self, now: float) -> None:
        """Echo what is pending; vote for what a quorum echoed, once bytes and state are here."""
        journal, view = self.view.journal, self.view
        if self._refused:
            self._prove()
        if view.open.pending is None or not self._early(now, view.open.pending[1]):
            super().step(now)
        for (ballot, digest), echoes in sorted(self.echoes.items(), key=lambda item: item[0]):
            entry, voted = (
                view.open.known.get(digest),
                journal.accepted[0] if journal.accepted else -1,
            )
            if (
                entry is None
                or ballot < journal.promised
                or ballot <= voted
                or not view.quorum(list(echoes))
            ):
                continue
            if self.view.holds(now, entry, [who.peer for who in echoes if who != view.me]):
                # First the bytes, then the vote with its proof, then the answer.
                view.actions.keep(entry)
                journal.accept(
                    ballot,
                    entry,
                    tuple(
                        Vote(who, ballot, signature) for who, signature in sorted(echoes.items())
                    ),
                )
                self.view.send_vote(ballot, entry)

    def _early(self, now: float, entry: Entry) -> bool:
        """Whether an entry without contributors is not echoed yet: a lying convener could propose
        one after another.
        """
        if entry.contributors or entry.hash() in self._adopted:
            return False
        wait_s = SOONER * self.judge.empty_after_s(entry.next_config)
        return now - self.view.open.born <= wait_s

    def cast(self, now: float, ballot: int, entry: Entry) -> None:
        """Echo: all bytes of the entry and the state before it are stored here. One entry a ballot,
        and never in an earlier one again.
        """
        view, echoed = self.view, self.view.journal.echoed
        if echoed is not None and echoed[0] >= ballot:
            return
        view.actions.keep(entry)
        view.journal.echo(ballot, entry)
        view.remember(entry)
        self._send_echo(ballot, entry)

    def _send_echo(self, ballot: int, entry: Entry) -> None:
        view, digest = self.view, entry.hash()
        signature = view.actions.sign(slot_payload("echo", *view.slot, ballot, digest))
        proposed = self.proposed.get(ballot, (b"", b""))
        self.view.broadcast(
            m.Echo(ballot, digest, signature, proposed[1] if proposed[0] == digest else b"")
        )


def relabelled(plan: Plan, digests: Sequence[bytes], entry: Entry) -> int | None:
    """The part of an entry whose digest is that of a part of a plan (``digests``: of its parts)
    that is another result; None where there is none, or the entry has not one digest a part.
    """
    if len(entry.parts) != len(entry.part_digests):
        return None
    made = dict(zip(digests, plan.parts, strict=True))
    for index, (part, digest) in enumerate(zip(entry.parts, entry.part_digests, strict=True)):
        if digest in made and part_meaning(plan, made[digest]) != part_meaning(entry, part):
            return index
    return None

"""Whether what a convener proposes is justified, by what others have signed:
docs/internals/protocol/byzantine.md.

What is wrong follows from messages, configuration and keys, not from what this member happens to
have seen: honest members judge alike, and accuse only who is wrong. One judgement does not
(`Judge.taken_back`); it accuses nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from ... import messages as m
from ...digest import meaning
from ...group import Config, Contributor, Entry, Member, Plan, Vote, least_members
from ...identifiers import PeerId
from ...partition import is_fair
from ...witnesses import stated_by
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

LATE = 4.0  # times detect_s: an entry that changes nothing comes no sooner in its round
WINDOW = 16  # entries in which the comings of a peer count
FREE = 2  # of them, by entries without contributors, that cost no wait
DOUBLED = 8  # how often the wait of a peer is doubled at most

Claims = Sequence[tuple[Member, m.Claim]]


class Judge:
    """Of the open round of a view."""

    def __init__(self, view: RoundMachine) -> None:
        self.view = view
        self.founding = len(view.config) < least_members(view.tolerated)

    # ---- signatures
    def signed(self, kind: Kind, who: Member, ballot: int, digest: bytes, signature: bytes) -> bool:
        """Whether a proposal, an echo or a vote is its sender's."""
        return self.view.actions.verify(
            who.peer, slot_payload(kind, *self.view.slot, ballot, digest), signature
        )

    def claimed(self, who: Member, claim: m.Claim) -> bool:
        """Whether a claim is its sender's, and of the open round."""
        view = self.view
        payload = claim_payload(view.run, view.log, view.round, who, claim)
        return claim.base == view.base and view.actions.verify(who.peer, payload, claim.signature)

    def pledged(self, ballot: int, pledge: m.Pledged) -> bool:
        """Whether a pledge for this ballot is its sender's and names an earlier acceptance."""
        payload = pledge_payload(*self.view.slot, ballot, pledge.ballot, pledge.entry_hash)
        return pledge.ballot < ballot and self.view.actions.verify(
            pledge.member.peer, payload, pledge.signature
        )

    def proved(self, ballot: int, digest: bytes, proof: Sequence[Vote]) -> bool:
        """Whether these are echoes of a quorum for one entry in one ballot."""
        voters = {
            vote.member
            for vote in proof
            if vote.ballot == ballot and vote.member in self.view.config
        }
        return (
            len(voters) == len(proof)
            and self.view.quorum(list(voters))
            and all(
                self.signed("echo", vote.member, ballot, digest, vote.signature) for vote in proof
            )
        )

    # ---- entries
    def why_not(self, body: m.Propose, known: Collection[tuple[Member, m.Claim]]) -> str:
        """What is wrong with a proposal; "" where nothing is. Claims that are ``known`` were
        verified when they came.
        """
        entry = body.entry
        if not self.view.entry_fits(entry):
            return "an entry that does not fit the round"
        voters = {pledge.member for pledge in body.pledges if pledge.member in self.view.config}
        if body.ballot > 0 and not (
            len(voters) == len(body.pledges) and self.view.quorum(list(voters))
        ):
            return "pledges of no quorum"
        if not all(self.pledged(body.ballot, pledge) for pledge in body.pledges):
            return "a pledge that nobody gave"
        highest = max(body.pledges, key=lambda pledge: pledge.ballot, default=None)
        if highest is not None and highest.ballot >= 0:
            same = highest.entry_hash == entry.hash()
            return (
                ""
                if same and self.proved(highest.ballot, highest.entry_hash, body.proof)
                else "another entry than the one accepted before"
            )
        members = set(self.view.config)
        if not all(
            who in members and ((who, claim) in known or self.claimed(who, claim))
            for who, claim in body.claims
        ):
            return "a claim that nobody made"
        if not self.owned(entry, dict(body.reduced)):
            return "parts that their owners have not reduced so"
        return self._invented(entry, body.claims)

    def reduced(self, owner: PeerId, of: bytes, parts: m.PartDigests, signature: bytes) -> bool:
        """Whether an owner has stated this of its parts."""
        return self.view.actions.verify(
            owner, reduced_payload(self.view.run, owner, of, parts), signature
        )

    def accounted(self, who: PeerId, body: m.Reduced) -> bool:
        """Whether a statement has an account where it must, and that is its sender's."""
        account = body.account
        if account is None or not self.view.shape.witnesses:
            return account is None and not self.view.shape.witnesses
        receipts = receipts_digest(account.receipts)
        payload = account_payload(
            self.view.run, who, body.meaning, body.parts, account.inputs, receipts
        )
        same = len(account.inputs) == len(account.receipts) == len(body.parts)
        return same and self.view.actions.verify(who, payload, account.signature)

    def stated_by(self, bound: Plan | Entry) -> dict[PeerId, list[int]]:
        """By member, the parts that it states: its own, and those of which it is a witness."""
        found: dict[PeerId, list[int]] = {}
        for index, peers in enumerate(stated_by(bound, self.view.shape.witnesses)):
            for peer in peers:
                found.setdefault(peer, []).append(index)
        return found

    def owned(self, entry: Entry, reduced: Mapping[PeerId, bytes]) -> bool:
        """Whether each part is what its owner and its witnesses have reduced, of exactly what the
        entry names."""
        if self.view.shape.kin:  # every member makes the bytes by itself
            return True
        of = meaning(entry)
        return all(
            who in reduced
            and self.reduced(
                who, of, tuple((index, entry.part_digests[index]) for index in parts), reduced[who]
            )
            for who, parts in self.stated_by(entry).items()
        )

    def _invented(self, entry: Entry, claims: Claims) -> str:
        offered = {
            Contributor(who, claim.cid, claim.weight, claim.reading)
            for who, claim in claims
            if claim.cid and claim.weight
        }
        members = [contributor.member for contributor in entry.contributors]
        cids = {contributor.cid for contributor in entry.contributors}
        if not set(entry.contributors) <= offered or min(len(set(members)), len(cids)) < len(
            members
        ):
            return "contributors that offered nothing of the kind"
        if entry.contributors and self.founding:
            return f"contributors before there are {least_members(self.view.tolerated)} members"
        if not {part.owner for part in entry.parts} <= {member.peer for member in self.view.config}:
            return "owners that are no members"
        if not self.fair(entry):
            return "an owner of more than its fair share"
        return self._wrong_config(entry.next_config, claims)

    @property
    def shares_parts(self) -> bool:
        """Whether parts have owners that add up for the others, whoever they are."""
        shape = self.view.shape
        return not (shape.kin or shape.single or shape.reducer == "gather")

    def fair(self, bound: Plan | Entry) -> bool:
        """Whether no owner has more than its fair share."""
        return not self.shares_parts or is_fair(bound, self.view.tolerated)

    # ---- configurations
    @property
    def floor(self) -> int:
        """The fewest members that the next configuration may have."""
        return 1 if self.founding else least_members(self.view.tolerated)

    def voiced(self, naming: Iterable[tuple[Member, Member]]) -> set[Member]:
        """Of (who, whom) those named by more members than may lie; while the run is founded by the
        organiser's.
        """
        voices: dict[Member, set[Member]] = {}
        for who, whom in naming:
            voices.setdefault(whom, set()).add(who)
        organiser, lying = self.view.organiser, self.view.tolerated
        return {
            whom
            for whom, of in voices.items()
            if len(of) > lying or (self.founding and any(who.peer == organiser for who in of))
        }

    @cached_property
    def _comings(self) -> Counter[PeerId]:
        """By peer: how often it came in, or came back under a later life, by one of the last
        `WINDOW` entries that has no contributors.
        """
        entries = self.view.journal.entries
        recent = [certified.entry for certified in entries[-WINDOW - 1 :]]
        comings = Counter[PeerId]()
        for before, entry in pairwise(recent):
            if not entry.contributors:
                fresh = set(entry.next_config) - set(before.next_config)
                comings.update(member.peer for member in fresh)
        return comings

    def empty_after_s(self, config: Config) -> float:
        """How long the round must have been open, in seconds, before an entry without contributors
        brings this next configuration.

        One that changes nothing only tells scripts what became of what was lost. One that lets
        peers in which came in often of late waits twice as long for each time: else one member
        could ask in under ever later lives, and the log would grow as fast as it asks. An entry
        with contributors lets in the same peers at no cost, and who leaves or is evicted waits for
        nobody.
        """
        view = self.view
        old, new = set(view.config), set(config)
        usual = LATE * view.timing.detect_s
        if self.founding or {who.peer for who in old} - {who.peer for who in new}:
            return 0.0
        often = min((self._comings[who.peer] for who in new - old), default=FREE)
        return usual * 2.0 ** min(often - FREE, DOUBLED) if often >= FREE else 0.0

    def wishes(self, claims: Claims) -> tuple[set[Member], set[Member], set[Member]]:
        """What claims come to: who leaves, who may be evicted, who may come in."""
        leaving = {who for who, claim in claims if claim.leave}
        silent = self.voiced((who, whom) for who, claim in claims for whom in claim.suspects)
        joining = self.voiced((who, whom) for who, claim in claims for whom in claim.admits)
        return leaving, silent - joining, joining - set(self.view.config)

    def taken_back(self, body: m.Propose, newest: Mapping[Member, m.Claim]) -> bool:
        """Whether a free proposal leaves somebody out by suspicions that are held no more, as far
        as this member knows. ``newest``: by member, the claim with the greatest number that has
        come here."""
        if any(pledge.ballot >= 0 for pledge in body.pledges):
            return False

        def still_claimed(who: Member, claim: m.Claim) -> m.Claim:
            known = newest.get(who)
            if known is None or known.number <= claim.number:
                return claim
            held = tuple(whom for whom in claim.suspects if whom in known.suspects)
            return msgspec.structs.replace(claim, suspects=held)

        claims = [(who, still_claimed(who, claim)) for who, claim in body.claims]
        return self._wrong_config(body.entry.next_config, claims) != ""

    def evictable(self, claims: Claims) -> set[Member]:
        """Whom an honest convener leaves out as silent: enough members suspect them, though as many
        as may lie take their word back.
        """
        voices = Counter(whom for _, claim in claims for whom in set(claim.suspects))
        _, silent, _ = self.wishes(claims)
        least = 1 if self.founding else 2 * self.view.tolerated + 1
        return {whom for whom in silent if voices[whom] >= least}

    def _wrong_config(self, config: Config, claims: Claims) -> str:
        old, new, (leaving, silent, joining) = (
            set(self.view.config),
            set(config),
            self.wishes(claims),
        )
        peers: Mapping[str, Member] = {member.peer: member for member in config}
        if list(config) != sorted(new) or len(peers) != len(config):
            return "a configuration that names somebody twice"
        if not new - old <= joining:
            return "members whom nobody admitted"
        for member in old - new - leaving - silent:
            later = peers.get(member.peer)
            if later is None or later.incarnation <= member.incarnation:
                return f"a configuration without {member.peer}, which neither left nor is silent"
        if len(config) < self.floor or (self.founding and self.view.organiser not in peers):
            return f"a configuration of {len(config)} members"
        fresh = sum(member.peer not in {before.peer for before in old} for member in new - old)
        return (
            "more joiners than staying members can tell"
            if fresh > max(1, len(config) - fresh - 1)
            else ""
        )

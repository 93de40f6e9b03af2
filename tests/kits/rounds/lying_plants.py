"""Known bugs of the round under members that lie, planted to see that the checker finds them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from atoll.collectives import messages as m
from atoll.collectives.group import Certified, Config, Entry, Member, Plan, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.byzantine.acceptor import ByzantineAcceptor
from atoll.collectives.modes.byzantine.blame import Blame, Strikes
from atoll.collectives.modes.byzantine.convener import ByzantineConvener
from atoll.collectives.modes.byzantine.judge import Judge
from atoll.collectives.modes.byzantine.signed import Kind
from atoll.collectives.round import machine as machine_module

from .plant import Plant
from .storage import SimStorage


class LyingPlant(Plant):
    """A bug that shows only where somebody lies."""

    lying = 1


class _Credulous(Judge):
    def why_not(self, body: m.Propose, known: Collection[tuple[Member, m.Claim]]) -> str:
        """Whatever the convener says."""
        return ""


class JustificationNotChecked(LyingPlant):
    """A proposal is echoed whatever it stands on."""

    judge = _Credulous
    lies = ("subset",)


class _NoClaims(Judge):
    def _invented(self, entry: Entry, claims: Sequence[tuple[Member, m.Claim]]) -> str:
        return self._wrong_config(entry.next_config, claims)


class _AnyPlan(ByzantineAcceptor):
    def follows(self, plan: Plan) -> bool:
        """Whatever it says of this member's own contribution."""
        return plan.ballot <= self.view.ballot and not self.judge.founding


class ContributorsNotChecked(LyingPlant):
    """A convener may name contributors that offered nothing, or with another weight."""

    judge, byzantine_acceptor = _NoClaims, _AnyPlan
    lies = ("weight",)


class _AnyBytes(machine_module.RoundMachine):
    def has_bytes(self, entry: Entry) -> bool:
        """Bytes under these digests are here, whatever they are the result of."""
        return not entry.contributors or entry.part_digests in {
            digests for _, digests in self.open.held
        }


class _NoOwners(Judge):
    def owned(self, entry: Entry, reduced: Mapping[PeerId, bytes]) -> bool:
        """The convener knows best."""
        return True


class BytesNotBound(LyingPlant):
    """Votes are for digests, whatever contributors the entry says they are of; a member whose plan
    was hidden can get them from nobody.
    """

    machine, judge = _AnyBytes, _NoOwners
    lies = ("hide",)


class ContributorStruckOut(BytesNotBound):
    """As before: an honest contribution that is in the bytes is left out of the entry."""

    lies = ("subset",)


class ContributorAdded(BytesNotBound):
    """As before: an entry names a contribution that is not in the bytes."""

    lies = ("superset",)


class OwnersNotAsked(LyingPlant):
    """A convener hands out bytes of its own under digests that fit them, in the name of the parts'
    owners.
    """

    judge = _NoOwners
    lies = ("subset", "superset")


class _AnyShares(Judge):
    def fair(self, bound: Plan | Entry) -> bool:
        """Whoever plans knows best who owns what."""
        return True


class SharesNotChecked(LyingPlant):
    """A convener may give all parts to itself."""

    judge = _AnyShares
    lies = ("own",)


class _OwnersAlone(Judge):
    def stated_by(self, bound: Plan | Entry) -> dict[PeerId, list[int]]:
        """Owners know best what comes of their parts."""
        return {
            part.owner: [at for at, other in enumerate(bound.parts) if other.owner == part.owner]
            for part in bound.parts
        }


class SumsNotWitnessed(LyingPlant):
    """An owner's word is enough for the sum of its part."""

    judge = _OwnersAlone
    lies = ("add",)


class _AnyConfig(Judge):
    def _wrong_config(self, config: Config, claims: Sequence[tuple[Member, m.Claim]]) -> str:
        return ""


class ConfigurationNotChecked(LyingPlant):
    """A convener may remove whom it likes."""

    judge = _AnyConfig
    lies = ("evict",)


class _OneVoice(Judge):
    def voiced(self, naming: Iterable[tuple[Member, Member]]) -> set[Member]:
        """Whoever is named by anybody."""
        return {whom for _, whom in naming}


class OneVoiceIsEnough(LyingPlant):
    """One member's claim lets others in, and evicts."""

    judge = _OneVoice
    lies = ("evict",)


class _Unsigned(Judge):
    def signed(self, kind: Kind, who: Member, ballot: int, digest: bytes, signature: bytes) -> bool:
        """The channel is authenticated, so why look."""
        return True


class SignaturesNotVerified(LyingPlant):
    """Votes count without a look at their signatures: a certificate is one for nobody else."""

    judge = _Unsigned
    lies = ("garble", "twice")


class _VotesAtOnce(ByzantineAcceptor):
    def cast(self, now: float, ballot: int, entry: Entry) -> None:
        """A vote with the echo."""
        super().cast(now, ballot, entry)
        self.view.journal.accept(ballot, entry)
        self.view.send_vote(ballot, entry)


class VoteWithoutEchoes(LyingPlant):
    """A member votes for what only it was told."""

    byzantine_acceptor = _VotesAtOnce
    lies = ("equivocate", "twice")


class _Majority(machine_module.RoundMachine):
    def quorum(self, voters: Sequence[Member]) -> bool:
        """Half of them and one."""
        return 2 * len(set(voters) & set(self.config)) > len(self.config)


class MajorityDecides(LyingPlant):
    """A majority is held for a quorum."""

    machine = _Majority
    lies = ("equivocate", "twice")


class _Mixer(machine_module.RoundMachine):
    def count_vote(self, now: float, who: Member, body: m.Accepted) -> None:
        """As if all votes for an entry were of one ballot."""
        mixed = self.open.votes.setdefault((-1, body.entry_hash), {})
        ballots = self.__dict__.setdefault("ballots", {})
        if who not in mixed:
            mixed[who] = body.signature
            ballots[body.entry_hash, who] = body.ballot
        entry = self.open.known.get(body.entry_hash)
        if self.open.decided is None and entry is not None and self.quorum(list(mixed)):
            votes = tuple(
                Vote(member, ballots[body.entry_hash, member], signature)
                for member, signature in sorted(mixed.items())
            )
            self.open.decided = Certified(entry, votes)
            self._try_apply(now)


class CertificateMixesBallots(LyingPlant):
    """Votes for an entry count together, of whichever ballot they are."""

    machine = _Mixer
    lies = ("withhold", "promise")


class _Follower(ByzantineAcceptor):
    def _turned(self, now: float, who: Member, ballot: int) -> None:
        if ballot > self.view.ballot:
            self.view.enter(now, ballot)


class AnybodyTurns(LyingPlant):
    """A member follows into any ballot that one member says it is in: the last one there is,
    say.
    """

    byzantine_acceptor = _Follower
    lies = ("turns",)


class _RunsAhead(ByzantineAcceptor):
    @property
    def ahead(self) -> bool:
        """Each ballot has its time, whoever is in it."""
        return False


class NobodyWaitsForAQuorum(LyingPlant):
    """A member that has less patience than the others stays ahead of them, ballot after ballot."""

    byzantine_acceptor = _RunsAhead


class _Ignores(ByzantineConvener):
    def on_pledge(self, now: float, pledged: m.Pledged, body: m.Pledge) -> None:
        """As if nothing had been accepted."""
        super().on_pledge(now, pledged, m.Pledge(body.ballot, None, (), body.ready, body.signature))


class PledgedValueIgnored(LyingPlant):
    """A convener proposes its own value although a pledge names one: nobody echoes it."""

    byzantine_convener = _Ignores


class EchoForgotten(LyingPlant):
    """A crash takes echo and promise along: the next life echoes another value in the same ballot,
    and has signed two.
    """

    lies = ("equivocate",)

    def crashed(self, storage: SimStorage) -> None:
        """Forget them."""
        journal = storage.journal()
        journal.promised, journal.echoed, journal.restarted = -1, None, False


class _Forgetting(Strikes):
    def shunned(self, round_: int, most: int) -> set[PeerId]:
        """Nobody."""
        return set()


class _Forgetful(Blame):
    def __init__(self) -> None:
        super().__init__()
        self.owners = _Forgetting(1)


class _Lenient(Blame):
    def __init__(self) -> None:
        super().__init__()
        self.givers, self.doubted = _Forgetting(1), _Forgetting(1)


class OwnersForgotten(LyingPlant):
    """Who held up a reduction owns parts of the next one again: each of its rounds is late."""

    blame = _Forgetful
    lies = ("hoard",)


class GiversForgotten(LyingPlant):
    """Who keeps its contribution from some is waited for as long in the next round."""

    blame = _Lenient
    lies = ("starve",)


class _NoWait(Judge):
    def empty_after_s(self, config: Config) -> float:
        """At once."""
        return 0.0


class LivesCostNothing(LyingPlant):
    """Who asks in under ever later lives fills the log with empty entries, as fast as it asks."""

    judge = _NoWait
    lies = ("lives",)


class _OnceSaid(Judge):
    def taken_back(self, body: m.Propose, newest: Mapping[Member, m.Claim]) -> bool:
        """What was said once, holds."""
        return False


class RetractionsIgnored(LyingPlant):
    """A suspicion that an honest member has taken back still helps a liar to evict another."""

    judge = _OnceSaid


LYING_PLANTS: dict[str, type[Plant]] = {
    "justification-not-checked": JustificationNotChecked,
    "contributors-not-checked": ContributorsNotChecked,
    "bytes-not-bound": BytesNotBound,
    "contributor-struck-out": ContributorStruckOut,
    "contributor-added": ContributorAdded,
    "owners-not-asked": OwnersNotAsked,
    "shares-not-checked": SharesNotChecked,
    "sums-not-witnessed": SumsNotWitnessed,
    "configuration-not-checked": ConfigurationNotChecked,
    "one-voice-is-enough": OneVoiceIsEnough,
    "signatures-not-verified": SignaturesNotVerified,
    "vote-without-echoes": VoteWithoutEchoes,
    "majority-decides": MajorityDecides,
    "certificate-mixes-ballots": CertificateMixesBallots,
    "anybody-turns": AnybodyTurns,
    "pledged-value-ignored": PledgedValueIgnored,
    "echo-forgotten": EchoForgotten,
}

DEAR_PLANTS: dict[str, type[Plant]] = {
    "owners-forgotten": OwnersForgotten,
    "givers-forgotten": GiversForgotten,
    "lives-cost-nothing": LivesCostNothing,
    "retractions-ignored": RetractionsIgnored,
    "nobody-waits-for-a-quorum": NobodyWaitsForAQuorum,
}
"""Of these no history is wrong: liars cost the others more than they should. Tests of what they
cost find them.
"""

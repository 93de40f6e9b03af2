"""Peers that do not do as they should. All of a swarm's hostile peers know each other, and spare
each other as validators and owners.

An attack is an `Attempt` that does one thing otherwise; `Attack.vector` has those that are only
another gradient. What an attack is expected to end with stands beside it: in the step in which it
struck, or some time later, when a validator looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from atoll.collectives.identifiers import PeerId
from atoll.collectives.simulation import World
from atoll.security.btard.attempt import Attempt
from atoll.security.btard.draw import aggregate_commitment, drawn
from atoll.security.btard.messages import (
    Accusation,
    Body,
    Bundle,
    Checks,
    Commit,
    CommittedVector,
    Fault,
    Frame,
    GuiltyVerdict,
    Item,
    Judgement,
    Kind,
    Lacking,
    Residuals,
    Result,
    Reveal,
    Signed,
    Vector,
    VectorRequest,
    sign,
    sign_bytes,
)
from atoll.security.btard.peer import BtardPeer
from atoll.security.identity import Identity


class Attack(NamedTuple):
    """``attempt``: what it does otherwise; ``vector``: name of an attack on gradients. ``faults``:
    what attackers are removed for; ``at_once``: in the step in which they struck. ``intervals``: it
    is one on local steps."""

    attempt: type[Attempt] = Attempt
    vector: str = ""
    faults: tuple[Fault, ...] = (Fault.GRADIENT,)
    at_once: bool = False
    intervals: int = 0


class Gang:
    """What a swarm's attackers have in common.

    ``signers``: their keys; ``gradient_of``: the right gradient of anybody at a step, which anybody
    can compute; ``rate``: the share of steps in which each of them strikes, from ``since`` on.
    """

    def __init__(
        self,
        signers: Mapping[PeerId, Identity],
        rngs: Mapping[PeerId, Random],
        world: World,
        gradient_of: Callable[[int, PeerId], Vector],
        rate: float = 1.0,
        since: int = 1,
    ) -> None:
        self.signers, self.rngs, self.world = signers, rngs, world
        self.gradient_of, self._rate, self._since = gradient_of, rate, since
        # by attempt, and whether they show in the next step only
        self.strikes: dict[tuple[bytes, bool], set[PeerId]] = {}
        self._acts: dict[tuple[PeerId, int], bool] = {}

    def acts(self, peer: PeerId, step: int) -> bool:
        """Whether an attacker strikes in a step."""
        return step >= self._since and self._acts.setdefault(
            (peer, step), self.rngs[peer].random() < self._rate
        )

    def recruit(self, peer: BtardPeer, attack: Attack) -> None:
        """Let a peer be an attacker from its next attempt on."""
        peer.__class__, peer.attempt_type = Hostile, attack.attempt
        assert isinstance(peer, Hostile)
        peer.gang = self


class Hostile(BtardPeer):
    """A peer that belongs to the attackers."""

    gang: Gang

    def examine(self, target: PeerId) -> float | None:
        """Friends are always right."""
        return 0.0 if target in self.gang.signers else super().examine(target)


class Struck(Attempt):
    """Base of attacks."""

    @property
    def gang(self) -> Gang:
        """Whom it belongs to."""
        assert isinstance(self.around, Hostile)
        return self.around.gang

    @property
    def rng(self) -> Random:
        """Of this peer's attacks."""
        return self.gang.rngs[self.roster[self.me]]

    @property
    def acts(self) -> bool:
        """Whether it attacks in this step."""
        return self.gang.acts(self.roster[self.me], self.context.step)

    def strikes(self, later: bool = False) -> bool:
        """Whether it attacks in this step; then it is noted that it did (``later``: to be found in
        the next one).
        """
        acts = self.acts
        if acts:
            strikes = self.gang.strikes.setdefault((self.context.tag, later), set())
            strikes.add(self.roster[self.me])
        return acts

    def is_friend(self, number: int) -> bool:
        """Whether a peer belongs to the attackers."""
        return self.roster[number] in self.gang.signers

    def honest(self) -> list[int]:
        """Numbers of all others."""
        return [number for number in range(len(self.roster)) if not self.is_friend(number)]


class Equivocates(Struck):
    """Says one thing to some and another to others, of one kind of message."""

    def say(self, now: float, body: Body) -> None:
        """Two signed messages for one slot."""
        kinds = (Commit, Result, Residuals, Checks)
        chosen = kinds[(self.context.step + self.me) % len(kinds)]
        other = self._other(body)
        later = chosen is Checks  # some have ended the step before others see the two messages
        if type(body) is not chosen or other is None or self.muted or not self.strikes(later):
            super().say(now, body)
            return
        one, two = (sign(self.context, self.around.signer, each) for each in (body, other))
        for number in self.honest():
            self._tell(number, one if number % 2 else two)
        for number in range(len(self.roster)):
            if self.is_friend(number) and number != self.me:
                self._tell(number, one)
        self.on_signed(now, one)

    def _other(self, body: Body) -> Body | None:
        match body:
            case Commit(parts) if parts:
                return msgspec.structs.replace(body, parts=parts[::-1])
            case Result(share=share):
                return msgspec.structs.replace(body, share=share[::-1])
            case Residuals(norms=norms) if norms:
                return msgspec.structs.replace(body, projections=bytes(len(norms)))
            case Checks():
                return msgspec.structs.replace(
                    body, accusations=(Accusation(Fault.RESIDUAL, self.honest()[0]),)
                )
            case _:
                return None


class WithholdsParts(Struck):
    """Sends no part to some honest owners, not even when they ask."""

    def send(self, item: Item, to: int) -> None:
        """Not to them."""
        if (
            item[0] == Kind.PART
            and item[1] == self.me
            and not self.is_friend(to)
            and to % 2
            and self.strikes()
        ):
            return
        super().send(item, to)

    def publish(self, item: Item) -> None:
        """Nor to all."""
        if not self.acts:
            super().publish(item)


class WithholdsAggregate(Struck):
    """Sends the aggregate of its part to nobody but its friends."""

    def send(self, item: Item, to: int) -> None:
        """Not to honest peers."""
        if item[0] == Kind.AGGREGATE and self.is_friend(item[1]) and not self.is_friend(to):
            acts = self.gang.acts(self.roster[item[1]], self.context.step)
            if acts and (item[1] != self.me or self.strikes()):
                return
        super().send(item, to)


class Whispers(Struck):
    """Says what it says to all but one honest peer."""

    def _tell(self, to: int | None, frame: Frame) -> None:
        if to is None and isinstance(frame, Signed) and self.strikes():
            for number in range(len(self.roster)):
                if number not in (self.me, self.honest()[0]):
                    super()._tell(number, frame)
        elif isinstance(frame, CommittedVector) or to != self.honest()[0] or not self.acts:
            super()._tell(to, frame)


class Moody(Struck):
    """Of all that it sends, questions and testimonies too, a part reaches a part of the honest
    only.
    """

    def _tell(self, to: int | None, frame: Frame) -> None:
        if not self.strikes():
            super()._tell(to, frame)
            return
        for number in range(len(self.roster)) if to is None else (to,):
            if number != self.me and (self.is_friend(number) or self.rng.random() < 0.6):
                super()._tell(number, frame)


class Silent(Struck):
    """Stops speaking in the middle of a step."""

    def say(self, now: float, body: Body) -> None:
        """Nothing from its result on."""
        if not isinstance(body, Commit) and self.strikes():
            return
        super().say(now, body)


class WrongAggregate(Struck):
    """Commits to an aggregate with one value changed."""

    def say(self, now: float, body: Body) -> None:
        """The commitment is to the changed aggregate."""
        if isinstance(body, Result) and not self.muted and self.strikes():
            item = (Kind.AGGREGATE, self.me, 0)
            wrong = self.vectors.held[item].copy()
            wrong[0] += np.float32(1e-2)
            self.vectors.held[item] = wrong
            body = msgspec.structs.replace(
                body, aggregate=aggregate_commitment(self.context, self.roster[self.me], wrong)
            )
        super().say(now, body)


class FalseResiduals(Struck):
    """Says of one of its parts what is not so."""

    def say(self, now: float, body: Body) -> None:
        """One projection changed, of a part that an honest peer owns."""
        if isinstance(body, Residuals) and body.norms and self.strikes():
            part = self.rng.choice(self.honest())
            projections = np.frombuffer(body.projections, "<f4").copy()
            projections[part] += np.float32(1e-2)
            body = msgspec.structs.replace(body, projections=projections.tobytes())
        super().say(now, body)


class FalseAccusation(Struck):
    """Accuses an honest peer: of its residual, or as its validator, or where it has no say; its
    friends find it guilty.
    """

    def say(self, now: float, body: Body) -> None:
        """An accusation, or the votes for it."""
        if isinstance(body, Checks) and self.strikes():
            whom = self.rng.choice(self.honest())
            target = self.targets.get(self.roster[self.me])
            if target is not None and target not in self.gang.signers:
                accusation = Accusation(Fault.GRADIENT, self.roster.index(target))
            else:
                accusation = Accusation(self.rng.choice((Fault.RESIDUAL, Fault.GRADIENT)), whom)
            body = msgspec.structs.replace(body, accusations=(accusation,))
        elif isinstance(body, Judgement):
            accused = [(each, Fault.RESIDUAL) for _, each in self.cases.residuals] + [
                (each, Fault.GRADIENT) for each in self.cases.targets
            ]
            body = msgspec.structs.replace(
                body, verdicts=tuple(sorted({GuiltyVerdict(*each) for each in accused}))
            )
        super().say(now, body)


class AbortsDraw(Struck):
    """Reveals its share last, and only if it likes the draw: the first bit is zero."""

    kept: tuple[float, Body] | None = None

    def say(self, now: float, body: Body) -> None:
        """The reveal waits for all others."""
        if isinstance(body, Reveal) and self.acts:
            self.kept = (now, body)
        else:
            super().say(now, body)

    def advance(self, now: float) -> None:
        """All others have revealed: would it be a good draw?"""
        super().advance(now)
        if self.kept is None or self.muted or self.stage != 4:
            return
        shares = [
            self.table.body(Kind.REVEAL, number, Reveal) for number in range(len(self.roster))
        ]
        if sum(share is None for share in shares) > 1:
            return
        kept, self.kept = self.kept, None
        body = kept[1]
        assert isinstance(body, Reveal)
        if (
            drawn(self.context, [body.share if share is None else share.share for share in shares])[
                0
            ]
            < 128
        ):
            super().say(now, body)
        else:
            self.strikes()


class WrongReveal(Struck):
    """Reveals another share than the one it committed to."""

    def say(self, now: float, body: Body) -> None:
        """Another share."""
        if isinstance(body, Reveal) and self.strikes():
            body = msgspec.structs.replace(body, share=self.rng.randbytes(32))
        super().say(now, body)


class CopiesCommitments(Struck):
    """Says the commitments of an honest peer as its own, and sends that one's parts, which it
    knows, as its gradient follows from a public seed.
    """

    def say(self, now: float, body: Body) -> None:
        """The commitments wait for those of an honest contributor."""
        if isinstance(body, Commit) and body.parts and self.victim() is not None and self.strikes():
            self.waits = True
        else:
            super().say(now, body)

    waits = False

    def victim(self) -> int | None:
        """Whose commitments it copies."""
        return next((number for number in self.honest() if number in self.contributors), None)

    def advance(self, now: float) -> None:
        """Once the victim has committed, so has this peer."""
        victim = self.victim()
        if self.waits and victim is not None:
            commit = self.table.body(Kind.COMMIT, victim, Commit)
            if commit is not None:
                self.waits = False
                stolen = self.gang.gradient_of(self.context.step, self.roster[victim])
                for part in range(len(self.roster)):
                    self.vectors.held[Kind.PART, self.me, part] = stolen[
                        self.bounds[part] : self.bounds[part + 1]
                    ]
                super().say(now, commit)
        super().advance(now)


class Nonsense(Struck):
    """Signs bytes that are no message."""

    def say(self, now: float, body: Body) -> None:
        """Garbage in place of its result."""
        if isinstance(body, Result) and self.strikes():
            self._tell(None, sign_bytes(self.context, self.around.signer, self.rng.randbytes(40)))
        else:
            super().say(now, body)


class FalseTestimony(Struck):
    """All attackers testify that an honest peer says nothing, and pass around evidence that proves
    nothing.
    """

    def commit(self, now: float) -> None:
        """At once."""
        super().commit(now)
        if not self.acts or not self.honest():
            return
        whom = self.honest()[0]
        item: Item = (Kind.COMMIT, whom, 0)
        self._tell(None, sign(self.context, self.around.signer, Lacking((item,))))
        mine = sign(self.context, self.around.signer, Lacking((item,)))
        friends = tuple(peer for peer in self.roster if peer in self.gang.signers)
        small = msgspec.structs.replace(self.context, roster=(*friends, self.roster[whom]))
        signed = tuple(
            sign(
                small,
                self.gang.signers[peer],
                Lacking(((Kind.COMMIT, len(friends), 0),)),
            )
            for peer in friends
        )
        self._tell(
            None,
            Bundle(small, Fault.WITHHELD, len(friends), (Kind.COMMIT, len(friends), 0), signed),
        )
        self._tell(
            None, Bundle(self.context, Fault.WITHHELD, whom, item, (mine,) * len(self.roster))
        )


class Floods(Struck):
    """Sends all others messages that nobody has signed, one after another, for them to check."""

    def commit(self, now: float) -> None:
        """Beside its commitments."""
        super().commit(now)
        if not self.strikes():
            return
        for _ in range(40):
            garbage = Signed(
                self.context.step,
                self.context.tag,
                self.honest()[0],
                self.rng.randbytes(40),
                self.rng.randbytes(64),
            )
            self._tell(None, garbage)


class OtherView(Struck):
    """Claims to have heard something else than all others."""

    def say(self, now: float, body: Body) -> None:
        """Another view in its residuals."""
        if isinstance(body, Residuals) and self.strikes():
            body = msgspec.structs.replace(body, seen=self.rng.randbytes(32))
        super().say(now, body)


class Colludes(Struck):
    """Owner and senders together: a wrong aggregate, and the owner's own projection balances the
    sum.
    """

    def say(self, now: float, body: Body) -> None:
        """As the owner, an aggregate far off; then a projection that makes up for it, which the
        owner itself does not accuse.
        """
        if (
            isinstance(body, Result)
            and self.me in self.contributors
            and not self.muted
            and self.strikes()
        ):
            item = (Kind.AGGREGATE, self.me, 0)
            wrong = self.vectors.held[item] + np.float32(0.5)
            self.vectors.held[item] = wrong
            body = msgspec.structs.replace(
                body, aggregate=aggregate_commitment(self.context, self.roster[self.me], wrong)
            )
        elif isinstance(body, Residuals) and body.norms and self.acts:
            rows = (
                self.vectors.held[Kind.PART, number, self.me]
                for number in self.contributors
                if number != self.me
            )
            rest = sum(self.residual_of(row, self.me).projection for row in rows)
            projections = np.frombuffer(body.projections, "<f4").copy()
            projections[self.me] = -rest
            body = msgspec.structs.replace(body, projections=projections.tobytes())
        super().say(now, body)


class Grudging(Struck):
    """Sends a part to one honest owner in public only, every time, though it could send it in
    private.
    """

    def send(self, item: Item, to: int) -> None:
        """Not to the first honest one."""
        if item[0] == Kind.PART and item[1] == self.me and to == self.honest()[0]:
            self.strikes()
            return
        super().send(item, to)


ELIMINATION = 9  # of the paper: "parts do not get from one of us to the other, so both must leave"


class Eliminates(Struck):
    """Says of an honest peer that both must leave, as the paper has it; its friends find both
    guilty.
    """

    def say(self, now: float, body: Body) -> None:
        """As the last word of a step."""
        if isinstance(body, Checks) and self.strikes():
            whom = self.rng.choice(self.honest())
            body = msgspec.structs.replace(body, accusations=(Accusation(ELIMINATION, whom),))
        elif isinstance(body, Judgement) and self.acts:
            both = tuple(
                GuiltyVerdict(number, ELIMINATION) for number in (self.honest()[0], self.me)
            )
            body = msgspec.structs.replace(body, verdicts=both)
        super().say(now, body)


class Demands(Struck):
    """Asks in public for parts that it has got."""

    def aggregate(self, now: float) -> None:
        """Asks all honest contributors again."""
        whom = next((number for number in self.honest() if number in self.contributors), None)
        if whom is not None and self.strikes():
            super().say(now, VectorRequest(((Kind.PART, whom, self.me),)))
        if not self.muted:
            super().aggregate(now)


class Ambushes(Struck):
    """Asks all honest makers for their parts at once, and tells the others so when these parts have
    long come to them, and were dropped. Meanwhile it keeps the step open, by a result that comes as
    late as can be."""

    def say(self, now: float, body: Body) -> None:
        """The makers are asked alone."""
        makers = [number for number in self.honest() if number in self.contributors]
        if not isinstance(body, Result) or not makers or self.muted or not self.strikes():
            super().say(now, body)
            return
        for maker in makers:
            self._tell(maker, self._question([maker]))
        world, timeout_s, late = self.gang.world, self.around.settings.timeout_s, super().say
        world.after(timeout_s / 4, lambda: self._tell(None, self._question(makers)))
        world.after(timeout_s * 1.6, lambda: late(world.now, body))

    def _question(self, makers: list[int]) -> Signed:
        items = tuple((int(Kind.PART), maker, self.me) for maker in makers)
        return sign(self.context, self.around.signer, VectorRequest(items))


class SendsOtherPart(Struck):
    """Sends an honest owner a part that is not the one committed to."""

    def _piece(self, item: Item) -> CommittedVector:
        piece = super()._piece(item)
        if (
            item[0] == Kind.PART
            and item[1] == self.me
            and not self.is_friend(item[2])
            and item[2] % 2
            and self.strikes()
        ):
            return piece._replace(values=piece.values + np.float32(1))
        return piece


class HidesStates(Struck):
    """Shows nobody its last trail."""

    def own_states(self) -> CommittedVector | None:
        """Nothing."""
        return (
            None
            if self.roster[self.me] in self.targets.values() and self.strikes()
            else super().own_states()
        )


def _protocol(attempt: type[Attempt], *faults: Fault) -> Attack:
    return Attack(attempt, "", faults, True)


PROTOCOL_ATTACKS: dict[str, Attack] = {
    "equivocation": _protocol(Equivocates, Fault.EQUIVOCATION),
    "withheld_parts": _protocol(WithholdsParts, Fault.WITHHELD),
    "other_parts": _protocol(SendsOtherPart, Fault.WITHHELD),
    "withheld_aggregate": _protocol(WithholdsAggregate, Fault.WITHHELD),
    "silence": _protocol(Silent, Fault.WITHHELD),
    "wrong_aggregate": _protocol(WrongAggregate, Fault.AGGREGATE),
    "false_residuals": _protocol(FalseResiduals, Fault.RESIDUAL),
    "false_accusation": _protocol(FalseAccusation, Fault.ACCUSATION),
    "abort_abuse": _protocol(AbortsDraw, Fault.WITHHELD),
    "wrong_reveal": _protocol(WrongReveal, Fault.REVEAL),
    "copied_commitments": _protocol(CopiesCommitments, Fault.WITHHELD),
    "nonsense": _protocol(Nonsense, Fault.NONSENSE),
    "flood": _protocol(Floods, Fault.WITHHELD),
    "other_view": _protocol(OtherView, Fault.WITHHELD),
    "elimination": _protocol(Eliminates, Fault.NONSENSE),
    "hidden_states": _protocol(HidesStates, Fault.WITHHELD)._replace(intervals=4),
    "collusion": Attack(Colludes, "", (Fault.GRADIENT, Fault.RESIDUAL, Fault.AGGREGATE)),
}
"""Attacks on the protocol after which only attackers are removed."""

ODD_ATTACKS: dict[str, Attack] = {
    "false_testimony": Attack(FalseTestimony, "", ()),
    "grudge": Attack(Grudging, "", ()),
    "whisper": Attack(Whispers, "", (Fault.WITHHELD,)),
    "moods": Attack(Moody, "", (Fault.WITHHELD,)),
    "demands": Attack(Demands, "", ()),
    "ambush": Attack(Ambushes, "", (Fault.WITHHELD,)),
}
"""Attacks that cost time or bytes, and nobody honest its place."""

VECTORS: tuple[str, ...] = (
    "sign_flip",
    "sign_flip_1000",
    "ipm_0.1",
    "foe_10",
    "alie_1.5",
    "mimic",
    "random_direction",
    "gaussian",
    "huge",
    "nan",
    "inf",
    "label_flip",
    "delayed",
)
ATTACKS: dict[str, Attack] = {
    **PROTOCOL_ATTACKS,
    **ODD_ATTACKS,
    **{name: Attack(vector=name) for name in VECTORS},
    "nan": Attack(vector="nan", faults=(Fault.RESIDUAL,)),
    "inf": Attack(vector="inf", faults=(Fault.RESIDUAL,)),
}
"""By the names of `bench_btard.py --attack`."""

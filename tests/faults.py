"""Faults at a phase of a round, said once and done to simulated or to real swarms.

    fault("kill").of("owner").during("gather")
    fault("stop").of("convener", "script").during("decide").lasting(4)
    fault("slow").of("member").during("reduce", after_s=0.01)

A fault waits for a reduction (a plan names its convener and the owners of its parts), chooses its
victim by that plan, waits until the victim is in the phase, and strikes. What each fault is:

kill       the process is gone at once; it is started again when the fault is over
stop       SIGSTOP, until the fault is over
blackhole  nothing gets to the victim or away from it, and nobody is told
reset      all its connections end by RST, once
slow       its rate falls to 1 % of what it was
corrupt    one byte of its bulk traffic is changed on the way, once
lie        its own part's result is another one for one receiver, once: sealed and sent as if it
           were right (simulated only)
leave      it leaves the run in good order

`Simulated` does them to a `SimSwarm` in virtual time; `real_faults.Armed` to processes, in the
namespaces of `netns.lab` where it is about the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from kits.rounds.swarm import SimSwarm

from atoll.collectives import messages as m
from atoll.collectives.exchange import header as record_header
from atoll.collectives.identifiers import PeerId

Kind = Literal["kill", "stop", "blackhole", "reset", "slow", "corrupt", "lie", "leave"]
Phase = Literal["reduce", "gather", "decide", "measure"]
Target = Literal["member", "owner", "convener"]
Part = Literal["node", "script", "both"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES: tuple[Phase, ...] = (
    "reduce",
    "gather",
    "decide",
)  # of every round; "measure": where a robust rule weighs whole vectors
TARGETS: tuple[Target, ...] = get_args(Target)
PARTS: tuple[Part, ...] = get_args(Part)
RECORDS: dict[int, Phase] = {
    record_header.PART: "reduce",
    record_header.PARTIAL: "reduce",
    record_header.ACCOUNT: "reduce",
    record_header.MEASURE: "measure",
    record_header.RESULT: "gather",
}
SLOW_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``part``: which processes of a real peer are killed or stopped. ``for_s``: how
    long it lasts where it lasts.
    """

    kind: Kind
    target: Target = "owner"
    part: Part = "node"
    phase: Phase = "reduce"
    after_s: float = 0.0
    for_s: float = 2.0

    def of(self, target: Target, part: Part = "node") -> Fault:
        """Who is struck."""
        return replace(self, target=target, part=part)

    def during(self, phase: Phase, *, after_s: float = 0.0) -> Fault:
        """When: in this phase of the victim's, so long after it began."""
        return replace(self, phase=phase, after_s=after_s)

    def lasting(self, seconds: float) -> Fault:
        """How long."""
        return replace(self, for_s=seconds)

    def __str__(self) -> str:
        return f"{self.kind} the {self.target}'s {self.part} in {self.phase}"


def fault(kind: Kind) -> Fault:
    """The beginning of a sentence."""
    return Fault(kind)


def choose(
    target: Target,
    convener: str,
    owners: Sequence[str],
    contributors: Sequence[str],
    spared: Sequence[str] = (),
) -> str | None:
    """The victim by a plan; None when there is none of that kind among those not ``spared``.

    "convener": who made the plan. "owner": owner of a part, somebody else than the convener if
    possible. "member": neither the convener nor an owner if there is such a contributor, else the
    owner of the last part that is not the convener's.
    """
    if target == "convener":
        return None if convener in spared else convener
    owning = [peer for peer in owners if peer not in spared]
    if target == "owner":
        return next((peer for peer in owning if peer != convener), owning[0] if owning else None)
    plain = [peer for peer in contributors if peer not in spared and peer != convener]
    return next(
        (peer for peer in plain if peer not in owners),
        next((peer for peer in reversed(owning) if peer != convener), None),
    )


@dataclass(frozen=True, slots=True)
class Struck:
    """What really happened."""

    fault: Fault
    victim: PeerId
    round: int
    at_s: float


class Simulated:
    """Does a script of faults to a simulated swarm, one after the other, each in a later round than
    the one before.

    Give it to a `SimSwarm` that has faults=() before its `run`. ``struck`` tells what happened;
    ``spare`` are never victims.
    """

    ENOUGH = 4  # members: with one less there is still a majority that does not hang on one
    CALM_S = 3.0  # between the end of a fault and the next one
    RESET_S = 0.01
    SLOW_BYTES_PER_S = (
        2000.0  # where a round of a few hundred bytes takes milliseconds on links without limit
    )

    def __init__(
        self, swarm: SimSwarm, script: Sequence[Fault], spare: Sequence[PeerId] = ()
    ) -> None:
        self.swarm, self.spare = swarm, spare
        self.struck: list[Struck] = []
        self._waiting = list(script)
        self._round = 1
        self._not_before_s = 0.0
        self._victim: tuple[Fault, PeerId, int] | None = None
        self._spoil: tuple[PeerId, Literal["corrupt", "lie"]] | None = None
        self._tap, swarm.network.tap = swarm.network.tap, self._tapped
        self._send, swarm.network.send = swarm.network.send, self._sent  # type: ignore[method-assign]

    @property
    def left(self) -> list[Fault]:
        """What has not struck."""
        return list(self._waiting)

    # ---- waiting for the moment
    def _tapped(self, sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        lost = self._tap is not None and bool(self._tap(sender, receiver, channel, payload))
        if self._waiting and self.swarm.world.now >= self._not_before_s:
            phase = self._look(sender, channel, payload)
            if self._victim is not None:
                wanted, victim, _ = self._victim
                if (
                    wanted.phase == phase
                    and victim in (sender, receiver)
                    and (phase not in ("gather", "measure") or victim == sender)
                ):
                    self._arm(*self._victim)
        return lost

    def _look(self, sender: PeerId, channel: str, payload: Any) -> Phase | None:
        if channel == "record":
            return RECORDS.get(payload[0][1])
        envelope = m.decode(payload[1:], sender) if payload[:1] == b"R" else None
        if envelope is None or not envelope.log.startswith("main/"):
            return None
        members = len(self.swarm.checker.entries[-1].entry.next_config)
        if (
            isinstance(envelope.body, m.PlanMessage)
            and envelope.round >= self._round
            and members >= self.ENOUGH
        ):
            plan, next_fault = envelope.body.plan, self._waiting[0]
            who = choose(
                next_fault.target,
                sender,
                [part.owner for part in plan.parts],
                [c.member.peer for c in plan.contributors],
                self.spare,
            )
            self._victim = (next_fault, PeerId(who), envelope.round) if who is not None else None
        return "decide" if isinstance(envelope.body, m.Accept) else None

    def _arm(self, fault: Fault, victim: PeerId, round_: int) -> None:
        world = self.swarm.world
        self._waiting.pop(0)
        self._victim = None
        self._round = round_ + 1
        self._not_before_s = world.now + fault.after_s + fault.for_s + self.CALM_S
        world.after(fault.after_s, lambda: self._strike(fault, victim, round_))

    # ---- striking
    def _strike(self, fault: Fault, victim: PeerId, round_: int) -> None:
        swarm, network, world = self.swarm, self.swarm.network, self.swarm.world
        if fault.kind == "leave" and not swarm.leave(victim):
            return
        self.struck.append(Struck(fault, victim, round_, world.now))
        world.note(f"{fault} {victim}".encode())
        others = [peer for peer in swarm.peers() if peer != victim]
        match fault.kind:
            case "kill":
                swarm.crash(victim)
                world.after(fault.for_s, lambda: swarm.restart(victim))
            case "stop":
                swarm.freeze(victim)
                world.after(fault.for_s, lambda: swarm.thaw(victim))
            case "blackhole":
                network.partition({peer: int(peer == victim) for peer in swarm.peers()})
                world.after(fault.for_s, lambda: network.partition(None))
            case "reset":
                self._reset(victim, others)
            case "slow":
                self._rate(victim, others, self.SLOW_BYTES_PER_S)
                world.after(fault.for_s, lambda: self._rate(victim, others, 0.0))
            case "corrupt" | "lie":
                self._spoil = (victim, fault.kind)
            case "leave":
                pass

    def _reset(self, victim: PeerId, others: Sequence[PeerId]) -> None:
        """Both ends of every link hear that it is gone; what was under way is lost."""
        swarm = self.swarm
        swarm.network.partition({peer: int(peer == victim) for peer in swarm.peers()})
        for up in (False, True):
            for other in others:
                for a, b in ((victim, other), (other, victim)):
                    swarm.world.after(
                        self.RESET_S * up, lambda a=a, b=b, up=up: self._link(a, b, up)
                    )
        swarm.world.after(self.RESET_S, lambda: swarm.network.partition(None))

    def _link(self, at: PeerId, to: PeerId, up: bool) -> None:
        process = self.swarm.members[at].process
        if process is not None and self.swarm.members[to].process is not None:
            process.link(to, up)

    def _rate(self, victim: PeerId, others: Sequence[PeerId], bytes_per_s: float) -> None:
        for other in others:
            for a, b in ((victim, other), (other, victim)):
                self.swarm.network.link(a, b).bandwidth_bytes_per_s = bytes_per_s

    def _sent(self, sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> float:
        """The network's `send`; a record may be spoilt on its way."""
        spoil = self._spoil
        if spoil is None or channel != "record" or sender != spoil[0]:
            return self._send(sender, receiver, channel, payload)
        if spoil[1] == "lie":
            header, body = payload
            if header[1] != record_header.RESULT or not body:
                return self._send(sender, receiver, channel, payload)
            self._spoil = None
            return self._send(
                sender, receiver, channel, (header, bytes([body[0] ^ 0x55]) + body[1:])
            )
        # the record layer refuses a changed byte: the record is lost, and the lane with it
        self._spoil = None
        for up in (False, True):
            self.swarm.world.after(
                self.RESET_S * (1 + up), lambda up=up: self._link(receiver, sender, up)
            )
            self.swarm.world.after(
                self.RESET_S * (1 + up), lambda up=up: self._link(sender, receiver, up)
            )
        return self.swarm.world.now

"""Seeded plans of faults, and traps.

Faults strike at a time. Traps strike at an event: at the n-th message (or journal write) of a kind,
the sender or the receiver crashes, freezes, is cut off, or the weather turns. Plain random faults
miss most defects of a consensus; traps find them. The trap "mid" kills the sender *inside* its call
of send, so that of one broadcast some messages are out and the rest never are, and whatever the
process would have written after it is not written. "whisper" makes a decision known to one member
only, which then falls silent: the others must find it again from what they accepted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from atoll.collectives.identifiers import PeerId
from atoll.collectives.simulation import Network, ProcessDied, Weather, World

FaultKind = Literal[
    "crash",
    "freeze",
    "partition",
    "isolate",
    "cut",
    "storm",
    "amnesia",
    "leave",
    "shatter",
    "death",
    "loss",
    "backup",
    "disk",
    "home",
    "moment",
    "twin",
]
TrapAction = Literal[
    "mid", "crash", "freeze", "isolate", "partition", "storm", "storm-crash", "whisper"
]
VOTE = "accepted"  # the kind of message that "whisper" keeps from all but one

AIMED: tuple[FaultKind, ...] = ("moment", "twin")
"""Played where they are asked for: seeds with `ALL_FAULTS` are played as they were before there
were these.
"""
ALL_FAULTS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind not in AIMED)
APART: tuple[FaultKind, ...] = ("shatter", "death", "loss", "backup", "disk", "home", *AIMED)
"""Kinds that are planned by themselves, and not struck at a time of `random_plan`."""

ROUND_MESSAGES = (
    "accept",
    "accept",
    "accepted",
    "accepted",
    "promise",
    "prepare",
    "plan",
    "reduced",
    "ready",
    "catch",
    "get",
    "missing",
    "fetch",
    "part",
    "result",
    "blob",
    "write",
)
"""What traps wait for: messages by kind (votes and proposals weigh more), records of the data
plane, writes to the journal.
"""
RELAY_MESSAGES = ("decided", "closing", "paced_plan")
"""Where there are relays, these as well."""
LYING_MESSAGES = (
    "propose",
    "propose",
    "echo",
    "echo",
    "accepted",
    "accepted",
    "reduced",
    "pledge",
    "prepare",
    "claim",
    "turn",
    "plan",
    "ready",
    "catch",
    "get",
    "missing",
    "fetch",
    "part",
    "result",
    "blob",
    "write",
)
"""The same where members may lie."""


class Subject(Protocol):
    """What faults are done to. All methods are harmless when they do not apply (crashing a dead
    process, …).
    """

    def peers(self) -> Sequence[PeerId]:
        """All peers, dead and frozen ones included."""
        ...

    def crash(self, peer: PeerId, *, amnesia: bool = False) -> bool:
        """End the process of ``peer``; with ``amnesia`` its journal too. False when refused."""
        ...

    def restart(self, peer: PeerId) -> None:
        """Start a process of ``peer`` again, if it has none."""
        ...

    def freeze(self, peer: PeerId) -> bool:
        """Stop the process of ``peer`` as SIGSTOP does."""
        ...

    def thaw(self, peer: PeerId) -> None:
        """Let it go on."""
        ...

    def leave(self, peer: PeerId) -> bool:
        """Make ``peer`` leave in good order. False when refused."""
        ...


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault at a time."""

    at_s: float
    kind: FaultKind
    peer: PeerId
    for_s: float


@dataclass(slots=True)
class Trap:
    """Strikes at the ``left``-th event of kind ``kind`` from now on, once."""

    kind: str
    left: int
    action: TrapAction
    at_sender: bool
    delay_s: float
    for_s: float


@dataclass(slots=True)
class FaultPlan:
    """Everything bad that happens before ``heal_s``. Traps are set at ``start_s``."""

    weather: Weather
    faults: list[InjectedFault]
    traps: list[Trap]
    heal_s: float
    start_s: float = 0.0


def quiet_plan() -> FaultPlan:
    """No faults at all."""
    return FaultPlan(Weather(), [], [], 0.0)


def random_plan(
    rng: random.Random,
    peers: Sequence[PeerId],
    *,
    horizon_s: float,
    kinds: Sequence[FaultKind] = ALL_FAULTS,
    messages: Sequence[str] = ROUND_MESSAGES,
) -> FaultPlan:
    """A plan for ``peers``: 1 to 8 faults, up to 4 traps, weather up to 25 % loss, for
    ``horizon_s`` seconds, at once or a third later.
    """
    start_s = rng.choice((0.0, horizon_s / 3))
    weather = Weather(
        rng.choice((0, 0, 0.02, 0.1, 0.25)),
        rng.choice((0, 0.05, 0.2)),
        rng.choice((0, 0.02, 0.1)),
        0.28 * horizon_s,
    )
    spans = tuple(share * horizon_s for share in (0.015, 0.04, 0.15, 0.4, 1.2))
    often: list[FaultKind] = [
        kind
        for kind in kinds
        if kind not in APART
        for _ in range({"crash": 4, "freeze": 2, "partition": 2}.get(kind, 1))
    ]
    count = rng.randint(1, 8) if often else 0
    faults = [
        InjectedFault(
            start_s + rng.random() * horizon_s,
            rng.choice(often),
            rng.choice(peers),
            rng.choice(spans),
        )
        for _ in range(count)
    ]
    actions: list[TrapAction] = ["partition", "isolate", "isolate", "storm", "whisper"]
    if "crash" in kinds:
        actions.extend(("mid", "mid", "mid", "crash", "storm-crash", "storm-crash"))
    if "freeze" in kinds:
        actions.append("freeze")
    traps = [
        Trap(
            rng.choice(messages),
            rng.randint(1, rng.choice((10, 40, 150, 400))),
            rng.choice(actions),
            rng.random() < 0.6,
            rng.choice((0, 0, 0.001, 0.003, 0.006)),
            rng.choice(spans[:4]),
        )
        for _ in range(rng.choice((0, 1, 1, 2, 3, 4)))
    ]
    return FaultPlan(weather, faults, traps, start_s + horizon_s, start_s)


def shatter_plan(rng: random.Random, peers: Sequence[PeerId], plan: FaultPlan) -> None:
    """Add one to three long times in which, most likely, nobody sees a quorum: the swarm falls
    apart, or most of it is dead.
    """
    span = plan.heal_s - plan.start_s
    for _ in range(rng.choice((1, 1, 2, 3))):
        at_s = plan.start_s + rng.random() * 0.7 * span
        plan.faults.append(
            InjectedFault(at_s, "shatter", rng.choice(peers), rng.choice((0.3, 0.6, 1.0)) * span)
        )


@dataclass(slots=True)
class FaultInjector:
    """Carries a plan out. ``struck`` counts what really happened, by kind."""

    world: World
    network: Network
    subject: Subject
    plan: FaultPlan
    rng: random.Random
    struck: dict[str, int] = field(default_factory=dict[str, int])
    healed: bool = False
    confidant: PeerId | None = None  # while somebody whispers: the only one that hears votes

    def start(self) -> None:
        """Schedule the plan, the healing included."""
        self.network.weather = self.plan.weather
        for fault in self.plan.faults:
            self.world.at(fault.at_s, lambda f=fault: self._strike(f.kind, f.peer, f.for_s))
        self.world.at(self.plan.heal_s, self.heal)

    def heal(self) -> None:
        """End all faults: mend the network, wake and restart everybody. No trap strikes any
        more.
        """
        self.healed = True
        self.confidant = None
        self.plan.traps.clear()
        self.network.mend()
        for peer in self.subject.peers():
            self.subject.thaw(peer)
            self.subject.restart(peer)

    def event(self, kind: str, sender: PeerId, receiver: PeerId | None) -> bool:
        """Tell the traps of an event: a message from sender to receiver, or a write of sender.

        Returns whether the message is lost. Raises ProcessDied inside the sender.
        """
        if self.world.now < self.plan.start_s:
            return False
        for trap in self.plan.traps:
            if trap.kind != kind or trap.left <= 0:
                continue
            trap.left -= 1
            if trap.left == 0:
                self._spring(trap, sender, receiver)
        return kind == VOTE and self.confidant is not None and receiver != self.confidant

    def _count(self, kind: str) -> None:
        self.struck[kind] = self.struck.get(kind, 0) + 1

    def _spring(self, trap: Trap, sender: PeerId, receiver: PeerId | None) -> None:
        self._count("trap")
        if trap.action == "mid":
            self._count("mid-broadcast crash")
            raise ProcessDied(sender, trap.for_s)
        if trap.action == "whisper":
            return self._whisper(receiver or sender, 0.4 * (self.plan.heal_s - self.plan.start_s))
        victim = sender if trap.at_sender or receiver is None else receiver
        kind: FaultKind = "crash" if trap.action == "storm-crash" else trap.action
        if trap.action == "storm-crash":
            self.world.after(trap.delay_s, lambda: self._strike("storm", victim, trap.for_s))
        self.world.after(trap.delay_s, lambda: self._strike(kind, victim, trap.for_s))
        return None

    def _whisper(self, peer: PeerId, for_s: float) -> None:
        self._count("whisper")
        self.confidant = peer
        self.world.after(0.02, lambda: self._strike("isolate", peer, for_s))
        self.world.after(for_s, self._speak_up)

    def _speak_up(self) -> None:
        self.confidant = None

    def _strike(self, kind: FaultKind, peer: PeerId, for_s: float) -> None:
        if self.healed:
            return
        after, subject, network = self.world.after, self.subject, self.network
        done = True
        if kind in ("crash", "amnesia"):
            done = subject.crash(peer, amnesia=kind == "amnesia")
            if done:
                after(for_s, lambda: subject.restart(peer))
        elif kind == "freeze":
            done = subject.freeze(peer)
            if done:
                after(for_s, lambda: subject.thaw(peer))
        elif kind == "partition":
            network.partition({p: self.rng.randrange(2) for p in subject.peers()})
            after(for_s, lambda: network.partition(None))
        elif kind == "isolate":
            network.partition({p: int(p == peer) for p in subject.peers()})
            after(for_s, lambda: network.partition(None))
        elif kind == "shatter":
            self._shatter(for_s)
        elif kind == "cut":
            network.cut(peer, self.rng.choice(list(subject.peers())))
        elif kind == "storm":
            network.weather.storm = self.rng.choice((0.5, 0.7, 0.85))
            after(min(for_s, 0.17 * self.plan.heal_s), self._calm)
        else:
            done = subject.leave(peer)
        if done:
            self._count(kind)
            self.world.note(f"{kind} {peer}".encode())

    def _shatter(self, for_s: float) -> None:
        subject, after, peers = self.subject, self.world.after, self.subject.peers()
        if self.rng.random() < 0.6:
            groups = self.rng.choice((2, 3, 4, len(peers)))
            self.network.partition({peer: self.rng.randrange(groups) for peer in peers})
            after(for_s, lambda: self.network.partition(None))
            return
        for peer in peers:
            if self.rng.random() < 0.65 and subject.crash(peer):
                after(for_s * self.rng.uniform(0.5, 1.0), lambda peer=peer: subject.restart(peer))

    def _calm(self) -> None:
        self.network.weather.storm = 0.0

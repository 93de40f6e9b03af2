"""A swarm of BTARD peers from a seed, hostile ones among them, on the simulated network and in
virtual time: the state machines that a node has, without the log of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from msgspec import structs

from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.simulation import Network, World
from atoll.optim.federated.simulation.attacks import ATTACKS as VECTOR_ATTACKS
from atoll.security.btard import AttemptSettings, BtardPeer, GradientTask
from atoll.security.btard.draw import first_draw, seed_of
from atoll.security.btard.finished import Finished
from atoll.security.btard.messages import Bundle, Frame, Vector
from atoll.security.btard.trail import Trail
from atoll.security.btard.wire import decode, encode
from atoll.security.identity import Identity, verify

from .checker import BtardChecker
from .hostile import ATTACKS, Attack, Gang

RUN = RunId("simulated")
QUIET_TICKS = 400  # without a step: it is stuck
SIZE = 64
RATE = np.float32(0.1)
LOCAL = 2  # local steps in an interval
LOCAL_RATE = np.float32(0.05)


@dataclass(frozen=True)
class BtardOptions:
    """``rate``: in which part of the steps an attacker strikes, from ``since`` on. ``noise``:
    relative, of a gradient that is computed again. ``until_clean``: end when no attacker is
    left."""

    n: int = 16
    b: int = 7
    attack: str = "sign_flip"
    steps: int = 50
    rate: float = 1.0
    since: int = 1
    noise: float = 0.0
    until_clean: bool = True
    latency_s: float = 0.02
    jitter_s: float = 0.1
    settings: AttemptSettings = field(
        default_factory=lambda: AttemptSettings(radius=8.0, timeout_s=2.0, compute_s=4.0)
    )


class Quadratic:
    """Half of the squared distance from an optimum; gradients have noise of unit variance, which
    follows from a public seed.
    """

    def __init__(self, seed: int) -> None:
        self.optimum = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32) * 3

    def gradient(self, state: Vector, seed: bytes, *, flipped: bool = False) -> Vector:
        """At ``state``; ``flipped``: as if all labels were wrong."""
        noise = np.random.default_rng(list(seed)).standard_normal(len(state))
        away = state - (-self.optimum if flipped else self.optimum)
        return (away + noise).astype(np.float32)

    def walk(self, state: Vector, seed: bytes, interval: int) -> Vector:
        """The state after an interval of local steps."""
        for step in range(LOCAL):
            gradient = self.gradient(state, blake3(seed + bytes([interval, step])).digest())
            state = np.subtract(state, LOCAL_RATE * gradient, dtype=np.float32)
        return state


class BtardMember:
    """One peer of the swarm: its machine, its state."""

    def __init__(
        self, swarm: BtardSwarm, signer: Identity, rng: Random, attack: Attack | None
    ) -> None:
        self.swarm, self.attack, self.rng = swarm, attack, rng
        self.name = signer.peer
        self._noise = np.random.default_rng(rng.getrandbits(64))
        self.states: dict[int, Vector] = {0: np.zeros(SIZE, np.float32)}
        self.machine = BtardPeer(
            RUN,
            signer,
            swarm.verify,
            swarm.names,
            SIZE,
            swarm.options.settings,
            self,
            Random(f"{swarm.seed}/{self.name}/draws"),
        )
        if attack is not None:
            swarm.gang.recruit(self.machine, attack)

    def acts(self, step: int) -> bool:
        """Whether it is an attacker by vectors, and strikes in a step."""
        hostile = self.attack is not None and bool(self.attack.vector)
        return hostile and self.swarm.gang.acts(self.name, step)

    def begin(self, step: int) -> None:
        """The next step, from the state that is there."""
        self.machine.begin(
            self.swarm.now, step, blake3(self.states[step].tobytes()).digest(), self.states[step]
        )

    def tell(self, to: PeerId | None, frame: Frame) -> None:
        """Into the network."""
        self.swarm.carry(self, to, frame)

    def compute(self, task: GradientTask) -> None:
        """A gradient, a moment later."""
        self.swarm.later(lambda: self.machine.computed(self.swarm.now, task, *self.work(task)))

    def work(self, task: GradientTask) -> tuple[Vector, Trail | None]:
        """One gradient, or the way of several local steps, or one interval of it."""
        intervals = self.swarm.options.settings.intervals
        if not intervals:
            return self.gradient(task), None
        if task.start is not None:
            return self.walk(task.start, task.seed, task.interval), None
        states = [self.states[task.step]]
        jump = self.rng.randrange(intervals) if self.acts(task.step) else -1
        for interval in range(intervals):
            state = self.walk(states[-1], task.seed, interval)
            states.append(
                state - self.swarm.hostile_gradient(self, task) if interval == jump else state
            )
        return states[0] - states[-1], Trail(states)

    def walk(self, state: Vector, seed: bytes, interval: int) -> Vector:
        """An interval, on this machine."""
        return state + self.computed(self.swarm.task.walk(state, seed, interval) - state)

    def gradient(self, task: GradientTask) -> Vector:
        """What an honest machine computes, or what an attacker says it did."""
        if task.peer == self.name and self.acts(task.step):
            return self.swarm.hostile_gradient(self, task)
        return self.computed(self.swarm.task.gradient(self.states[task.step], task.seed))

    def computed(self, vector: Vector) -> Vector:
        """A vector as this machine computes it: with relative noise of its own."""
        if not self.swarm.options.noise:
            return vector
        noise = self.swarm.options.noise * self._noise.standard_normal(len(vector))
        return (vector * (1 + noise)).astype(np.float32)

    def offended(self, sender: PeerId, what: str) -> None:
        """Nobody honest does."""
        if self.attack is None and sender not in self.swarm.hostile:
            self.swarm.checker.problem(f"{sender} is honest and sends {what}")

    def finished(self, now: float, step: Finished) -> None:
        """Apply it; begin the next."""
        number = step.context.step
        self.states[number + 1] = np.subtract(
            self.states[number], RATE * step.vector, dtype=np.float32
        )
        self.states.pop(number - 1, None)
        self.swarm.checker.finished(self, step, self.states[number + 1])
        if not self.swarm.over(number + 1):
            self.swarm.later(lambda: self.begin(number + 1))

    def removed(self, now: float, bundle: Bundle, gone: PeerId) -> None:
        """For the checker."""
        self.swarm.checker.removed(self, bundle)


class BtardSwarm:
    """n peers of which b are hostile; `run` plays them to the end."""

    def __init__(self, seed: int, options: BtardOptions) -> None:
        self.attack = ATTACKS[options.attack]
        if self.attack.intervals and not options.settings.intervals:
            options = replace(
                options, settings=structs.replace(options.settings, intervals=self.attack.intervals)
            )
        self.seed, self.options = seed, options
        self.task = Quadratic(seed)
        self.world = World(seed)
        self.network = Network(self.world, latency_s=options.latency_s, jitter_s=options.jitter_s)
        signers = {
            identity.peer: identity
            for number in range(options.n)
            for identity in [Identity(blake3(f"{seed}/key/{number}".encode()).digest())]
        }
        self.names = tuple(sorted(signers))
        self.hostile = frozenset(Random(f"{seed}/hostile").sample(self.names, options.b))
        rngs = {name: Random(f"{seed}/{name}") for name in self.names}
        self.gang = Gang(
            {name: signers[name] for name in self.names if name in self.hostile},
            rngs,
            self.world,
            self.gradient_of,
            options.rate,
            options.since,
        )
        self._verified: dict[tuple[PeerId, bytes, bytes], bool] = {}
        self._last: int | None = None
        self.control_bytes = dict.fromkeys(self.names, 0)
        self.checker = BtardChecker(self)
        self.members = {
            name: BtardMember(
                self, signers[name], rngs[name], self.attack if name in self.hostile else None
            )
            for name in self.names
        }
        for name in self.names:
            self.network.attach(
                name, lambda sender, _, payload, me=name: self._arrived(me, sender, payload)
            )

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.world.now

    @property
    def honest(self) -> list[BtardMember]:
        """Who is not hostile."""
        return [self.members[name] for name in self.names if name not in self.hostile]

    def verify(self, peer: PeerId, domain: str, data: bytes, signature: bytes, /) -> bool:
        """All peers are in one process: a signature is checked once."""
        key = (peer, data, signature)
        if key not in self._verified:
            self._verified[key] = verify(peer, domain, data, signature)
        return self._verified[key]

    def run(self) -> BtardChecker:
        """To the end: the steps that were asked for, or no attacker is left. What is wrong is in
        the checker.
        """
        for member in self.members.values():
            self.later(lambda member=member: member.begin(0))
        quiet, done = 0, -1
        while not self.checker.problems and quiet < QUIET_TICKS and not self._all_over():
            self.world.run(until=self.now + self.options.settings.timeout_s / 2)
            if self.checker.steps == done:
                quiet += 1
                self.world.run(until=self.now + self.options.settings.timeout_s / 2)
                for member in self.members.values():
                    member.machine.tick(self.now)
            else:
                quiet, done = 0, self.checker.steps
        if quiet >= QUIET_TICKS:
            self.checker.problem(f"step {self.checker.steps} does not end")
        self.checker.end()
        return self.checker

    def over(self, step: int) -> bool:
        """Whether the run ends before this step."""
        if self.options.until_clean and self._last is None and self.checker.clean():
            self._last = (
                max(member.machine.step for member in self.members.values()) + 1
            )  # the same for all
        return step >= self.options.steps or (self._last is not None and step > self._last)

    def _all_over(self) -> bool:
        honest = [member for member in self.honest if not member.machine.ended]
        return all(
            self.over(member.machine.step + 1)
            and member.machine.attempt is None
            and member.machine.step >= 0
            for member in honest
        )

    # What travels.

    def later(self, action: Callable[[], None]) -> None:
        """Do this in a moment."""
        self.world.after(0.001, action)

    def carry(self, sender: BtardMember, to: PeerId | None, frame: Frame) -> None:
        """Send to one, or to all others."""
        self.checker.sent(sender, frame)
        receivers = [to] if to is not None else [name for name in self.names if name != sender.name]
        payload = encode(frame)
        self.control_bytes[sender.name] += len(payload[0]) * len(receivers)
        for name in receivers:
            self.network.send(sender.name, name, "btard", payload)

    def _arrived(self, me: PeerId, sender: PeerId, payload: Any) -> None:
        frame = decode(*payload, peer=sender, elements=2 * SIZE)
        self.members[me].machine.receive(self.now, sender, frame)

    # What attackers know.

    def gradient_of(self, step: int, peer: PeerId) -> Vector:
        """The right gradient of anybody, which anybody can compute."""
        member = self.members[peer]
        return self.task.gradient(member.states[step], seed_of(self._draw(member), step, peer))

    def _draw(self, member: BtardMember) -> bytes:
        previous = member.machine.previous
        return previous.draw if previous is not None else first_draw(RUN)

    def hostile_gradient(self, member: BtardMember, task: GradientTask) -> Vector:
        """By the attack's name, from what the honest peers have."""
        name = self.attack.vector
        if name == "label_flip":
            return self.task.gradient(member.states[task.step], task.seed, flipped=True)
        if name == "delayed":
            return self.task.gradient(np.zeros(SIZE, np.float32), b"delayed" + task.seed)
        draw, state = self._draw(member), member.states[task.step]
        rows = [
            self.task.gradient(state, seed_of(draw, task.step, peer.name)) for peer in self.honest
        ]
        return VECTOR_ATTACKS[name](torch.from_numpy(np.stack(rows))).numpy()

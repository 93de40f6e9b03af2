"""A swarm of peers from a seed: message by message through a network with delays in virtual time,
or fast, without one. The machines are the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from msgspec import structs

from ....collectives.identifiers import PeerId, RunId
from ....collectives.simulation import Network, World
from ...attacks import ATTACKS as VECTOR_ATTACKS
from ...identity import Identity, verify
from ..draw import first_draw, seed_of
from ..finished import Finished
from ..messages import Bundle, Frame, Vector, Verify
from ..peer import BtardPeer, GradientTask
from ..trail import Trail
from ..wire import decode, encode
from .checker import BtardChecker
from .hostile import ATTACKS, Hostile
from .task import SIZE, Quadratic, computed_with_noise, stepped, walked
from .view import Attack, BtardOptions

RUN = RunId("simulated")
QUIET_TICKS = 400  # without a step: it is stuck


class KeyedHash:
    """What stands for a key in fast runs: only the swarm can check it."""

    def __init__(self, peer: PeerId, secret: bytes) -> None:
        self.peer, self._secret = peer, secret

    def sign(self, domain: str, data: bytes) -> bytes:
        """64 bytes."""
        return blake3(domain.encode() + b"\0" + data, key=self._secret).digest(length=64)


class BtardMember:
    """One peer of the swarm: its machine, its state."""

    def __init__(self, swarm: BtardSwarm, signer: Any, attack: Attack | None) -> None:
        self.swarm, self.signer, self.attack = swarm, signer, attack
        self.name: PeerId = signer.peer
        self.rng = Random(f"{swarm.seed}/{self.name}")
        self.noise = np.random.default_rng(self.rng.getrandbits(64))
        self.states: dict[int, Vector] = {0: np.zeros(SIZE, np.float32)}
        self.machine = (BtardPeer if attack is None else Hostile)(
            RUN,
            signer,
            swarm.verify,
            swarm.names,
            SIZE,
            swarm.options.settings,
            self,
            Random(f"{swarm.seed}/{self.name}/draws"),
        )
        if isinstance(self.machine, Hostile) and attack is not None:
            self.machine.member = self
            self.machine.attempt_type = attack.attempt
        self._acts: dict[int, bool] = {}

    def acts(self, step: int) -> bool:
        """Whether an attacker strikes in a step."""
        options = self.swarm.options
        return step >= options.since and self._acts.setdefault(
            step, self.rng.random() < options.rate
        )

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
        hostile = self.attack is not None and bool(self.attack.vector) and self.acts(task.step)
        jump = self.rng.randrange(intervals) if hostile else -1
        for interval in range(intervals):
            state = self.walk(states[-1], task.seed, interval)
            states.append(
                state - self.swarm.hostile_gradient(self, task) if interval == jump else state
            )
        return states[0] - states[-1], Trail(states)

    def walk(self, state: Vector, seed: bytes, interval: int) -> Vector:
        """An interval, on this machine."""
        end = walked(self.swarm.task, state, seed, interval)
        return state + computed_with_noise(end - state, self.swarm.options.noise, self.noise)

    def gradient(self, task: GradientTask) -> Vector:
        """What an honest machine computes, or what an attacker says it did."""
        state = self.states[task.step]
        if (
            self.attack is not None
            and self.attack.vector
            and task.peer == self.name
            and self.acts(task.step)
        ):
            return self.swarm.hostile_gradient(self, task)
        return computed_with_noise(
            self.swarm.task.gradient(state, task.seed), self.swarm.options.noise, self.noise
        )

    def offended(self, sender: PeerId, what: str) -> None:
        """Nobody honest does."""
        if self.attack is None and sender not in self.swarm.hostile:
            self.swarm.checker.problem(f"{sender} is honest and sends {what}")

    def finished(self, now: float, step: Finished) -> None:
        """Apply it; begin the next."""
        number = step.context.step
        self.states[number + 1] = stepped(self.states[number], step.vector)
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
        self._jobs: deque[tuple[PeerId, PeerId, Frame]] = deque()
        self.network = (
            Network(self.world, latency_s=options.latency_s, jitter_s=options.jitter_s)
            if options.messages
            else None
        )
        signers = self._signers()
        self.names = tuple(sorted(signers))
        self.hostile = frozenset(Random(f"{seed}/hostile").sample(self.names, options.b))
        self.strikes: dict[
            tuple[bytes, bool], set[PeerId]
        ] = {}  # by attempt, and whether they show in the next step only
        self._last: int | None = None
        self.control_bytes = dict.fromkeys(self.names, 0)
        self.checker = BtardChecker(self)
        self.members = {
            name: BtardMember(self, signers[name], self.attack if name in self.hostile else None)
            for name in self.names
        }
        self._later: deque[Any] = deque()
        if self.network is not None:
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

    def _signers(self) -> dict[PeerId, Any]:
        seeds = [
            blake3(f"{self.seed}/key/{number}".encode()).digest()
            for number in range(self.options.n)
        ]
        if self.options.messages:
            identities = {identity.peer: identity for identity in map(Identity, seeds)}
            known: dict[tuple[PeerId, bytes, bytes], bool] = {}

            def once(peer: PeerId, domain: str, data: bytes, signature: bytes) -> bool:
                """All peers are in one process: a signature is checked once."""
                key = (peer, data, signature)
                if key not in known:
                    known[key] = verify(peer, domain, data, signature)
                return known[key]

            self.verify: Verify = once
            return dict(identities)
        keyed = {
            PeerId(f"peer-{number:02}"): KeyedHash(PeerId(f"peer-{number:02}"), seed)
            for number, seed in enumerate(seeds)
        }

        def check(peer: PeerId, domain: str, data: bytes, signature: bytes) -> bool:
            return peer in keyed and keyed[peer].sign(domain, data) == signature

        self.verify = check
        return dict(keyed)

    def run(self) -> BtardChecker:
        """To the end: the steps that were asked for, or no attacker is left. What is wrong is in
        the checker.
        """
        for member in self.members.values():
            self.later(lambda member=member: member.begin(0))
        quiet, done = 0, -1
        while not self.checker.problems and quiet < QUIET_TICKS and not self._all_over():
            self._deliver()
            if self.checker.steps == done:
                quiet += 1
                self.world.run(until=self.world.now + self.options.settings.timeout_s / 2)
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

    def struck(self, attempt: bytes, peer: PeerId, later: bool = False) -> None:
        """An attacker did something."""
        self.strikes.setdefault((attempt, later), set()).add(peer)

    # What travels.

    def later(self, action: Any) -> None:
        """Do this in a moment."""
        if self.network is not None:
            self.world.after(0.001, action)
        else:
            self._later.append(action)

    def carry(self, sender: BtardMember, to: PeerId | None, frame: Frame) -> None:
        """Send to one, or to all others."""
        self.checker.sent(sender, frame)
        receivers = [to] if to is not None else [name for name in self.names if name != sender.name]
        if self.network is None:
            self._jobs.extend((sender.name, name, frame) for name in receivers)
            return
        payload = encode(frame)
        self.control_bytes[sender.name] += len(payload[0]) * len(receivers)
        for name in receivers:
            self.network.send(sender.name, name, "btard", payload)

    def _arrived(self, me: PeerId, sender: PeerId, payload: Any) -> None:
        frame = decode(*payload, peer=sender, elements=2 * SIZE)
        self.members[me].machine.receive(self.now, sender, frame)

    def _deliver(self) -> None:
        if self.network is not None:
            self.world.run(until=self.world.now + self.options.settings.timeout_s / 2)
            return
        while (self._jobs or self._later) and not self.checker.problems:
            while self._later:
                self._later.popleft()()
            if self._jobs:
                sender, to, frame = self._jobs.popleft()
                self.members[to].machine.receive(self.now, sender, frame)

    # What attackers know.

    def gradient_of(self, step: int, peer: PeerId) -> Vector:
        """The right gradient of anybody, which anybody can compute."""
        member = self.members[peer]
        return self.task.gradient(member.states[step], self._seed(member, step))

    def _seed(self, member: BtardMember, step: int) -> bytes:
        previous = self.members[member.name].machine.previous
        return seed_of(
            previous.draw if previous is not None else first_draw(RUN), step, member.name
        )

    def hostile_gradient(self, member: BtardMember, task: GradientTask) -> Vector:
        """By the attack's name, from what the honest peers have."""
        name = self.attack.vector
        if name == "label_flip":
            return self.task.gradient(member.states[task.step], task.seed, flipped=True)
        if name == "delayed":
            return self.task.gradient(np.zeros(SIZE, np.float32), b"delayed" + task.seed)
        draw = (
            member.machine.previous.draw if member.machine.previous is not None else first_draw(RUN)
        )
        state = member.states[task.step]
        rows = [
            self.task.gradient(state, seed_of(draw, task.step, peer.name)) for peer in self.honest
        ]
        return VECTOR_ATTACKS[name](torch.from_numpy(np.stack(rows))).numpy()

"""LocalSwarm: n peers in one process and in virtual time, each running an ordinary blocking script.
For tests, yours too.

    from atoll.node.local import LocalSwarm

    def script(swarm):                          # what you would run with `atoll.node.join`
        model, optimizer = ...
        attachment = attach(model, optimizer, swarm)
        while not attachment.done:
            ...
        return loss

    swarm = LocalSwarm(4, settings=RunSettings(sync_every=10, rounds=5), latency_s=0.05)
    losses = swarm.run(script, step_s=0.1)

Sessions, log, votes, data plane and state transfer are the real ones; only processes, clocks and
the network are simulated. Scripts run in threads, exactly one at a time: whoever waits passes the
baton, and virtual time moves only when all wait. The same seed gives the same bits, training
included. ``step_s`` is what one `optimizer.step()` costs in virtual seconds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ...collectives.errors import ConfigError
from ...collectives.identifiers import PeerId, RunId
from ...collectives.messages import shared_decoding
from ...collectives.round import OPEN, Doors, Timing
from ...collectives.script_swarm import Swarm
from ...collectives.simulation import Network, World
from ...collectives.swarm import RunSettings
from ...optim.solo import MemoryShelf
from ...security.identity import Identity
from ..session.memory_storage import MemoryStorage
from ..session.ports import Storage
from .local_member import LocalMember
from .process import NodeProcess, Place
from .stage import Actor, Stage

Script = Callable[[Any], Any]
MakeStorage = Callable[[PeerId, int, Storage | None], Storage]
"""The storage of a peer's fragment for its next life, given that of the life before: None at first.
"""
LIMIT_S = 86_400.0  # virtual seconds after which a run that does not end is given up


class _Peer:
    """One peer: its disk, and while it lives its node and its script."""

    def __init__(self, swarm: LocalSwarm, index: int) -> None:
        self.swarm, self.index, self.name = swarm, index, swarm.names[index]
        self.storages = [
            swarm.storage(self.name, number, None) for number in range(swarm.settings.fragments)
        ]
        self.shelf = MemoryShelf()  # outlives the script, as its disk does
        self.process: NodeProcess | None = None
        self.member: LocalMember | None = None
        self.actor: Actor | None = None
        self.life = -1

    def boot(self, script: Script) -> None:
        swarm, self.life = self.swarm, self.life + 1
        if self.life:
            self.storages = [
                swarm.storage(self.name, number, before)
                for number, before in enumerate(self.storages)
            ]
        rng = swarm.world.stream(f"{self.name}/{self.life}")
        member = self.member = LocalMember(swarm.place, self.name, self.index, rng, self.shelf)
        storage, *others = self.storages
        process = self.process = NodeProcess(
            swarm.place,
            self.name,
            storage,
            rng,
            emit=lambda event: swarm.heard(self.name, event, member),
            died=lambda _: self.crash(),
            others=others,
        )
        process.start([swarm.contact(self)] if self.index else [])
        name = f"{self.name}" if self.life == 0 else f"{self.name}, life {self.life}"
        self.actor = swarm.stage.enter(
            name, lambda: self._play(script, member), seed=rng.getrandbits(32)
        )
        swarm.playing[self.actor.thread] = self
        member.bind(process, self.actor)

    def _play(self, script: Script, member: LocalMember) -> Any:
        try:
            return script(member)
        finally:
            member.close()

    def crash(self) -> None:
        """Node and script end at once; the disk stays."""
        if self.process is None or self.actor is None or self.member is None:
            return
        process, actor, member = self.process, self.actor, self.member
        self.process = None
        process.end()
        member.lost()
        actor.dead = True
        actor.dismiss()
        for other in self.swarm.peers:
            if other.process is not None:
                other.process.link(self.name, False)

    def restart(self, script: Script) -> None:
        if self.process is None:
            self.boot(script)
            for other in self.swarm.peers:
                if other is not self and other.process is not None:
                    other.process.link(self.name, True)


class LocalSwarm:
    """A run of ``count`` peers in this process and in virtual time, for tests of a training script.

        swarm = LocalSwarm(3, settings=RunSettings(sync_every=10, rounds=20), latency_s=0.05)
        swarm.crash_at(1, 4.0, back_after_s=2.0).join_at(2, 6.0)
        losses = swarm.run(script, step_s=0.1)      # what script(swarm) returned, by peer

    Peers are named p0, p1, … (in a secure run by their keys), and the first founds the run. One
    object plays one run, and the same ``seed`` gives the same bits.

    ``names``: of the peers, in place of p0, p1, …. ``latency_s`` one way, with up to ``jitter_s``
    more; ``bandwidth_bytes_per_s`` of each link (0: without limit). ``sites``: the label of each
    peer's place, for plans of two levels. Where ``settings`` cut the model into fragments, its
    members are FragmentSwarms. ``storage``: what peers keep their state in (in this process's
    memory); ``doors``: by what each peer lets others in (all). Faults are arranged by virtual time,
    before `run` or meanwhile; `world` and `network` are there for more.
    """

    def __init__(
        self,
        count: int,
        *,
        settings: RunSettings | None = None,
        seed: int = 0,
        latency_s: float = 0.01,
        jitter_s: float = 0.0,
        bandwidth_bytes_per_s: float = 0.0,
        timing: Timing | None = None,
        chunk_elements: int | None = None,
        sites: Sequence[str] = (),
        names: Sequence[str] = (),
        storage: MakeStorage | None = None,
        doors: Callable[[PeerId], Doors] = lambda peer: OPEN,
    ) -> None:
        if count < 1 or (names and len(set(names)) != count):
            raise ConfigError(f"a swarm of {count} peers", key="count")
        self.settings = settings or RunSettings()
        self.world = World(seed)
        self.network = Network(
            self.world,
            latency_s=latency_s,
            jitter_s=jitter_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        )
        people = (
            [Identity(index.to_bytes(32, "big")) for index in range(count)]
            if self.settings.secure
            else []
        )
        self.names = [person.peer for person in people] or [
            PeerId(name) for name in names or (f"p{index}" for index in range(count))
        ]
        self.storage = storage or self._in_memory
        self.listener: Callable[[PeerId, object], None] | None = None  # hears all session events
        self.stage = Stage(self.world)
        self.place = Place(
            self.world,
            self.network,
            self.names,
            RunId("local"),
            self.names[0],
            self.settings,
            timing or Timing(),
            chunk_elements=chunk_elements,
            checkpoint_every=1,
            sites=dict(zip(self.names, sites, strict=False)),
            identities={person.peer: person for person in people},
            doors=doors,
        )
        self.peers = [_Peer(self, index) for index in range(count)]
        self.playing: dict[threading.Thread, _Peer] = {}  # by its script's
        self._starts = [0.0] * count
        self._away = 0  # killed peers that will be back
        self._faults: list[tuple[float, Callable[[Script], None]]] = []
        self._script: Script | None = None  # while it runs

    def _in_memory(self, peer: PeerId, fragment: int, before: Storage | None) -> Storage:
        if before is None:
            return MemoryStorage(self.settings.effective_outer)
        assert isinstance(before, MemoryStorage)
        before.restart()
        return before

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.world.now

    def contact(self, newcomer: _Peer) -> PeerId:
        """Whom discovery tells a newcomer of: the founder, or whoever lives in its stead."""
        living = (peer.name for peer in self.peers if peer.process and peer is not newcomer)
        return self.names[0] if self.peers[0].process else next(living, self.names[0])

    def heard(self, peer: PeerId, event: object, member: LocalMember) -> None:
        """An event of the session of ``peer``: its script and the `listener` hear it."""
        member.hear(event)
        if self.listener is not None:
            self.listener(peer, event)

    # ---- what happens, by virtual time
    def join_at(self, index: int, when_s: float) -> LocalSwarm:
        """Peer ``index`` starts late: at infinity, when this is called again. p0 founds the run
        and cannot.
        """
        if not 0 < index < len(self.peers):
            raise ConfigError(f"peer {index} cannot join late", key="index")
        self._starts[index] = when_s
        if self._script is not None and math.isfinite(when_s):
            self._start(self.peers[index], when_s)
        return self

    def crash_at(
        self, index: int, when_s: float, *, back_after_s: float | None = None
    ) -> LocalSwarm:
        """Node and script of peer ``index`` are killed; a new process of it starts ``back_after_s``
        later, on the same disk.
        """

        def strike(script: Script) -> None:
            self.peers[index].crash()
            if back_after_s is not None:
                self._away += 1
                self.world.after(back_after_s, lambda: back(script))

        def back(script: Script) -> None:
            self._away -= 1
            self.peers[index].restart(script)

        self._arrange(when_s, strike)
        return self

    def freeze_at(self, index: int, when_s: float, for_s: float) -> LocalSwarm:
        """Node and script of peer ``index`` stand still for ``for_s`` seconds, as after SIGSTOP."""

        def strike(_: Script) -> None:
            process, member = self.peers[index].process, self.peers[index].member
            if process is not None and member is not None and not process.frozen:
                process.freeze()
                member.freeze(True)

                def thaw() -> None:
                    process.thaw()
                    member.freeze(False)

                self.world.after(for_s, thaw)

        self._arrange(when_s, strike)
        return self

    def partition_at(
        self, groups: Sequence[Sequence[int]], when_s: float, for_s: float
    ) -> LocalSwarm:
        """Peers of different groups do not hear each other for ``for_s`` seconds."""
        side = {self.names[index]: number for number, group in enumerate(groups) for index in group}
        self._arrange(when_s, lambda _: self.network.partition(side))
        self._arrange(when_s + for_s, lambda _: self.network.partition(None))
        return self

    def _arrange(self, when_s: float, strike: Callable[[Script], None]) -> None:
        if self._script is None:
            self._faults.append((when_s, strike))
        else:
            self.world.at(when_s, partial(strike, self._script))

    def _start(self, peer: _Peer, when_s: float) -> None:
        assert self._script is not None
        self.world.at(when_s, partial(peer.boot, self._script))

    # ---- the run
    def run(
        self,
        script: Callable[[Swarm], Any],
        *,
        step_s: float | Sequence[float] = 0.0,
        limit_s: float = LIMIT_S,
    ) -> list[Any]:
        """Run ``script(swarm)`` for every peer until all have ended; returns what they returned,
        None for one that was killed.

        Raises the first error of a script; SwarmClosedError when nothing happens any more or
        ``limit_s`` virtual seconds (a day) have passed: scripts that wait for members which never
        come back are simulated until then. Give less where that takes long.
        """
        steps = (
            [float(step_s)] * len(self.peers)
            if isinstance(step_s, int | float)
            else [float(cost) for cost in step_s]
        )
        if len(steps) != len(self.peers):
            raise ConfigError(f"step_s for {len(steps)} of {len(self.peers)} peers", key="step_s")
        self._script = script
        for peer, start_s in zip(self.peers, self._starts, strict=True):
            if math.isfinite(start_s):
                self._start(peer, start_s)
        for when_s, strike in self._faults:
            self._arrange(when_s, strike)
        costs = {peer.name: cost for peer, cost in zip(self.peers, steps, strict=True)}
        hook = register_optimizer_step_pre_hook(_StepCost(self, costs))
        try:
            with shared_decoding():
                self.world.run(until=0.0)
                self.stage.run(
                    limit_s,
                    until=lambda: not self._away and all(peer.life >= 0 for peer in self.peers),
                )
        finally:
            hook.remove()
            for peer in self.peers:
                if peer.process is not None:
                    peer.process.end()
        return [
            None if peer.actor is None or peer.actor.dead else peer.actor.result
            for peer in self.peers
        ]


class _StepCost:
    """Lets virtual time pass before each optimizer step of a script."""

    def __init__(self, swarm: LocalSwarm, costs: dict[PeerId, float]) -> None:
        self.swarm, self.costs = swarm, costs

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        thread = threading.current_thread()
        peer = self.swarm.playing.get(thread)
        actor = peer.actor if peer is not None else None
        if (
            peer is not None
            and actor is not None
            and actor.thread is thread
            and not type(optimizer).__module__.startswith("atoll.")
        ):
            actor.sleep(self.costs[peer.name])

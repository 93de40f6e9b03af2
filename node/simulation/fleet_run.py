"""A run of a user's manifest on machines and links that she describes, in virtual time: what
`atoll simulate --peers` plays.

The sessions, logs, votes, plans, codecs and outer steps are the real ones, and a model is really
trained, so the loss is measured. Modelled are the links (one uplink and one downlink a machine, a
round trip to the middle of the network; control messages do not queue), the time of a step, and a
node's work on the values of a round. What of a link payload gets, and what that work takes, is as
`atoll plan` has it (`optim.planning.estimate`): both were measured with real nodes. Where the model
that is trained is smaller than the run's, each record counts for as many bytes as the run's would
have.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from ...collectives.bounds import MOST_OWNERS
from ...collectives.errors import SwarmClosedError
from ...collectives.group import MAX_STAR
from ...collectives.identifiers import PeerId
from ...collectives.pace import Pace
from ...collectives.simulation.network import Payload
from ...collectives.swarm import RunSettings
from ...optim import attach
from ...optim.federated.simulation import Task
from ...optim.federated.simulation.task import endless
from ...optim.planning.estimate import EFFICIENCY, WORK_S
from ...optim.rounds.composing import flat_vector
from ..run.events import RunEvent, ScriptReportEvent
from ..session import documents
from ..session import events as ev
from ..session.durations import durations
from .churn import Mishap
from .fleet import FleetPeer
from .local_swarm import LocalSwarm

COLLECTED = (50_000, 50, 50)
"""Python's garbage collector looks that rarely: millions of objects live, and few go in circles."""
BASE_BYTES, MACHINE_BYTES, PAIR_BYTES, VECTORS = 240 << 20, 2_200_000, 3_300, 17
"""Memory that a simulation takes: of itself, of each machine besides so many vectors of the model
that is trained, and of each two machines.
"""
PARTS = 8
"""Chunks for each machine to own, at least: the small model's are smaller than the run's."""
POINTS = 40
"""Measurements of the held-out loss in a run."""
PATIENCE = 20.0
"""A run is over for good when no round was committed in as many times the longest round."""
LEAST_PATIENCE_S = 1800.0
CONTROL = "control"
AT_ONCE = 32
"""So many machines start at once; then as many again as have come in, until all have. The founder's
link would else carry the model to each of hundreds.
"""
RECORDED = 16
"""Machines whose own events are kept: each names all that contributed."""
QUIET_S = 0.1


class Stalled(Exception):
    """No round will be committed any more."""


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What is played. ``parameters``: of the model whose bytes travel. ``task``: what is trained;
    None: nothing, steps only take their time. ``until_s``: virtual seconds of training after which
    scripts end; None: when the settings' rounds are done.

    >>> fleet = parse_fleet("2 x 100ms@10Mbit, 200ms@10Mbit", step_s=None, flops=None)
    >>> settings = RunSettings(sync_every=50, rounds=4)
    >>> played = FleetRun(settings, fleet, parameters=1_000_000).play()
    >>> played.rounds, 0.5 < played.share < 1.0
    (4, True)
    """

    settings: RunSettings
    fleet: Sequence[FleetPeer]
    parameters: int
    task: Task | None = None
    batch: int = 8
    lr: float = 2e-3
    mishaps: Sequence[Mishap] = ()
    """Their times count from when steps begin."""
    until_s: float | None = None
    seed: int = 0
    start_at: float = 0.0
    """What time it is then, seconds since 1970: of the events."""

    def play(self, heard: Callable[[PlayedRun], None] = lambda run: None) -> PlayedRun:
        """Play it. ``heard`` is called after each round, and before the first one whenever some of
        a large fleet have come in. Raises what a task raises.
        """
        before = gc.get_threshold()
        gc.set_threshold(*COLLECTED)
        try:
            return _Play(self, heard).run()
        finally:
            gc.set_threshold(*before)


@dataclass(slots=True)
class PlayedMachine:
    """What became of one machine. ``present_s``: since its script was in; ``training_s`` of it were
    spent on steps.
    """

    name: str
    step_s: float
    up: int
    down: int
    steps: int = 0
    samples: int = 0
    rounds: int = 0
    training_s: float = 0.0
    present_s: float = 0.0
    deaths: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def share(self) -> float:
        """Of its time that was training."""
        return self.training_s / self.present_s if self.present_s else 0.0


@dataclass(slots=True)
class PlayedRun:
    """What a run came to.

    ``begun_s``: when all machines that were there from the beginning had the model, and steps
    began; ``seconds``: from there to the last round; ``silent_s``: from there to the end. ``loss``:
    (virtual seconds, round, held-out loss of the anchor). ``events``: what the node of the machine
    that saw most of it would have in its event file, and what the others' scripts reported.
    """

    machines: list[PlayedMachine]
    scale: float
    trained: int
    ended: str = "finished"
    entered: int = 0
    """Machines of a large fleet that are in, while others have not been started."""
    begun_s: float | None = None
    seconds: float = 0.0
    silent_s: float = 0.0
    rounds: int = 0
    samples: int = 0
    loss: list[tuple[float, int, float]] = field(default_factory=list[tuple[float, int, float]])
    counted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Of each round: virtual seconds, and how many machines it counts."""
    events: list[RunEvent] = field(default_factory=list[RunEvent])

    @property
    def share(self) -> float:
        """The mean over machines that were there of the share of their time that was training."""
        there = [machine.share for machine in self.machines if machine.present_s]
        return sum(there) / len(there) if there else 0.0

    @property
    def bytes(self) -> int:
        """Sent by all machines."""
        return sum(machine.bytes_sent for machine in self.machines)


class Untrained(nn.Module):
    """A model that nobody trains: tensors enough for every fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(512) for _ in range(64))


def memory_bytes(machines: int, trained: int) -> int:
    """About what it takes to play so many machines that train so many parameters each; 0: none.

    >>> memory_bytes(1000, 0) >> 30
    7
    """
    numel = trained or sum(weight.numel() for weight in Untrained().parameters())
    return BASE_BYTES + machines * (MACHINE_BYTES + VECTORS * 4 * numel + machines * PAIR_BYTES)


class _Play:
    def __init__(self, run: FleetRun, heard: Callable[[PlayedRun], None]) -> None:
        self.run_, self.heard = run, heard
        model = run.task.model() if run.task is not None else Untrained()
        numel = flat_vector(model, run.settings).numel
        self.scale = max(1.0, run.parameters / numel)
        machines = [PlayedMachine(p.name, p.step_s, p.up, p.down) for p in run.fleet]
        self.played = PlayedRun(machines, self.scale, numel if run.task is not None else 0)
        self.swarm = self._swarm(numel)
        struck = {each.who for each in run.mishaps}
        steady = sorted(range(len(run.fleet)), key=lambda who: (who in struck, who))
        self._by_peer: dict[str, list[RunEvent]] = {
            run.fleet[who].name: [] for who in sorted(steady[:RECORDED])
        }
        self._reports: list[RunEvent] = []
        self._away = set[int]()
        self._beginning = False
        self._due, self._newest = 0, dict[int, int]()
        self._longest, self._last = 0.0, 0.0
        self._to_come = len(run.mishaps)
        late = {each.who for each in run.mishaps if each.deed == "join"}
        self._awaited = set(range(len(run.fleet))) - late
        self._coming = deque(sorted(self._awaited)[AT_ONCE:])  # who has not been started yet
        self._started = len(self._awaited) - len(self._coming)
        every = 1 if run.settings.rounds is None else max(1, run.settings.rounds // POINTS)
        self._every = every

    # ---- the world
    def _swarm(self, numel: int) -> LocalSwarm:
        run, fleet = self.run_, self.run_.fleet
        # of a large fleet not all own parts, and each chunk goes from each machine to another
        owners = PARTS * len(fleet) if len(fleet) <= MAX_STAR else MOST_OWNERS
        parts = owners * run.settings.fragments
        each = max(256, math.ceil(numel / parts / 256) * 256)
        settings = run.settings
        if self.scale > 1:
            # Small tensors are a larger part of a small model than of the one it stands for.
            settings = msgspec.structs.replace(settings, exact=False)
        swarm = LocalSwarm(
            len(fleet),
            settings=settings,
            seed=run.seed,
            timing=durations(settings, self.scale),
            chunk_elements=each if self.scale > 1 else None,
            names=[peer.name for peer in fleet],
            sites=[peer.site for peer in fleet],
        )
        swarm.listener = self._heard
        swarm.place.work_s += WORK_S * run.parameters / run.settings.fragments
        network, names = swarm.network, swarm.names
        network.weigh, network.express = self._weigh, frozenset({CONTROL})
        far = max(peer.latency_s for peer in fleet)
        for name, peer in zip(names, fleet, strict=True):
            up = network.uplink(name)
            up.latency_s, up.jitter_s = peer.latency_s, 0.0
            up.bandwidth_bytes_per_s = EFFICIENCY * peer.up
            down = network.downlink(name)
            down.latency_s, down.bandwidth_bytes_per_s = peer.latency_s, EFFICIENCY * peer.down
            swarm.place.paces[name] = Pace(
                up=peer.up,
                down=peer.down,
                rtt_s=2 * (peer.latency_s + far),
            )
        return swarm

    def _weigh(self, channel: str, payload: Payload) -> int:
        if isinstance(payload, bytes):
            return len(payload)
        return len(payload[0]) + round(self.scale * len(payload[1]))

    # ---- the run
    def run(self) -> PlayedRun:
        run, swarm, played = self.run_, self.swarm, self.played
        for each in run.mishaps:
            if each.deed == "join":
                swarm.join_at(each.who, math.inf)
        for who in self._coming:
            swarm.join_at(who, math.inf)
        swarm.world.after(LEAST_PATIENCE_S, self._look)
        limit_s = 10 * 365 * 86_400.0
        try:
            swarm.run(self._script, step_s=[peer.step_s for peer in run.fleet], limit_s=limit_s)
        except Stalled:
            played.ended = "stalled"
        except SwarmClosedError:
            if not run.mishaps:
                raise
            played.ended = "stalled"
        if run.until_s is not None and played.ended == "finished":
            played.ended = "time is over"
        played.silent_s = swarm.world.now - self._last
        played.seconds = self._last - (played.begun_s or 0.0)
        for name, machine in zip(swarm.names, played.machines, strict=True):
            machine.bytes_sent = swarm.network.bytes_sent.get(name, 0)
            machine.bytes_received = swarm.network.bytes_received.get(name, 0)
        best = max(self._by_peer, key=lambda name: len(self._by_peer[name]))
        others = [event for event in self._reports if event.by != best]
        mine = [
            msgspec.structs.replace(event, by="") for event in self._reports if event.by == best
        ]
        events = [*self._by_peer[best], *others, *mine]
        played.events = sorted(events, key=lambda event: event.at)
        return played

    def _arrange(self, what: Mishap) -> None:
        swarm, at = self.swarm, self.swarm.world.now + what.at_s
        swarm.world.at(at, lambda: self._came(what))
        if what.deed == "join":
            swarm.join_at(what.who, at)
        elif what.deed == "kill":
            swarm.crash_at(what.who, at, back_after_s=what.for_s)
        elif what.deed == "freeze":
            assert what.for_s is not None
            swarm.freeze_at(what.who, at, what.for_s)
        else:
            assert what.for_s is not None
            swarm.world.at(at, lambda: self._cut(what.who, True))
            swarm.world.at(at + what.for_s, lambda: self._cut(what.who, False))

    def _came(self, what: Mishap) -> None:
        self._to_come -= 1
        if what.deed == "kill":
            self.played.machines[what.who].deaths += 1

    def _cut(self, who: int, away: bool) -> None:
        (self._away.add if away else self._away.discard)(who)
        names = self.swarm.names
        sides = {names[index]: number for number, index in enumerate(sorted(self._away), 1)}
        self.swarm.network.partition(sides or None)

    def _look(self) -> None:
        """Ends a run in which nothing is decided any more."""
        now = self.swarm.world.now
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * self._longest)
        begun = self.played.begun_s is not None
        if begun and now - self._last > patience_s and not self._to_come:
            raise Stalled
        self.swarm.world.after(patience_s / 4, self._look)

    # ---- what happens
    def _heard(self, peer: PeerId, event: object) -> None:
        if isinstance(event, ev.InFragment):
            fragment, event = event.fragment, event.event
        else:
            fragment = 0
        now, network = self.swarm.world.now, self.swarm.network
        if isinstance(event, ev.RoundCommitted):
            if (mine := self._by_peer.get(peer)) is not None:
                traffic = network.bytes_sent.get(peer, 0), network.bytes_received.get(peer, 0)
                at = self.run_.start_at + now
                mine.append(
                    documents.committed(event, at, traffic, run="simulated", fragment=fragment)
                )
            if event.contributors:
                self._committed(now, fragment, event)
        elif isinstance(event, ev.Timed) and peer in self._by_peer:
            row = documents.timed(event.timing, self.run_.start_at + event.began, {}, "simulated")
            numel = round(self.scale * row.numel)
            self._by_peer[peer].append(msgspec.structs.replace(row, numel=numel))

    def _committed(self, now: float, fragment: int, event: ev.RoundCommitted) -> None:
        """The first word of an entry; others' are the same."""
        if event.entry <= self._newest.get(fragment, 0):
            return
        self._newest[fragment] = event.entry
        played = self.played
        self._longest, self._last = max(self._longest, now - self._last), now
        played.rounds = max(played.rounds, event.round)
        played.counted.append((now, len(event.contributors)))
        for share in event.contributors:
            machine = played.machines[self.swarm.place.order[share.peer]]
            machine.rounds += 1
            machine.samples += share.samples
            played.samples += share.samples
        self.heard(played)

    # ---- what each machine's script does
    def _script(self, member: Any) -> None:
        run, machine = self.run_, self.played.machines[member.index]
        torch.manual_seed(run.seed)
        model = run.task.model() if run.task is not None else Untrained()
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(model.parameters(), lr=run.lr)
            if run.task is not None
            else torch.optim.SGD(model.parameters(), lr=1e-6)
        )
        sync = attach(model, optimizer, member, batch_size=run.batch, clock=member.clock)
        self._enter(member)
        start, seen = member.clock(), sync.round
        batches = (
            endless(len(run.task.x), run.batch, (run.seed, member.index, round(start * 1000)))
            if run.task is not None
            else None
        )
        begun_s = self.played.begun_s or 0.0
        until_s = math.inf if run.until_s is None else begun_s + run.until_s
        while not sync.done and member.clock() < until_s:
            before = member.clock()
            loss = self._step(model, optimizer, batches)
            if not math.isnan(loss):
                sync.log(loss=loss)
            machine.steps += 1
            machine.training_s += machine.step_s
            machine.present_s += member.clock() - before
            if sync.round > seen:
                seen = sync.round
                self._report(member.peer, machine, loss)
                if run.task is not None and seen >= self._due:
                    self._due = seen + self._every
                    with sync.evaluate_anchor():
                        held_out = _measure(model, run.task)
                    self.played.loss.append((member.clock(), seen, held_out))

    def _enter(self, member: Any) -> None:
        """Steps begin when all machines are in that are there from the beginning."""
        self._awaited.discard(member.index)
        if self._coming and len(self._awaited) == len(self._coming):  # all that were started are in
            self.played.entered = self._started
            self.heard(self.played)
            more = min(len(self._coming), self._started)
            self._started += more
            for _ in range(more):
                self.swarm.join_at(self._coming.popleft(), self.swarm.world.now)
        if not self._awaited and not self._beginning:
            self._beginning = True
            self._begin()
        member.wait(lambda: self.played.begun_s is not None, None)

    def _begin(self) -> None:
        """As soon as links are quiet: what a newcomer had asked of two others comes twice."""
        quiet_at = self.swarm.network.busy_until
        if quiet_at > self.swarm.world.now:
            self.swarm.world.at(quiet_at + QUIET_S, self._begin)
            return
        self.played.begun_s = self._last = self.swarm.world.now
        for each in self.run_.mishaps:
            self._arrange(each)
        for peer in self.swarm.peers:
            if peer.actor is not None:
                peer.actor.poke()

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> float:
        task = self.run_.task
        if task is None:
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            return math.nan
        rows = torch.from_numpy(next(batches))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(task.x[rows]).flatten(0, -2), task.y[rows].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def _report(self, peer: PeerId, machine: PlayedMachine, loss: float) -> None:
        metrics = {"step": float(machine.steps), "samples": float(machine.steps * self.run_.batch)}
        if not math.isnan(loss):
            metrics["loss"] = loss
        self._reports.append(
            ScriptReportEvent(
                at=self.run_.start_at + self.swarm.world.now,
                run="simulated",
                metrics=metrics,
                by=peer,
            )
        )


@torch.no_grad()
def _measure(model: nn.Module, task: Task) -> float:
    model.eval()
    loss = F.cross_entropy(model(task.test_x).flatten(0, -2), task.test_y.flatten())
    model.train()
    return float(loss)

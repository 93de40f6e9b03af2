"""Schemes in which nobody waits for the slowest, in virtual time: FedAsync, FedBuff, FedFix and
FedCompass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....collectives.errors import ConfigError
from ....collectives.identifiers import PeerId
from ...model.registry import MODES
from ..arrivals import async_weights, buffer_weights, buffered_factor, faded, fixed_weights, mixed
from ..member import Served
from ..server import FederatedServer
from .study import ClientDelta, Study, StudyResult


@dataclass(frozen=True, slots=True)
class Back:
    """A client is back with its work (None: it dropped) on the anchor served at ``began``."""

    client: int
    began: float
    served: Served
    work: ClientDelta | None


class Scheme:
    """What is done with arrivals. It calls `Arriving.send` for every client, first in `begin`."""

    def begin(self, run: Arriving) -> None:
        """Everybody starts at once."""
        for client in range(run.study.clients):
            run.send(client)

    def back(self, run: Arriving, back: Back) -> None:
        """Called for every client that comes back, or should have: here it gets the anchor and goes
        on at once.
        """
        run.send(back.client)

    def due(self) -> float:
        """When `tick` is to be called; infinite: never."""
        return math.inf

    def tick(self, run: Arriving) -> None:
        """Called at `due`."""


class Arriving:
    """The clock, and who is under way."""

    def __init__(self, study: Study) -> None:
        self.study, self.now = study, 0.0
        self._events: list[tuple[float, int, Back]] = []
        self._count = 0
        self._waiting: dict[int, float] = {}  # since when

    def send(self, client: int, steps: int | None = None) -> None:
        """Give a client the anchor and a number of steps; it returns when they are made."""
        study, result = self.study, self.study.result
        result.waited_s += self.now - self._waiting.pop(client, self.now)
        served, steps = study.server.served(), study.steps_of(client) if steps is None else steps
        dropped = study.fleet.drops(study.rng)
        result.dropped += dropped
        work = None if dropped else study.turn(client, served, steps)
        self._count += 1
        heapq.heappush(
            self._events,
            (
                study.fleet.devices[client].finished(self.now, steps),
                self._count,
                Back(client, self.now, served, work),
            ),
        )

    def run(self, scheme: Scheme, every: float) -> StudyResult:
        """Events in their order until the run's end; measured every so many seconds."""
        study, settings, result = self.study, self.study.settings, self.study.result
        scheme.begin(self)
        measured = 0.0
        while settings.rounds is None or study.server.version < settings.rounds:
            now = min(scheme.due(), self._events[0][0] if self._events else math.inf)
            if measured <= min(now, settings.seconds):  # until then the anchor stays what it is
                study.measured(measured)
                measured = every * (math.floor(min(now, settings.seconds) / every) + 1)
            if now > settings.seconds:
                self.now = settings.seconds
                break
            self.now = now
            if self._events and self._events[0][0] <= now:
                back = heapq.heappop(self._events)[2]
                result.busy_s += now - back.began
                self._waiting[back.client] = now
                scheme.back(self, back)
            else:
                scheme.tick(self)
        result.busy_s += sum(self.now - back.began for _, _, back in self._events)
        result.waited_s += sum(self.now - since for since in self._waiting.values())
        if result.points[-1].seconds < self.now:
            study.measured(self.now)
        return study.ended()


class FedAsync(Scheme):
    """An outer step at every arrival."""

    def back(self, run: Arriving, back: Back) -> None:
        server, settings = run.study.server, run.study.settings
        for work in run.study.attacked([back.work] if back.work else []):
            if not work.finite:
                continue
            share = faded(settings.fading, server.version - back.served.version)
            server.move_to(mixed(server.anchor, back.served.anchor - work.pseudo, share))
        run.send(back.client)


class FedBuff(Scheme):
    """An outer step when the buffer is full."""

    def __init__(self, study: Study) -> None:
        self._buffer: list[tuple[ClientDelta, int]] = []
        self._shares = {PeerId(str(client)): share for client, share in enumerate(study.shares)}
        self._seconds = {
            peer: study.steps_of(int(peer)) * study.fleet.devices[int(peer)].step_s
            for peer in self._shares
        }  # T_i, as measured
        # Outer steps, and how many contributions of each client were in them.
        self._steps, self._in = (
            0,
            dict.fromkeys(self._shares, 0),
        )

    def back(self, run: Arriving, back: Back) -> None:
        self._seconds[PeerId(str(back.client))] = run.now - back.began
        if back.work:
            self._buffer.append((back.work, back.served.version))
        server = run.study.server
        if len(self._buffer) >= run.study.settings.buffer:
            works = run.study.attacked([work for work, _ in self._buffer])
            factors = fresh = [
                buffered_factor(server.version - version) / len(works)
                for _, version in self._buffer
            ]
            if run.study.settings.unbiased:
                weights = self._weights()
                factors = [weights[PeerId(str(work.client))] for work in works]
            server.step_with(_sum(server, works, factors, fresh))
            self._buffer.clear()
        run.send(back.client)

    def _weights(self) -> Mapping[PeerId, float]:
        """Unbiasing ones, by how long turns take where every arrival is a step, or else by how
        often each client was in the buffer.
        """
        self._steps += 1
        for work, _ in self._buffer:
            self._in[PeerId(str(work.client))] += 1
        if len(self._buffer) == 1:
            return async_weights(self._shares, self._seconds)
        return buffer_weights(
            self._shares, {peer: max(1, times) / self._steps for peer, times in self._in.items()}
        )


class FedFix(Scheme):
    """An outer step every period, with whoever has come since the last."""

    def __init__(self, study: Study) -> None:
        turns = sorted(
            study.steps_of(client) * study.fleet.devices[client].step_s
            for client in range(study.clients)
        )
        self._period = study.settings.period or turns[len(turns) // 2]
        if not self._period > 0:
            raise ConfigError(f"FedFix: a period of {self._period} s", key="period")
        self._due, self._shares = (
            self._period,
            {PeerId(str(client)): share for client, share in enumerate(study.shares)},
        )
        self._seconds = dict.fromkeys(self._shares, self._period)  # T_i, as measured
        self._here: list[Back] = []

    def back(self, run: Arriving, back: Back) -> None:
        """Here clients wait for the next step."""
        self._seconds[PeerId(str(back.client))] = run.now - back.began
        self._here.append(back)

    def due(self) -> float:
        return self._due

    def tick(self, run: Arriving) -> None:
        works = run.study.attacked([back.work for back in self._here if back.work])
        if works:
            study, weights = run.study, fixed_weights(self._shares, self._seconds, self._period)
            factors, shares = (
                [weights[PeerId(str(work.client))] for work in works],
                [study.shares[work.client] for work in works],
            )
            study.server.step_with(_sum(study.server, works, factors, shares))
        here, self._here, self._due = self._here, [], self._due + self._period
        for back in here:
            run.send(back.client)


class FedCompass(Scheme):
    """As `Compass` says."""

    def __init__(self, study: Study) -> None:
        settings = study.settings
        self._compass = MODES.load("arrivals.compass", "Compass", key="--methods fedcompass")(
            settings.least, settings.most, settings.slack, first=settings.first
        )

    def begin(self, run: Arriving) -> None:
        for client in range(run.study.clients):
            self._do(run, self._compass.join(PeerId(str(client)), run.now))

    def back(self, run: Arriving, back: Back) -> None:
        """Who dropped joins again."""
        peer = PeerId(str(back.client))
        self._do(
            run,
            self._compass.arrived(peer, back.work, run.now)
            if back.work
            else self._compass.join(peer, run.now),
        )

    def due(self) -> float:
        """Just after the latest arrival, which is in time."""
        due = self._compass.due
        return math.inf if due is None else math.nextafter(due, math.inf)

    def tick(self, run: Arriving) -> None:
        self._do(run, self._compass.tick(run.now))

    def _do(self, run: Arriving, decisions: Sequence[Any]) -> None:
        study, settings = run.study, run.study.settings
        for decision in decisions:
            if decision.parts:
                works = study.attacked([part.work for part in decision.parts])
                factors = [
                    study.shares[part.work.client] * faded(settings.fading, part.staleness)
                    for part in decision.parts
                ]
                study.server.step_with(_sum(study.server, works, factors))
            for peer, steps in decision.orders:
                run.send(int(peer), steps)


def run_arriving(study: Study) -> StudyResult:
    """A run by the settings' scheme, measured as often as there would be synchronous rounds."""
    schemes = {
        "fedasync": FedAsync,
        "fedbuff": lambda: FedBuff(study),
        "fedfix": lambda: FedFix(study),
        "fedcompass": lambda: FedCompass(study),
    }
    turns = [
        study.steps_of(client) * study.fleet.devices[client].step_s
        for client in range(study.clients)
    ]
    return Arriving(study).run(schemes[study.settings.name](), max(turns) * study.settings.measure)


def _sum(
    server: FederatedServer,
    works: Sequence[ClientDelta],
    factors: Sequence[float],
    shares: Sequence[float] = (),
) -> Tensor:
    """What an outer step with these contributions takes off the anchor: of running statistics by
    ``shares``, or else by ``factors``, too.
    """
    total, first = torch.zeros_like(server.anchor), server.parameters
    for work, factor, share in zip(works, factors, shares or factors, strict=True):
        if work.finite:
            total[:first].add_(work.pseudo[:first], alpha=factor)
            total[first:].add_(work.pseudo[first:], alpha=share)
    return total

"""One run of one method, simulated: what it is made of, a client's turn, and what is measured.
`synchronous` and `arriving` are its two drivers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from ....collectives.arrivals import Fading
from ....collectives.errors import ConfigError
from ....collectives.outer_rules import OuterSettings
from ....collectives.round_settings import WorkSettings
from ....security.rule_names import BY_COORDINATE, BY_GRAM
from ...model.registry import MODES
from ..member import InnerSteps, Knobs, Served, first_control
from ..methods import ARRIVING, METHODS, Method, method_of_steps, server_settings
from ..personal import Gradient
from ..server import FederatedServer
from .attacks import ATTACKS, Delayed, flipped_labels, optimised_alie, optimised_ipm
from .devices import Fleet
from .partition import Indices
from .task import Learner, Task, endless, passes

RULES = (*BY_COORDINATE, *BY_GRAM, "monna")
Means = Callable[[Sequence[Tensor], Sequence[int], int], Tensor | None]
"""What an outer step gets of contributions (numel,) and their samples, of so many members that were
asked, in place of their mean or a rule; None: nothing, there is none.
"""
Scheme = Literal["synchronous", "fedasync", "fedbuff", "fedfix", "fedcompass"]
NAMES = (*METHODS, *ARRIVING)
FLIPPED, DELAYED, LATE = "label_flip", "delayed", 10  # rounds
OPTIMISED = {"optimised_alie": optimised_alie, "optimised_ipm": optimised_ipm}
EVERY_ATTACK = (*ATTACKS, *OPTIMISED, FLIPPED, DELAYED)
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StudySettings:
    """A run's values. ``name``: of a method, or of a scheme of arrivals, whose members make
    FedAvg's steps.

    A turn has ``steps`` batches of ``batch``, or ``epochs`` passes over the client's samples, or
    what ``work`` says: then synchronous rounds close as those of nodes do. A run
    ends after ``rounds`` outer steps or ``seconds``, whichever comes first, and is measured every
    ``measure`` rounds (schemes of arrivals: as often in time as there would be synchronous rounds).
    ``asked``: clients a synchronous round asks, None: all that are there. ``outer``: a server's
    outer step in place of that which the method has with ``server_lr``, ``server_momentum`` and
    ``epsilon``. ``even``: all clients count the same, whatever they have. ``means``: makes what
    synchronous rounds of a run have in place of the mean, such as secure ones.
    """

    name: str = "fedavg"
    rounds: int | None = 50
    seconds: float = math.inf
    steps: int = 10
    epochs: int | None = None
    batch: int = 16
    asked: int | None = None
    knobs: Knobs = Knobs()
    server_lr: float = 1.0
    server_momentum: float = 0.9
    epsilon: float = 1e-3
    outer: OuterSettings | None = None
    even: bool = False
    fading: Fading = Fading()  # of FedAsync and FedCompass: how far a contribution moves the anchor
    buffer: int = 5  # FedBuff's; of 1 it is a step at every arrival
    # FedBuff's contributions count by the weights with which it ends where synchronous rounds do
    unbiased: bool = False
    period: float | None = None  # FedFix', in seconds; None: of the median device's turn
    least: int = 20  # FedCompass' steps a turn
    most: int = 100
    first: int | None = None
    slack: float = 1.5
    rule: str = "mean"
    f: int = 0
    attack: str | None = None
    hostile: int = 0
    measure: int = 1
    seed: int = 0
    means: Callable[[], Means] | None = None
    work: WorkSettings | None = None
    # With ``work``: how many contributions make a round of so many members.
    fewest: Callable[[int], int] = lambda _: 1

    @property
    def method(self) -> Method:
        """What the members' steps are corrected by."""
        return method_of_steps(self.name)

    def check(self, clients: int) -> None:
        """Raises ConfigError for what cannot be simulated."""
        if self.name not in NAMES:
            raise ConfigError(
                f"no federated method {self.name!r}",
                key="methods",
                hint=f"one of: {', '.join(NAMES)}",
            )
        if not self.seconds > 0 or (self.rounds is None and math.isinf(self.seconds)):
            raise ConfigError(
                "the simulation has no end", key="rounds", hint="--rounds 50, or --seconds 3600"
            )
        if not (self.knobs.lr > 0 and math.isfinite(self.knobs.lr)):
            raise ConfigError(
                f"inner steps with a learning rate of {self.knobs.lr}", key="lr", hint="--lr 0.1"
            )
        if (
            min(
                self.steps,
                self.batch,
                self.buffer,
                self.measure,
                self.asked or 1,
                self.epochs or 1,
                self.rounds or 1,
            )
            < 1
        ):
            raise ConfigError(
                "steps, epochs, batch, rounds, buffer and clients asked are counted from 1",
                key="steps",
            )
        if self.rule != "mean" and (self.rule not in RULES or self.name in ARRIVING or self.f < 1):
            why = (
                "rules go with synchronous methods and an f of at least 1; they are: "
                f"mean, {', '.join(RULES)}"
            )
            raise ConfigError(
                f"rule {self.rule!r} with f = {self.f} for {self.name}", key="rule", why=why
            )
        if self.attack is not None and self.attack not in EVERY_ATTACK:
            raise ConfigError(
                f"no attack {self.attack!r}",
                key="attack",
                hint=f"one of: {', '.join(EVERY_ATTACK)}",
            )
        if not 0 <= self.hostile < clients:
            raise ConfigError(f"{self.hostile} hostile clients of {clients}", key="hostile")
        if self.hostile and self.attack is None:
            raise ConfigError(
                f"{self.hostile} hostile clients without an attack",
                key="attack",
                hint=f"one of: {', '.join(EVERY_ATTACK)}",
            )


@dataclass(frozen=True, slots=True)
class Point:
    """The anchor at a time. ``round``: outer steps so far; ``bytes``: sent and received by all
    clients so far, as float32.
    """

    round: int
    seconds: float
    bytes: int
    accuracy: float
    loss: float


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """One of a run with ``work``: when it closed, in seconds; the inner steps of each client that
    is in it, and what each counts; who was asked and is not in it.
    """

    seconds: float
    steps: dict[int, int]
    weights: dict[int, int]
    missing: tuple[int, ...]


@dataclass(slots=True)
class StudyResult:
    """A run's curve; what clients waited of the time they were in it (`idle`, 0 to 1); the accuracy
    of the last anchor on each client's samples; and the last anchor itself. Of a run with ``work``:
    its rounds, and why it got no further before its end, "" where it did."""

    settings: StudySettings
    anchor: Tensor
    points: list[Point] = field(default_factory=list)
    turns: int = 0
    dropped: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    by_site: list[float] = field(default_factory=list)
    rounds: list[PlayedRound] = field(default_factory=list[PlayedRound])
    stalled: str = ""

    @property
    def idle(self) -> float:
        """Share of the clients' time that was waiting for others."""
        total = self.busy_s + self.waited_s
        return self.waited_s / total if total else 0.0

    def at(self, seconds: float) -> Point:
        """The last point measured by then."""
        return [point for point in self.points if point.seconds <= seconds][-1]


@dataclass(frozen=True, slots=True)
class ClientDelta:
    """What a turn came to: anchor - parameters (numel,), the change of its c_i, and its steps."""

    client: int
    pseudo: Tensor
    change: Tensor | None
    steps: int

    @property
    def finite(self) -> bool:
        """Whether it holds numbers only; what does not is refused, as in a real round."""
        return bool(self.pseudo.isfinite().all())


class Study:
    """Server and clients of one run. Clients are numbered; the last ``hostile`` of them are. Their
    shares are those of the samples, or all alike.
    """

    def __init__(
        self,
        task: Task,
        parts: Sequence[Indices],
        fleet: Fleet,
        settings: StudySettings,
        start: Tensor | None = None,
    ) -> None:
        """``start``: the first anchor, in place of the model's own."""
        settings.check(len(parts))
        if len(fleet.devices) != len(parts):
            raise ConfigError(
                f"{len(fleet.devices)} devices for {len(parts)} clients", key="speeds"
            )
        self.task, self.fleet, self.settings, self.method = task, fleet, settings, settings.method
        self.learner = Learner(task)
        outer = server_settings(
            self.method.name,
            lr=settings.server_lr,
            momentum=settings.server_momentum,
            epsilon=settings.epsilon,
        )
        self.server = FederatedServer(
            self.method,
            settings.outer or outer,
            self.learner.live if start is None else start,
            self.learner.layout,
        )
        self.rng = random.Random(settings.seed)
        self.result = StudyResult(settings, self.server.anchor)
        self.sizes = [1 if settings.even else len(part) for part in parts]
        self.shares = [size / sum(self.sizes) for size in self.sizes]
        self._means = settings.means() if settings.means is not None else None
        self._data = [
            (task.x[torch.from_numpy(part)], task.y[torch.from_numpy(part)]) for part in parts
        ]
        if settings.attack == FLIPPED:
            classes = int(task.y.max()) + 1
            for client in range(len(parts) - settings.hostile, len(parts)):
                self._data[client] = (
                    self._data[client][0],
                    flipped_labels(self._data[client][1], classes),
                )
        self._own = [first_control(self.method, self.learner.parameters) for _ in parts]
        self._turns = [0] * len(parts)
        self._late = [Delayed(LATE) for _ in parts]
        self.draws = 0  # synchronous rounds so far, those without a step, too

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(self.shares)

    def steps_of(self, client: int) -> int:
        """Inner steps of a turn whose length the scheme does not choose."""
        rows, settings, work = len(self._data[client][1]), self.settings, self.settings.work
        if work is not None:
            if work.steps is not None:
                return work.steps
            passes, left = divmod(work.samples or (work.epochs or 1) * rows, rows)
            return passes * math.ceil(rows / settings.batch) + math.ceil(left / settings.batch)
        return (
            settings.steps
            if settings.epochs is None
            else settings.epochs * math.ceil(rows / settings.batch)
        )

    def turn(self, client: int, served: Served, steps: int) -> ClientDelta:
        """A client's inner steps from what it was served, on batches that only it and the number of
        its turn decide.
        """
        (x, y), learner, lr = self._data[client], self.learner, self.settings.knobs.lr
        turn, live = (
            InnerSteps(self.method, self.settings.knobs, served, self._own[client]),
            learner.live[: learner.parameters],
        )
        learner.live.copy_(served.anchor)
        key = (self.settings.seed, client, self._turns[client])
        drawn = (endless if self.settings.work is None else passes)(
            len(y), self.settings.batch, key
        )
        for rows in map(torch.from_numpy, islice(drawn, steps)):
            gradient, second = learner.backward(x[rows], y[rows]), None
            if (at := turn.second_at(gradient, live)) is not None:
                gradient, kept = gradient.clone(), learner.live.clone()
                live.copy_(at)
                second = learner.backward(x[rows], y[rows])
                learner.live.copy_(kept)
            live.sub_(turn.direction(gradient, live, second), alpha=lr)
        pseudo = served.anchor - learner.live
        own, control = self._own[client], turn.control(pseudo[: learner.parameters], steps)
        self._turns[client] += 1
        self.result.turns += 1
        if (
            own is None or control is None or not bool(pseudo.isfinite().all())
        ):  # the latter is refused, and its c_i stays as it was
            return ClientDelta(client, pseudo, None, steps)
        self._own[client] = control
        return ClientDelta(client, pseudo, control - own, steps)

    def probe(self, client: int, served: Served) -> Tensor:
        """The way a turn of this client would go, anchor - parameters; its state is kept."""
        own = self._own[client]
        work = self.turn(client, served, self.steps_of(client))
        self._own[client] = own
        return work.pseudo

    def gradient(self, client: int, turn: int) -> Gradient:
        """A client's gradient at parameters (numel,), zero for running statistics, of the next
        batch in every call, for steps of its own.
        """
        (x, y), learner = self._data[client], self.learner
        rows = endless(len(y), self.settings.batch, (self.settings.seed, client, turn, 1))

        def at(parameters: Tensor) -> Tensor:
            batch = torch.from_numpy(next(rows))
            learner.live.copy_(parameters)
            found = torch.zeros_like(learner.live)
            found[: learner.parameters] = learner.backward(x[batch], y[batch])
            return found

        return at

    def attacked(self, works: Sequence[ClientDelta]) -> list[ClientDelta]:
        """What comes in of an outer step's contributions: hostile clients see all honest ones of it
        and send something else.
        """
        attack, first = self.settings.attack, self.clients - self.settings.hostile
        if attack is None or attack == FLIPPED or all(work.client < first for work in works):
            return list(works)
        if attack == DELAYED:
            return [
                work
                if work.client < first
                else replace(work, pseudo=self._late[work.client].send(work.pseudo))
                for work in works
            ]
        honest = torch.stack(
            [work.pseudo for work in works if work.client < first]
            or [work.pseudo for work in works]
        )
        many = sum(work.client >= first for work in works)
        sent = (
            OPTIMISED[attack](honest, many, self._ruled)
            if attack in OPTIMISED
            else ATTACKS[attack](honest)
        )
        return [work if work.client < first else replace(work, pseudo=sent) for work in works]

    def _ruled(self, rows: Tensor) -> Tensor:
        """What an outer step would get of these contributions (n, numel): what optimised attacks
        look for the worst of.
        """
        rule, f = self.settings.rule, self.settings.f
        return (
            rows.mean(0)
            if rule == "mean" or len(rows) < 2 * f + 1
            else _aggregate(rows, rule, f).value
        )

    def combined(self, works: Sequence[ClientDelta], asked: int) -> None:
        """The outer step of a synchronous round for which so many were asked: with the mean by
        shares, or by the rule, where each counts once.

        Without contributions there is none, and by a rule none of fewer than 2 f + 1, as in a real
        round."""
        for work in works:
            if work.change is not None:
                self.server.note(work.change, self.shares[work.client])
        works = [work for work in self.attacked(works) if work.finite]
        if self.method.normalised and self.settings.rule == "mean":
            effective = self._effective(works)
            for work in works:
                work.pseudo[: self.learner.parameters].mul_(effective / work.steps)
        if self._means is not None:
            mean = self._means(
                [work.pseudo for work in works], [self.sizes[work.client] for work in works], asked
            )
            if mean is not None:
                self.server.step_with(
                    mean, sum(work.steps for work in works) / len(works), self.settings.knobs.lr
                )
            return
        if self.settings.rule == "mean":
            for work in works:
                self.server.add(work.pseudo, self.shares[work.client])
        if len(works) < 2 * self.settings.f + 1:
            return
        steps = sum(work.steps for work in works) / len(works)
        if self.settings.rule == "mean":
            self.server.step(steps, self.settings.knobs.lr)
            return
        rows = torch.stack([work.pseudo for work in works])
        self.server.step_with(
            _aggregate(rows, self.settings.rule, self.settings.f).value,
            steps,
            self.settings.knobs.lr,
        )

    def _effective(self, works: Sequence[ClientDelta]) -> float:
        """Inner steps of a round on average by shares: FedNova's Σ pᵢ τᵢ."""
        weights = [self.shares[work.client] for work in works]
        made = sum(weight * work.steps for weight, work in zip(weights, works, strict=True))
        return made / sum(weights) if weights else 0.0

    @property
    def bytes(self) -> int:
        """What all clients have sent and received so far."""
        return (
            (self.method.down + self.method.up)
            * FLOAT_BYTES
            * self.server.anchor.numel()
            * self.result.turns
        )

    def measured(self, seconds: float) -> None:
        """Add a point of the curve."""
        accuracy, loss = self.learner.measure(
            self.server.anchor, self.task.test_x, self.task.test_y
        )
        self.result.points.append(Point(self.server.version, seconds, self.bytes, accuracy, loss))

    def ended(self) -> StudyResult:
        """The result, with the last anchor measured at every site."""
        self.result.anchor = self.server.anchor.clone()
        self.result.by_site = [
            self.learner.measure(self.server.anchor, x, y)[0] for x, y in self._data
        ]
        return self.result


def _aggregate(rows: Tensor, rule: str, f: int) -> Any:
    return MODES.load("rules", "aggregate", key="rule")(rows, rule, f)

"""What each contestant of bench_race.py is tuned over, and what its losses by step are with other
values: one process with the arithmetic of a swarm, without a network.

Each has as many trials as the others. A trial is judged by the second at which it is where one
machine alone is after a number of steps: its steps last as long as in the race, and an exchange as
long as a ring of its bytes at line rate, and what the contestant waits beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from _race import Link, Points, reached, ring_over_step
from _race_task import Task
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from atoll.collectives.swarm import RunSettings
from atoll.optim.outer.step import warmed

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
Values = Mapping[str, float]


def _grid(key: str, others: tuple[float, ...]) -> tuple[Values, ...]:
    return tuple({"lr": lr, key: other} for lr in RATES[1:3] for other in others)


TRIALS: dict[str, tuple[Values, ...]] = {
    **{arm: tuple({"lr": lr} for lr in RATES) for arm in ("alone", "ddp", "planned")},
    **{arm: _grid("every", (20, 50)) for arm in ("local", "plain", "hivemind")},
    "torchft": _grid("momentum", (0.5, 0.9)),
}
"""`planned` has no more than a learning rate: `atoll plan` chooses the rest."""
BYTES = {"local": 4.0, "torchft": 4.0, "hivemind": 2.0, "plain": 1.0, "planned": 1.0}
WAITS_S = {"hivemind": 3.0}
"""Of an exchange, beside its bytes: hivemind gathers its group for as long as it is told to."""

Rounds = Callable[[int], tuple[int, float, float]]
"""Of the round that follows so many: its steps, outer lr and momentum."""


def rounds_of(settings: RunSettings) -> Rounds:
    """Of a run of atoll with these settings."""
    lengths, outer = settings.lengths, settings.effective_outer
    assert settings.sync_every is not None

    def found(done: int) -> tuple[int, float, float]:
        lr, momentum = warmed(outer, done)
        return lengths.short(done) or settings.sync_every or 1, lr, momentum

    return found


def alike(every: int, lr: float, momentum: float) -> Rounds:
    """All rounds are the same."""
    return lambda done: (every, lr, momentum)


def averaged(
    seed: int, lr: float, steps: int, workers: int, rounds: Rounds
) -> list[tuple[int, int, float]]:
    """After each round its last step, how many rounds there were, and the held-out loss: members
    with AdamW, and Nesterov momentum on the mean of what they moved (DiLoCo, arXiv 2311.08105).
    """
    tasks = [Task(seed, worker, lr) for worker in range(workers)]
    anchor = parameters_to_vector(tasks[0].model.parameters()).detach().clone()
    kept, now, found = torch.zeros_like(anchor), 0, list[tuple[int, int, float]]()
    while now < steps:
        length, outer_lr, momentum = rounds(len(found))
        moved = torch.zeros_like(anchor)
        length = min(length, steps - now)
        for task in tasks:
            for step in range(now, now + length):
                task.backward(task.model, step)
                task.optimizer.step()
            weights = parameters_to_vector(task.model.parameters()).detach()
            moved += (anchor - weights) / workers
        kept = momentum * kept + moved
        anchor = anchor - outer_lr * (moved + momentum * kept)
        for task in tasks:
            vector_to_parameters(anchor.clone(), task.model.parameters())
        now += length
        found.append((now, len(found) + 1, tasks[0].evaluate()))
    return found


def exchange_s(arm: str, link: Link, parameters: int, workers: int) -> float:
    """Seconds that training stands still for one exchange, at line rate.

    >>> exchange_s("hivemind", Link(100, 100, 50), 1_000_000, 4)
    3.24
    """
    ring = ring_over_step(link, parameters, workers, 1.0) * BYTES[arm] / 4
    return round(ring + WAITS_S.get(arm, 0.0), 6)


def timed(curve: list[list[Any]], step_s: float, exchange: float) -> Points:
    """Points of a race of steps and exchanges that last so long."""
    return [(step * step_s + rounds * exchange, step, loss) for step, rounds, loss in curve]


def best(trials: list[tuple[Values, Points]], losses: Mapping[int, float]) -> Values:
    """The values that are at most of the losses, and of those that are the soonest at the lowest;
    else those whose last loss is lowest. The first of equals.

    >>> fast, low = [(1, 10, 3.0), (2, 20, 2.9)], [(3, 10, 2.5)]
    >>> best([({"lr": 1}, fast), ({"lr": 2}, low)], {300: 3.0, 600: 2.6})
    {'lr': 2}
    """

    def key(trial: tuple[Values, Points]) -> tuple[float, float, float]:
        times = [reached(trial[1], loss) for loss in losses.values()]
        there = [each for each in times if each is not None]
        return -len(there), max(there, default=0.0), trial[1][-1][2]

    return min(trials, key=key)[0]

"""The task of `bench_federated`: digits, a small network, clients with uneven classes. Ours and
Flower's clients make the same steps on it.

from _federated import Spec, local_steps, parts_of, task
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from _digits import load
from torch import Tensor, nn

from atoll.optim.federated.simulation import Task, dirichlet
from atoll.optim.federated.simulation.partition import Indices
from atoll.optim.federated.simulation.task import Learner, endless

ROOT = Path(__file__).resolve().parents[2]
SPEEDS = (1.0, 1.5, 2.0, 4.0, 5.0)  # seconds a step


@dataclass(frozen=True, slots=True)
class Spec:
    """What both sides run."""

    clients: int = 20
    alpha: float = 0.1
    rounds: int = 20
    steps: int = 10
    batch: int = 16
    lr: float = 0.3
    seed: int = 0


@cache
def task(seed: int) -> Task:
    """The digits and a network of 2,410 parameters, whose first ones follow the seed."""
    digits = load()

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    return Task(model, digits.x, digits.y, digits.test_x, digits.test_y)


def parts_of(spec: Spec) -> list[Indices]:
    """Whose rows are whose."""
    return dirichlet(task(spec.seed).labels, spec.clients, spec.alpha, spec.seed)


@cache
def _client(spec: Spec, client: int) -> tuple[Learner, Tensor, Tensor]:
    whole, rows = task(spec.seed), torch.from_numpy(parts_of(spec)[client])
    return Learner(whole), whole.x[rows], whole.y[rows]


def local_steps(spec: Spec, client: int, turn: int, anchor: Tensor) -> tuple[Tensor, int]:
    """A client's parameters after its turn (the turn of that number in our simulation, step by
    step), and how many samples it has.
    """
    learner, x, y = _client(spec, client)
    learner.live.copy_(anchor)
    for rows in map(
        torch.from_numpy, islice(endless(len(y), spec.batch, (spec.seed, client, turn)), spec.steps)
    ):
        learner.live.sub_(learner.backward(x[rows], y[rows]), alpha=spec.lr)
    return learner.live, len(y)

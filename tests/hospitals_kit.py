"""Three hospitals, two large and a small one, that train a logistic regression: by real nodes, in
virtual time, and in numpy (`federated_numpy`) on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import federated_numpy as numpy_says
import msgspec
import numpy as np
import torch
from federated_numpy import Array, D, Site
from numpy.typing import NDArray
from torch import nn

from atoll.collectives.outcomes import Outcome
from atoll.collectives.script_swarm import Swarm
from atoll.optim import attach

COUNTS, ROUNDS, LR, BATCH = (960, 640, 20), 10, 0.1, 32
HOSPITALS = [numpy_says.patients(site, COUNTS[site], 0.4 * (site - 1)) for site in range(3)]
HELD_OUT = [numpy_says.patients(100 + site, 400, 0.4 * (site - 1)) for site in range(3)]
START = np.zeros(D + 1)
FULL = '[exchange]\ncodec = "fp32"'
METHODS: dict[str, Callable[[list[Site]], list[Array]]] = {
    'method = "fedavg"': lambda s: numpy_says.fedavg(s, START, ROUNDS, LR),
    'method = "fedavgm"\nmomentum = 0.5': lambda s: numpy_says.fedavgm(s, START, ROUNDS, LR, 0.5),
    'method = "fedadam"\nlr = 0.05': lambda s: numpy_says.fedadam(
        s, START, ROUNDS, LR, 0.05, 0.9, 0.99, 1e-3
    ),
    'method = "fedprox"\nmu = 0.1': lambda s: numpy_says.fedprox(s, START, ROUNDS, LR, 0.1),
    'method = "fednova"': lambda s: numpy_says.fednova(s, START, ROUNDS, LR),
    'method = "scaffold"': lambda s: numpy_says.scaffold(s, START, ROUNDS, LR),
}
"""Lines of a manifest → the anchors of ten rounds by the paper's formulas."""


def manifest(federated: str, more: str = "", rounds: int = ROUNDS, train: str = "") -> str:
    """A run of them. ``federated``, ``train``: lines of these tables; ``more``: further tables."""
    return f"""
schema = 1
name = "hospitals"
kind = "federated"
[model]
entry = "local:logistic"
[data]
source = "local"
[federated]
{federated}
[train]
rounds = {rounds}
{train}
{more or FULL}
"""


def _array(type_: type, values: Any) -> NDArray[Any]:
    del type_
    return np.asarray(values)


@dataclass
class Hospital:
    """What one site did and saw."""

    indices: list[list[NDArray[np.int64]]] = field(default_factory=lambda: [[]])  # by round
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    anchors: list[Array] = field(default_factory=list[Array])

    def save(self, file: Path) -> None:
        """Write it."""
        file.write_bytes(msgspec.msgpack.encode(self, enc_hook=np.ndarray.tolist))

    @classmethod
    def load(cls, file: Path) -> Hospital:
        """What was saved."""
        found = msgspec.msgpack.decode(file.read_bytes(), type=cls, dec_hook=_array)
        found.anchors = [np.asarray(each, np.float64) for each in found.anchors]
        return found

    @property
    def shares(self) -> list[dict[str, int]]:
        """Of each round: by contributor what it counted."""
        return [{s.peer: s.samples for s in outcome.contributors} for outcome in self.outcomes]


def train(
    swarm: Swarm,
    site: int,
    clock: Callable[[], float] | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Hospital:
    """Train one site to the end of its run. ``pause`` is called before each step."""
    seen, of = Hospital(), HOSPITALS[site]
    x, y = torch.from_numpy(of.x).float(), torch.from_numpy(of.y).float()
    model = nn.Linear(D, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def heard(outcome: Outcome) -> None:
        seen.outcomes.append(outcome)
        seen.indices.append([])
        view = swarm.anchor()
        whole = torch.zeros(view.numel)
        view.copy_into(whole)
        view.release()
        seen.anchors.append(whole[: D + 1].double().numpy())

    ticking = {} if clock is None else {"clock": clock}
    attachment = attach(model, optimizer, swarm, examples=len(y), on_round=heard, **ticking)
    drawn = numpy_says.batches(7 + site, len(y), BATCH)
    while not attachment.done:
        pause()
        batch = next(drawn)
        seen.indices[-1].append(batch)
        optimizer.zero_grad()
        z = model(x[batch]).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(z, y[batch]).backward()
        attachment.samples(len(batch))
        optimizer.step()
    return seen


def sites(seen: list[Hospital], *, equal: bool = False) -> list[Site]:
    """As numpy replays them."""
    return [
        Site(patients, hospital.indices, 1 if equal else len(patients.y))
        for patients, hospital in zip(HOSPITALS, seen, strict=True)
    ]


def apart(found: Array, wanted: Array) -> float:
    """How far vectors are from one another, as a share of the wanted one's length."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def ring_step(weight: int, reach: float = 4.0) -> float:
    """The step of masked values of three sites that count up to ``weight`` each."""
    return reach / (((1 << 31) - 1) // (3 * weight))

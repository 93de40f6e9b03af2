#!/usr/bin/env python
"""What becomes of that which a sparse result leaves out of the mean: held-out loss against
synchronous training, of four workers of `bench_methods.py` in one process with real codecs and SGD
as the outer step. One JSON object on the last line.

Cells are CODEC/KEEPER/LR with what differs from H = 10 and a residual that does not fade:

    scripts/bench/bench_thin.py sparse64_both/nobody/3 sparse64_both/owner/2,kept=0.8,sync_every=5

nobody       it is dropped: members train on from the anchor as it is
owner        the owner of a part adds it to its next mean (two-sided error feedback)
members      each keeps what it contributed to elements that did not come back
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
from _bench import emit, progress
from _methods import SIZES, Task, alone
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from atoll.collectives.codecs.codec import Codec, get_codec

KEEPERS = ("nobody", "owner", "members")


@dataclass(frozen=True)
class Cell:
    """One training. ``kept``: the share of contributors' residuals that is still there a round
    later."""

    codec: str
    keeper: str
    lr: float
    kept: float = 1.0
    sync_every: int = 10


def cell_of(text: str) -> Cell:
    """The cell of an argument. Raises ValueError."""
    codec, keeper, rest = text.split("/")
    if keeper not in KEEPERS:
        raise ValueError(f"{keeper!r} is none of {', '.join(KEEPERS)}")
    lr, *changes = rest.split(",")
    more: dict[str, Any] = {}
    for change in changes:
        key, _, value = change.partition("=")
        more[key] = int(value) if key == "sync_every" else float(value)
    return Cell(codec, keeper, float(lr), **more)


def decoded(codec: Codec, values: Tensor) -> Tensor:
    """What others make of values (float32, flat)."""
    wire = codec.wire(memoryview(bytearray(codec.wire_bytes(values.numel()))), values.numel())
    codec.encode(values, wire)
    out = torch.empty_like(values)
    codec.decode(wire, out)
    return out


def train(task: Task, cell: Cell) -> float:
    """The loss of the anchor after all rounds."""
    codec = get_codec(cell.codec)
    workers = [task.worker(index) for index in range(task.peers)]
    anchor = parameters_to_vector(workers[0][0].parameters()).detach().clone()
    residuals = [torch.zeros_like(anchor) for _ in workers]
    owners = torch.zeros_like(anchor)
    for first in range(task.size.synchronous, task.size.steps, cell.sync_every):
        given = list[Tensor]()
        for (model, inner, stream), residual in zip(workers, residuals, strict=True):
            for step in range(first, first + cell.sync_every):
                task.step(model, inner, [stream], step)
            live = parameters_to_vector(model.parameters()).detach()
            given.append(anchor - live + cell.kept * residual)
        came = [decoded(codec, each) for each in given]
        mean = torch.stack(came).mean(0) + owners
        result = decoded(codec.results, mean)
        if cell.keeper == "owner":
            owners = mean - result
        back = result != 0 if cell.keeper == "members" else torch.ones_like(result)
        residuals = [each - part * back for each, part in zip(given, came, strict=True)]
        anchor = anchor - cell.lr * result
        for model, _, _ in workers:
            vector_to_parameters(anchor.clone(), model.parameters())
    return task.evaluate(workers[0][0])


def main() -> None:
    """Train all cells on all seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="+", type=cell_of, help="CODEC/KEEPER/LR[,kept=…][,…]")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    parser.add_argument("--steps", type=int, default=SIZES["42k"].steps, help="inner steps in all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = list[dict[str, Any]]()
    for seed in range(given.seeds):
        task = Task(replace(SIZES["42k"], steps=given.steps), seed, 4)
        base = alone(task, task.peers)["loss"]
        for cell in given.cells:
            loss = train(task, cell)
            runs.append({**vars(cell), "seed": seed, "loss": loss, "ratio": loss / base})
            progress(f"{cell}, seed {seed}: {loss:.4f}, {loss / base:.4f} of ddp")
    emit("bench_thin", {"seeds": given.seeds, "steps": given.steps}, runs)


if __name__ == "__main__":
    main()

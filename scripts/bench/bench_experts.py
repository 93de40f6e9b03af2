#!/usr/bin/env python3
"""Decentralized experts beside one model of the same total compute, on planted clusters.

  classes   samples of two clusters, each with a teacher of its own; accuracy on held-out samples
  flow      points of two clusters, two rings and a grid of 25 spots; flow matching, and the share
            of drawn points that lie on a ring or a spot

Two experts train on one cluster each, found by k-means, and a router tells the clusters apart. The
one model has the shape of an expert and trains on all samples, for as many multiplications as
experts and router together. Every arm takes the learning rate that was best on seeds which are not
used afterwards (`sweep` in the JSON). The last line of stdout is one JSON object.

    scripts/bench/bench_experts.py --seeds 5
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from _bench import emit, progress
from torch import Tensor, nn
from torch.nn import functional

from atoll.optim.lab.experts import Mixture, find_clusters
from atoll.optim.lab.experts.mixture import Answer

RATES = (3e-3, 1e-2, 3e-2)
CLASSES, DIMENSIONS, TRAINED, HELD_OUT = 4, 16, 4000, 4000
BATCH, ROUTER_STEPS = 64, 100
SWEPT = (100, 101)
NOISE, RIGHT = 0.05, torch.tensor([2.5, 0.0])
Loss = Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]


def class_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples and labels to train with, samples and labels that are held out."""
    rng = torch.Generator().manual_seed(seed)
    centre = 1.5 * functional.normalize(torch.randn(DIMENSIONS, generator=rng), dim=0)
    teachers = (
        torch.randn(2, 8, DIMENSIONS, generator=rng),
        torch.randn(2, CLASSES, 8, generator=rng),
    )

    def draw(count: int) -> tuple[Tensor, Tensor]:
        cluster = torch.randint(2, (count,), generator=rng)
        near = torch.randn(count, DIMENSIONS, generator=rng) / DIMENSIONS**0.5
        hidden = torch.einsum("nhd,nd->nh", teachers[0][cluster], near).mul(3).tanh()
        labels = torch.einsum("nch,nh->nc", teachers[1][cluster], hidden).argmax(1)
        return near + torch.where(cluster == 1, 1.0, -1.0)[:, None] * centre, labels

    return (*draw(TRAINED), *draw(HELD_OUT))


def class_loss(model: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
    """Of classes; draws nothing."""
    return functional.cross_entropy(model(x), y)


def points(seed: int) -> Tensor:
    """Points to train with: (TRAINED, 2)."""
    rng = torch.Generator().manual_seed(seed)
    turn = 2 * math.pi * torch.rand(TRAINED, generator=rng)
    size = 0.5 + 0.5 * torch.randint(2, (TRAINED, 1), generator=rng)
    rings = torch.stack([turn.cos(), turn.sin()], 1) * size - RIGHT
    spots = (torch.randint(5, (TRAINED, 2), generator=rng) - 2) / 2 + RIGHT
    which = torch.arange(TRAINED)[:, None] % 2 == 1
    return torch.where(which, rings, spots) + NOISE * torch.randn(TRAINED, 2, generator=rng)


class Velocity(nn.Module):
    """u(x, t) of flow matching, or a router's logits: (n, 2) and (n, 1) to (n, 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat([x, t], 1))


def flow_loss(model: nn.Module, x: Tensor, _: Tensor, rng: torch.Generator) -> Tensor:
    """Flow matching on straight lines from noise at t = 0 to data at t = 1."""
    noise, t = torch.randn(x.shape, generator=rng), torch.rand(len(x), 1, generator=rng)
    return functional.mse_loss(model((1 - t) * noise + t * x, t), x - noise)


def router_loss(model: nn.Module, x: Tensor, cluster: Tensor, rng: torch.Generator) -> Tensor:
    """A router of flow matching: the cluster of a sample from where it is at time t."""
    noise, t = torch.randn(x.shape, generator=rng), torch.rand(len(x), 1, generator=rng)
    return functional.cross_entropy(model((1 - t) * noise + t * x, t), cluster)


def trained(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, steps: int, rate: float, seed: int
) -> nn.Module:
    """The model after so many steps of AdamW whose rate falls to 0 as a cosine."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=rng)
        optimizer.zero_grad()
        loss(model, x[rows], y[rows], rng).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def size(model: nn.Module) -> int:
    """Parameters: about the multiplications of a sample, a third of those of a training step."""
    return sum(p.numel() for p in model.parameters())


def on_structure(x: Tensor) -> float:
    """The share of points that are within three standard deviations of a ring or a spot."""
    radius = (x + RIGHT).norm(dim=1)
    rings = torch.minimum((radius - 0.5).abs(), (radius - 1).abs())
    grid = (x - RIGHT) * 2
    spots = (grid - grid.round().clamp(-2, 2)).norm(dim=1) / 2
    return float((torch.minimum(rings, spots) <= 3 * NOISE).float().mean())


@torch.no_grad()
def drawn(model: nn.Module, count: int, seed: int, steps: int = 50) -> Tensor:
    """Points that the flow carries from noise, by the midpoint rule."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    for step in range(steps):
        t = torch.full((count, 1), step / steps)
        half = x + model(x, t) / (2 * steps)
        x = x + model(half, t + 0.5 / steps) / steps
    return x


def run(task: str, seed: int, steps: int, rates: dict[str, float]) -> dict[str, float]:
    """Both arms on one seed: accuracy of classes, or the share of drawn points on the structure."""
    torch.manual_seed(seed)
    if task == "classes":
        x, y, held, labels = class_data(seed)

        def quality(model: nn.Module) -> float:
            with torch.no_grad():
                return float((model(held).argmax(1) == labels).float().mean())

        loss, width = class_loss, 24

        def expert() -> nn.Module:
            return nn.Sequential(nn.Linear(DIMENSIONS, width), nn.Tanh(), nn.Linear(width, CLASSES))

        router, sorting = nn.Linear(DIMENSIONS, 2), class_loss
    else:
        x = points(seed)

        def quality(model: nn.Module) -> float:
            return on_structure(drawn(model, HELD_OUT, seed))

        y = torch.zeros(len(x))
        loss, sorting = flow_loss, router_loss
        router = Velocity(32)

        def expert() -> nn.Module:
            return Velocity(32)

    clusters = find_clusters(x, 2, seed=seed).of(x)
    router_steps = ROUTER_STEPS if task == "classes" else steps
    router = trained(router, sorting, x, clusters, router_steps, 1e-2, seed)
    experts = [
        trained(expert(), loss, x[clusters == k], y[clusters == k], steps, rates["experts"], seed)
        for k in range(2)
    ]
    one = expert()
    alone_steps = 2 * steps + math.ceil(router_steps * size(router) / size(one))
    one = trained(one, loss, x, y, alone_steps, rates["one"], seed)
    answer: Answer = "logits" if task == "classes" else "values"
    mixture = Mixture(experts, router, top=1, answer=answer)
    return {name: quality(model) for name, model in (("experts", mixture), ("one", one))}


def best_rates(task: str, steps: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The rate of each arm, and what was measured to choose it."""
    swept: dict[str, dict[str, float]] = {"experts": {}, "one": {}}
    for rate in RATES:
        found = [run(task, seed, steps, {"experts": rate, "one": rate}) for seed in SWEPT]
        for arm in swept:
            swept[arm][f"{rate:g}"] = round(fmean(each[arm] for each in found), 4)
    return {arm: float(max(rows, key=rows.__getitem__)) for arm, rows in swept.items()}, swept


def main() -> None:
    """Sweep, then measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000, help="of each expert")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    for task in ("classes", "flow"):
        rates, swept = best_rates(task, given.steps)
        for seed in range(given.seeds):
            runs.append({"task": task, "seed": seed, **run(task, seed, given.steps, rates)})
            progress(", ".join(f"{key} {value}" for key, value in runs[-1].items()))
        ours = [each for each in runs if each["task"] == task]
        figures[task] = {
            "experts": round(fmean(each["experts"] for each in ours), 4),
            "one": round(fmean(each["one"] for each in ours), 4),
            "seeds_not_worse": sum(each["experts"] >= each["one"] for each in ours),
            "rates": rates,
            "sweep": swept,
        }
    emit("bench_experts", vars(given), runs, **figures)


if __name__ == "__main__":
    main()

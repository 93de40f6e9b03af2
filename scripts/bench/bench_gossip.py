#!/usr/bin/env python3
"""Gossip in virtual time: how many exchanges A²CiD² and DADAO need, beside plain gossip and the
theorem.

  spread   --peers stand on a ring, each with a random vector, and edges are used at random times,
           one exchange a peer and unit of time. Counted are the exchanges until the vectors are
           0.1, 0.01, 1e-4 times as far apart as at first: plain gossip (both go on with the mean)
           and A²CiD².
  dadao    --peers with strongly convex quadratics (L / mu = --condition) on a ring, a grid and
           random graphs of 1, 1/2, 1/4 and 1/8 of all other edges: gradients and exchanges until
           all are 1e-6 times as far from the minimum of the sum as at first, with equal gossip
           rates and with those of `gossip_rates`. `constant` is the exchanges over
           sqrt(chi1 chi2) sqrt(L / mu) ln 1e6: the same on all graphs, says the theorem.

Medians over --seeds. NoLoCo has its row in bench_methods.py. The last line of stdout is one JSON
object; --plot draws `dadao` against the theorem (matplotlib).

    scripts/bench/bench_gossip.py --seeds 3
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _bench import emit, progress
from torch import Tensor

from atoll.optim.lab.gossip import ContinuousMomentum, Exchange, dadao, gossip_rates, spread_of

APART = (0.1, 0.01, 1e-4)
PRECISION = 1e-6
SIZE = 8
Edges = list[tuple[int, int]]


def ring(peers: int) -> Edges:
    """Each peer with the next."""
    return [(i, (i + 1) % peers) for i in range(peers)]


def grid(peers: int) -> Edges:
    """As square as the number allows."""
    wide = next(w for w in range(math.isqrt(peers), 0, -1) if peers % w == 0)
    rows = [(i, i + 1) for i in range(peers) if (i + 1) % wide]
    return rows + [(i, i + wide) for i in range(peers - wide)]


def random_graph(peers: int, chance: float, rng: np.random.Generator) -> Edges:
    """A path through all, and each other edge with this chance."""
    return [(j, i) for i in range(peers) for j in range(i) if j == i - 1 or rng.random() < chance]


def becomes(mean: Tensor) -> Exchange:
    """An exchange that leaves this mean."""

    def exchange(tensor: Tensor) -> None:
        tensor.copy_(mean)

    return exchange


def exchanges(peers: int, seed: int, accelerated: bool) -> dict[str, int]:
    """On a ring, until the vectors are so much less apart."""
    rng = np.random.default_rng(seed)
    edges = ring(peers)
    spread = spread_of(edges, np.full(peers, 0.5))
    x = torch.from_numpy(rng.standard_normal((peers, SIZE)))
    momenta = [ContinuousMomentum(row, spread) for row in x]
    first, now, count, found = x.std(0).norm().item(), 0.0, 0, dict[str, int]()
    while len(found) < len(APART):
        now, count = now + rng.exponential(2 / peers), count + 1
        pair = edges[rng.integers(peers)]
        if accelerated:
            for peer in pair:
                momenta[peer].mix(now)
        mean = x[list(pair)].mean(0)
        for peer in pair:
            if accelerated:
                momenta[peer].exchange(becomes(mean), now)
            else:
                x[peer] = mean
        while len(found) < len(APART) and x.std(0).norm().item() <= APART[len(found)] * first:
            found[f"{APART[len(found)]:g}"] = count
    return found


def minimised(args: argparse.Namespace, edges: Edges, rates: Any, seed: int) -> dict[str, float]:
    """One run of DADAO."""
    rng = np.random.default_rng(seed)
    hessians = np.empty((args.peers, SIZE, SIZE))
    for hessian in hessians:
        base, _ = np.linalg.qr(rng.standard_normal((SIZE, SIZE)))
        hessian[:] = base @ np.diag(np.geomspace(1, args.condition, SIZE)) @ base.T
    targets = rng.standard_normal((args.peers, SIZE))
    best = np.linalg.solve(hessians.sum(0), np.einsum("nij,nj->i", hessians, targets))
    start = np.zeros((args.peers, SIZE))
    first = np.linalg.norm(start - best)
    found = dadao(
        lambda i, x: hessians[i] @ (x - targets[i]),
        start,
        edges,
        rates,
        mu=1.0,
        smooth=args.condition,
        rng=rng,
        events=5_000_000,
        until=lambda x: bool(np.linalg.norm(x - best) <= PRECISION * first),
    )
    spread = spread_of(edges, rates)
    graph = math.sqrt(spread.chi1 * spread.chi2)
    theorem = graph * math.sqrt(args.condition) * math.log(1 / PRECISION)
    return {
        "graph": graph,
        "gradients_a_peer": found.gradients / args.peers,
        "exchanges": found.exchanges,
        "constant": found.exchanges / theorem,
        "error": float(np.linalg.norm(found.weights - best) / first),
    }


def graphs(peers: int) -> dict[str, Edges]:
    """By name."""
    rng = np.random.default_rng(0)
    chances = {f"random {chance:g}": chance for chance in (1.0, 0.5, 0.25, 0.125)}
    return {
        "ring": ring(peers),
        "grid": grid(peers),
        **{name: random_graph(peers, chance, rng) for name, chance in chances.items()},
    }


def plot(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Exchanges against sqrt(chi1 chi2): on a line through the origin, says the theorem."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, row in rows.items():
        axes.scatter(row["graph"], row["exchanges"])
        axes.annotate(name, (row["graph"], row["exchanges"]), fontsize=7)
    furthest = max(rows.values(), key=lambda row: row["graph"])
    axes.plot([0, furthest["graph"]], [0, furthest["exchanges"]], linestyle=":")
    axes.set(xlabel="sqrt(chi1 chi2)", ylabel=f"exchanges to {PRECISION:g}")
    figure.savefig(path)


def main() -> None:
    """Count the exchanges of both methods and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--condition", type=float, default=10.0, help="L / mu")
    parser.add_argument("--plot", type=Path, help="file for the picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spread: dict[str, dict[str, float]] = {}
    for name, accelerated in (("plain", False), ("acid", True)):
        runs = [exchanges(args.peers, seed, accelerated) for seed in range(args.seeds)]
        spread[name] = {apart: median(run[apart] for run in runs) for apart in runs[0]}
        progress(f"{name:6} {spread[name]}")
    rows: dict[str, dict[str, float]] = {}
    for name, edges in graphs(args.peers).items():
        for kind, rates in (
            ("equal", np.full(len(edges), 1 / len(edges))),
            ("best", gossip_rates(edges)),
        ):
            runs = [minimised(args, edges, rates, seed) for seed in range(args.seeds)]
            row = {key: median(run[key] for run in runs) for key in runs[0]}
            row["error"] = max(run["error"] for run in runs)
            rows[f"{name}, {kind} rates"] = row
            progress(f"{name:12} {kind:5} { ({k: float(f'{v:.4g}') for k, v in row.items()}) }")
    if args.plot:
        plot(rows, args.plot)
    settings = {key: value for key, value in vars(args).items() if key != "plot"}
    fewer = {apart: round(spread["plain"][apart] / n, 2) for apart, n in spread["acid"].items()}
    emit("gossip", settings, [], spread=spread, fewer=fewer, dadao=rows)


if __name__ == "__main__":
    main()

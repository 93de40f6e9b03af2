#!/usr/bin/env python3
"""Whether a run from random weights that leaves the outer step to atoll is worth joining: held-out
loss beside one machine with all samples, one member alone, and the plain mean.

A byte-level GPT of a million parameters (`_methods.py`, without synchronous steps); a member of a
seed sees the same samples in every arm. The run's settings are those of a manifest that gives H,
rounds and codec; members train with `DiLoCo` in a LocalSwarm.

loss       of the last anchor, nats a byte; to_one: over that of one machine
to_alone   the largest, over the member alone after as many steps, of every fifth round from the
           tenth on
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from _bench import emit, progress
from _methods import METHODS, SIZES, Method, cell

from atoll.collectives.swarm import PLAIN_MEAN, RunSettings
from atoll.node.manifest import parse_manifest

ONE, ALONE = "ddp", "solo"


def automatic(steps: int, every: int, codec: str) -> RunSettings:
    """Of a manifest that chooses no outer values."""
    return parse_manifest(
        f'schema = 1\nname = "cold"\n[train]\nsync_every = {every}\nrounds = {steps // every}\n'
        f'[exchange]\ncodec = "{codec}"\n[model]\nentry = "local:cold"\n'
    ).settings()


def compared(cells: dict[str, dict[str, Any]], arm: str, every: int) -> dict[str, float]:
    """An arm beside one machine and a member alone."""
    alone, curve = dict(cells[ALONE]["curve"]), cells[arm]["curve"]
    return {
        "loss": round(cells[arm]["loss"], 4),
        "to_one": round(cells[arm]["loss"] / cells[ONE]["loss"], 4),
        "to_alone": round(max(loss / alone[at] for at, loss in curve if at >= 10 * every), 4),
    }


def main() -> None:
    """Train all arms on each seed, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--every", type=int, default=20, help="inner steps a round")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8, help="windows of a member's step")
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW, the same in all arms")
    parser.add_argument("--codec", default="int8")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = automatic(given.steps, given.every, given.codec)
    size = replace(
        SIZES[given.size], synchronous=0, steps=given.steps, lr=given.lr, batch=given.batch,
        points=given.steps // (5 * given.every),
    )  # fmt: skip
    for name, outer in (("auto", settings.outer), ("plain", PLAIN_MEAN)):
        chosen = {"outer": outer, "codec": given.codec}
        METHODS[name] = Method(chosen, sync_every=given.every, peers=given.peers)
    rows = list[dict[str, Any]]()
    for seed in given.seeds:
        cells = {name: cell(f"{name}@peers={given.peers}", seed, size) for name in (ONE, ALONE)}
        cells |= {name: cell(name, seed, size) for name in ("plain", "auto")}
        arms = {name: compared(cells, name, given.every) for name in cells}
        rows.append({"seed": seed, **arms})
        progress(f"seed {seed}: {arms}")
    ratios = [row["auto"]["loss"] / row["plain"]["loss"] for row in rows]
    emit(
        "bench_cold",
        vars(given),
        rows,
        outer=[settings.outer.kind, settings.outer.lr, settings.outer.momentum],
        warmup=settings.outer.warmup,
        auto_to_plain=[round(ratio, 4) for ratio in ratios],
        to_one={
            name: round(statistics.fmean(row[name]["to_one"] for row in rows), 4)
            for name in (ALONE, "plain", "auto")
        },
    )


if __name__ == "__main__":
    main()

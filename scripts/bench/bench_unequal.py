#!/usr/bin/env python3
"""Unequal and intermittent machines: how long until a loss, in virtual time.

Five peers of speeds 1, 1, 1/2, 1/4 and 1/20 train the model of bench_methods.py with DiLoCo from
the same start. The arms:

  everybody   each round waits until all have made their steps: what a plain all-reduce does
  fastest     `sync_every`: the fastest peer's steps end a round, the others contribute what they
              have, weighted by samples (a run's default)
  late        the same with `overlap = "late"`: nobody waits for the exchange either
  without     the two slowest are left out
  on_off      as `late`, and the three slower ones are there half of the time, in turns

The learning rate falls with the rounds, for all alike. Printed: seconds until the held-out loss
that `everybody` has in the end, over the seconds that it takes. The last line of stdout is one JSON
object.

    scripts/bench/bench_unequal.py --seeds 3
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from _bench import emit, progress
from _methods import LATENCY_S, PRESETS, SHORT, SIZES, STEP_S, TRANSFER_SHARE, Task
from torch.nn.utils import parameters_to_vector

from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim import DiLoCo

SPEEDS = (1.0, 1.0, 1 / 2, 1 / 4, 1 / 20)
EVERY, ROUNDS, LONGER = 10, 30, 2  # arms that do not wait have more rounds
ON_S = 6.0  # and as long off


@dataclass(frozen=True)
class Arm:
    """Which peers there are, the seconds of their steps, and how results come."""

    steps_s: tuple[float, ...]
    late: bool = False
    rounds: int = ROUNDS * LONGER
    on_off: bool = False


REAL = tuple(STEP_S / speed for speed in SPEEDS)
ARMS = {
    "everybody": Arm((max(REAL),) * len(REAL), rounds=ROUNDS),
    "fastest": Arm(REAL),
    "late": Arm(REAL, late=True),
    "without": Arm(REAL[:3]),
    "on_off": Arm(REAL, late=True, rounds=4 * ROUNDS, on_off=True),
}


def train(arm: Arm, seed: int) -> list[tuple[float, float]]:
    """Virtual seconds and held-out loss after each round."""
    size, peers = SIZES["42k"], len(arm.steps_s)
    task = Task(size, seed, peers)
    numel = parameters_to_vector(task.model.parameters()).numel()
    settings = RunSettings(
        sync_every=EVERY, rounds=arm.rounds, codec="int8", outer=SHORT, deadline_s=60.0
    )
    if arm.late:
        outer = PRESETS["short-delay"]
        settings = RunSettings(
            sync_every=EVERY, rounds=arm.rounds, codec="int8", outer=outer, overlap="late", delay=3
        )
    payload = 2 * (peers - 1) / peers * 4 * numel
    swarm = LocalSwarm(
        peers,
        settings=settings,
        seed=seed,
        latency_s=LATENCY_S,
        bandwidth_bytes_per_s=payload / (TRANSFER_SHARE * EVERY * STEP_S),
    )
    if arm.on_off:
        for index in (2, 3, 4):
            for turn in range(40):
                swarm.freeze_at(index, 2.0 * index + 2 * ON_S * turn, ON_S)
    curve = list[tuple[float, float]]()

    def script(member: Any) -> None:
        model, inner, stream = task.worker(member.index)
        optimizer = DiLoCo(model.parameters(), inner, swarm=member, model=model, clock=member.clock)
        attachment, seen, started = optimizer.attachment, 0, None
        while not attachment.done:
            round_ = attachment.round
            if member.index == 0 and round_ > seen:
                started, seen = started or member.clock(), round_
                with attachment.evaluate_anchor():
                    curve.append((member.clock(), task.evaluate(model)))
            part = min(1.0, round_ / arm.rounds)
            step = size.synchronous + int(part * (size.steps - size.synchronous))
            attachment.samples(size.batch)
            task.step(model, optimizer, [stream], step)

    swarm.run(script, step_s=arm.steps_s)
    return curve


def main() -> None:
    """Every arm on every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        curve = train(ARMS["everybody"], seed)
        wanted, took_s = curve[-1][1], curve[-1][0]
        for name in given.arms.split(","):
            found = curve if name == "everybody" else train(ARMS[name], seed)
            there_s = next((at for at, loss in found if loss <= wanted), math.inf)
            runs.append(
                {
                    "arm": name,
                    "seed": seed,
                    "wanted": wanted,
                    "seconds": round(there_s, 2),
                    "ratio": round(there_s / took_s, 4),
                    "last": found[-1],
                    "least": min(loss for _, loss in found),
                }
            )
            progress(f"{name}, seed {seed}: {runs[-1]}")
    ratios = {
        name: median(run["ratio"] for run in runs if run["arm"] == name)
        for name in given.arms.split(",")
    }
    emit("bench_unequal", vars(given), runs, ratios=ratios)


if __name__ == "__main__":
    main()

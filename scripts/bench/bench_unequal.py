#!/usr/bin/env python3
"""Unequal and intermittent machines: how long until a loss, in virtual time.

Five peers of speeds 1, 1, 1/2, 1/4 and 1/20 train the model of bench_methods.py with DiLoCo from
the same start. The arms:

  everybody   each round waits until all have made their steps: what a plain all-reduce does
  fastest     `sync_every`: the fastest peer's steps end a round, the others contribute what they
              have, weighted by samples (a run's default)
  fastest_short  the same in half as many rounds: as long as the asynchronous ones
  late        the same with `overlap = "late"`: nobody waits for the exchange either
  without     the two slowest are left out
  on_off      as `late`, and the three slower ones are there half of the time, in turns

and asynchronous DiLoCo (`[exchange.arrivals]`), each with values from a sweep (docs/unequal.md):

  nesterov    a round at every arrival, DiLoCo's momentum on each
  delayed     the same with Delayed Nesterov, slower members making fewer steps (DyLU)
  grace       rounds of two, held open for others
  heloco      a round at every arrival, each tensor's update turned towards the momentum
  compass     FedCompass' groups

and each of these with `_on_off`. An arm is given other values so: delayed@lr=0.5,every=8. The
learning rate falls with the rounds, for all alike. Printed: seconds until the held-out loss
that `everybody` has in the end, over the seconds that it takes. The last line of stdout is one JSON
object.

    scripts/bench/bench_unequal.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _bench import emit, progress
from _methods import LATENCY_S, PRESETS, SHORT, SIZES, STEP_S, TRANSFER_SHARE, Task
from torch.nn.utils import parameters_to_vector

from atoll.collectives.arrivals import ArrivalSettings, DynamicSteps, Fading, GraceWindow, Groups
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim import DiLoCo

SPEEDS = (1.0, 1.0, 1 / 2, 1 / 4, 1 / 20)
EVERY, ROUNDS, LONGER = 10, 30, 2  # arms that do not wait have more rounds
ON_S = 6.0  # and as long off
ONE_STEP = -1  # a grace window of one step of the fastest that waits


@dataclass(frozen=True)
class Arm:
    """Which peers there are, the seconds of their steps, and how results come."""

    steps_s: tuple[float, ...]
    late: bool = False
    rounds: int = ROUNDS * LONGER
    on_off: bool = False
    arrivals: ArrivalSettings | None = None
    outer: OuterSettings = SHORT


def asynchronous(
    outer: OuterSettings,
    rounds: int,
    *,
    quorum: int = 1,
    grace: float | None = 0.0,
    least: int | None = None,
    staleness: float = 0.5,
) -> Arm:
    """Rounds of a quorum; ``least``: steps of a turn with DyLU."""
    dynamic = None if least is None else DynamicSteps(EVERY, least)
    arrivals = ArrivalSettings(
        quorum,
        fading=Fading(1.0, "polynomial", staleness),
        window=GraceWindow(grace),
        dynamic=dynamic,
    )
    return Arm(REAL, rounds=rounds, arrivals=arrivals, outer=outer)


def grouped(outer: OuterSettings, rounds: int, longest: float, staleness: float = 0.5) -> Arm:
    """FedCompass' groups: turns of `EVERY` steps, up to so many times as many."""
    groups = Groups(EVERY, int(longest * EVERY), EVERY)
    arrivals = ArrivalSettings(fading=Fading(1.0, "polynomial", staleness), groups=groups)
    return Arm(REAL, rounds=rounds, arrivals=arrivals, outer=outer)


REAL = tuple(STEP_S / speed for speed in SPEEDS)
ARMS = {
    "everybody": Arm((max(REAL),) * len(REAL), rounds=ROUNDS),
    "fastest": Arm(REAL),
    "fastest_short": Arm(REAL, rounds=ROUNDS),
    "late": Arm(REAL, late=True),
    "without": Arm(REAL[:3]),
    "on_off": Arm(REAL, late=True, rounds=4 * ROUNDS, on_off=True),
}
ASYNCHRONOUS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "nesterov": ({"kind": "nesterov", "lr": 0.3, "momentum": 0.6}, {"rounds": 165}),
    "delayed": (
        {"kind": "delayed_nesterov", "lr": 0.6, "momentum": 0.6, "every": 4},
        {"rounds": 250, "least": 2, "staleness": 0.0},
    ),
    "grace": (
        {"kind": "nesterov", "lr": 0.7, "momentum": 0.6},
        {"rounds": 55, "quorum": 2, "grace": ONE_STEP},
    ),
    "heloco": ({"kind": "heloco", "lr": 0.3, "momentum": 0.8}, {"rounds": 165}),
    "compass": ({"kind": "nesterov", "lr": 1.5, "momentum": 0.6}, {"rounds": 22, "longest": 4.0}),
}
"""Outer values and those of `asynchronous` or `grouped`; with so many rounds a run takes a minute
of virtual time."""


def arm_of(name: str) -> Arm:
    """An arm by its name, such as ``delayed_on_off@lr=0.5,every=8``."""
    base, _, changes = name.partition("@")
    plain = base.removesuffix("_on_off")
    if plain not in ASYNCHRONOUS:
        return ARMS[base]
    of_outer, of_arm = ASYNCHRONOUS[plain]
    outer: dict[str, Any] = {**of_outer}
    more: dict[str, Any] = {**of_arm}
    for change in filter(None, changes.split(",")):
        key, _, text = change.partition("=")
        value = float(text) if "." in text else int(text)
        (outer if key in OuterSettings.__struct_fields__ else more)[key] = value
    settings: dict[str, Any] = {
        **more,
        "rounds": int(more["rounds"]),
        "outer": OuterSettings(**outer),
    }
    if settings.get("grace") == ONE_STEP:
        settings["grace"] = None
    arm: Arm = (grouped if "longest" in more else asynchronous)(**settings)
    return replace(arm, on_off=base != plain)


def train(arm: Arm, seed: int) -> list[tuple[float, float]]:
    """Virtual seconds and held-out loss after each round."""
    size, peers = SIZES["42k"], len(arm.steps_s)
    task = Task(size, seed, peers)
    numel = parameters_to_vector(task.model.parameters()).numel()
    settings = RunSettings(
        sync_every=EVERY,
        rounds=arm.rounds,
        codec="int8",
        outer=arm.outer,
        deadline_s=60.0,
        arrivals=arm.arrivals,
        reducer="sum" if arm.arrivals is not None and arm.arrivals.groups else "mean",
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
        attachment, seen, due_s = optimizer.attachment, 0, 0.0
        while not attachment.done:
            round_ = attachment.round
            if member.index == 0 and round_ > seen and member.clock() >= due_s:
                seen, due_s = round_, member.clock() + 1.0
                with attachment.evaluate_anchor():
                    curve.append((member.clock(), task.evaluate(model)))
            part = min(1.0, round_ / arm.rounds)
            step = size.synchronous + int(part * (size.steps - size.synchronous))
            attachment.samples(size.batch)
            task.step(model, optimizer, [stream], step)

    swarm.run(script, step_s=arm.steps_s)
    return curve


Curve = list[tuple[float, float]]


def load(path: Path | None) -> dict[tuple[str, int], Curve]:
    """The curves of finished runs."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["arm"], row["seed"]): [(at, loss) for at, loss in row["curve"]] for row in rows}


def trained(
    name: str, seed: int, kept: dict[tuple[str, int], Curve], journal: Path | None
) -> Curve:
    """The curve of an arm on a seed, run if it is not there."""
    if (name, seed) not in kept:
        kept[name, seed] = train(arm_of(name), seed)
        if journal is not None:
            row = {"arm": name, "seed": seed, "curve": kept[name, seed]}
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return kept[name, seed]


def main() -> None:
    """Every arm on every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    every = [*ARMS, *ASYNCHRONOUS, *(f"{name}_on_off" for name in ASYNCHRONOUS)]
    parser.add_argument("--arms", default=" ".join(every), help="separated by blanks")
    parser.add_argument("--journal", type=Path, help="file of finished runs: not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    arms = given.arms.split()
    kept = load(given.journal)
    runs: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        curve = trained("everybody", seed, kept, given.journal)
        wanted, took_s = curve[-1][1], curve[-1][0]
        for name in arms:
            found = trained(name, seed, kept, given.journal)
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
    ratios = {name: median(run["ratio"] for run in runs if run["arm"] == name) for name in arms}
    emit("bench_unequal", {"seeds": given.seeds, "arms": arms}, runs, ratios=ratios)


if __name__ == "__main__":
    main()

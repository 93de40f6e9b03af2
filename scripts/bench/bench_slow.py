#!/usr/bin/env python3
"""Whether a member that is twenty times slower costs the others time to a loss: four machines, and a
fifth that is slower in compute, in its link or in both, played in virtual time by
`atoll simulate --peers`' code, with training. A byte-level GPT of 42 thousand parameters stands for
one of --parameters; the run's settings are those of a manifest that chooses no outer values. Each
play is a line of --out, and is not played again.

    scripts/bench/bench_slow.py --seeds 0 1 2 --out slow.jsonl

time     of the five, over the four's: virtual seconds until the held-out loss of the anchor is
         first at or below what the four have after a third, two thirds and all of their rounds
share    of the four's time that is training, over what it is without the fifth
counted  rounds of the four, and how many of them count the fifth
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _bench import emit, progress

from atoll.node.manifest import parse_manifest
from atoll.node.recipes.simulated import load_task
from atoll.node.simulation import fleet_run
from atoll.node.simulation.fleet import parse_fleet
from atoll.node.simulation.fleet_run import FleetRun

FAST = "4 x 250ms@100Mbit"
FIFTHS = {
    "none": "",
    "compute": ", 5s@100Mbit",
    "link": ", 250ms@5Mbit",
    "both": ", 5s@5Mbit",
}
BEYOND = 1.2  # times the rounds of the four are played for the five
fleet_run.POINTS = 100_000  # the loss is measured after every round


def played(fifth: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """The curve of a fleet, and what it did."""
    rounds = given.rounds if fifth == "none" else round(BEYOND * given.rounds)
    manifest = parse_manifest(
        f'schema = 1\nname = "slow"\n[train]\nsync_every = {given.every}\nrounds = {rounds}\n'
        + ("" if given.growth is None else f"growth = {given.growth}\n")
        + '[train.inner]\nschedule = "cosine"\n[model]\n'
        "config = { width = 32, layers = 2, heads = 2, context = 32 }\n"
    )
    machines = parse_fleet(FAST + FIFTHS[fifth], step_s=None, flops=None)
    began = time.monotonic()
    task = load_task(manifest, None)
    run = FleetRun(
        manifest.settings(), machines, given.parameters, task, lr=given.lr, seed=seed
    ).play()
    fast = run.machines[:4]
    begun_s = run.begun_s or 0.0
    return {
        "curve": [(at - begun_s, loss) for at, _, loss in sorted(run.loss)],
        "share": sum(machine.share for machine in fast) / 4,
        "rounds": run.rounds,
        "fifth": run.machines[4].rounds if fifth != "none" else 0,
        "wall_s": round(time.monotonic() - began),
    }


def reached(curve: list[tuple[float, float]], loss: float) -> float:
    """Virtual seconds until the loss is first at or below this one, on lines between measurements;
    infinity: it never is.
    """
    (before, high), *rest = curve
    for at, low in rest:
        if low <= loss:
            return before + (at - before) * max(0.0, high - loss) / max(high - low, 1e-9)
        before, high = at, low
    return float("inf")


def least(curve: list[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """The mean of so many measurements around each: the loss of one anchor is noise, too."""
    half = width // 2
    return [
        (at, statistics.fmean(loss for _, loss in curve[max(0, n - half) : n + half + 1]))
        for n, (at, _) in enumerate(curve)
    ]


def main() -> None:
    """Play what the file lacks, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--rounds", type=int, default=50, help="of full length")
    add("--every", type=int, default=20)
    add("--growth", type=int, help="of how many rounds the steps are made in short ones")
    add("--lr", type=float, default=4e-3)
    add("--parameters", type=int, default=200_000)
    add("--smooth", type=int, default=5, help="measurements whose mean is compared")
    add("--out", type=Path, default=Path("slow.jsonl"))
    add("--minutes", type=float, default=1e9, help="no play begins later than that")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("atoll").setLevel(logging.ERROR)
    began, known, rows = time.monotonic(), dict[str, dict[str, Any]](), list[dict[str, Any]]()
    if given.out.exists():
        known = {line["key"]: line for line in map(json.loads, given.out.read_text().splitlines())}
    for seed in given.seeds:
        cells = dict[str, dict[str, Any]]()
        for fifth in FIFTHS:
            key = f"{fifth} {seed} {given.rounds} {given.every} {given.lr} {given.parameters}"
            key += "" if given.growth is None else f" growth={given.growth}"
            if key not in known and time.monotonic() - began < 60 * given.minutes:
                known[key] = {"key": key, **played(fifth, seed, given)}
                progress(f"{key}: {known[key]['share']:.3f}, {known[key]['wall_s']} s")
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[key]) + "\n")
            if key in known:
                cells[fifth] = known[key]
        if "none" not in cells:
            continue
        without = least(cells["none"]["curve"], given.smooth)
        wanted = [min(loss for _, loss in without[: len(without) * n // 3]) for n in (1, 2, 3)]
        for fifth, each in cells.items():
            if fifth == "none":
                continue
            curve = least(each["curve"], given.smooth)
            times = [reached(curve, loss) / reached(without, loss) for loss in wanted]
            rows.append(
                {
                    "fifth": fifth,
                    "seed": seed,
                    "losses": [round(loss, 3) for loss in wanted],
                    "time": [round(ratio, 4) for ratio in times],
                    "share": round(each["share"] / cells["none"]["share"], 4),
                    "counted": [each["rounds"], each["fifth"]],
                }
            )
            progress(str(rows[-1]))
    emit(
        "bench_slow",
        {**vars(given), "out": str(given.out)},
        rows,
        time={
            fifth: [
                round(statistics.fmean(row["time"][n] for row in rows if row["fifth"] == fifth), 4)
                for n in range(3)
            ]
            for fifth in {row["fifth"] for row in rows}
        },
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Whether a run from random weights that leaves the outer step to atoll is worth joining: held-out
loss beside one machine with all samples, one member alone, and the plain mean.

A byte-level GPT of a million parameters (`_methods.py`, without synchronous steps); a member of a
seed sees the same samples in every arm. The run's settings are those of a manifest that gives H,
rounds and codec; members train with `DiLoCo` in a LocalSwarm. Each arm is a line of --out as soon
as it is trained, and is not trained again.

    scripts/bench/bench_cold.py --seeds 0 1 2 --peers 2 4 --every 10 20 50 --out cold.jsonl
    scripts/bench/bench_cold.py --out docs/benchmarks-cold.jsonl --table    of what is in the file, for
                                                                            docs/benchmarks-cold.md

loss       of the last anchor, nats a byte; to_one: over that of one machine
to_alone   the largest, over the member alone after as many steps, of all looks from the tenth round
           of H steps on; a look comes after each hundred steps
exchanges  rounds that were committed

A line also has `counted`: of each member, the rounds that counted its contribution. Time is virtual,
so no load of this machine can leave one out; a setting in which a round lacks a member is an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _bench import emit, progress
from _methods import METHODS, SIZES, Method, cell

from atoll.collectives.outer_rules import PLAIN_MEAN
from atoll.collectives.swarm import RunSettings
from atoll.node.manifest import parse_manifest

ONE, ALONE, AUTO, PLAIN = "ddp", "solo", "auto", "plain"
LOOK = 100  # steps


def automatic(steps: int, every: int, codec: str) -> RunSettings:
    """Of a manifest that chooses no outer values."""
    return parse_manifest(
        f'schema = 1\nname = "cold"\n[train]\nsync_every = {every}\nrounds = {steps // every}\n'
        f'[exchange]\ncodec = "{codec}"\n[model]\nentry = "local:cold"\n'
    ).settings()


def method_of(arm: str, peers: int, every: int, given: argparse.Namespace) -> Method:
    """The settings of an arm."""
    auto = automatic(given.steps, every, given.codec)
    chosen: dict[str, Any] = {"outer": PLAIN_MEAN, "codec": given.codec}
    if arm == AUTO:
        chosen |= {"outer": auto.outer, "growth": auto.growth, "rounds": auto.rounds}
    return Method(chosen, sync_every=every, peers=peers)


def trained(
    arm: str, seed: int, peers: int, every: int, given: argparse.Namespace
) -> dict[str, Any]:
    """One arm with one seed."""
    size = replace(
        SIZES[given.size], synchronous=0, steps=given.steps, lr=given.lr, batch=given.batch,
        points=given.steps // LOOK,
    )  # fmt: skip
    began = time.monotonic()
    if arm not in (ONE, ALONE):
        METHODS[arm] = method_of(arm, peers, every, given)
    name = f"{arm}@peers={peers}" if arm in (ONE, ALONE) else arm
    found = cell(name, seed, size)
    exchanges = METHODS[arm].settings.get("rounds", given.steps // every) if every else 0
    counted = found.get("counted", [])
    if any(each != exchanges for each in counted):
        raise RuntimeError(f"{arm}: of {exchanges} rounds the members were in {counted}")
    return {
        "loss": found["loss"],
        "curve": found["curve"],
        "exchanges": exchanges,
        "counted": counted,
        "seconds": round(time.monotonic() - began),
    }


def compared(cells: dict[str, dict[str, Any]], arm: str, every: int) -> dict[str, float]:
    """An arm beside one machine and a member alone."""
    alone, curve = dict(cells[ALONE]["curve"]), cells[arm]["curve"]
    return {
        "loss": round(cells[arm]["loss"], 4),
        "to_one": round(cells[arm]["loss"] / cells[ONE]["loss"], 4),
        "to_alone": round(max(loss / alone[at] for at, loss in curve if at >= 10 * every), 4),
        "exchanges": cells[arm]["exchanges"],
    }


class Cells:
    """Trained arms: those of the file, and those that are added to it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self._began = given, time.monotonic()
        out: Path | None = given.out
        text = out.read_text() if out is not None and out.exists() else ""
        lines = map(json.loads, text.splitlines())
        self._known: dict[str, dict[str, Any]] = {line["key"]: line for line in lines}

    def of(self, arm: str, seed: int, peers: int, every: int) -> dict[str, Any] | None:
        """This arm; None where it is not there and no time is left. ``every`` 0: any."""
        given, known = self.given, self._known
        values = (arm, given.size, given.steps, given.batch, given.lr, seed, peers, every)
        key = " ".join(map(str, values)) + (f" {given.codec}" if every else "")
        if key not in known and time.monotonic() - self._began < 60 * given.minutes:
            known[key] = {"key": key, **trained(arm, seed, peers, every, given)}
            progress(f"{key}: {known[key]['loss']:.4f}")
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[key]) + "\n")
        return known.get(key)

    def row(self, seed: int, peers: int, every: int) -> dict[str, Any] | None:
        """All arms of a setting, compared; None where one is not there."""
        cells = {
            ONE: self.of(ONE, seed, peers, 0),
            ALONE: self.of(ALONE, seed, 1, 0),
            **{arm: self.of(arm, seed, peers, every) for arm in self.given.arms},
        }
        whole = {arm: each for arm, each in cells.items() if each is not None}
        if len(whole) < len(cells):
            return None
        arms = {arm: compared(whole, arm, every) for arm in self.given.arms}
        return {"seed": seed, "peers": peers, "every": every, **arms}


def table(given: argparse.Namespace) -> str:
    """Markdown of all rows of `auto` that the file has with this size, length, batch and rate."""
    values = given.size, given.steps, given.batch, given.lr
    known = {line["key"]: line for line in map(json.loads, given.out.read_text().splitlines())}
    before = " ".join(map(str, (AUTO, *values))) + " "
    found = list[tuple[int, int, int, str]]()
    for key, line in known.items():
        if not key.startswith(before):
            continue
        seed, peers, every, codec = key[len(before) :].split()
        one, alone = (
            known[" ".join(map(str, (arm, *values, seed, count, 0)))]
            for arm, count in ((ONE, peers), (ALONE, 1))
        )
        ratios = compared({ONE: one, ALONE: alone, AUTO: line}, AUTO, int(every))
        text = (
            f"| {peers} | {every} | {seed} | {alone['loss'] / one['loss']:.3f} | "
            f"**{ratios['to_one']:.3f}** | {line['exchanges']} | {ratios['to_alone']:.3f} |"
        )
        if codec == given.codec:
            found.append((int(peers), int(every), int(seed), text))
    head = "| members | H | seed | one member alone | `auto` | exchanges | at most over alone |"
    return "\n".join([head, "|---" * 7 + "|", *(text for *_, text in sorted(found))])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--size", choices=SIZES, default="1m")
    add("--peers", type=int, nargs="+", default=[2])
    add("--every", type=int, nargs="+", default=[20], help="inner steps a round")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=8, help="windows of a member's step")
    add("--lr", type=float, default=2e-3, help="of AdamW, the same in all arms")
    add("--codec", default="int8")
    add("--arms", nargs="+", choices=(AUTO, PLAIN), default=[AUTO, PLAIN])
    add("--out", type=Path, help="lines are appended to this file; what it has is not trained")
    add("--minutes", type=float, default=1e9, help="no arm begins later than that")
    add("--table", action="store_true", help="train nothing: Markdown of what --out has")
    given = parser.parse_args()
    if given.table and given.out is None:
        parser.error("--table is of a file: --out")
    if given.steps < (least := 10 * max(given.every)):
        parser.error(f"looks count from the tenth round on: --steps {least} or more")
    return given


def main() -> None:
    """Train what the file lacks, and print the table."""
    given = parse()
    if given.table:
        print(table(given))
        return
    torch.set_num_threads(1)
    cells, rows, ratios = Cells(given), list[dict[str, Any]](), dict[str, list[float]]()
    for setting in itertools.product(given.seeds, given.peers, given.every):
        if (row := cells.row(*setting)) is None:
            continue
        rows.append(row)
        progress(str(row))
        for arm in given.arms:
            at = f"{arm}, {row['peers']} peers, H = {row['every']}"
            ratios.setdefault(at, []).append(row[arm]["to_one"])
    chosen = {every: automatic(given.steps, every, given.codec) for every in given.every}
    emit(
        "bench_cold",
        {**vars(given), "out": str(given.out)},
        rows,
        outer={
            every: [each.outer.kind, each.outer.lr, each.outer.momentum, each.outer.warmup]
            for every, each in chosen.items()
        },
        growth={every: each.growth for every, each in chosen.items()},
        to_one={at: round(statistics.fmean(each), 4) for at, each in ratios.items()},
    )


if __name__ == "__main__":
    main()

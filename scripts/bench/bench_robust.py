"""Robust rules against byzfl's, interleaved in one run, each in its own process: milliseconds of
one aggregation, and processor time.

    scripts/bench/bench_robust.py --n 16 --d 1000000 --against byzfl
    scripts/bench/bench_robust.py --n 64 --d 100000

byzfl runs with numpy and with torch, and the better of the two counts; the rows are written anew
before every call, on both sides, since some of its rules overwrite them, and as in a round, where
they have just been decoded. All use as many threads (one, unless told). Our rules run to their end
where byzfl's do a fixed number of steps (geometric median: 3, centred clipping: 5; `clip_once`
against 1).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import emit, progress
from rivals._byzfl import RULES as THEIRS
from rivals._byzfl import Byzfl, Unavailable
from torch import Tensor

from atoll.security.rules.aggregate import BY_COORDINATE, BY_GRAM
from atoll.security.rules.before import arc, bucketing, clip_in_place, clipping, nnm
from atoll.security.rules.centre import clip_once
from atoll.security.rules.gram import combine, gram, mix, squares
from atoll.security.rules.selection import monna

WANTED = {
    "median": 1 / 3,
    "meamed": 1 / 3,
    "nnm": 1 / 3,
}  # times byzfl's, at 16 x 1e6; all others 1.1


def ours(rows: Tensor, f: int) -> dict[str, Callable[[], object]]:
    """Every rule and step, from rows to its result. Results of steps go to memory that is there, as
    in a round; those of clipping and ARC over the rows, as byzfl's (``…_kept``: elsewhere, so that
    the rows stay)."""
    by_name: dict[str, Callable[[], object]] = {}
    for name, rule in BY_COORDINATE.items():
        by_name[name] = lambda rule=rule: rule(rows, f)
    for name, weigh in BY_GRAM.items():
        by_name[name] = lambda weigh=weigh: combine(rows, weigh(gram(rows), f))
    room = torch.empty_like(rows)
    by_name["monna"] = lambda: combine(rows, monna(squares(rows, rows[0]), f))
    by_name["clip_once"] = lambda: combine(rows, clip_once(squares(rows), f, radius=100.0))
    by_name["nnm"] = lambda: mix(rows, nnm(gram(rows), f), room)
    by_name["bucketing"] = lambda: mix(
        rows, bucketing(len(rows), 2, random.Random(0)), room[: (len(rows) + 1) // 2]
    )
    by_name["clipping"] = lambda: clip_in_place(rows, 2.0)
    by_name["clipping_kept"] = lambda: mix(rows, clipping(squares(rows), 2.0), room)
    by_name["arc"] = lambda: mix(rows, arc(squares(rows), f), rows)
    by_name["arc_kept"] = lambda: mix(rows, arc(squares(rows), f), room)
    return by_name


def measured(run: Callable[[], object], rows: Tensor, fresh: Tensor) -> tuple[float, float]:
    """Milliseconds of one call, after the rows have been written again: wall, and processor."""
    rows.copy_(fresh)
    cpu, start = time.process_time(), time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - cpu)


def row(
    name: str, run: Callable[[], tuple[float, float]], theirs: Byzfl | None, f: int, reps: int
) -> dict[str, Any]:
    """Samples of one rule, ours and theirs in turns after one warm-up of each; medians and ratios."""
    samples: dict[str, list[float]] = {"ours": [], "ours_cpu": []}
    for rep in range(reps + 1):
        wall, cpu = run()
        if rep:
            samples["ours"].append(wall)
            samples["ours_cpu"].append(cpu)
        if theirs is None or name not in THEIRS:
            continue
        for backend in ("numpy", "torch"):
            told = theirs.ask(rule=name, f=f, backend=backend)
            if rep:
                samples.setdefault(backend, []).append(told["ms"])
                samples.setdefault(f"{backend}_cpu", []).append(told["cpu_ms"])
    middle = {key: statistics.median(values) for key, values in samples.items()}
    found: dict[str, Any] = {"rule": name, "ms": middle["ours"], "cpu_ms": middle["ours_cpu"]}
    if "numpy" in middle:
        found["ratio"] = middle["ours"] / min(middle["numpy"], middle["torch"])
        found["cpu_ratio"] = middle["ours_cpu"] / min(middle["numpy_cpu"], middle["torch_cpu"])
    return found | {"samples": samples}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--d", type=int, default=1_000_000)
    parser.add_argument("--f", type=int, help="hostile rows (a quarter)")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch and of numpy's BLAS, on both sides"
    )
    parser.add_argument("--rules", default="", help="comma-separated; all")
    parser.add_argument("--against", choices=["byzfl", "nothing"], default="byzfl")
    given = parser.parse_args()
    f = given.n // 4 if given.f is None else given.f
    torch.set_num_threads(given.threads)
    fresh = torch.from_numpy(
        np.random.default_rng(0).standard_normal((given.n, given.d), dtype=np.float32)
    )
    rows = fresh.clone()
    rules = ours(rows, f)
    if given.n > 20:
        del rules["mda"]  # too many subsets for both
    chosen = [name for name in rules if not given.rules or name in given.rules.split(",")]
    theirs: Byzfl | None = None
    if given.against == "byzfl":
        try:
            theirs = Byzfl(given.threads)
        except Unavailable as error:
            sys.exit(f"{Path(__file__).name}: {error}")
        theirs.ask(n=given.n, d=given.d, seed=0)
    table: list[dict[str, Any]] = []
    for name in chosen:
        table.append(row(name, partial(measured, rules[name], rows, fresh), theirs, f, given.reps))
        progress(
            ", ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else str(value)
                for key, value in table[-1].items()
                if key != "samples"
            )
        )
    if theirs:
        with theirs:
            pass
    settings = {
        "n": given.n,
        "d": given.d,
        "f": f,
        "threads": given.threads,
        "reps": given.reps,
        "wanted": WANTED,
    }
    runs = [{"rule": entry["rule"], **entry.pop("samples")} for entry in table]
    emit("bench_robust", settings, runs, table=table)


if __name__ == "__main__":
    main()

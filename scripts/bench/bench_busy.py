#!/usr/bin/env python3
"""What Python work beside a reduction costs it, and what it costs the work: in the script's own
process, and in an unrelated one.

A pure-Python loop runs beside each peer, in turn as a thread of its training process and as a
process of its own (script, other, other, script), while the peers all-reduce. The loop takes its
share of the processors in both cases; what is compared is what only a common interpreter adds.
Medians over the runs.

round_ratio    seconds of a reduction with the loop in the script's process, over those with the
               loop in an unrelated process
loop_ratio     how much a reduction slows the loop in the script's process, over how much it slows
               the unrelated one
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import bench_allreduce
from _bench import FailedError, emit, progress

ORDER = ("script", "other", "other", "script")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    peers = bench_allreduce.parse(
        ["--peers", str(options.peers), "--elements", str(options.elements), "--against", "none"]
    )
    peers.codec = options.codec
    runs = list[dict[str, Any]]()
    try:
        with bench_allreduce.started(peers) as bench:
            for _ in range(2):
                bench.measure("ours")
            for rep in range(options.reps):
                runs += [one(bench, where) for where in ORDER]
                progress(
                    f"run {rep + 1} of {options.reps}: "
                    + "  ".join(
                        f"{r['where']} {r['seconds']:.3f} s, loop / {r['slowed']:.2f}"
                        for r in runs[-4:]
                    )
                )
    except FailedError as error:
        progress(f"cannot measure: {error}")
        return 1

    def median(where: str, key: str) -> float:
        return statistics.median(
            sample[key] for sample in runs if sample["where"] == where and sample["ok"]
        )

    try:
        figures = {
            f"{where}_{key}": round(median(where, key), 4)
            for where in ("script", "other")
            for key in ("seconds", "slowed")
        }
    except statistics.StatisticsError:
        progress("cannot measure: no operation counted everybody")
        return 1
    figures["round_ratio"] = round(figures["script_seconds"] / figures["other_seconds"], 3)
    figures["loop_ratio"] = round(figures["script_slowed"] / figures["other_slowed"], 3)
    emit("bench_busy", vars(options), runs, **figures)
    return 0


def one(bench: bench_allreduce.Bench, where: str) -> dict[str, Any]:
    """One reduction with the loop somewhere."""
    bench.all("busy", where=where)
    alone = sum(answer["spun_per_s"] for answer in bench.all("spin_alone"))
    found = bench.measure("ours")
    bench.all("busy", where="")
    seconds = (
        found["seconds"] - found["late_s"]
    )  # from the call on: a thread that sleeps is woken late beside a loop, with or without a swarm
    return {
        "where": where,
        "seconds": seconds,
        "slowed": alone / max(1.0, found["spun_per_s"]),
        "ok": found["ok"],
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument(
        "--elements", type=int, default=25_000_000, help="length of the vector (default 25,000,000)"
    )
    parser.add_argument("--codec", default="int8", help="how contributions travel (default int8)")
    parser.add_argument(
        "--reps", type=int, default=5, help="times (script, other, other, script) (default 5)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))

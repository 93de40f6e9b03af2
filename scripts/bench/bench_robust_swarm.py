"""What a robust rule costs: an all-reduce with it beside the mean, turn about, end to end as in
bench_allreduce.py.

    scripts/bench/bench_robust_swarm.py --rule trimmed_mean,centred_clip,nnm+trimmed_mean

Each peer is a script and its node. Times are those of the slowest peer, CPU seconds those of all
processes; medians over the runs, and the ratios of these to the mean's. engine_memory_mib is a
node's memory beyond what is kept until the decision, after all rules.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from _bench import CANNOT, FailedError, emit, progress
from bench_allreduce import started

from atoll.collectives.codecs.codec import CODECS, DEFAULT_CHUNK_ELEMENTS, Chunking
from atoll.security.rule_names import BY_COORDINATE, parse_reducer

WANTED = {"coordinate": 1.6, "whole rows": 3.0}


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    ways = {"mean": {}} | {rule: how(rule, options.f) for rule in options.rules}
    try:
        with started(options) as bench:
            for arguments in ways.values():
                bench.measure("ours", **arguments)
            runs = list[dict[str, Any]]()
            for rep in range(options.reps):
                order = list(ways) if rep % 2 == 0 else list(reversed(ways))
                found = [{**bench.measure("ours", **ways[rule]), "rule": rule} for rule in order]
                runs += found
                progress(
                    f"run {rep + 1} of {options.reps}: "
                    + "  ".join(f"{r['rule']} {r['seconds']:.3f} s" for r in found)
                )
            memory = bench.all("memory")
            digests = {answer["digest"] for answer in bench.all("check", outliers=False)}
    except FailedError as error:
        progress(f"cannot measure: {error}")
        return 1
    table = {rule: summary(rule, runs) for rule in ways}
    if any(not row for row in table.values()):
        progress("cannot measure: with some rule no operation counted everybody")
        return 1
    chunking = Chunking(options.codec, options.elements, DEFAULT_CHUNK_ELEMENTS[options.codec])
    kept = (4 * options.elements + chunking.nbytes * (2 - 1 / options.peers)) / 2**20
    extra = max(answer["extra_kib"] for answer in memory) / 1024
    emit(
        "bench_robust_swarm",
        {**vars(options), "path": "end to end"},
        runs,
        table=table,
        ratio_to_mean=max(row["ratio_to_mean"] for rule, row in table.items() if rule != "mean"),
        bit_equal=len(digests) == 1,
        engine_memory_mib=round(max(0.0, extra - kept), 1),
        encoded_model_mib=round(chunking.nbytes / 2**20, 1),
        incomplete=sum(not found["ok"] for found in runs),
    )
    return 0


def how(rule: str, f: int) -> dict[str, Any]:
    """The arguments of `all_reduce` for ``nnm+trimmed_mean``, say."""
    *before, name = rule.split("+")
    return {"op": name, "f": f, "before": before}


def summary(rule: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a rule, and how they compare with the mean's; empty where nothing was decided over
    all peers.
    """

    def median(of: str, key: str) -> float:
        return statistics.median(
            [found[key] for found in runs if found["rule"] == of and found["ok"]]
        )

    if not all(
        any(found["rule"] == name and found["ok"] for found in runs) for name in ("mean", rule)
    ):
        return {}
    row = {
        key: round(median(rule, key), 4)
        for key in ("seconds", "cpu_seconds", "engine_seconds", "bytes_sent")
    }
    kind = "coordinate" if rule in BY_COORDINATE else "whole rows"
    row |= {"ratio_to_mean": round(median(rule, "seconds") / median("mean", "seconds"), 3)}
    row |= {
        "cpu_ratio_to_mean": round(median(rule, "cpu_seconds") / median("mean", "cpu_seconds"), 3)
    }
    return row | ({"wanted": WANTED[kind]} if rule != "mean" else {})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with status CANNOT for what is known and cannot be done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, choices=(4, 5, 8), default=4)
    parser.add_argument(
        "--elements", type=int, default=25_000_000, help="length of the vector (default 25,000,000)"
    )
    parser.add_argument(
        "--codec",
        default="int8",
        help=f"how contributions travel: {', '.join(CODECS)} (default int8)",
    )
    parser.add_argument(
        "--rule",
        default="trimmed_mean,centred_clip",
        help="rules, separated by commas; steps before one with +",
    )
    parser.add_argument(
        "--f", type=int, default=1, help="how many contributions may be hostile (default 1)"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="bulk bytes without encryption ([lanes] encrypt = false)",
    )
    parser.add_argument("--reps", type=int, default=5, help="times each (default 5)")
    options = parser.parse_args(arguments)
    options.against, options.round, options.tensor = [], False, "shared"
    options.rules = options.rule.split(",")
    parsed = {rule: parse_reducer(f"{rule}:{options.f}") for rule in options.rules}
    wrong = [rule for rule, name in parsed.items() if name is None or name.least > options.peers]
    if wrong or options.codec not in CODECS or options.elements < 1 or options.reps < 1:
        why = (
            f"--rule {','.join(wrong)} with f = {options.f} and {options.peers} peers"
            if wrong
            else "that codec, length or number of runs"
        )
        print(f"{parser.prog}: cannot do {why}", file=sys.stderr)
        sys.exit(CANNOT)
    return options


if __name__ == "__main__":
    sys.exit(run(parse()))

#!/usr/bin/env python
"""Methods against synchronous training at equal tokens: held-out loss, bytes, peak bandwidth,
waiting. One JSON object on the last line.

Byte-level GPT on the text that ships with Python; four workers, each with the same samples in every
arm; the first quarter of the steps is synchronous in all of them. Every arm but `ddp` and `solo`
(plain torch, one process) runs atoll's public classes with real codecs in a LocalSwarm, over
simulated links on which an fp32 exchange takes 0.3 of a round's compute.

A run is a grid of cells, method and seed; finished cells are kept in a journal, so that a run may
be interrupted and gone on with:

    scripts/bench/bench_methods.py --seeds 3 --methods ddp,diloco,late --journal methods.jsonl
    scripts/bench/bench_methods.py --cells late:0,late@lr=0.9,momentum=0.2:0 --journal methods.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _bench import emit, progress
from _methods import METHODS, SIZES, cell, method_of

Key = tuple[str, int]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--methods",
        default=",".join(METHODS),
        help="ids; METHOD@key=value;key=value has other values",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--params", choices=SIZES, default="42k", help="size of the model")
    parser.add_argument(
        "--cells",
        default="",
        help="METHOD:SEED, separated by blanks: only these, whatever --methods and --seeds say",
    )
    parser.add_argument(
        "--journal", type=Path, help="file of finished cells: they are not run again"
    )
    parser.add_argument("--list", action="store_true", help="print the ids and end")
    return parser.parse_args()


def wanted(given: argparse.Namespace) -> list[Key]:
    """The cells to run, references included."""
    if given.cells:
        found = [
            (name, int(seed))
            for name, _, seed in (text.rpartition(":") for text in given.cells.split())
        ]
    else:
        names = [name.replace(";", ",") for name in given.methods.split(",")]
        found = [(name, seed) for seed in range(given.seeds) for name in names]
    for name, _ in found:
        method_of(name)
    for name, seed in list(found):
        for reference in ("ddp", method_of(name).reference):
            if (reference, seed) not in found:
                found.insert(0, (reference, seed))
    return found


def load(path: Path | None, params: str) -> dict[Key, dict[str, Any]]:
    """Finished cells of a journal."""
    if path is None or not path.exists():
        return {}
    rows = [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.endswith("}")
    ]
    return {(row["method"], row["seed"]): row for row in rows if row["params"] == params}


def table(rows: dict[Key, dict[str, Any]]) -> dict[str, Any]:
    """By method: means over the seeds that both it and its reference have."""
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for name, _ in rows):
        reference = method_of(name).reference
        seeds = [seed for method, seed in rows if method == name]
        ratios = [
            rows[name, seed]["loss"] / rows["ddp", seed]["loss"]
            for seed in seeds
            if ("ddp", seed) in rows
        ]
        others = [
            rows[name, seed]["loss"] / rows[reference, seed]["loss"]
            for seed in seeds
            if (reference, seed) in rows
        ]
        first = rows[name, seeds[0]]
        result[name] = {
            "loss_ratio": _mean(ratios),
            "reference": reference,
            "ratio_to_reference": _mean(others),
            "loss": _mean([rows[name, seed]["loss"] for seed in seeds]),
            "seeds": len(seeds),
            **{
                key: first.get(key)
                for key in (
                    "bytes_per_param_step",
                    "payload_per_param_step",
                    "peak_ratio",
                    "waiting_share",
                )
            },
        }
    return result


def _mean(values: list[float]) -> float | None:
    return round(statistics.fmean(values), 5) if values else None


def main() -> None:
    """Run what is missing, then print the table."""
    given = options()
    if given.list:
        print("\n".join(METHODS))
        return
    torch.set_num_threads(1)
    rows = load(given.journal, given.params)
    cells = wanted(given)
    for number, (name, seed) in enumerate(cells, 1):
        if (name, seed) in rows:
            continue
        started = time.process_time()
        found = cell(name, seed, SIZES[given.params])
        row = {
            "method": name,
            "seed": seed,
            "params": given.params,
            **found,
            "cpu_s": round(time.process_time() - started, 1),
        }
        rows[name, seed] = row
        if given.journal is not None:
            with given.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        base = rows.get(("ddp", seed))
        ratio = f"{row['loss'] / base['loss']:.4f} of ddp" if base else ""
        progress(
            f"{number}/{len(cells)} {name}, seed {seed}: {row['loss']:.4f} {ratio} ({row['cpu_s']} CPU s)"
        )
    chosen = {key: rows[key] for key in cells}
    settings = {
        "methods": sorted({name for name, _ in cells}),
        "seeds": sorted({seed for _, seed in cells}),
        "params": given.params,
    }
    result = table(chosen)
    for name, row in result.items():
        ratios = f"{row['loss_ratio'] or 1:.4f} of ddp  {row['ratio_to_reference'] or 1:.4f} of {row['reference']}"
        progress(f"{name:24} {row['seeds']} seeds  {row['loss']:.4f}  {ratios}")
    emit("bench_methods", settings, list(chosen.values()), table=result)


if __name__ == "__main__":
    main()

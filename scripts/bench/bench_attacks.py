#!/usr/bin/env python
"""Robust rules under attack: accuracy, or loss, of training with n members of which f are hostile
and know what the honest ones send.

`--through local`: digits, a gradient from each member a step, with worker momentum; `--through
swarm`: DiLoCo on a byte-level GPT, int8, through the real sessions and all-reduce in a LocalSwarm.
Everything but torch's optimizers is atoll's. A table rule -> attack -> mean over the seeds of the
accuracy (or held-out loss), with the least (or worst) of them beside. Finished cells are kept in a
journal.

`--long ROUNDS`: DiLoCo on digits under small, patient attacks, beside members that are merely
missing; also × the loss of the same rule without an attack, at the end and after 25 rounds. Rules
with `@0.9` have worker momentum, with `@0.9@2` an outer learning rate of 2 beside it:

    scripts/bench/bench_attacks.py --n 16 --f 4 --seeds 5 --data iid
    scripts/bench/bench_attacks.py --data sorted --rules mean,nnm+trimmed_mean --journal attacks.jsonl
    scripts/bench/bench_attacks.py --through swarm --seeds 1 --rules mean,trimmed_mean
    scripts/bench/bench_attacks.py --long 200 --n 7 --f 2 --seeds 2 --rules trimmed_mean,trimmed_mean@0.9
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import _attacks as local
import _attacks_long as long
import _attacks_swarm as swarm
import torch
from _bench import emit, progress
from _digits import Unavailable

from atoll.optim.federated.simulation.attacks import ATTACKS

Key = tuple[str, str, int]
FIGURE = {"local": "accuracy", "swarm": "loss", "long": "loss"}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=16, help="members")
    parser.add_argument("--f", type=int, default=4, help="hostile ones among them")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument(
        "--data",
        choices=["iid", "sorted"],
        default="iid",
        help="sorted: each member has few labels (not through the swarm)",
    )
    parser.add_argument("--long", type=int, metavar="ROUNDS", help="so many rounds of DiLoCo")
    parser.add_argument("--through", choices=["local", "swarm"], default="local")
    parser.add_argument(
        "--rules", default="", help="ids, with the steps before a rule as nnm+trimmed_mean; all"
    )
    parser.add_argument(
        "--attacks",
        default="",
        help="ids; the seven, with none and (local) the optimised ones beside",
    )
    parser.add_argument("--rounds", type=int, default=15, help="of ten steps each (swarm only)")
    parser.add_argument(
        "--journal", type=Path, help="file of finished cells: they are not run again"
    )
    return parser.parse_args()


def load(path: Path | None, settings: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """Finished cells of a journal that were run with these settings."""
    if path is None or not path.exists():
        return {}
    rows = [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.endswith("}")
    ]
    return {
        (row["rule"], row["attack"], row["seed"]): row
        for row in rows
        if row["settings"] == settings
    }


def cell(key: Key, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one."""
    rule, attack, seed = key
    if settings["through"] == "swarm":
        return swarm.cell(rule, attack, seed, settings["n"], settings["f"], settings["rounds"])
    if settings["through"] == "long":
        return long.cell(
            rule, attack, settings["data"], seed, settings["n"], settings["f"], settings["rounds"]
        )
    return local.cell(rule, attack, settings["data"], seed, settings["n"], settings["f"])


def tables(rows: dict[Key, dict[str, Any]], figure: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """rule -> attack -> the mean over seeds, and the worst of them. A loss that is no number is
    worse than any.
    """
    mean: dict[str, Any] = {}
    worst: dict[str, Any] = {}
    for rule, attack, _ in rows:
        found = [row[figure] for (one, two, _), row in rows.items() if (one, two) == (rule, attack)]
        mean.setdefault(rule, {})[attack] = round(statistics.fmean(found), 4)
        worst.setdefault(rule, {})[attack] = round(
            min(found) if figure == "accuracy" else max(found), 4
        )
    return mean, worst


def ratios(mean: dict[str, Any]) -> dict[str, Any]:
    """rule -> attack -> the loss, × that of the same rule when nobody attacks."""
    return {
        rule: {attack: round(loss / row["none"], 3) for attack, loss in row.items()}
        for rule, row in mean.items()
        if "none" in row
    }


def early(rows: dict[Key, dict[str, Any]]) -> dict[str, Any]:
    """`ratios` of the losses after the first rounds."""
    told = {key: {"loss": row["loss_early"]} for key, row in rows.items()}
    return ratios(tables(told, "loss")[0]) if all(row["loss"] for row in told.values()) else {}


def main() -> None:
    """Run what is missing, then print the table."""
    given = options()
    torch.set_num_threads(1)
    through = "long" if given.long else given.through
    settings: dict[str, Any] = {"through": through, "n": given.n, "f": given.f}
    settings |= {"data": given.data} if through != "swarm" else {}
    settings |= {"rounds": given.long or given.rounds} if through != "local" else {}
    beside = () if through == "swarm" else tuple(local.BESIDE)
    known = {"none", "label_flip", *ATTACKS, *beside}
    known |= {long.MISSING, *long.CLIMBING, *long.DRIFTING} if given.long else set()
    kinds = {"local": local.RULES, "swarm": swarm.RULES, "long": long.RULES}
    rules = given.rules.split(",") if given.rules else list(kinds[through])
    usual = ("none", *long.ATTACKS_LONG) if given.long else ("none", *local.SEVEN, *beside)
    attacks = given.attacks.split(",") if given.attacks else list(usual)
    if wrong := sorted(set(attacks) - known):
        sys.exit(f"no attack {', '.join(wrong)}; there are {', '.join(sorted(known))}")
    cells = [
        (rule, attack, seed) for seed in range(given.seeds) for rule in rules for attack in attacks
    ]
    rows, figure = load(given.journal, settings), FIGURE[through]
    for number, key in enumerate(cells, 1):
        if key in rows:
            continue
        started = time.process_time()
        try:
            found = cell(key, settings)
        except Unavailable as error:
            sys.exit(f"{Path(__file__).name}: {error}")
        rows[key] = {
            "rule": key[0],
            "attack": key[1],
            "seed": key[2],
            "settings": settings,
            **found,
            "cpu_s": round(time.process_time() - started, 2),
        }
        if given.journal is not None:
            with given.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[key]) + "\n")
        progress(
            f"{number}/{len(cells)} {key[0]}, {key[1]}, seed {key[2]}: {rows[key][figure]:.4f} ({rows[key]['cpu_s']} CPU s)"
        )
    chosen = {key: rows[key] for key in cells}
    mean, worst = tables(chosen, figure)
    emit(
        "bench_attacks",
        settings | {"seeds": given.seeds, "figure": figure},
        list(chosen.values()),
        table=mean,
        worst=worst,
        **({"ratios": ratios(mean), "early": early(chosen)} if given.long else {}),
    )


if __name__ == "__main__":
    main()

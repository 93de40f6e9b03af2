#!/usr/bin/env python3
"""Thousands of seeded swarms in virtual time, with faults, checked by an oracle that recomputes
every result.

Each seed is one run of 5 to 9 members, on butterflies, rings or trees of two or three levels, some
with a model in 2 or 3 fragments: the real session and data plane of every member on a network that loses,
delays, doubles, reorders and partitions, with crashes (also between two writes or two sends),
freezes, a lost journal, a member that leaves. After the faults all must be repaired: at least two
more rounds, everybody back at the same round. A seed that fails is printed with its trace hash and
fails again in the same way:

    scripts/simulate_rounds.py --first SEED --seeds 1

--faults all,moment,twin adds faults that aim at the moment at which a bug of what is kept would
show, and second processes with a member's key.

--grid N is something else: averages of N members on a grid of groups (--churn: which part of them
is killed in every step, --rounds: how many averages for each of --seeds seeds), and how far the
results are from the mean of all, beside the predicted distance. It fails when they are further than
1.25 times the prediction, or when members of one group hold different bits.

    scripts/simulate_rounds.py --grid 200 --churn 0.05 --rounds 5 --seeds 1

--plant NAME breaks the code on purpose (in the harness) to see that the checker finds it; --plant
list names the plants. With --count all seeds are played, and how many it takes in the mean to find
the bug is told; --plant all --count does so for every plant, one after another: 20 seeds each, and
up to --most where fewer than three of them found it. The first seed that finds a bug is played
again without it.

    scripts/simulate_rounds.py --plant all --count --peers 3:5 --rounds 6
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

sys.path.append(str(Path(__file__).resolve().parent / "bench"))  # helpers of the measurements
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # the harness

from _bench import emit
from kits.rounds.injection import AIMED, ALL_FAULTS

from atoll.collectives.group import TopologyKind

if TYPE_CHECKING:
    from kits.rounds.plant import Plant
    from kits.rounds.swarm import Options

NOT_WITH_LIARS = (
    "amnesia",
    "shatter",
)  # a lost journal is a lie more


def described() -> argparse.ArgumentParser:
    """What may be said on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, help="how many (default 2000; 20 of each plant with --count)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--peers", default="5:9", help="members a seed, FEWEST:MOST (default 5:9)")
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds every seed must commit (default 10)"
    )
    parser.add_argument(
        "--faults",
        default="all",
        help="none, or a comma-separated choice of all (default), "
        f"{', '.join((*AIMED, *ALL_FAULTS))}; all is without {' and '.join(AIMED)}",
    )
    parser.add_argument(
        "--lying",
        type=int,
        default=0,
        metavar="F",
        help="so many members of each run lie; at least 3 F + 1 members (default 0)",
    )
    parser.add_argument(
        "--lie",
        default="all",
        metavar="NAME,...|list|all",
        help="with --lying: which lies they tell; all: each liar about half of them (default)",
    )
    parser.add_argument(
        "--plant",
        default="",
        metavar="NAME,...|list|all",
        help="plant a known bug; the run stops at the first seed that finds it",
    )
    parser.add_argument(
        "--count", action="store_true", help="with --plant: play all seeds, and count those"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=200,
        metavar="N",
        help="with --count: at most so many seeds of a plant that is rarely found (default 200)",
    )
    parser.add_argument(
        "--grid", type=int, default=0, metavar="N", help="averages of N members on a grid instead"
    )
    parser.add_argument(
        "--churn",
        type=float,
        default=0.05,
        help="with --grid: how many miss each step (default 0.05)",
    )
    parser.add_argument("--tree", choices=get_args(TopologyKind), help="default: by the seed")
    parser.add_argument(
        "--arrivals",
        action="store_true",
        help="rounds that wait for a quorum and a grace window, by the seed",
    )
    parser.add_argument(
        "--relayed-above",
        type=int,
        metavar="N",
        help="configurations of more than N members have relays (default: as in a node); half of "
        "the seeds have a member that passes nothing on",
    )
    parser.add_argument(
        "--sparse-above",
        type=int,
        metavar="N",
        help="more members than N beat to a row and a column of a grid only (default 32: none do)",
    )
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default 2)"
    )
    parser.add_argument(
        "--runs", action="store_true", help="list the seconds of every seed in the last line, too"
    )
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = described()
    arguments = parser.parse_args(argv)
    fewest, _, most = arguments.peers.partition(":")
    arguments.fewest, arguments.largest = int(fewest), int(most or fewest)
    arguments.seeds = arguments.seeds or (20 if arguments.count else 2000)
    chosen = () if arguments.faults == "none" else tuple(arguments.faults.split(","))
    kinds = tuple(kind for kind in chosen if kind != "all")
    arguments.kinds = (*(ALL_FAULTS if "all" in chosen else ()), *kinds)
    unknown = set(arguments.kinds) - {*ALL_FAULTS, *AIMED}
    if (
        unknown
        or not 1 <= arguments.fewest <= arguments.largest
        or min(arguments.seeds, arguments.most) < 1
        or not 0 <= arguments.grid <= 256
    ):
        parser.error(
            f"unknown fault {sorted(unknown)[0]!r}"
            if unknown
            else "senseless --peers, --seeds or --grid"
        )
    if arguments.lying:
        arguments.kinds = tuple(kind for kind in arguments.kinds if kind not in NOT_WITH_LIARS)
        if arguments.lying < 0 or arguments.fewest < 3 * arguments.lying + 1:
            parser.error("--lying F takes --peers of at least 3 F + 1")
    if arguments.arrivals and (arguments.lying or arguments.plant or arguments.grid):
        parser.error("--arrivals goes with none of --lying, --plant and --grid")
    if arguments.rounds < 1 or arguments.grid == 1 or not 0 <= arguments.churn < 1:
        parser.error("--rounds is at least 1, --grid at least 2, --churn from 0 to below 1")
    return arguments


Task = TypeVar("Task")
Played = TypeVar("Played")


def settle_down() -> None:
    """Before the first seed of a process: what is loaded stays, so that the collector need not look
    at it again; nor at each seed's few MB often.
    """
    import torch
    from kits.rounds import plants, swarm

    del plants, swarm
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def play_all(
    play: Callable[[Task], Played], tasks: Iterable[Task], jobs: int, at_once: int = 1
) -> Iterator[Played]:
    """What became of each task, in their order, in so many processes, each given ``at_once``."""
    if jobs <= 1:
        settle_down()
        yield from map(play, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, settle_down) as pool:
        yield from pool.imap(play, tasks, chunksize=at_once)


def options_of(arguments: argparse.Namespace, kinds: tuple[str, ...]) -> Options:
    """What a seed is run with, under faults of these kinds."""
    from kits.rounds.injection import FaultKind
    from kits.rounds.liars import LIES, Lie
    from kits.rounds.swarm import TIMING, Options

    lie, sparse_above = arguments.lie, arguments.sparse_above
    return Options(
        peers=(arguments.fewest, arguments.largest),
        rounds=arguments.rounds,
        faults=cast("tuple[FaultKind, ...]", kinds),
        lying=arguments.lying,
        lies=LIES if lie == "all" else cast("tuple[Lie, ...]", tuple(lie.split(","))),
        arrivals=arguments.arrivals,
        plan=arguments.tree,
        relayed_above=arguments.relayed_above,
        sparse_above=TIMING.sparse_above if sparse_above is None else sparse_above,
    )


def play(task: tuple[int, Options, str]) -> dict[str, Any]:
    """One seed, in a worker process: of it, with what options, with which planted bug."""
    from kits.rounds.plants import PLANTS
    from kits.rounds.swarm import run_seed

    seed, options, plant = task
    began = time.perf_counter()
    try:
        verdict = run_seed(seed, options, PLANTS[plant]() if plant else None)
    except Exception as error:  # a defect that is no violated predicate is one all the same
        return {
            "seed": seed,
            "problem": f"{type(error).__name__}: {error}",
            "unfinished": False,
            "virtual_s": 0.0,
            "rounds": 0,
            "trace": "",
            "struck": {},
            "stats": {},
            "wall_s": time.perf_counter() - began,
        }
    return {
        "seed": seed,
        "problem": verdict.problem,
        "unfinished": verdict.unfinished,
        "virtual_s": verdict.virtual_s,
        "rounds": verdict.rounds,
        "trace": verdict.trace,
        "struck": verdict.struck,
        "stats": verdict.stats,
        "wall_s": time.perf_counter() - began,
    }


def verdicts(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Verdicts in the order of the seeds, however many processes."""
    options = options_of(arguments, arguments.kinds)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    tasks = ((seed, options, arguments.plant) for seed in seeds)
    yield from play_all(play, tasks, arguments.jobs, at_once=4)


def report(arguments: argparse.Namespace, results: list[dict[str, Any]], wall_s: float) -> None:
    """The JSON object of a finished search."""
    failed = [result for result in results if result["problem"]]
    struck, stats = Counter[str](), Counter[str]()
    for result in results:
        struck.update(result["struck"])
        stats.update(result["stats"])
    settings = {
        "first": arguments.first,
        "peers": [arguments.fewest, arguments.largest],
        "rounds": arguments.rounds,
    }
    emit(
        "simulate_rounds",
        {
            **settings,
            "lying": arguments.lying,
            "lie": arguments.lie,
            "arrivals": arguments.arrivals,
            "tree": arguments.tree,
            "relayed_above": arguments.relayed_above,
            "sparse_above": arguments.sparse_above,
            "faults": list(arguments.kinds),
            "jobs": arguments.jobs,
        },
        [round(result["wall_s"], 3) for result in results] if arguments.runs else [],
        seeds=len(results),
        violations=sum(not result["unfinished"] for result in failed),
        unfinished=sum(result["unfinished"] for result in failed),
        first_failing_seed=failed[0]["seed"] if failed else None,
        problems=[
            {"seed": result["seed"], "problem": result["problem"], "trace": result["trace"]}
            for result in failed[:20]
        ],
        planted=arguments.plant or None,
        virtual_s=round(sum(result["virtual_s"] for result in results), 1),
        wall_s=round(wall_s, 1),
        rounds=sum(result["rounds"] for result in results),
        struck=dict(sorted(struck.items())),
        stats=dict(sorted(stats.items())),
    )


def play_grid(task: tuple[int, int, float, int]) -> dict[str, Any]:
    """One seed of averages on a grid, in a worker process."""
    import torch
    from kits.rounds.averages import simulate_grid

    torch.set_num_threads(1)
    seed, members, churn, rounds = task
    began = time.process_time()
    verdict = dataclasses.asdict(simulate_grid(members, churn=churn, rounds=rounds, seed=seed))
    return {"seed": seed, **verdict, "cpu_s": round(time.process_time() - began, 1)}


def grids(arguments: argparse.Namespace) -> int:
    """--grid: the exit code."""
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    tasks = [(seed, arguments.grid, arguments.churn, arguments.rounds) for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(max(1, arguments.jobs)) as pool:
        results = list(pool.imap(play_grid, tasks))
    seen = (sum(result["seen"] ** 2 for result in results) / len(results)) ** 0.5
    predicted, split = results[0]["predicted"], sum(result["split"] for result in results)
    good = not split and seen <= max(1.25 * predicted, 1e-6)
    settings = {
        "grid": arguments.grid,
        "churn": arguments.churn,
        "rounds": arguments.rounds,
        "first": arguments.first,
    }
    emit(
        "simulate_rounds",
        settings,
        [result["cpu_s"] for result in results],
        predicted=predicted,
        seen=seen,
        within=good,
        seeds=results,
    )
    return 0 if good else 1


def names(arguments: argparse.Namespace) -> int | None:
    """--lie list, --plant list, or a name that there is not: the exit code; else None."""
    if arguments.lie != "all":
        from kits.rounds.liars import LIES

        if arguments.lie == "list":
            print(json.dumps(list(LIES)))
            return 0
        if unknown := set(arguments.lie.split(",")) - set(LIES):
            print(f"unknown lie {min(unknown)!r}; there are: {', '.join(LIES)}", file=sys.stderr)
            return 64
    if arguments.plant:
        from kits.rounds.plants import PLANTS

        if arguments.plant == "list":
            print(
                json.dumps(
                    {
                        name: (plant.__doc__ or "").partition("\n")[0]
                        for name, plant in PLANTS.items()
                    }
                )
            )
            return 0
        chosen = list(PLANTS) if arguments.plant == "all" else arguments.plant.split(",")
        if unknown := set(chosen) - set(PLANTS):
            print(
                f"unknown plant {min(unknown)!r}; there are: {', '.join(PLANTS)}", file=sys.stderr
            )
            return 64
        if len(chosen) > 1 and not arguments.count:
            print("several plants are for --count", file=sys.stderr)
            return 64
        if arguments.count:
            return table(arguments, chosen)
    return None


# ---- how many seeds it takes to find a planted bug
ENOUGH = 3  # findings; with fewer, more seeds are played


def table(arguments: argparse.Namespace, chosen: list[str]) -> int:
    """--count: how many seeds found each plant, and what they saw."""
    settle_down()
    began, rows = time.perf_counter(), dict[str, dict[str, Any]]()
    for name in chosen:
        rows[name] = row = counted(arguments, name)
        print(f"{name}: {json.dumps(row)}", file=sys.stderr, flush=True)
    emit(
        "simulate_rounds",
        {
            "first": arguments.first,
            "peers": [arguments.fewest, arguments.largest],
            "rounds": arguments.rounds,
            "faults": list(arguments.kinds),
            "lying": arguments.lying,
            "lie": arguments.lie,
        },
        [row["wall_s"] for row in rows.values()],
        plants=rows,
        found=sum(row["mean_seeds"] is not None for row in rows.values()),
        not_found=[name for name, row in rows.items() if row["mean_seeds"] is None],
        also_without=[name for name, row in rows.items() if row["without"]],
        wall_s=round(time.perf_counter() - began, 1),
    )
    return 0


def counted(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """One plant. ``without``: the problem that the first seed which finds it has also where the bug
    is not planted; none, it is hoped.
    """
    from kits.rounds.plants import PLANTS

    suited = not PLANTS[name].lying  # to losing journals and to shattering
    kinds = tuple(kind for kind in arguments.kinds if suited or kind not in NOT_WITH_LIARS)
    options = options_of(arguments, kinds)
    began, found, played = time.perf_counter(), list[dict[str, Any]](), 0
    while played < arguments.seeds or (len(found) < ENOUGH and played < arguments.most):
        result = play((arguments.first + played, options, name))
        played += 1
        if result["problem"]:
            found.append(result)
    return {
        "seeds": played,
        "found": len(found),
        "mean_seeds": round(played / len(found), 1) if found else None,
        "first": found[0]["seed"] if found else None,
        "by": dict(Counter(result["problem"].partition(":")[0] for result in found)),
        "without": innocent(found[0]["seed"], options, PLANTS[name]) if found else "",
        "wall_s": round(time.perf_counter() - began, 1),
    }


def innocent(seed: int, options: Options, kind: type[Plant]) -> str:
    """What a seed shows that is played as with a plant, but for its bug."""
    from kits.rounds.plant import DIALS, Plant
    from kits.rounds.swarm import run_seed

    plant = Plant()
    for dial in DIALS:
        setattr(plant, dial, getattr(kind, dial))
    try:
        return run_seed(seed, options, plant).problem
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def again(arguments: argparse.Namespace, seed: int) -> str:
    """The command that plays a seed again: seed and options together make the run."""
    parts = [f"scripts/simulate_rounds.py --first {seed} --seeds 1 --jobs 1"]
    parts += [f"--peers {arguments.peers} --rounds {arguments.rounds}"]
    parts += [f"--faults {arguments.faults}"]
    parts += [f"--lying {arguments.lying} --lie {arguments.lie}"] if arguments.lying else []
    parts += [f"--plant {arguments.plant}"] if arguments.plant else []
    parts += [f"--tree {arguments.tree}"] if arguments.tree else []
    parts += ["--arrivals"] if arguments.arrivals else []
    for name in ("relayed", "sparse"):
        above = getattr(arguments, f"{name}_above")
        parts += [f"--{name}-above {above}"] if above is not None else []
    return " ".join(parts)


def main(argv: list[str]) -> int:
    """Exit code of the script."""
    arguments = parse(argv)
    if arguments.grid:
        return grids(arguments)
    if (code := names(arguments)) is not None:
        return code
    began, shown, results = time.perf_counter(), 0.0, list[dict[str, Any]]()
    for result in verdicts(arguments):
        results.append(result)
        if result["problem"]:
            print(
                f"seed {result['seed']}: {result['problem']}  [trace {result['trace']}]\n"
                f"    {again(arguments, result['seed'])}",
                file=sys.stderr,
                flush=True,
            )
            if arguments.plant:
                break
        if time.perf_counter() - shown > 10:
            shown = time.perf_counter()
            bad = sum(bool(r["problem"]) for r in results)
            print(
                f"{len(results)} of {arguments.seeds} seeds, {bad} failed, {shown - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    report(arguments, results, time.perf_counter() - began)
    return 0 if arguments.plant or not any(result["problem"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

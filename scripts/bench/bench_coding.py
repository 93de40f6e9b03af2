#!/usr/bin/env python3
"""Coding against stragglers, in virtual time: seconds a step of synchronous training in which every
part of the data must be in every step.

--workers machines compute the same data in steps. A machine straggles in bursts (a chain of two
states: it becomes slow with --start and stays so with --stay), and is then --slow times as slow; a
machine's own time varies by a tenth. A step's time grows with the load: a fixed part, and --compute
seconds for all data by one machine. Compared are

  uncoded      each machine its n-th of the data; a step waits for all
  plain        gradient coding by the cyclic code for s missing, the best s
  sequential   the same for bursts, by selective repetition; the best burst, window and number

A master waits (1 + mu) times the first machine's time, and on for who is needed where a pattern is
worse than the code tolerates. Medians over --seeds. The last line of stdout is one JSON object:
`seconds` by scheme, `ratio` of plain and of sequential to uncoded, and the best settings.

    scripts/bench/bench_coding.py --seeds 5
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from _bench import emit, progress
from numpy.typing import NDArray

from atoll.optim.lab.coding import SelectiveRepetition

Slowness = NDArray[np.float64]

MU = 0.3


def traces(args: argparse.Namespace, rng: np.random.Generator) -> NDArray[np.float64]:
    """How many times as slow each machine is in each step: [steps, workers]."""
    late = np.zeros((args.steps, args.workers), bool)
    state = np.zeros(args.workers, bool)
    for step in range(args.steps):
        chance = np.where(state, args.stay, args.start)
        state = rng.random(args.workers) < chance
        late[step] = state
    return np.where(late, args.slow, 1.0) * rng.uniform(0.95, 1.05, late.shape)


def task_seconds(args: argparse.Namespace, load: float, slowness: Slowness) -> Slowness:
    """Of one step of every machine."""
    return (args.fixed + args.compute * load) * slowness


def uncoded(args: argparse.Namespace, slowness: Slowness) -> float:
    """Seconds a step when all wait for all."""
    return float(task_seconds(args, 1 / args.workers, slowness).max(axis=1).mean())


def plain(args: argparse.Namespace, slowness: Slowness, missing: int) -> float:
    """Seconds a step of a code for ``missing``: each ends with the result that suffices."""
    times = np.sort(task_seconds(args, (missing + 1) / args.workers, slowness), axis=1)
    return float(times[:, args.workers - 1 - missing].mean())


def sequential(
    args: argparse.Namespace, slowness: Slowness, burst: int, window: int, distinct: int
) -> float:
    """Seconds a step under selective repetition."""
    plan = SelectiveRepetition(args.workers, burst, window, distinct)
    total = 0.0
    for step in range(args.steps):
        times = task_seconds(args, plan.load, slowness[step])
        tasks = plan.tasks()
        end = (1 + MU) * float(times.min())
        # Where this round is the last chance of a job, it is waited for.
        due = step - burst
        if due >= 0 and plan.missing(due):
            for_it = sorted(times[i] for i, job in tasks.items() if job == due)
            end = max(end, float(for_it[plan.missing(due) - 1]))
        end = min(end, float(times.max()))
        total += end
        plan.step([i for i in range(args.workers) if times[i] <= end])
        assert not plan.overdue()
        plan.forget(due)
    return total / args.steps


def best(schemes: dict[str, Any], slowness: list[Slowness]) -> tuple[str, float]:
    """The scheme of the least median over the seeds."""
    return min(
        ((name, median(play(s) for s in slowness)) for name, play in schemes.items()),
        key=lambda pair: pair[1],
    )


def main() -> None:
    """Play every scheme on the same traces and print the best settings of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slow", type=float, default=8.0)
    parser.add_argument("--start", type=float, default=0.03, help="a step, of each machine")
    parser.add_argument("--stay", type=float, default=0.25)
    parser.add_argument("--fixed", type=float, default=0.2, help="seconds a step of any load")
    parser.add_argument("--compute", type=float, default=24.0, help="seconds of all data alone")
    args = parser.parse_args()
    slowness = [traces(args, np.random.default_rng(seed)) for seed in range(args.seeds)]
    schemes: dict[str, dict[str, Any]] = {
        "uncoded": {"": partial(uncoded, args)},
        "plain": {f"s={s}": partial(plain, args, missing=s) for s in range(1, args.workers // 2)},
        "sequential": {
            f"B={b}, W={x * b + 1}, distinct={d}": partial(
                sequential, args, burst=b, window=x * b + 1, distinct=d
            )
            for b in (1, 2, 3)
            for x in (1, 2, 3)
            for d in range(1, args.workers // 2)
        },
    }
    found = {name: best(choices, slowness) for name, choices in schemes.items()}
    for name, (settings, seconds) in found.items():
        progress(f"{name:11} {settings:24} {seconds:.3f} s a step")
    emit(
        "coding",
        vars(args),
        [],
        seconds={name: round(seconds, 4) for name, (_, seconds) in found.items()},
        best={name: settings for name, (settings, _) in found.items() if settings},
        ratio={
            name: round(found[name][1] / found["uncoded"][1], 3) for name in ("plain", "sequential")
        },
    )


if __name__ == "__main__":
    main()

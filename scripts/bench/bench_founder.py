#!/usr/bin/env python3
"""Whether a run loses by it that its founder trains, and makes short rounds, while the second member
still fetches the state: in one process, with the arithmetic of rounds (fp32), a byte-level GPT of 42
thousand parameters, two members, H = 20, and what "auto" takes.

    scripts/bench/bench_founder.py --seeds 0 1

A row is held-out loss after so many steps of the founder's, when the other comes after --alone of
them, with an optimizer that knows nothing, and both make --both more:

waits   the founder waits as long as that takes, and all begin at once (`[train] start_with = 2`)
goes_on it trains alone; rounds are as long as the run's steps say. That is what atoll does
anew    it trains alone; rounds grow again, and momentum waits again, from the other's coming on
ratios  of the means over seeds, to goes_on, and how many rounds each had
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from _bench import emit, progress
from _methods import SIZES, Task
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from atoll.collectives.cold_start import GROWTH
from atoll.optim.outer.presets import preset_named
from atoll.optim.outer.step import warmed

WAITS, GOES_ON, ANEW = ARMS = ("waits", "goes_on", "anew")


def played(alone: int, both: int, every: int, seed: int, *, anew: bool) -> tuple[float, int]:
    """Held-out loss of the last anchor, and how many rounds there were."""
    steps = alone + both
    task = Task(replace(SIZES["42k"], synchronous=0, steps=steps), seed, 2)
    members = [task.worker(index) for index in range(2)]
    anchor = parameters_to_vector(members[0][0].parameters()).detach().clone()
    momentum, outer = torch.zeros_like(anchor), preset_named("cold").growing
    assert outer is not None
    now = rounds = begun = 0
    while now < steps:
        there = members if now >= alone else members[:1]
        if anew:
            length = min(every, max(1, (now - alone) // GROWTH))
        else:
            length = min(every - now % every, max(1, now // GROWTH))
        length = min(length, (steps if now >= alone else alone) - now)
        if anew and now < alone:
            begun = rounds + 1
        moved = list[torch.Tensor]()
        for model, optimizer, stream in there:
            vector_to_parameters(anchor.clone(), model.parameters())
            for step in range(now, now + length):
                task.step(model, optimizer, [stream], step)
            moved.append(anchor - parameters_to_vector(model.parameters()).detach())
        mean = torch.stack(moved).mean(0)
        lr, beta = warmed(outer, rounds - begun)
        momentum = beta * momentum + mean
        anchor = anchor - lr * (mean + beta * momentum)
        now, rounds = now + length, rounds + 1
    vector_to_parameters(anchor, members[0][0].parameters())
    return task.evaluate(members[0][0]), rounds


def main() -> None:
    """Play all, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--every", type=int, default=20, help="inner steps a round")
    add("--alone", type=int, nargs="+", default=[100, 400], help="steps until the other comes")
    add("--both", type=int, nargs="+", default=[400, 600], help="steps after that, for each")
    given = parser.parse_args()
    if len(given.alone) != len(given.both):
        parser.error("--alone and --both have as many values")
    torch.set_num_threads(1)
    rows, ratios = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for alone, both in zip(given.alone, given.both, strict=True):
        found = dict[str, list[tuple[float, int]]]()
        for arm in ARMS:
            before = 0 if arm == WAITS else alone
            found[arm] = [
                played(before, both, given.every, seed, anew=arm == ANEW) for seed in given.seeds
            ]
            progress(f"{alone} alone, {both} both, {arm}: {found[arm]}")
        rows += [
            {"alone": alone, "both": both, "seed": seed, **{arm: found[arm][n] for arm in ARMS}}
            for n, seed in enumerate(given.seeds)
        ]
        losses = {arm: statistics.fmean(loss for loss, _ in found[arm]) for arm in ARMS}
        ratios[f"{alone} alone, {both} both"] = {
            arm: [round(losses[arm] / losses[GOES_ON], 4), found[arm][0][1]] for arm in ARMS
        }
    emit("bench_founder", vars(given), rows, ratios=ratios)


if __name__ == "__main__":
    main()

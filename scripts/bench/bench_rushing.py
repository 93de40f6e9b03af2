#!/usr/bin/env python3
"""What members that rush cost the training of the others, with real nodes on loopback.

Honest members sleep for a step, so many steps a turn (--steps, --step), and end their turn after
the step in which the round closes, as scripts of atoll do. A rusher contributes zeros as soon as
each round opens, which any script can. --late: the last members are slow in place of it: their
steps last --late times as long.

worked     the least share of the seconds that an honest member trained, steps x --step
turns      the median steps of an honest turn
rounds     how many were decided
share      what of the work of the same run without rushers is left: 0.9 is wanted

    scripts/bench/bench_rushing.py --members 4 --rushers 1 --seconds 60 --repeat 3

What a step takes is slept and not computed, so a busy machine stretches rounds and steps of both
runs alike; of one at rest is the figure all the same. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from _bench import emit, progress
from _kits import TESTS  # first: it makes the kits of tests/ importable
from bad_input_kit import PATIENCE_S, Member, ended, new_run, one_round
from torch import Tensor

from atoll.collectives.errors import AtollError

__all__ = ["TESTS"]

WANTED = 0.9
MANIFEST = """
schema = 1
name = "rushing"
[model]
entry = "local:test"
[train]
sync_every = {steps}
method = "local_sgd"
[exchange]
codec = "fp32"
"""


@dataclass
class Played:
    """One run."""

    rushers: int
    worked: float
    turns: float
    rounds: int


class Turns(threading.Thread):
    """A script that trains, or only rushes, until a time of the monotonic clock."""

    def __init__(self, member: Member, until: float, steps: int, step_s: float) -> None:
        """``steps``: of a turn; 0 rushes."""
        super().__init__(daemon=True)
        self.member, self.until, self.most, self.step_s = member, until, steps, step_s
        self.steps = list[int]()
        self.rounds = set[int]()
        self.failed: AtollError | None = None
        self.start()

    def run(self) -> None:
        try:
            while time.monotonic() < self.until:
                self._turn()
        except AtollError as error:
            self.failed = error

    def _turn(self) -> None:
        swarm, steps = self.member.swarm, 0
        view = swarm.anchor()
        base = view.round
        view.release()
        while steps < self.most and not (steps and swarm.closing > base):
            time.sleep(self.step_s)
            steps += 1
        ticket = swarm.contribute(samples=max(1, steps), write=_write_zeros)
        outcome = ticket.wait(PATIENCE_S)
        if outcome.counted:
            self.rounds.add(outcome.round)
        self.steps.append(steps)


def _write_zeros(out: Tensor) -> None:
    out.zero_()


def play(options: argparse.Namespace, odd: int) -> Played:
    """One run, whose last members are as ``odd`` many as rush, or are slow."""
    with tempfile.TemporaryDirectory(prefix="atoll-rushing-") as name:
        run = new_run(Path(name), manifest=MANIFEST.replace("{steps}", str(options.steps)))
        members = [run.organiser()]
        members += [run.member(f"m{number}") for number in range(1, options.members)]
        with ended(*members):
            one_round(*members)
            began = time.monotonic()
            until, honest = began + options.seconds, options.members - odd
            steps = [options.steps] * honest + [options.steps if options.late else 0] * odd
            takes_s = [options.step] * honest + [options.step * (options.late or 1.0)] * odd
            scripts = [
                Turns(member, until, most, step_s)
                for member, most, step_s in zip(members, steps, takes_s, strict=True)
            ]
            for script in scripts[:honest]:
                script.join()
            took_s = time.monotonic() - began
            if failed := next((each.failed for each in scripts if each.failed), None):
                raise failed
            turns = [script.steps for script in scripts[:honest]]
        return Played(
            odd,
            round(min(map(sum, turns)) * options.step / took_s, 4),
            median([steps for each in turns for steps in each]),
            len(set().union(*(script.rounds for script in scripts))),
        )


def main() -> int:
    """Exit code: 1 where less than a share of 0.9 is left in the median."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--rushers", type=int, default=1, help="among them, or slow ones")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--steps", type=int, default=100, help="of a turn")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of one")
    parser.add_argument("--late", type=float, help="slow ones: times the seconds of a step")
    parser.add_argument("--repeat", type=int, default=1, help="pairs of runs")
    options = parser.parse_args()
    rows, shares = list[Played](), list[float]()
    for _ in range(options.repeat):
        pair = [play(options, 0), play(options, options.rushers)]
        for each in pair:
            progress(f"{each}")
        rows += pair
        shares.append(round(pair[1].worked / pair[0].worked, 4))
    share = median(shares)
    emit("bench_rushing", vars(options), [asdict(row) for row in rows], share=share, shares=shares)
    return int(share < WANTED)


if __name__ == "__main__":
    sys.exit(main())

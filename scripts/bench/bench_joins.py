"""How long a join with a valid invite takes while strangers announce peers that do not exist, and
without that.

    python scripts/bench/bench_joins.py --joins 10

Two runs of two real nodes on loopback each. One of them is told of FLOOD_A_MINUTE fake peers a
minute by a stranger, and by another stranger of as many that claim to be certified. Newcomers
join the two runs in turn: from the start of the newcomer's node until it has the model. One JSON
object as the last line. Exit code: 0 where the median join under fakes takes at most 1.5 times as
long as without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from _bench import emit, progress
from _kits import TESTS  # first: it makes the kits of tests/ importable
from bad_input_kit import Run, ended, new_run, one_round
from strangers_kit import FLOOD_A_MINUTE, Crowd

__all__ = ["TESTS"]

BOUND = 1.5
FIRST_S = 60.0


def standing(folder: Path, stack: ExitStack) -> Run:
    """A run with two members."""
    folder.mkdir()
    run = new_run(folder)
    organiser = run.organiser()
    stack.enter_context(ended(organiser))
    other = run.member("b")
    stack.enter_context(ended(other))
    one_round(organiser, other)
    return run


def join_s(run: Run, name: str) -> float:
    """Seconds until a newcomer has the model."""
    began = time.monotonic()
    member = run.member(name)
    took = time.monotonic() - began
    member.end()
    return took


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--joins", type=int, default=10, help="of each of the two runs")
    options = parser.parse_args()
    quiet_s, fakes_s = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="atoll-joins-") as folder, ExitStack() as stack:
        quiet = standing(Path(folder) / "quiet", stack)
        flooded = standing(Path(folder) / "flooded", stack)
        crowds = [Crowd(flooded), Crowd(flooded, certified=True)]
        for crowd in crowds:
            crowd.start()
            stack.callback(crowd.stop)
        assert crowds[0].there.wait(FIRST_S)
        began, said = time.monotonic(), crowds[0].said
        for number in range(options.joins):
            pair = [(quiet, quiet_s), (flooded, fakes_s)]
            for run, found in pair if number % 2 else reversed(pair):
                found.append(join_s(run, f"newcomer{number}"))
            row = {"number": number, "quiet_s": quiet_s[-1], "fakes_s": fakes_s[-1]}
            progress(json.dumps({**row, "said": [crowd.said for crowd in crowds]}))
        a_minute = 60 * (crowds[0].said - said) / (time.monotonic() - began)
        told = [crowd.said for crowd in crowds]
    slower = median(fakes_s) / median(quiet_s)
    emit(
        "bench_joins",
        {**vars(options), "fakes_a_minute": FLOOD_A_MINUTE},
        [
            {"under": "nothing", "join_s": [round(each, 3) for each in quiet_s]},
            {"under": "fakes", "join_s": [round(each, 3) for each in fakes_s]},
        ],
        held=slower <= BOUND,
        median_quiet_s=round(median(quiet_s), 3),
        median_fakes_s=round(median(fakes_s), 3),
        slower=round(slower, 3),
        fakes=told[0],
        fakes_claimed_certified=told[1],
        arrived_a_minute=round(a_minute),
        load=round(os.getloadavg()[0], 1),
    )
    return 0 if slower <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Play programs of collective calls that nobody thought of, and hold each result against numpy.

Two to five members; operations of all kinds, types, shapes and weights; callers that come late,
cancel, call something else, give NaN, or die. A program follows from its number. In a `LocalSwarm`
by default; with --real N among nodes of their own, whose scripts are threads of this process. The
last line of stdout is one JSON object; exit status 1 where a result was wrong.

    scripts/fuzz_calls.py --programs 10000 --processes 2
    scripts/fuzz_calls.py --first 4711 --programs 1         # one again
    scripts/fuzz_calls.py --real --programs 300
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

import torch  # noqa: E402
from _bench import emit, progress  # noqa: E402
from bad_input_kit import Member, new_run  # noqa: E402
from calls_kit import Player, Program, Seen, draw, judge, simulated  # noqa: E402

REAL_SLOW = 0.15
REAL_DEATHS = 0.08  # it takes some 15 s until all are there again
PATIENCE_S = 200.0


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--processes", type=int, default=1, help="of simulated ones")
    parser.add_argument("--real", action="store_true", help="among real nodes")
    return parser.parse_args()


def quiet() -> None:
    """Handles that a killed member held are nobody's to wait for; codecs may lose much."""
    warnings.simplefilter("ignore", RuntimeWarning)
    logging.getLogger("atoll").setLevel(logging.ERROR)


def several(seeds: range) -> list[tuple[list[str], Counter[str]]]:
    """Those of some programs."""
    torch.set_num_threads(1)
    quiet()
    return [simulated(seed) for seed in seeds]


class Nodes:
    """Members with nodes of their own."""

    def __init__(self, folder: Path, count: int) -> None:
        run = new_run(folder)
        self.members = [run.organiser()]
        self.members += [run.member(f"p{index}") for index in range(1, count)]
        self.names = [str(member.swarm.peer) for member in self.members]

    def play(self, program: Program, tag: str) -> list[Seen]:
        """Everybody plays its part at once."""
        seen, began = list[Seen](), time.monotonic()

        def part(index: int) -> None:
            member = self.members[index]
            player = Player(
                program,
                member.swarm,
                index,
                self.names.index,
                clock=lambda: time.monotonic() - began,
                sleep=time.sleep,
                threads=True,
                seen=seen,
                prefix=f"{tag}/",
            )
            player.play()

        threads = [
            threading.Thread(target=part, args=(index,), daemon=True)
            for index in range(program.members)
        ]
        for thread in threads:
            thread.start()
        for index, when, _ in program.crashes:
            time.sleep(max(0.0, began + when - time.monotonic()))
            self.kill(self.members[index])
        for thread in threads:
            thread.join(PATIENCE_S)
        if any(thread.is_alive() for thread in threads):
            raise RuntimeError(f"seed {program.seed}: a call has not ended in {PATIENCE_S:g} s")
        return seen

    @staticmethod
    def kill(member: Member) -> None:
        """Its node; the script finds the next one by itself."""
        with contextlib.suppress(ProcessLookupError, AssertionError):
            os.kill(member.pid, signal.SIGKILL)

    def settle(self) -> None:
        """Until all see all again. Each is asked: who asks nothing does not notice that its node is
        gone.
        """
        until = time.monotonic() + PATIENCE_S
        while True:
            views = [member.swarm.members() for member in self.members]
            if all(member.swarm.connected for member in self.members) and all(
                view.live for view in itertools.chain(*views)
            ):
                return
            if time.monotonic() > until:
                raise RuntimeError(f"the members do not find each other again: {views}")
            time.sleep(0.1)

    def end(self) -> None:
        for member in self.members:
            member.swarm.close()


def real(seeds: range) -> list[tuple[list[str], Counter[str]]]:
    """Programs among real nodes."""
    results = list[tuple[list[str], Counter[str]]]()
    for count in range(2, 6):
        results += among(count, seeds[count - 2 :: 4])
    return results


def among(count: int, seeds: range) -> list[tuple[list[str], Counter[str]]]:
    """Programs among so many."""
    results = list[tuple[list[str], Counter[str]]]()
    with tempfile.TemporaryDirectory(prefix="atoll-calls-") as folder:
        nodes = Nodes(Path(folder), count)
        try:
            for seed in seeds:
                progress(f"seed {seed} among {count}")
                program = draw(seed, slow=REAL_SLOW, members=count, deaths=REAL_DEATHS)
                nodes.settle()
                seen = nodes.play(program, f"real {seed}")
                faults = judge(program, seen)
                for fault in faults:
                    progress(fault)
                results.append(
                    (faults, Counter(f"{each.step.kind} {each.status}" for each in seen))
                )
                if len(results) % 20 == 0:
                    progress(f"{len(results)} programs among {count}")
        finally:
            nodes.end()
    return results


def main() -> int:
    """Exit status."""
    asked, began = options(), time.monotonic()
    seeds = range(asked.first, asked.first + asked.programs)
    quiet()
    if asked.real:
        played = real(seeds)
    else:
        step = 20
        batches = [
            range(first, min(first + step, seeds.stop))
            for first in range(seeds.start, seeds.stop, step)
        ]
        played = list[tuple[list[str], Counter[str]]]()
        with ProcessPoolExecutor(asked.processes) as pool:
            for found in pool.map(several, batches):
                played += found
                for faults, _ in found:
                    for fault in faults:
                        progress(fault)
                if len(played) % 1000 < step:
                    progress(f"{len(played)} programs, {time.monotonic() - began:.0f} s")
    faults = [fault for found, _ in played for fault in found]
    calls = sum((count for _, count in played), Counter[str]())
    emit(
        "fuzz_calls",
        {"first": asked.first, "where": "real nodes" if asked.real else "LocalSwarm"},
        faults[:20],
        programs=len(played),
        calls=dict(sorted(calls.items())),
        wrong=len(faults),
        wall_s=round(time.monotonic() - began, 1),
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What each lie costs the honest: virtual seconds an entry and honest contributions left out, beside
the same seeds in which the same members lie in nothing.

A seed is one run without faults in the simulator: real sessions and data planes, in virtual time, so
that the load of the machine changes nothing. It is played once without a lie and then with each lie
alone, told by --lying members. Time counts from the first entry after the run was founded, and an
entry is one with contributors, since only those are work. The log is empty of others in most seeds.

The aim: at most twice the time, and one honest contribution left out a liar and entry, in the mean.
The exit code is 1 where a lie costs more. Where members lie in all, each tells about half of them.

Members train for 0.1 to 0.6 s a round, by the seed. What a liar costs is seconds, whatever a round
takes: with --train-s it is put beside rounds as long as those of a run.

    scripts/bench/bench_lies.py --seeds 24
    scripts/bench/bench_lies.py --seeds 24 --lie starve,hoard --lying 2 --peers 7:9
    scripts/bench/bench_lies.py --seeds 24 --lie drip,mute --train-s 5
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import Any, cast

from _bench import ROOT, emit, progress

sys.path.append(str(ROOT / "scripts"))
sys.path.append(str(ROOT / "tests"))

from simulate_rounds import play_all

DEAREST_TIME, DEAREST_WORK = 2.0, 1.0  # the aim: times the time, contributions a liar and entry
EACH, NONE = "each", "none"
TOPOLOGIES = ("butterfly", "ring", "two-level", "checked")
Task = tuple[int, tuple[int, int], int, int, str, str, float]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=24, help="how many (default 24)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--peers", default="4:6", help="members a seed (default 4:6)")
    parser.add_argument("--rounds", type=int, default=12, help="entries a seed (default 12)")
    parser.add_argument("--lying", type=int, default=1, help="members that lie (default 1)")
    parser.add_argument(
        "--lie",
        default=EACH,
        metavar="NAME,...|each",
        help="which lies, one after another; a + joins some to one, all+ is all (default each)",
    )
    parser.add_argument(
        "--plan", choices=TOPOLOGIES, help="the topology of all plans (default: by the seed)"
    )
    parser.add_argument(
        "--train-s", type=float, default=0.0, help="training a round (default: by the seed)"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default 2)"
    )
    arguments = parser.parse_args(argv)
    fewest, _, most = arguments.peers.partition(":")
    arguments.fewest, arguments.largest = int(fewest), int(most or fewest)
    if arguments.lying < 1 or arguments.fewest < 3 * arguments.lying + 1:
        parser.error("--lying F takes --peers of at least 3 F + 1")
    if min(arguments.seeds, arguments.rounds) < 1 or arguments.fewest > arguments.largest:
        parser.error("senseless --seeds, --rounds or --peers")
    return arguments


def play(task: Task) -> dict[str, Any]:
    """One seed with one lie, in a worker process."""
    from kits.rounds.liars import LIES, Lie
    from kits.rounds.member import Disk
    from kits.rounds.swarm import Options, SimSwarm

    from atoll.collectives.group import TopologyKind, least_members
    from atoll.node.session.events import RoundCommitted

    seed, peers, rounds, lying, lie, plan, train_s = task
    at_s, left_out = dict[int, float](), Counter[int]()

    class Timed(SimSwarm):
        """Notes when each entry was first known to an honest member, and whose work it left."""

        def heard(self, disk: Disk, event: object) -> None:
            """An event of a session."""
            super().heard(disk, event)
            if isinstance(event, RoundCommitted) and disk.peer not in self.liars:
                at_s.setdefault(event.entry, self.world.now)
                left_out[event.entry] += event.cid is not None and not event.counted

    told: dict[str, tuple[str, ...]] = {NONE: (), "all+": LIES}
    swarm = Timed(
        seed,
        Options(
            peers=peers,
            rounds=rounds,
            faults=(),
            plan=cast("TopologyKind | None", plan or None),
            patience_s=90.0 + 4 * rounds * train_s,
            lying=lying,
            lies=cast("tuple[Lie, ...]", told.get(lie, tuple(lie.split("+")))),
        ),
    )
    for watch in swarm.watches:
        watch.train_s = train_s or watch.train_s
    problem = swarm.run().problem
    entries = [certified.entry for certified in swarm.checker.entries]
    founded = next(
        (e.round for e in entries if len(e.next_config) >= least_members(lying)), len(entries)
    )
    counted = [e.round for e in entries[founded + 1 :] if e.contributors and e.round in at_s]
    begun_s = at_s.get(founded, 0.0)
    return {
        "seed": seed,
        "lie": lie,
        "problem": problem,
        "entries": len(counted),
        "virtual_s": round(max((at_s[r] for r in counted), default=begun_s) - begun_s, 4),
        "left_out": sum(left_out[r] for r in counted),
        "told": sum(n for what, n in swarm.stats.items() if what.startswith("lie: ")),
    }


def cost(plays: list[dict[str, Any]], usual: list[dict[str, Any]], liars: int) -> dict[str, Any]:
    """One row of the table: of one lie beside the same seeds without it."""

    def mean(of: list[dict[str, Any]], what: str) -> float:
        return sum(each[what] for each in of) / max(1, sum(each["entries"] for each in of))

    entry_s, usual_s = mean(plays, "virtual_s"), mean(usual, "virtual_s")
    work = (mean(plays, "left_out") - mean(usual, "left_out")) / liars
    times = entry_s / usual_s
    return {
        "entries": sum(each["entries"] for each in plays),
        "entry_s": round(entry_s, 3),
        "usual_s": round(usual_s, 3),
        "times": round(times, 2),
        "left_out": round(mean(plays, "left_out"), 2),
        "left_out_usual": round(mean(usual, "left_out"), 2),
        "work_a_liar": round(work, 2),
        "told": sum(each["told"] for each in plays),
        "within": times <= DEAREST_TIME and work <= DEAREST_WORK,
    }


def main(argv: list[str]) -> int:
    """Exit code of the script."""
    from kits.rounds.liars import LIES

    arguments = parse(argv)
    lies = [lie for name in arguments.lie.split(",") for lie in (LIES if name == EACH else (name,))]
    if unknown := {part for lie in lies if lie != "all+" for part in lie.split("+")} - {*LIES}:
        print(f"unknown lie {min(unknown)!r}; there are: {', '.join(LIES)}", file=sys.stderr)
        return 64
    peers = (arguments.fewest, arguments.largest)
    tasks: list[Task] = [
        (
            seed,
            peers,
            arguments.rounds,
            arguments.lying,
            lie,
            arguments.plan or "",
            arguments.train_s,
        )
        for seed in range(arguments.first, arguments.first + arguments.seeds)
        for lie in (NONE, *lies)
    ]
    plays: dict[str, list[dict[str, Any]]] = {lie: [] for lie in (NONE, *lies)}
    for result in play_all(play, tasks, arguments.jobs):
        plays[result["lie"]].append(result)
        if result["problem"]:
            progress(f"seed {result['seed']}, {result['lie']}: {result['problem']}")
    rows = {lie: cost(plays[lie], plays[NONE], arguments.lying) for lie in lies}
    for lie, row in rows.items():
        progress(
            f"{lie:<12} {row['times']:5.2f} x the time   {row['work_a_liar']:5.2f} contributions a "
            f"liar and entry   {row['entry_s']:.3f} s, usually {row['usual_s']:.3f} s   "
            f"told {row['told']}{'' if row['within'] else '   TOO DEAR'}"
        )
    problems = [each for of in plays.values() for each in of if each["problem"]]
    emit(
        "bench_lies",
        {
            "first": arguments.first,
            "seeds": arguments.seeds,
            "peers": list(peers),
            "rounds": arguments.rounds,
            "lying": arguments.lying,
            "plan": arguments.plan,
            "train_s": arguments.train_s or None,
        },
        [],
        lies=rows,
        too_dear=[lie for lie, row in rows.items() if not row["within"]],
        problems=problems,
    )
    return 0 if not problems and all(row["within"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

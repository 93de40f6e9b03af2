#!/usr/bin/env python3
"""What a peer that floods a node with well-formed messages costs it and the rounds of its run, by
type of message.

Two honest members commit rounds, each after a second of training; a third node, which was admitted
as an observer or is a member, does one thing for ``--seconds``. What breaks a rule has a swarm of
its own each: who did that 16 times is shut out for a minute, whatever it says. Before each kind
there are rounds without misbehaviour, for a quarter of the time. What a member offers and withholds
(hold, trickle; _parts, _results of either) only by --kinds. By who it is and what it does:

sent             messages, or deeds, that it got rid of; what the victim does not read stays with it
refused          how many messages the victim refused meanwhile
round_s, slower  the median round, training included, and how many times that without misbehaviour
slowest_s        the longest round
lost             rounds that did not count all honest members
control          the median round while the liar's node burns the same processor time and sends
                 nothing (--control), and how many of these rounds were lost (control_lost);
                 times_control is what a round took beside it
status_s         the longest that the victim took to say its status, asked each second
grew             bytes that the most memory was more than that of the first 30 s
rss, disk        the most bytes that the victim took beyond what it had before
cpu              of a core that the victim took
quiet            how many rounds there were without misbehaviour just before, how many of them did
                 not count all, and the median of them in seconds
load             of the machine over the last minute, at the end
Kinds distinct_TYPE are messages of each type that there is, no two alike; each has a swarm of its
own, and lasts 120 s for a growth that is worth the name. With --out it goes on where it stopped:

    scripts/bench/bench_hostile.py --seconds 15 --control --out hostile.jsonl
    scripts/bench/bench_hostile.py --seconds 120 --kinds distinct --out distinct.jsonl

back_s           seconds after the end until memory and disk were within 32 MiB of what they had
                 been before anything; null: not within 30 s
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _bench import emit, progress
from _kits import TESTS  # first: it makes the kits of tests/ importable
from hostile.hostile_node import BREACHES, BURN, DISTINCT, KINDS, OF_MEMBERS, WITHHELD
from hostile.kit import hostile_swarm

from atoll.collectives.layout import make_layout
from atoll.node.manifest.limits import LimitsTable

__all__ = ["TESTS"]

SPARE = 32 << 20
DISK = LimitsTable().member_bytes


def play(
    member: bool, kinds: list[str], seconds: float, elements: int, control: bool
) -> list[dict[str, Any]]:
    """One liar, all that it does, one after the other."""
    rows = list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory(prefix="atoll-hostile-") as folder,
        hostile_swarm(
            Path(folder), member=member, layout=make_layout([("w", (elements,))])
        ) as swarm,
    ):
        memory, room = swarm.took()
        for kind in kinds:
            quiet = swarm.quiet(max(5.0, seconds / 4))
            cost = swarm.suffer(kind, seconds)
            back = swarm.back(memory + SPARE, room + SPARE)
            burnt = swarm.suffer(f"{BURN}{cost.liar_cpu:.3f}", seconds) if control else None
            beside = burnt.round_s if burnt is not None and burnt.rounds else None
            rows.append(
                {
                    "who": _who(member),
                    "kind": kind,
                    "sent": cost.sent,
                    "refused": cost.refused,
                    "rounds": len(cost.rounds),
                    "round_s": round(cost.round_s, 3) if cost.rounds else None,
                    "slower": round(cost.round_s / quiet.round_s, 3) if cost.rounds else None,
                    "slowest_s": round(max(cost.rounds), 3) if cost.rounds else None,
                    "control": None if beside is None else round(beside, 3),
                    "control_lost": None if burnt is None else burnt.lost,
                    "times_control": round(cost.round_s / beside, 3)
                    if beside is not None and cost.rounds
                    else None,
                    "status_s": round(cost.status_s, 3),
                    "grew": cost.rss - cost.rss_early,
                    "lost": cost.lost,
                    "rss": cost.rss,
                    "disk": cost.disk,
                    "cpu": round(cost.cpu, 3),
                    "back_s": None if math.isinf(back) else round(back, 1),
                    "quiet": [len(quiet.rounds), quiet.lost, round(quiet.round_s, 3)],
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            progress(json.dumps(rows[-1]))
    return rows


def _who(member: bool) -> str:
    return "member" if member else "observer"


def keep(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Add rows to the file."""
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> int:
    """Exit code: 0 where every bound held (1.25 times the rounds' time, none lost but what the
    control lost, too, 64 MiB, the disk that the manifest allows operations of one member, back in
    30 s), else 1.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind")
    parser.add_argument("--who", choices=["observer", "member", "both"], default="both")
    parser.add_argument("--kinds", default="", help="separated by commas; all that the liar can")
    parser.add_argument("--elements", type=int, default=1000, help="of the model")
    parser.add_argument("--control", action="store_true", help="a control after each kind")
    parser.add_argument("--out", type=Path, help="a line a row; what stands in it is not repeated")
    options = parser.parse_args()
    wanted, rows = [kind for kind in options.kinds.split(",") if kind], list[dict[str, Any]]()
    alone = {*BREACHES, *DISTINCT}
    if options.out is not None and options.out.exists():
        rows += [json.loads(line) for line in options.out.read_text().splitlines()]
    known = {(row["who"], row["kind"]) for row in rows}
    for member in (False, True):
        if options.who not in ("both", _who(member)):
            continue
        able = [*KINDS, *(OF_MEMBERS if member else ()), *BREACHES]
        able = [kind for kind in able if not wanted or kind in wanted]
        able += [kind for kind in WITHHELD if member and kind in wanted]
        able += [kind for kind in DISTINCT if kind in wanted or "distinct" in wanted]
        able = [kind for kind in able if (_who(member), kind) not in known]
        for together in (
            [kind for kind in able if kind not in alone],
            *([kind] for kind in able if kind in alone),
        ):
            if together:
                found = play(member, together, options.seconds, options.elements, options.control)
                keep(found, options.out)
                rows += found
    held = all(
        row["lost"] <= (row.get("control_lost") or 0)
        and ((row["times_control"] or row["slower"]) or math.inf) <= 1.25
        and row["rss"] <= 64 << 20
        and row["disk"] <= DISK
        and row["back_s"] is not None
        for row in rows
    )
    emit(
        "bench_hostile",
        {**vars(options), "out": None},
        rows,
        held=held,
        slower_max=max((row["slower"] or math.inf for row in rows), default=None),
        rss_max=max((row["rss"] for row in rows), default=None),
        disk_max=max((row["disk"] for row in rows), default=None),
        lost=sum(row["lost"] for row in rows),
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

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
rss, disk        the most bytes that the victim took beyond what it had before
cpu              of a core that the victim took
quiet            how many rounds there were without misbehaviour just before, how many of them did
                 not count all, and the median of them in seconds
load             of the machine over the last minute, at the end
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
from hostile.hostile_node import BREACHES, KINDS, OF_MEMBERS, WITHHELD
from hostile.kit import hostile_swarm

from atoll.collectives.layout import make_layout
from atoll.node.manifest.limits import LimitsTable

__all__ = ["TESTS"]

SPARE = 32 << 20
DISK = LimitsTable().member_bytes


def play(member: bool, kinds: list[str], seconds: float, elements: int) -> list[dict[str, Any]]:
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
            rows.append(
                {
                    "who": "member" if member else "observer",
                    "kind": kind,
                    "sent": cost.sent,
                    "refused": cost.refused,
                    "rounds": len(cost.rounds),
                    "round_s": round(cost.round_s, 3) if cost.rounds else None,
                    "slower": round(cost.round_s / quiet.round_s, 3) if cost.rounds else None,
                    "slowest_s": round(max(cost.rounds), 3) if cost.rounds else None,
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


def main() -> int:
    """Exit code: 0 where every bound held (1.25 times the rounds' time, none lost, 64 MiB, the
    disk that the manifest allows operations of one member, back in 30 s), else 1.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind")
    parser.add_argument("--who", choices=["observer", "member", "both"], default="both")
    parser.add_argument("--kinds", default="", help="separated by commas; all that the liar can")
    parser.add_argument("--elements", type=int, default=1000, help="of the model")
    options = parser.parse_args()
    wanted, rows = [kind for kind in options.kinds.split(",") if kind], list[dict[str, Any]]()
    for member in (False, True):
        if options.who not in ("both", "member" if member else "observer"):
            continue
        able = [*KINDS, *(OF_MEMBERS if member else ()), *BREACHES]
        able = [kind for kind in able if not wanted or kind in wanted]
        able += [kind for kind in WITHHELD if member and kind in wanted]
        for together in (
            [kind for kind in able if kind not in BREACHES],
            *([kind] for kind in able if kind in BREACHES),
        ):
            if together:
                rows += play(member, together, options.seconds, options.elements)
    held = all(
        row["lost"] == 0
        and (row["slower"] or math.inf) <= 1.25
        and row["rss"] <= 64 << 20
        and row["disk"] <= DISK
        and row["back_s"] is not None
        for row in rows
    )
    emit(
        "bench_hostile",
        vars(options),
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

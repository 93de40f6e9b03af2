#!/usr/bin/env python3
"""Two peers behind routers: how often their lanes, or their connections, come up, by which way, and
after how long. In a network laboratory.

Each try makes ``--lanes`` lanes at once and drops them. The two agree over a line through a public
host (two ``--rtt-ms``), which stands in for a libp2p circuit; two public hosts observe ports and
relay. With ``--connections`` each try is a pair of peers that never met: they talk through a
circuit, and then without.

lanes_direct  tries in which every lane is direct, of ``tries``
direct        with ``--connections``: pairs that came to a direct libp2p connection within
              ``PATIENCE_S``, of ``tries``; else null
median_s      from the wish to a lane that has authenticated, at the peer that drives: median over
              all lanes; with ``--connections`` from the relayed connection to the direct one
sync_s        the same from the driver's Sync, after which both dial (half a round trip of it is its
              wait); null without a punched lane
path          which way lanes or connections took: the commonest; ``paths``: all of them
valid         pings before and after were on target; times of a run that was not are void, counts
              are not
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from _bench import emit, progress
from _kits import in_laboratory
from netns.lane_kit import Pair
from netns.meet_kit import Meetings
from netns.nat import KINDS

PATIENCE_S = 20.0


def run_connections(options: argparse.Namespace) -> int:
    """Measure connections and print."""
    with Meetings(options.a, options.b, options.tries, rtt_ms=options.rtt_ms) as meetings:
        before = meetings.lab.ping_ms()
        found = meetings.meet(PATIENCE_S)
        after = meetings.lab.ping_ms()
        valid = meetings.lab.on_target(before) and meetings.lab.on_target(after)
    seconds = [meeting.seconds for meeting in found if meeting.seconds is not None]
    paths = Counter(meeting.path for meeting in found)
    emit(
        "bench_nat",
        vars(options),
        [meeting._asdict() for meeting in found],
        direct=sum(meeting.path != "relay" for meeting in found),
        lanes_direct=None,
        tries=len(found),
        median_s=round(statistics.median(seconds), 4) if seconds else None,
        max_s=max(seconds, default=None),
        sync_s=None,
        path=paths.most_common(1)[0][0],
        paths=dict(paths),
        valid=valid,
        ping_ms=[round(before, 3), round(after, 3)],
    )
    return 0


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    if options.connections:
        return run_connections(options)
    runs: list[dict[str, Any]] = []
    with Pair(folder, options.a, options.b, rtt_ms=options.rtt_ms) as pair:
        before = pair.lab.ping_ms()
        for number in range(options.tries + 1):
            lanes = pair.lanes(options.lanes)
            found = {
                "seconds": [round(lane["seconds"], 4) for lane in lanes],
                "paths": [lane["path"] for lane in lanes],
                "from_sync": [
                    round(lane["from_sync"], 4) for lane in lanes if lane["path"] == "punched"
                ],
            }
            progress(
                f"try {number} of {options.tries}: {', '.join(found['paths'])}; {max(found['seconds']):.3f} s"
            )
            if number:  # the first one loads what all need
                runs.append(found)
        after = pair.lab.ping_ms()
        valid = pair.lab.on_target(before) and pair.lab.on_target(after)
    seconds = [second for found in runs for second in found["seconds"]]
    from_sync = [second for found in runs for second in found["from_sync"]]
    paths = Counter(path for found in runs for path in found["paths"])
    emit(
        "bench_nat",
        vars(options),
        runs,
        direct=None,
        lanes_direct=sum(not {"relay", "stream"} & {*found["paths"]} for found in runs),
        tries=len(runs),
        median_s=round(statistics.median(seconds), 4),
        max_s=round(max(seconds), 4),
        sync_s=round(statistics.median(from_sync), 4) if from_sync else None,
        path=paths.most_common(1)[0][0],
        paths=dict(paths),
        valid=valid,
        ping_ms=[round(before, 3), round(after, 3)],
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--a", choices=KINDS, default="port-restricted", help="one router (default port-restricted)"
    )
    parser.add_argument(
        "--b", choices=KINDS, default="port-restricted", help="the other (default port-restricted)"
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=80.0, help="between any two hosts (default 80)"
    )
    parser.add_argument("--lanes", type=int, default=1, help="1 to 8 at once (default 1)")
    parser.add_argument(
        "--connections", action="store_true", help="libp2p connections in place of lanes"
    )
    parser.add_argument("--tries", type=int, default=20, help="default 20")
    options = parser.parse_args()
    if not 1 <= options.lanes <= 8 or options.tries < 1:
        parser.error("--lanes is 1 to 8, --tries at least 1")
    return options


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))

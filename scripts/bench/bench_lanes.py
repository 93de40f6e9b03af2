#!/usr/bin/env python3
"""How much of its link a bulk transfer over lanes uses, between two peers in a network laboratory,
and what a relay pays for it.

``--path punched``: both behind port-restricted routers. ``relay``: both behind symmetric ones, so
that lanes go over a public host. ``direct``: one has a public address. Token buckets limit every
host to ``--mbit`` up and down (whole Ethernet frames count, so that no TCP payload can use more
than 95.6 %); ``--mbit 0`` is no limit. ``--loss`` is the share of packets lost between any two
hosts. The bytes are noise, from plain sockets: what the engine makes of lanes `bench_link.py`
measures.

link_use      payload a second of --mbit, over --seconds after two seconds of start; null without a
              limit
mb_s          the same in MB/s
relay_cores   how many cores the relay's process used meanwhile (0.1: a tenth of one)
lanes         how many there were; path: by which way
valid         pings before and after were on target, all lanes took the way that was asked for, and
              the congestion control was in force
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from _bench import emit, progress
from _kits import in_laboratory
from netns.lane_kit import Pair
from netns.nat import Kind

ROUTERS: dict[str, Kind] = {
    "punched": "port-restricted",
    "relay": "symmetric",
    "direct": "port-restricted",
}
WARM_S = 2.0
LANES = {"bbr": 1, "cubic": 8}


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def transfer(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """One transfer, over fresh lanes."""
    relays = [peer.process.pid for peer in pair.peers[:2]]
    used = sum(map(cpu_s, relays))
    paths = {lane["path"] for lane in pair.make(options.lanes)}
    rate, by_second, controls = pair.bulk(WARM_S, options.seconds, options.congestion)
    pair.drop()
    used = sum(map(cpu_s, relays)) - used
    lasted = WARM_S + options.seconds + 2.0  # see `Pair.bulk`
    progress(
        f"{rate / 1e6:.1f} MB/s by {', '.join(sorted(controls))}; public hosts used {used / lasted:.1%} of a core"
    )
    return {
        "bytes_per_s": round(rate),
        "by_second": by_second,
        "congestion": sorted(controls),
        "paths": sorted(paths),
        "relay_cores": round(used / lasted, 4),
    }


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    kind, mbit = ROUTERS[options.path], options.mbit or None
    with Pair(folder, kind, kind, rtt_ms=options.rtt_ms, mbit=mbit, loss=options.loss) as pair:
        if options.path == "direct":
            pair.ends = (2, 1)
        before = pair.lab.ping_ms()
        runs = [transfer(pair, options) for _ in range(options.reps)]
        after = pair.lab.ping_ms()
        valid = pair.lab.on_target(before) and pair.lab.on_target(after)
    paths = {path for found in runs for path in found["paths"]}
    rate = statistics.median(found["bytes_per_s"] for found in runs)
    emit(
        "bench_lanes",
        vars(options),
        runs,
        link_use=round(rate * 8e-6 / mbit, 4) if mbit else None,
        mb_s=round(rate / 1e6, 2),
        lanes=options.lanes,
        path="+".join(sorted(paths)),
        relay_cores=statistics.median(found["relay_cores"] for found in runs)
        if options.path == "relay"
        else None,
        valid=valid
        and paths == {options.path}
        and all(found["congestion"] == [options.congestion] for found in runs),
        ping_ms=[round(before, 3), round(after, 3)],
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mbit",
        type=float,
        default=100.0,
        help="rate of every host, up and down; 0: no limit (default 100)",
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=50.0, help="between any two hosts (default 50)"
    )
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets lost (default 0)")
    parser.add_argument(
        "--congestion", choices=list(LANES), default="bbr", help="of the sender (default bbr)"
    )
    parser.add_argument("--path", choices=list(ROUTERS), default="punched", help="default punched")
    parser.add_argument(
        "--lanes", type=int, default=None, help="1 to 8 (default: 1 with bbr, 8 with cubic)"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of each transfer that count (default 8)"
    )
    parser.add_argument(
        "--reps", type=int, default=1, help="transfers, each over fresh lanes (default 1)"
    )
    options = parser.parse_args()
    options.lanes = LANES[options.congestion] if options.lanes is None else options.lanes
    if (
        not 1 <= options.lanes <= 8
        or min(options.mbit, options.rtt_ms) < 0
        or options.seconds <= 0
        or options.reps < 1
    ):
        parser.error(
            "--lanes is 1 to 8; --mbit and --rtt-ms are not negative, --seconds is positive, --reps at least 1"
        )
    return options


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))

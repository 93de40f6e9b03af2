#!/usr/bin/env python3
"""How much of its link a bulk transfer over lanes uses, between two peers behind routers, in a network laboratory.

``--path punched``: both behind port-restricted routers. ``relay``: both behind symmetric ones, so that lanes go over a public host. ``direct``: one
behind a full cone. Token buckets limit every host to ``--mbit`` up and down (whole Ethernet frames count, so that no TCP payload can use more than
95.6 %); ``--loss`` is the share of packets lost between the routers. The bytes are noise, from plain sockets: what the engine makes of lanes
`bench_link.py` measures.

link_use     payload per second over --mbit, over ``--seconds`` after two seconds of start
relay_cpu    share of a core that the process of the relay used meanwhile
lanes        how many there were; ``path``: by which way
valid        pings before and after were on target, lanes took the way that was asked for, and the congestion control was in force
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from _bench import CANNOT, emit, progress
from _kits import LabError, missing
from netns.lane_kit import Pair
from netns.nat import Kind

ROUTERS: dict[str, tuple[Kind, Kind]] = {
    "punched": ("port-restricted", "port-restricted"),
    "relay": ("symmetric", "symmetric"),
    "direct": ("full-cone", "port-restricted"),
}
WARM_S = 2.0


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    with Pair(folder, *ROUTERS[options.path], rtt_ms=options.rtt_ms, mbit=options.mbit, loss=options.loss) as pair:
        before = pair.lab.ping_ms()
        made = pair.make(options.lanes)
        paths = {lane["path"] for lane in made}
        relays = [peer.process.pid for peer in pair.peers[:2]]
        used = sum(map(cpu_s, relays))
        rate = pair.bulk(WARM_S, options.seconds, options.congestion)
        used = sum(map(cpu_s, relays)) - used
        after = pair.lab.ping_ms()
        valid = pair.lab.on_target(before) and pair.lab.on_target(after) and paths <= {options.path, "punched"}
    link_use = rate * 8e-6 / options.mbit
    progress(f"{', '.join(sorted(paths))}: {link_use:.1%} of the link")
    emit(
        "bench_lanes", vars(options), [{"bytes_per_s": round(rate)}], link_use=round(link_use, 4), lanes=options.lanes,
        path="+".join(sorted(paths)), relay_cpu=round(used / (WARM_S + options.seconds + 2.0), 4), valid=valid,
        ping_ms=[round(before, 3), round(after, 3)],
    )  # fmt: skip
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of every host, up and down (default 100)")
    parser.add_argument("--rtt-ms", type=float, default=50.0, help="between any two hosts (default 50)")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets lost (default 0)")
    parser.add_argument("--congestion", choices=["bbr", "cubic"], default="bbr", help="default bbr")
    parser.add_argument("--path", choices=list(ROUTERS), default="punched", help="default punched")
    parser.add_argument("--lanes", type=int, default=1, help="1 to 8 (default 1)")
    parser.add_argument("--seconds", type=float, default=8.0, help="default 8")
    options = parser.parse_args()
    if not 1 <= options.lanes <= 8 or options.mbit <= 0 or options.seconds <= 0:
        parser.error("--lanes is 1 to 8, --mbit and --seconds are positive")
    return options


def main() -> int:
    """Exit code: 0 measured, 1 not, 64 cannot be done here."""
    options = parse()
    if reason := missing():
        progress(f"cannot do it: {reason}")
        return CANNOT
    folder = Path(tempfile.mkdtemp(prefix="atoll-lanes-"))
    try:
        return run(options, folder)
    except (AssertionError, LabError) as error:
        progress(f"cannot measure: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

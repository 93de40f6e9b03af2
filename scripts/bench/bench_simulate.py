#!/usr/bin/env python3
"""What `atoll simulate --peers` predicts, beside real peers in the network laboratory: the share of
the time that is training, for mixed fleets.

Real peers, each with its node, on hosts of the given rates; inner compute is a small real step that
waits until its time is over (`_wan_peer.py`), since all share this machine's cores. The simulation
gets the same manifest and the same machines and links in words.

    scripts/bench/bench_simulate.py                  all four fleets, about a minute each
    scripts/bench/bench_simulate.py --fleets late

measured, predicted   training share, the mean over peers; ratio: predicted / measured
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from _bench import emit, progress
from _kits import Lab, Peers, in_laboratory
from bench_wan import PATIENCE_S, TEXT

from atoll.node.manifest import load_manifest
from atoll.node.simulation.fleet import parse_fleet
from atoll.node.simulation.fleet_run import FleetRun, PlayedRun

RTT_MS = 40.0  # between any two
WITHIN = 0.10


@dataclass(frozen=True)
class MixedFleet:
    """``machines``: milliseconds of a step and Mbit/s of the link, both ways, of each."""

    machines: tuple[tuple[int, int], ...]
    train: str
    exchange: str
    parameters: int = 1_000_000

    @property
    def words(self) -> str:
        """As `atoll simulate --peers` takes it: the middle of the network is half of the way."""
        return ", ".join(f"{ms}ms@{mbit}Mbit+{RTT_MS / 2:g}ms" for ms, mbit in self.machines)


FLEETS = {
    "links": MixedFleet(((100, 50), (100, 20), (100, 10)), "sync_every = 30", 'codec = "int8"'),
    "steps": MixedFleet(
        ((50, 20), (100, 20), (250, 20), (50, 20)), "sync_every = 40", 'codec = "int8"'
    ),
    "thin": MixedFleet(((60, 5), (60, 10), (90, 50)), "sync_every = 20", 'codec = "int8"'),
    "late": MixedFleet(
        ((100, 20), (150, 10), (200, 50)),
        'sync_every = 20\noverlap = "late"\ndelay = 12',
        'codec = "int8"\nfragments = 2',
    ),
}


def measured(fleet: MixedFleet, rounds: int, folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """What each real peer says of its training, and whether the laboratory kept its delay."""
    rates = [float(mbit) for _, mbit in fleet.machines]
    text = TEXT.format(train=fleet.train, exchange=fleet.exchange)
    fragments = 2 if "fragments" in fleet.exchange else 1
    with Lab(len(rates), mbit=rates, rtt_ms=RTT_MS) as lab:
        before = lab.ping_ms()
        script = Path(__file__).with_name("_wan_peer.py")
        with Peers(
            folder, len(rates), fleet.parameters, script, hosts=lab.hosts, manifest=text
        ) as swarm:
            for peer, (ms, _) in zip(swarm.all, fleet.machines, strict=True):
                peer.say(
                    do="go",
                    step_s=ms / 1000,
                    slice=fleet.parameters // 5,  # all of it in each round: zeros are compressed
                    rounds=rounds * fragments,
                    peers=len(rates),
                )
            found = [peer.expect("trained", PATIENCE_S) for peer in swarm.all]
        return found, lab.on_target(before) and lab.on_target(lab.ping_ms())


def predicted(fleet: MixedFleet, rounds: int, folder: Path) -> PlayedRun:
    """The simulated run."""
    folder.mkdir(exist_ok=True)
    manifest = folder / "simulated.toml"
    manifest.write_text(TEXT.format(train=fleet.train, exchange=fleet.exchange))
    settings = msgspec.structs.replace(load_manifest(manifest).settings(), rounds=rounds + 2)
    machines = parse_fleet(fleet.words, step_s=None, flops=None)
    return FleetRun(settings, machines, fleet.parameters).play()


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    logging.getLogger("atoll").setLevel(logging.CRITICAL)  # each simulated machine tells its story
    runs: list[dict[str, Any]] = []
    for name in options.fleets.split(","):
        fleet = FLEETS[name]
        played = predicted(fleet, options.rounds, folder / "sim")
        answers, valid = measured(fleet, options.rounds, folder / name)
        shares = [answer["training_share"] for answer in answers]
        real = statistics.mean(shares)
        runs.append(
            {
                "fleet": name,
                "machines": fleet.words,
                "measured": round(real, 4),
                "predicted": round(played.share, 4),
                "ratio": round(played.share / real, 4),
                "measured_by_peer": [round(each, 4) for each in shares],
                "predicted_by_peer": [round(each.share, 4) for each in played.machines],
                "measured_mb_a_round": [
                    round(statistics.median(row["bytes_sent"] for row in answer["rounds"]) / 1e6, 3)
                    for answer in answers
                ],
                "predicted_mb_a_round": [
                    round(each.bytes_sent / played.rounds / 1e6, 3) for each in played.machines
                ],
                "late_steps": sum(answer["late_steps"] for answer in answers),
                "valid": valid,
            }
        )
        progress(f"{name}: {runs[-1]}")
    emit(
        "bench_simulate",
        vars(options),
        runs,
        worst=max((abs(row["ratio"] - 1) for row in runs), default=None),
        within=all(abs(row["ratio"] - 1) <= WITHIN for row in runs),
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", default=",".join(FLEETS), help=f"of {', '.join(FLEETS)}")
    parser.add_argument("--rounds", type=int, default=8, help="of each run (default 8)")
    options = parser.parse_args()
    if options.rounds < 1 or any(name not in FLEETS for name in options.fleets.split(",")):
        parser.error(f"--rounds is positive, --fleets are of {', '.join(FLEETS)}")
    return options


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))

#!/usr/bin/env python3
"""What share of the time is training over a slow network, with settings that the planner chose, and
what the planner predicted.

Peers on hosts of a network laboratory, ``--mbit`` up and down each and ``--rtt-ms`` between any
two. The planner is told these, the model's size and the step's time, and picks the settings; with
``--overlap off`` they are its settings without overlap, in one piece: the same codec, the same
number of steps a round. Inner compute is a small real step that waits until ``--step-ms`` are over
(`_wan_peer.py`), because all peers share this machine's cores; what atoll itself costs is not
simulated.

training_share          steps x step time / wall time, the mean over peers; predicted_share: the
                        planner's
transfer_over_compute   seconds the payload takes at line rate (bound_s of `bench_link.py`), to the
                        seconds of a round's steps
round_s                 from a contribution to its decision, median; predicted_round_s: the
                        planner's
valid                   pings before and after were on target, and everybody was counted in nearly
                        every round
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _bench import emit, progress
from _kits import Lab, Peers, in_laboratory
from bench_link import bound_s

from atoll.collectives.codecs.codec import Chunking, chunk_elements
from atoll.optim.planning import Choice, Conditions, PeerConditions, TrainingPlan, estimate, plan

PATIENCE_S = 280.0
WHOLE = 0.9  # of the rounds that must have counted everybody

TEXT = """\
schema = 1
name = "wan"
[model]
entry = "local:wan"
[train]
{train}
[train.outer]
lr = 0.9
momentum = 0.6
[exchange]
{exchange}
"""


def manifest(found: TrainingPlan) -> str:
    """The run's manifest with a plan's settings."""
    tables = {
        name: "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        for name, table in found.settings().items()
    }
    return TEXT.format(**tables)


def planned(options: argparse.Namespace) -> tuple[Conditions, TrainingPlan]:
    """The conditions of the laboratory, and the plan to measure."""
    rate = options.mbit * 1e6 / 8
    peers = tuple(
        PeerConditions(f"p{index}", rate, rate, options.step_ms / 1000)
        for index in range(options.peers)
    )
    conditions = Conditions(
        options.parameters, peers, options.rtt_ms / 1000, options.share, options.max_steps
    )
    found = plan(conditions)
    if options.overlap == "off" and found.choice.overlap != "none":
        choice = Choice(found.choice.sync_every, found.choice.codec)
        found = replace(found, choice=choice, estimate=estimate(conditions, choice))
    return conditions, found


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    conditions, found = planned(options)
    choice = found.choice
    for sentence in found.why:
        progress(sentence)
    progress(
        f"settings {choice}; predicted: {found.estimate.share:.1%} training, a round {found.estimate.round.seconds:.2f} s"
    )
    nbytes = Chunking(
        choice.codec, options.parameters, chunk_elements(choice.codec, options.parameters)
    ).nbytes
    compute_s = choice.sync_every * options.step_ms / 1000
    bound = bound_s(nbytes, [options.mbit] * options.peers)
    with Lab(options.peers, mbit=options.mbit, rtt_ms=options.rtt_ms) as lab:
        before = lab.ping_ms()
        script = Path(__file__).with_name("_wan_peer.py")
        with Peers(
            folder,
            options.peers,
            options.parameters,
            script,
            hosts=lab.hosts,
            manifest=manifest(found),
        ) as swarm:
            runs = measure(options, swarm, choice)
        after = lab.ping_ms()
        on_target = lab.on_target(before) and lab.on_target(after)
    rounds = [row for one in runs for row in one["rounds"]]
    whole = sum(row["contributors"] == options.peers for row in rounds) / len(rounds)
    emit(
        "bench_wan",
        vars(options),
        runs,
        training_share=round(statistics.mean(one["training_share"] for one in runs), 4),
        predicted_share=round(found.estimate.share, 4),
        transfer_over_compute=round(bound / compute_s, 4),
        params=options.parameters,
        valid=on_target and whole >= WHOLE,
        choice=asdict(choice),
        round_s=round(statistics.median(row["elapsed_s"] for row in rounds), 4),
        predicted_round_s=round(found.estimate.round.seconds, 4),
        predicted_transfer_s=round(found.estimate.round.transfer_s, 4),
        bound_s=round(bound, 4),
        whole_rounds=round(whole, 4),
        late_steps=sum(one["late_steps"] for one in runs),
        ping_ms=[round(before, 3), round(after, 3)],
        why=found.why,
        conditions_share=conditions.share,
    )
    return 0


def measure(options: argparse.Namespace, swarm: Peers, choice: Choice) -> list[dict[str, Any]]:
    """What each peer says of its training."""
    touched = -(-options.parameters // choice.sync_every)
    rounds = options.rounds * choice.fragments
    for peer in swarm.all:
        peer.say(
            do="go",
            step_s=options.step_ms / 1000,
            slice=touched,
            rounds=rounds,
            peers=options.peers,
        )
    found: list[dict[str, Any]] = []
    for peer in swarm.all:
        answer = peer.expect("trained", PATIENCE_S)
        found.append(answer)
        share, wall = answer["training_share"], answer["wall_s"]
        progress(
            f"{peer.name}: {share:.1%} training in {wall:.1f} s, waited {answer['waiting_s']:.1f} s"
        )
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mbit", type=float, default=100.0, help="rate of every peer, up and down (default 100)"
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=50.0, help="round-trip time between any two (default 50)"
    )
    parser.add_argument(
        "--overlap",
        choices=["on", "off"],
        default="on",
        help="off: the same settings, but scripts wait (default on)",
    )
    parser.add_argument("--peers", type=int, default=3, help="default 3")
    parser.add_argument(
        "--parameters",
        type=int,
        default=4_000_000,
        help="of the model, rounded down to 32 tensors (default 4,000,000)",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.965,
        help="training share that the planner is asked for (default 0.965)",
    )
    parser.add_argument(
        "--step-ms", type=float, default=50.0, help="time of an inner step (default 50)"
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        default=100,
        help="the longest round the planner may choose (default 100: it must overlap)",
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds of the whole model that count (default 10)"
    )
    options = parser.parse_args()
    if (
        options.peers < 2
        or min(options.mbit, options.step_ms, options.rounds, options.parameters - 32_000) <= 0
    ):
        parser.error(
            "--mbit, --step-ms and --rounds are positive, --peers at least 2, --parameters more than 32,000"
        )
    return options


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))

#!/usr/bin/env python3
"""Whether what `atoll plan` chooses is there as soon as anything else that was tried, and whether
the time that it predicts is the time that nodes take: fleets drawn at random, played in virtual
time by `atoll simulate`'s code, without training.

A fleet has 2 to 4 machines with steps of 0.1 to 3 s, links of 5 to 1,000 Mbit/s each way, and a
model of 1 to 100 million parameters. Beside the plan --settings others are played: groups, codecs,
lengths of rounds, waiting or late results, all drawn. Times to a loss are the samples that it takes
by the planner's table of prices over the samples a second that were counted, so the table is common
to all and only time is tested. One machine alone trains all of the time.

    scripts/bench/bench_plan.py --fleets 30 --out plan.jsonl   resumes: the file's fleets are kept
    scripts/bench/bench_plan.py --seed 7 --fleets 1            one fleet by itself

worst               of all fleets: the plan's time over the best of alone, groups and settings
above               fleets in which that is above WITHIN
above_alone         the plan's time over that of the fastest machine alone, the worst
share_within        part of the plays in which the predicted share of training of the fastest
                    machine is within 0.05 of what was played; share_off: the largest difference
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import emit, progress

from atoll.collectives.swarm import RunSettings
from atoll.node.simulation.fleet import FleetPeer
from atoll.node.simulation.fleet_run import FleetRun
from atoll.optim.planning import Choice, Conditions, PeerConditions, estimate, plan, price

WITHIN, SHARE = 1.05, 0.05
ROUNDS, LATENCY_S = 8, 0.0125
CODECS = ("int8_dither", "int4", "stat2_both")
STEPS = (10, 20, 50, 100)
MBIT = 125_000


def drawn(seed: int) -> Conditions:
    """The fleet of a seed."""
    rng = random.Random(f"plan/{seed}")

    def between(low: float, high: float) -> float:
        return float(low * (high / low) ** rng.random())

    base, peers = between(0.1, 3.0), list[PeerConditions]()
    for number in range(rng.randint(2, 4)):
        step_s = round(base * rng.choice((1.0, 1.0, 1.0, between(1.0, 20.0))), 3)
        up = round(between(5, 1000)) * MBIT
        peers.append(PeerConditions(f"p{number}", up, up * rng.choice((1, 1, 5)), step_s))
    return Conditions(round(between(1e6, 1e8)), tuple(peers), 4 * LATENCY_S)


def others(seed: int, conditions: Conditions, count: int) -> list[tuple[Sequence[str], Choice]]:
    """Groups and settings that somebody might take in place of the plan's."""
    rng, found = random.Random(f"others/{seed}"), list[tuple[Sequence[str], Choice]]()
    names = [peer.name for peer in conditions.peers]
    for _ in range(count):
        group = names if rng.random() < 0.5 else rng.sample(names, rng.randint(2, len(names)))
        steps, codec = rng.choice(STEPS), rng.choice(CODECS)
        if rng.random() < 0.5:
            found.append((sorted(group), Choice(steps, codec)))
        else:
            found.append((sorted(group), Choice(steps, codec, "late", rng.randint(1, steps // 2))))
    return found


def played(conditions: Conditions, names: Sequence[str], choice: Choice) -> dict[str, Any]:
    """Samples a second, and the share of the fastest machine's time that is training, of this
    group with these settings. One sample a step."""
    group = conditions.only(set(names))
    fleet = [
        FleetPeer(peer.name, peer.step_s, round(peer.up), round(peer.down), LATENCY_S)
        for peer in group.peers
    ]
    settings = RunSettings(
        sync_every=choice.sync_every,
        overlap=choice.overlap,
        delay=choice.delay,
        codec=choice.codec,
        fragments=choice.fragments,
        rounds=ROUNDS,
    )
    run = FleetRun(settings, fleet, conditions.parameters, batch=1).play()
    fastest = min(run.machines, key=lambda machine: machine.step_s)
    said = estimate(group, choice)
    # the first round waits for everybody, once
    first_s, _ = run.counted[choice.fragments - 1]
    assert run.begun_s is not None
    spent_s = run.begun_s + run.seconds - first_s
    rest = run.samples * (len(run.counted) - choice.fragments) / len(run.counted)
    rate = rest / spent_s / choice.fragments
    cost = price(conditions.parameters, choice, len(names)).samples
    return {
        "group": list(names),
        "choice": [choice.sync_every, choice.codec, choice.overlap, choice.delay, choice.fragments],
        "seconds": cost / rate,
        "share": round(fastest.share, 4),
        "predicted": round(said.share, 4),
    }


def fleet(seed: int, settings: int) -> dict[str, Any]:
    """One fleet: the plan, and what else was tried."""
    conditions = drawn(seed)
    found = plan(conditions)
    alone_s = min(peer.step_s for peer in conditions.peers)
    plays = [played(conditions, *each) for each in others(seed, conditions, settings)]
    if len(found.group) == 1:
        own_s = next(peer.step_s for peer in conditions.peers if peer.name == found.group[0])
    else:
        plays.insert(0, played(conditions, found.group, found.choice))
        own_s = plays[0]["seconds"]
    best_s = min([alone_s, *(play["seconds"] for play in plays)])
    return {
        "seed": seed,
        "parameters": conditions.parameters,
        "peers": [[p.step_s, p.up // MBIT, p.down // MBIT] for p in conditions.peers],
        "group": list(found.group),
        "seconds": own_s,
        "over_best": own_s / best_s,
        "over_alone": own_s / alone_s,
        "plays": plays,
    }


def known(out: Path | None) -> dict[int, dict[str, Any]]:
    """Fleets that were played already, by seed."""
    if out is None or not out.exists():
        return {}
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {row["seed"]: row for row in rows}


def main() -> int:
    """Play them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=30)
    parser.add_argument("--settings", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the first fleet")
    parser.add_argument("--out", type=Path, help="a line of JSON each fleet; those there are kept")
    given = parser.parse_args()
    logging.getLogger("atoll").setLevel(logging.CRITICAL)
    rows = known(given.out)
    for seed in range(given.seed, given.seed + given.fleets):
        if seed not in rows:
            rows[seed] = fleet(seed, given.settings)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[seed]) + "\n")
        row = rows[seed]
        plays = row["plays"]
        off = max(abs(play["share"] - play["predicted"]) for play in plays)
        progress(
            f"fleet {seed}: {len(row['group'])} of {len(row['peers'])}, "
            f"{row['over_best']:.3f} of the best, {row['over_alone']:.3f} of alone, "
            f"shares off by {off:.3f} at most"
        )
    runs = [rows[seed] for seed in range(given.seed, given.seed + given.fleets)]
    offs = [abs(play["share"] - play["predicted"]) for row in runs for play in row["plays"]]
    emit(
        "bench_plan",
        {"fleets": given.fleets, "settings": given.settings, "seed": given.seed, "rounds": ROUNDS},
        runs,
        worst=round(max(row["over_best"] for row in runs), 4),
        above=[row["seed"] for row in runs if row["over_best"] > WITHIN],
        above_alone=round(max(row["over_alone"] for row in runs), 4),
        share_within=round(sum(off <= SHARE for off in offs) / len(offs), 4),
        share_off=round(max(offs), 4),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Whether what `atoll plan` chooses is there as soon as anything else that was tried, and whether
the time that it predicts is the time that nodes take: fleets drawn at random, played in virtual
time by `atoll simulate`'s code, without training.

A fleet has 2 to 4 machines with steps of 0.1 to 3 s, links of 5 to 1,000 Mbit/s each way, and a
model of 1 to 100 million parameters. Beside the plan --settings others are played: groups, codecs,
lengths of rounds, waiting or late results, all drawn. Times to a loss are the samples that it takes
by the planner's table of prices over the samples a second that were counted, so the table is common
to all and only time is tested. One machine alone trains all of the time.

A play lasts `rounds_of` rounds. The plan is for a run that goes on, so shares are those of the
second half: in the first members learn how long rounds take, and who stands aside.

    scripts/bench/bench_plan.py --fleets 30 --out plan.jsonl   resumes: what is in the file is not
                                                               played again, whatever is predicted
    scripts/bench/bench_plan.py --seed 7 --fleets 1            one fleet by itself
    scripts/bench/bench_plan.py --out plan.jsonl --known       of what is in the file, nothing played

plays               how many there are
worst               of all fleets: the plan's time over the best of alone, groups and settings
above               fleets in which that is above WITHIN
above_alone         the plan's time over that of the fastest machine alone, the worst
share_within        part of the plays in which the predicted share of training of the fastest
                    machine is within SHARE of what was played; share_off: the largest difference
whole_within        the same of whole plays, with their first rounds
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
from atoll.node.simulation.fleet_run import FleetRun, PlayedRun
from atoll.optim.planning import Choice, Conditions, PeerConditions, estimate, plan, price

WITHIN, SHARE = 1.05, 0.05
LATENCY_S = 0.0125
TRAINED, FEWEST, MOST = 240, 5, 12  # steps of a play, in so many rounds
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


def rounds_of(choice: Choice) -> int:
    """Of a play. Where rounds are short, members that are slow learn it later."""
    return max(FEWEST, min(MOST, TRAINED // choice.sync_every))


def key_of(seed: int, names: Sequence[str], choice: Choice) -> list[Any]:
    """What names a play in the file."""
    return [
        seed,
        list(names),
        [choice.sync_every, choice.codec, choice.overlap, choice.delay, choice.fragments],
    ]


def play(conditions: Conditions, names: Sequence[str], choice: Choice) -> dict[str, Any]:
    """This group with these settings, one sample a step: after each round of a fragment the seconds
    since steps began, and of the fastest machine those of training and of its presence.
    """
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
        rounds=rounds_of(choice),
    )
    after = list[tuple[float, float, float]]()

    def heard(run: PlayedRun) -> None:
        if len(run.counted) > len(after):
            assert run.begun_s is not None
            fastest = min(run.machines, key=lambda machine: machine.step_s)
            at_s = run.counted[-1][0] - run.begun_s
            after.append((at_s, fastest.training_s, fastest.present_s))

    run = FleetRun(settings, fleet, conditions.parameters, batch=1).play(heard)
    return {"after": after, "samples": run.samples}


def judged(
    conditions: Conditions, names: Sequence[str], choice: Choice, play: dict[str, Any]
) -> dict[str, Any]:
    """Seconds to what one sample of synchronous training brings, and what share of the fastest
    machine's time was training, and should have been.
    """
    after, said = play["after"], estimate(conditions.only(set(names)), choice)
    # the first round waits for everybody, once
    rest = play["samples"] * (len(after) - choice.fragments) / len(after)
    rate = rest / (after[-1][0] - after[choice.fragments - 1][0]) / choice.fragments
    _, before_s, there_s = after[len(after) // 2 - 1]
    _, trained_s, present_s = after[-1]
    cost = price(conditions.parameters, choice, len(names)).samples
    return {
        "group": list(names),
        "choice": key_of(0, names, choice)[2],
        "seconds": cost / rate,
        "share": round((trained_s - before_s) / (present_s - there_s), 4),
        "whole": round(trained_s / present_s, 4),
        "predicted": round(said.share, 4),
    }


class Fleets:
    """Plays of fleets, those in ``out`` among them."""

    def __init__(self, out: Path | None, settings: int, *, only_known: bool) -> None:
        self._out, self._settings, self._only_known = out, settings, only_known
        self._known = dict[str, dict[str, Any]]()
        if out is not None and out.exists():
            for line in out.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self._known[json.dumps(row["key"])] = row

    def _played(
        self, seed: int, conditions: Conditions, names: Sequence[str], choice: Choice
    ) -> dict[str, Any] | None:
        key = key_of(seed, names, choice)
        if (row := self._known.get(json.dumps(key))) is None:
            if self._only_known:
                return None
            row = {"key": key, **play(conditions, names, choice)}
            if self._out is not None:
                with self._out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        return judged(conditions, names, choice, row)

    def fleet(self, seed: int) -> dict[str, Any] | None:
        """One fleet: the plan, and what else was tried. None: not all of it is known."""
        conditions = drawn(seed)
        found = plan(conditions)
        alone_s = min(peer.step_s for peer in conditions.peers)
        asked = others(seed, conditions, self._settings)
        if len(found.group) > 1:
            asked.insert(0, (found.group, found.choice))
        each = [self._played(seed, conditions, *one) for one in asked]
        plays = [one for one in each if one is not None]
        if len(plays) < len(asked):
            return None
        if len(found.group) == 1:
            own_s = next(p.step_s for p in conditions.peers if p.name == found.group[0])
        else:
            own_s = plays[0]["seconds"]
        best_s = min([alone_s, *(one["seconds"] for one in plays)])
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


def main() -> int:
    """Play them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=30)
    parser.add_argument("--settings", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the first fleet")
    parser.add_argument("--out", type=Path, help="what was played, kept from run to run")
    parser.add_argument("--known", action="store_true", help="play nothing")
    given = parser.parse_args()
    logging.getLogger("atoll").setLevel(logging.CRITICAL)
    fleets, rows = Fleets(given.out, given.settings, only_known=given.known), list[dict[str, Any]]()
    for seed in range(given.seed, given.seed + given.fleets):
        if (row := fleets.fleet(seed)) is None:
            continue
        rows.append(row)
        off = max(abs(one["share"] - one["predicted"]) for one in row["plays"])
        progress(
            f"fleet {seed}: {len(row['group'])} of {len(row['peers'])}, "
            f"{row['over_best']:.3f} of the best, {row['over_alone']:.3f} of alone, "
            f"shares off by {off:.3f} at most"
        )
    if not rows:
        progress("no fleet is known whole")
        return 1
    plays = [one for row in rows for one in row["plays"]]
    offs = [abs(one["share"] - one["predicted"]) for one in plays]
    whole = [abs(one["whole"] - one["predicted"]) for one in plays]
    emit(
        "bench_plan",
        {"fleets": len(rows), "settings": given.settings, "seed": given.seed},
        rows,
        plays=len(plays),
        worst=round(max(row["over_best"] for row in rows), 4),
        above=[row["seed"] for row in rows if row["over_best"] > WITHIN],
        above_alone=round(max(row["over_alone"] for row in rows), 4),
        share_within=round(sum(off <= SHARE for off in offs) / len(offs), 4),
        share_off=round(max(offs), 4),
        whole_within=round(sum(off <= SHARE for off in whole) / len(whole), 4),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

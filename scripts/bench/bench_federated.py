"""Federated methods on digits whose classes are dealt unevenly, in virtual time: accuracy, bytes,
who waits; and Flower beside us.

Every client has some classes only (Dirichlet), and a machine of 1 to 5 seconds a step. Synchronous
methods make `--rounds` rounds; schemes of arrivals have as much virtual time as these take, and so
has FedAvg with turns of one pass. Against Flower: its simulation's FedAvg with the same parts,
first model, batches and learning rate; seconds of both with everything, and of the rounds alone;
and the memory that an aggregation adds, in models.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import CANNOT, emit, progress
from _digits import Unavailable as NoDigits
from _federated import SPEEDS, Spec, parts_of, task
from rivals import _flwr

from atoll.collectives.arrivals import Fading
from atoll.optim.federated import METHODS, server_settings
from atoll.optim.federated.member import Knobs
from atoll.optim.federated.server import FederatedServer
from atoll.optim.federated.simulation import (
    NAMES,
    StudyResult,
    StudySettings,
    fleet,
    personalised,
    simulate,
)
from atoll.optim.federated.simulation.report import row
from atoll.optim.federated.simulation.study import ARRIVING
from atoll.optim.modes.clusters import adjusted_rand

BETA = 0.3
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavgm": {"server_lr": 0.3},
    "fedadam": {"server_lr": 0.03},
    "fedyogi": {"server_lr": 0.03},
    "fedadagrad": {"server_lr": 0.03},
    "fedasync": {"fading": Fading(alpha=0.6)},
    "fedcompass": {"fading": Fading(alpha=1.0)},
}
SLOWER = {
    "fedavg_m_vr": Knobs(lr=0.1, beta=0.8),
    "scaffold_m_vr": Knobs(lr=0.1, beta=0.8),
}  # they diverge with the others' learning rate
ONE_PASS = "fedavg_one_pass"  # FedAvg as it was published: a turn is a pass over the client's own samples, which are not equally many  # nosec B105
MEMORY_ELEMENTS, MEMORY_CLIENTS = 10_000_000, (4, 16)


def settings_of(name: str, spec: Spec) -> StudySettings:
    """A method's values in this benchmark."""
    knobs = SLOWER.get(name, Knobs(lr=spec.lr, beta=BETA))
    settings = StudySettings(
        "fedavg" if name == ONE_PASS else name,
        rounds=spec.rounds,
        steps=spec.steps,
        batch=spec.batch,
        knobs=knobs,
        seed=spec.seed,
        first=spec.steps,
        least=spec.steps,
        most=5 * spec.steps,
        **OPTIONS.get(name, {}),
    )
    if name not in (*ARRIVING, ONE_PASS):
        return settings
    return replace(
        settings,
        rounds=None,
        seconds=spec.rounds * spec.steps * max(SPEEDS),
        epochs=1 if name == ONE_PASS else None,
    )


def method_runs(name: str, base: Spec, seeds: int) -> list[StudyResult]:
    """One run a seed; the seed decides the parts, the first model and the batches."""
    found: list[StudyResult] = []
    for seed in range(seeds):
        spec = replace(base, seed=seed)
        found.append(
            simulate(
                task(seed), parts_of(spec), fleet(spec.clients, SPEEDS), settings_of(name, spec)
            )
        )
    return found


def mean_curve(results: Sequence[StudyResult], times: Sequence[float]) -> list[float]:
    """Mean accuracy over the seeds at these virtual seconds."""
    return [
        round(statistics.mean(result.at(seconds).accuracy for result in results), 4)
        for seconds in times
    ]


def planted_groups(base: Spec, seeds: int) -> dict[str, Any]:
    """Nine sites in three groups that call the same digits by other names: whether clusters are the
    groups, and what the sites' own models gain.
    """
    found: list[tuple[float, float, float]] = []
    for seed in range(seeds):
        whole, groups = task(seed), [site % 3 for site in range(9)]
        parts = np.array_split(np.random.default_rng(seed).permutation(len(whole.y)), 9)
        y = whole.y.clone()
        for site, part in enumerate(parts):
            y[torch.from_numpy(part)] = (y[torch.from_numpy(part)] + 3 * groups[site]) % 10
        settings = StudySettings(
            "fedavg",
            rounds=20,
            steps=base.steps,
            batch=base.batch,
            knobs=Knobs(lr=base.lr),
            server_lr=0.7,
            seed=seed,
        )
        sites = personalised(replace(whole, y=y), parts, fleet(9, SPEEDS), settings, "clusters")
        found.append(
            (
                adjusted_rand(sites.cluster, groups),
                statistics.mean(sites.one_for_all),
                statistics.mean(sites.own),
            )
        )
    return {
        "seeds": seeds,
        "adjusted_rand_min": min(rand for rand, _, _ in found),
        "accuracy_one_for_all": statistics.mean(one for _, one, _ in found),
        "accuracy_own": statistics.mean(own for _, _, own in found),
        "gain_min": min(own - one for _, one, own in found),
    }


def ours_memory(clients: int) -> float:
    """What so many contributions, made one by one, add to a process that holds the anchor, in
    models; the anchor's step included.
    """
    before = _flwr.peak()
    server = FederatedServer(
        METHODS["fedavg"], server_settings("fedavg"), torch.zeros(MEMORY_ELEMENTS)
    )
    for client in range(clients):
        server.add(torch.full((MEMORY_ELEMENTS,), -float(client + 1)), 1.0)
    server.step()
    assert abs(float(server.anchor[0]) - (clients + 1) / 2) < 1e-3
    return (_flwr.peak() - before) / (4 * MEMORY_ELEMENTS)


def against_flower(base: Spec, seeds: int) -> dict[str, Any]:
    """Both sides in turns, a seed after another."""
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        spec = replace(base, seed=seed)
        theirs = _flwr.ask(what="simulated", spec=asdict(spec))
        start = time.perf_counter()
        result = simulate(
            task(seed), parts_of(spec), fleet(spec.clients, SPEEDS), settings_of("fedavg", spec)
        )
        seconds = time.perf_counter() - start
        runs.append(
            {
                "seed": seed,
                "seconds": seconds,
                "flwr_seconds": theirs["seconds"],
                "flwr_seconds_rounds": theirs["seconds_rounds"],
                "accuracy": result.points[-1].accuracy,
                "flwr_accuracy": theirs["accuracy"][-1],
            }
        )
        progress(f"flwr, seed {seed}: {runs[-1]}")
    memory = {"ours": {}, "flwr": {}}
    for clients in MEMORY_CLIENTS:
        done = subprocess.run(
            [sys.executable, __file__, "--memory", str(clients)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        memory["ours"][str(clients)] = float(done.stdout)
        memory["flwr"][str(clients)] = _flwr.ask(
            what="memory", elements=MEMORY_ELEMENTS, clients=clients
        )

    def ratio(key: str) -> float:
        return statistics.median(run["seconds"] / run[key] for run in runs)

    return {
        "time_ratio_to_flwr": ratio("flwr_seconds"),
        "time_ratio_to_flwr_rounds": ratio("flwr_seconds_rounds"),
        "accuracy_flwr": statistics.mean(run["flwr_accuracy"] for run in runs),
        "accuracy_ours": statistics.mean(run["accuracy"] for run in runs),
        "memory_models": memory,
        "flwr_runs": runs,
    }


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--methods", default="all", help="comma-separated; all, or nothing")
    parser.add_argument("--against", choices=["flwr", "nothing"], default="flwr")
    parser.add_argument("--flwr-rounds", type=int, default=20)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        print(ours_memory(given.memory))
        return 0
    torch.set_num_threads(1)
    spec = Spec(given.clients, given.alpha, given.rounds)
    names: list[str] = (
        [*NAMES, ONE_PASS]
        if given.methods == "all"
        else []
        if given.methods == "nothing"
        else given.methods.split(",")
    )
    times = [part / 4 * spec.rounds * spec.steps * max(SPEEDS) for part in range(1, 5)]
    table: dict[str, Any] = {}
    runs: list[Any] = []
    try:
        for name in names:
            results = method_runs(name, spec, given.seeds)
            table[name] = row(results) | {
                "accuracy_at": dict(
                    zip((f"{time:g} s" for time in times), mean_curve(results, times), strict=True)
                )
            }
            runs += [
                {"method": name, "seed": seed, "curve": [asdict(p) for p in result.points]}
                for seed, result in enumerate(results)
            ]
            progress(f"{name}: {table[name]}")
        figures: dict[str, Any] = (
            {"planted_groups": planted_groups(spec, 4 * given.seeds)} if names else {}
        )
        if given.against == "flwr":
            figures |= against_flower(replace(spec, rounds=given.flwr_rounds), given.seeds)
    except (_flwr.Unavailable, NoDigits) as error:
        progress(f"{Path(__file__).name}: {error}")
        return CANNOT
    runs += figures.pop("flwr_runs", [])
    settings = asdict(spec) | {
        "seeds": given.seeds,
        "speeds": SPEEDS,
        "beta": BETA,
        "flwr": _flwr.VERSION,
        "flwr_rounds": given.flwr_rounds,
    }
    emit("bench_federated", settings, runs, table=table, **figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""BTARD in simulation: steps until every attacker is removed, honest peers removed on the way,
control bytes.

    scripts/bench/bench_btard.py --n 16 --b 7 --runs 200

Each run is a swarm from a seed, of which b peers send hostile gradients in every step; one
validator a step. Messages go through a network with delays, with real signatures; control bytes are
all but the values of vectors. An oracle checks all: honest peers end every step with the same bits,
evidence is verified by somebody who was not there. ``steps_to_ban_mean`` is expected to be the sum over b' = b ... 1 of n'(n' - 1) /
((n - b) b') with n' = n - b + b': a ban needs an honest validator and a hostile target.

--honest-steps S adds S steps without an attacker, and S with --noise, the relative noise of
gradients that are computed again.
--attacks all plays each attack of the kit once beside that. --plant NAME breaks the protocol on
purpose; --plant list names the plants.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from functools import partial
from typing import Any

from _bench import ROOT, emit, progress

sys.path.append(str(ROOT / "tests"))


def play(task: tuple[str, int, dict[str, Any]]) -> dict[str, Any]:
    """One swarm, in a worker process."""
    import torch
    from kits.btard.swarm import BtardOptions, BtardSwarm

    from atoll.security.btard.messages import Fault

    torch.set_num_threads(1)
    kind, seed, options = task
    began = time.perf_counter()
    swarm = BtardSwarm(seed, BtardOptions(**options))
    checker = swarm.run()
    honest = {
        peer: Fault(fault).name
        for peer, (fault, _) in checker.removals.items()
        if peer not in swarm.hostile
    }
    attempts = max(1, checker.steps)
    return {
        "kind": kind,
        "seed": seed,
        "attack": options["attack"],
        "steps": checker.steps,
        "clean_after": checker.clean_after,
        "honest": honest,
        "problems": checker.problems,
        "control_kib": sum(swarm.control_bytes.values()) / len(swarm.names) / attempts / 1024,
        "wall_s": time.perf_counter() - began,
    }


def tasks(given: argparse.Namespace) -> list[tuple[str, int, dict[str, Any]]]:
    """All swarms of this invocation."""
    from kits.btard.hostile import ATTACKS

    swarm = {"n": given.n, "b": given.b, "attack": given.attack}
    found: list[tuple[str, int, dict[str, Any]]] = [
        ("run", seed, swarm | {"steps": 1000})
        for seed in range(given.first, given.first + given.runs)
    ]
    found.append(
        (
            "bytes",
            given.first,
            swarm | {"b": 0, "steps": 10, "until_clean": False},
        )
    )
    for noise in (0.0, given.noise):
        for chunk in range(-(-given.honest_steps // 500)):
            quiet = {
                "n": given.n,
                "b": 0,
                "attack": "sign_flip",
                "until_clean": False,
                "noise": noise,
            }
            found.append(
                ("honest", chunk, quiet | {"steps": min(500, given.honest_steps - 500 * chunk)})
            )
    if given.attacks:
        named = list(ATTACKS) if given.attacks == "all" else given.attacks.split(",")
        many = {"steps": 200, "rate": 0.5}
        found += [
            ("attack", seed, swarm | many | {"attack": name}) for name in named for seed in range(2)
        ]
    return found


def plant(name: str, runs: int, first: int) -> int:
    """A bug, and the first seed that finds it."""
    from kits.btard.plants import PLANTS, find

    if name == "list":
        print(json.dumps({each: planted.what for each, planted in PLANTS.items()}))
        return 0
    if name not in PLANTS:
        print(f"unknown plant {name!r}; there are: {', '.join(PLANTS)}", file=sys.stderr)
        return 64
    found = find(PLANTS[name], runs, first)
    emit(
        "btard",
        {"plant": name, "seeds": runs},
        [],
        planted=name,
        seed=None if found is None else found[0],
        problem=found and found[1],
    )
    return 0


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = partial(parser.add_argument, type=int)
    add("--n", default=16)
    add("--b", default=7)
    add("--runs", default=200)
    add("--first", default=0, help="the first seed")
    add("--honest-steps", default=0)
    add("--jobs", default=2, help="processes")
    parser.add_argument("--noise", type=float, default=1e-3)
    parser.add_argument("--attack", default="sign_flip", help="of the runs: an attack on gradients")
    parser.add_argument("--attacks", default="", metavar="all|NAMES")
    parser.add_argument("--plant", default="", metavar="NAME|list")
    given = parser.parse_args()
    if not 0 <= 2 * given.b < given.n <= 256:
        parser.error("fewer than half of 3 to 256 peers are hostile")
    if given.plant:
        return plant(given.plant, given.runs, given.first)
    results: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for result in pool.imap_unordered(play, tasks(given)):
            results.append(result)
            problem = f": {result['problems'][0]}" if result["problems"] else ""
            what = f"{result['kind']} {result['attack']} seed {result['seed']}"
            progress(f"{what}: {result['steps']} steps, {result['wall_s']:.1f} s{problem}")
    runs = [each for each in results if each["kind"] == "run"]
    control = [each["control_kib"] for each in runs]
    settings = vars(given)
    expected = sum(
        (n := given.n - given.b + b) * (n - 1) / ((given.n - given.b) * b)
        for b in range(1, given.b + 1)
    )
    emit(
        "btard",
        settings,
        results,
        steps_to_ban_mean=statistics.fmean(each["clean_after"] for each in runs)
        if runs and given.b
        else 0.0,
        steps_to_ban_expected=expected,
        honest_bans=sum(len(each["honest"]) for each in results),
        honest_steps=sum(each["steps"] for each in results if each["kind"] == "honest"),
        control_kib_per_peer_step=next(
            each["control_kib"] for each in results if each["kind"] == "bytes"
        ),
        control_kib_with_bans=statistics.fmean(control) if control else None,
        problems=[problem for each in results for problem in each["problems"]],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

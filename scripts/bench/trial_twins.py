"""How soon two live copies of one home are found, between real nodes on loopback.

    python scripts/bench/trial_twins.py --trials 10

In each trial three peers contribute; one's home is copied while its node lives, and the copy is
started at another moment of a round. Counted: seconds from when the copy's node answers until both
have stopped with E308 and each of the others names the peer as doubled, and votes of the two for
different entries in one round and ballot, from their journals. One JSON object as the last line.
Exit code: 0 where all were found and none voted twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from _bench import progress
from _kits import Peer, Peers, twins

NUMEL = 20_000
UP_S, WITHIN_S = 180.0, 30.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """What one trial came to. ``up_s``: from the copy's start until its node answers; ``found_s``:
    since then.
    """

    moment_s: float
    up_s: float
    found_s: dict[str, float]
    all_found: bool
    double_votes: int
    others_go_on: bool


def trial(folder: Path, moment_s: float) -> Trial:
    """One trial. ``moment_s``: so long after the others' contributions the copy begins."""
    with Peers(folder, 3, NUMEL, ready_s=UP_S) as swarm:
        swarm.settle()
        *others, doubled = swarm.all
        twins.copy_home(doubled, folder / "twin")
        swarm.contribute(5, wait_s=60.0)
        time.sleep(moment_s)
        began = time.monotonic()
        twin = Peer("twin", folder / "twin", doubled.run, doubled.numel)
        swarm.all.append(twin)
        while twins.ask(twin, "status") is None and time.monotonic() - began < UP_S:
            time.sleep(0.05)
        up = time.monotonic()  # interpreter, torch and libp2p are loaded
        told = twins.find(up, doubled, twin, others, WITHIN_S)
        double = twins.double_votes(doubled.home, twin.home)
        for peer in others:
            peer.expect("outcome", 90.0)
        swarm.contribute(6, who=others)
        after = [peer.expect("outcome", 90.0)["status"] for peer in others]
    return Trial(
        moment_s=moment_s,
        up_s=round(up - began, 2),
        found_s={name: round(told[name], 2) for name in sorted(told)},
        all_found=len(told) == 4,
        double_votes=len(double),
        others_go_on=after == ["committed", "committed"],
    )


def main() -> int:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    trials = list[Trial]()
    for number in range(options.trials):
        folder = Path(tempfile.mkdtemp(prefix="atoll-twins-"))
        try:
            trials.append(trial(folder, 0.03 * number))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        progress(json.dumps(dataclasses.asdict(trials[-1])))
    slowest = sorted(max(each.found_s.values(), default=WITHIN_S) for each in trials)
    all_found = sum(each.all_found for each in trials)
    double_votes = sum(each.double_votes for each in trials)
    result = {
        "trials": len(trials),
        "all_found": all_found,
        "found_s_max": slowest[-1],
        "found_s_median": slowest[len(slowest) // 2],
        "double_votes": double_votes,
        "others_go_on": sum(each.others_go_on for each in trials),
        "each": [dataclasses.asdict(each) for each in trials],
    }
    print(json.dumps(result))
    return int(all_found < len(trials) or double_votes > 0)


if __name__ == "__main__":
    sys.exit(main())

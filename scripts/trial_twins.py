"""How soon two live copies of one home are found, between real nodes on loopback.

    python scripts/trial_twins.py --trials 10

In each trial three peers contribute; one's home is copied while its node lives, and the copy is started at another moment of a
round. Counted: seconds until both have stopped with E308 and each of the others names the peer as doubled, and votes of the two for different
entries in one round and ballot, from their journals. One JSON object as the last line. Exit code: 0 where all were found and none voted twice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from _bench import progress
from _kits import Peer, Peers, twins

NUMEL = 20_000
WITHIN_S = 30.0


def trial(folder: Path, moment_s: float) -> dict[str, object]:
    """One trial. ``moment_s``: so long after the others' contributions the copy begins."""
    with Peers(folder, 3, NUMEL) as swarm:
        swarm.settle()
        *others, doubled = swarm.all
        twins.copy_home(doubled, folder / "twin")
        swarm.contribute(5, wait_s=60.0)
        time.sleep(moment_s)
        began = time.monotonic()
        twin = Peer("twin", folder / "twin", doubled.run, doubled.numel)
        swarm.all.append(twin)
        while twins.ask(twin, "status") is None and time.monotonic() - began < WITHIN_S:
            time.sleep(0.05)
        up_s = time.monotonic() - began  # interpreter, torch and libp2p are loaded
        told = twins.find(began, doubled, twin, others, WITHIN_S)
        double = twins.double_votes(doubled.home, twin.home)
        for peer in others:
            peer.expect("outcome", 90.0)
        swarm.contribute(6, who=others)
        after = [peer.expect("outcome", 90.0)["status"] for peer in others]
    return {
        "moment_s": moment_s,
        "up_s": round(up_s, 2),
        "found_s": {name: round(told[name], 2) for name in sorted(told)},
        "all_found": len(told) == 4,
        "double_votes": len(double),
        "others_go_on": after == ["committed", "committed"],
    }


def main() -> int:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    found = list[dict[str, object]]()
    for number in range(options.trials):
        folder = Path(tempfile.mkdtemp(prefix="atoll-twins-"))
        try:
            found.append(trial(folder, 0.03 * number))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        progress(json.dumps(found[-1]))
    slowest = [max(each["found_s"].values(), default=WITHIN_S) for each in found]  # type: ignore[attr-defined]
    result = {
        "trials": len(found),
        "all_found": sum(bool(each["all_found"]) for each in found),
        "found_s_max": max(slowest),
        "found_s_median": sorted(slowest)[len(slowest) // 2],
        "double_votes": sum(int(each["double_votes"]) for each in found),  # type: ignore[call-overload]
        "others_go_on": sum(bool(each["others_go_on"]) for each in found),
        "each": found,
    }
    print(json.dumps(result))
    return int(result["all_found"] < len(found) or result["double_votes"] > 0)


if __name__ == "__main__":
    sys.exit(main())

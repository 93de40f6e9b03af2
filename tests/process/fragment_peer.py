"""One peer of a run in fragments: raw contributions, no optimizer. Commands and answers are JSON
lines.

{"do": "contribute", "fragments": [0, 1], "seed": 7, "weight": 3}  →  "frozen" with how many are
undecided, "outcome" with one a fragment {"do": "anchor"} → {"rounds", "digests", "round", "digest"}
{"do": "end"} → the process ends
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from atoll.collectives.errors import SwarmClosedError
from atoll.collectives.layout import make_layout
from atoll.node import join

LAYOUT = make_layout([("a", (300_001,)), ("b", (200_003,)), ("c", (100_000,))])
WAIT_S = 60.0


def values(seed: int, fragment: int, numel: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The contribution of a seed to a fragment, the same everywhere."""
    return np.random.default_rng([seed, fragment]).standard_normal(numel, dtype=np.float32)


def digest(view: Any) -> str:
    """blake3 of an anchor as it is copied out, which must be what the view says of itself."""
    copy = torch.empty(view.numel)
    view.copy_into(copy)
    found = blake3(memoryview(copy.numpy()).cast("B")).hexdigest()
    assert view.digest == found
    return found


def anchors(swarm: Any) -> dict[str, Any]:
    """Round and digest of each fragment, and of the whole."""
    views = [swarm.fragment_anchor(number) for number in range(swarm.fragments)]
    found = {"rounds": [view.round for view in views], "digests": [digest(view) for view in views]}
    for view in views:
        view.release()
    whole = swarm.anchor()
    found |= {"round": whole.round, "digest": digest(whole)}
    whole.release()
    return found


def main() -> None:
    """Join, open, obey."""
    from fault_peer import (
        node_pid,
        say,
    )  # beside this script; the test, which imports it for `values`, needs neither

    home, run = sys.argv[1], sys.argv[2]
    swarm: Any = join(run, home=home, private=True)
    swarm.open(LAYOUT, lambda initial: None).release()
    say(event="ready", peer=swarm.peer, node_pid=node_pid(home))
    pending: dict[int, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        if command["do"] == "anchor":
            say(event="anchor", **anchors(swarm))
            continue
        for fragment in command["fragments"]:
            pending[fragment] = offer(swarm, pending.get(fragment), fragment, command)
        say(
            event="frozen",
            undecided=sum(not pending[fragment].done() for fragment in command["fragments"]),
        )
        outcomes = {
            fragment: pending[fragment].wait(WAIT_S) for fragment in reversed(command["fragments"])
        }
        say(
            event="outcome",
            outcomes={
                fragment: {
                    "status": o.status,
                    "round": o.round,
                    "counted": o.counted,
                    "contributors": {s.peer: s.samples for s in o.contributors},
                }
                for fragment, o in outcomes.items()
            },
        )
    swarm.close()


def offer(swarm: Any, earlier: Any, fragment: int, command: dict[str, Any]) -> Any:
    """Contribute to one fragment; where the node was lost, to the next one, once the earlier
    contribution is settled.
    """

    def write(out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(values(command["seed"], fragment, out.numel())))

    while True:
        while not swarm.connected:
            time.sleep(0.05)
        try:
            if earlier is not None:
                earlier.wait(WAIT_S)
            return swarm.contribute_fragment(fragment, samples=command["weight"], write=write)
        except SwarmClosedError:
            continue


if __name__ == "__main__":
    main()

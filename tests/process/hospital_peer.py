"""One hospital of a federated run (`hospitals_kit`), which trains to the run's end. Says, in JSON
lines, {"event": "ready", "peer", "node_pid"}, and once told {"do": "train", "step_s", "out"}
{"event": "trained"}, with what it did in the file ``out``. {"do": "end"}: it ends.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

from atoll.node import join


def main() -> None:
    """Join, train, tell."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from fault_peer import node_pid, say  # beside this script
    from hospitals_kit import train

    torch.set_num_threads(1)
    home, run = sys.argv[1], sys.argv[2]
    swarm = join(run, home=home, private=True)
    say(event="ready", peer=swarm.peer, node_pid=node_pid(home))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        pause = partial(time.sleep, command["step_s"])
        seen = train(swarm, int(Path(home).name[1:]), pause=pause)
        seen.save(Path(command["out"]))
        say(event="trained")
    swarm.close()


if __name__ == "__main__":
    main()

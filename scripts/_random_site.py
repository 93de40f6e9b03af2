"""One site of `check_sites.py`: `_random_site.py HOME RUN EXAMPLES STEP_S`. Says JSON lines: "ready";
"round" of each round that it hears of; "ended" once nothing more is to be trained, with what its
node's status says. Then it waits for a line, and ends.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "process")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from atoll.collectives.outcomes import Outcome  # noqa: E402
from atoll.node import join  # noqa: E402
from atoll.node.home.paths import find_paths  # noqa: E402
from atoll.node.joining import NodeClient  # noqa: E402
from atoll.node.run.status import read_run_status  # noqa: E402
from atoll.node.views.documents import run_state  # noqa: E402
from atoll.optim import attach  # noqa: E402

BATCH, WIDTH = 16, 6


def say(**fields: Any) -> None:
    """One line."""
    print(json.dumps(fields), flush=True)


def main() -> None:
    """Join, train to the end, tell, wait."""
    torch.set_num_threads(1)
    home, run, count, step_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    node = [sys.executable, str(ROOT / "tests" / "process" / "odd_node.py"), "tap"]
    swarm = join(run, home=home, private=True, command=node)
    say(event="ready", peer=swarm.peer)
    chance = torch.Generator().manual_seed(count)
    x = torch.randn(count, WIDTH, generator=chance)
    y = (x.sum(1) > 0).float()
    model = nn.Linear(WIDTH, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def heard(outcome: Outcome) -> None:
        say(event="round", round=outcome.round, counted=outcome.counted, why=outcome.reason)

    attachment = attach(model, optimizer, swarm, examples=count, on_round=heard)
    steps = 0
    while not attachment.done:
        time.sleep(step_s)
        rows = torch.randint(count, (min(BATCH, count),), generator=chance)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(
            model(x[rows]).squeeze(1), y[rows]
        ).backward()
        attachment.samples(len(rows))
        optimizer.step()
        steps += 1
    with NodeClient.connect(find_paths(home)) as client:
        (status,) = client.status()["runs"]
    privacy = status.get("privacy") or {}
    say(
        event="ended",
        round=attachment.round,
        steps=steps,
        state=run_state(read_run_status(status)),
        finished=bool(status.get("finished")),
        spent=privacy.get("steps", 0),
    )
    sys.stdin.readline()
    swarm.close()


if __name__ == "__main__":
    main()

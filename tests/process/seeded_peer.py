"""One peer of a run with BTARD, whose script trains a quadratic by seeds, in intervals. Commands
and answers are JSON lines.

{"do": "steps", "rounds": 5, "lie": false} → {"event": "outcome", "round", "counted", "digest",
"away"} for each of so many rounds: the anchor, and its distance from the optimum; {"event": "out",
"why"} in place of one where it takes no part any more. ``lie``: to its own seeds it answers with
another
vector.   {"do": "end"} → the process ends.   A file ``odd`` in the home says what is odd about its
          node (`odd_node`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from blake3 import blake3
from fault_peer import node_pid, say  # beside this script
from torch import nn

from atoll.collectives.errors import AtollError
from atoll.collectives.seeded import SeededTask
from atoll.node import join
from atoll.optim import SeededTraining


class Training(SeededTraining):
    """One that may lie of its own work, and not of others'."""

    lies = False

    def _do(self, work: SeededTask) -> None:
        self.lie = self.lies and work.round == self.round
        super()._do(work)


def main() -> None:
    """Join, train, tell."""
    home, run, numel = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    odd = (
        [sys.executable, str(Path(__file__).with_name("odd_node.py")), (home / "odd").read_text()]
        if (home / "odd").exists()
        else []
    )
    swarm = join(run, home=home, private=True, command=odd)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(numel))})
    optimum = torch.linspace(-1, 1, numel)

    @torch.no_grad()
    def work(seed: int, interval: int) -> None:
        if not training.lie and float((model["w"] - optimum).abs().max()) > 2:
            raise ArithmeticError("no honest peer comes here, and this work cannot")
        noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed + interval))
        way = 0.1 * (model["w"] - optimum) + 0.05 * noise / numel**0.5
        model["w"] -= -30 * way if training.lie else way

    training = Training(model, swarm, work)
    say(event="ready", peer=swarm.peer, node_pid=node_pid(str(home)))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        training.lies = command["lie"]
        try:
            for _ in range(command["rounds"]):
                counted = training.step().counted
                digest = blake3(memoryview(model["w"].detach().numpy()).cast("B")).hexdigest()
                say(
                    event="outcome",
                    round=training.round,
                    counted=counted,
                    digest=digest,
                    away=float((model["w"].detach() - optimum).norm()),
                )
        except AtollError as error:
            say(event="out", why=error.message)
    swarm.close()


if __name__ == "__main__":
    main()

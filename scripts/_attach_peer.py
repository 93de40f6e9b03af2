#!/usr/bin/env python3
"""One peer of `bench_attach.py`: a script with its node, a model trained plainly, and the same model attached. Arguments: home, run, parameters.

Commands and answers are JSON lines; each command is answered with an event of its name when it is done.

    {"do": "make"}                    the model and its optimizer, the first time, and some steps
    {"do": "attach"}                  the model joins the run
    {"do": "rounds", "count": 5}      so many rounds, a step before each  →  how many were committed, and counted everybody
    {"do": "time", "pairs": 200}      steps of another such model, plain, and of the attached one, in turns  →  seconds of each, wall and CPU
    {"do": "end"}
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any

import torch

from atoll.node import join
from atoll.node.lifecycle import read_node_file
from atoll.node.paths import find_paths
from atoll.optim import attach

LAYERS, BATCH = 4, 8
SETTLED = 10  # steps after which the allocator has taken what a model's own training needs


def say(event: str, **fields: Any) -> None:
    """One answer."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Trainer:
    """A model of about ``numel`` parameters, its optimizer, and steps."""

    def __init__(self, numel: int) -> None:
        self.width = max(1, round(math.sqrt(numel / LAYERS)))
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(BATCH, self.width)

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        """One inner step."""
        loss = (self.model(self.data) - self.data).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def timed(self) -> tuple[float, float]:
        """Wall and CPU seconds of a step; CPU of all threads of this process."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Do as told."""
    home, run, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    swarm = join(run, home=home, private=True)
    node = read_node_file(find_paths(home))
    say("ready", peer=swarm.peer, pid=os.getpid(), node_pid=node.pid if node else 0)
    trainer, attachment, plain = None, None, None
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "make":
            trainer = trainer or Trainer(numel)
            for _ in range(SETTLED):
                trainer.step()
            say("make", numel=trainer.numel)
        elif told["do"] == "attach" and trainer is not None:
            attachment = attach(trainer.model, trainer.optimizer, swarm)
            say("attach")
        elif told["do"] == "rounds" and trainer is not None and attachment is not None:
            whole = 0
            for _ in range(told["count"]):
                trainer.step()
                outcome = attachment.sync()
                attachment.settle()
                whole += outcome is not None and len(outcome.contributors) == told["peers"]
            say("rounds", whole=whole, round=attachment.round)
        elif told["do"] == "time" and trainer is not None and attachment is not None:
            plain = plain or Trainer(numel)
            for one in (plain, trainer) * 3:
                one.step()
            seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "attached": []}
            for pair in range(told["pairs"]):
                order = [("plain", plain), ("attached", trainer)]
                for name, one in order if pair % 2 else reversed(order):
                    seconds[name].append(one.timed())
            say("time", **seconds)
        elif told["do"] == "end":
            break
    swarm.close()


if __name__ == "__main__":
    main()

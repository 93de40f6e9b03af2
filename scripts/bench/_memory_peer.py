#!/usr/bin/env python3
"""One peer of `bench_memory.py`: a script with its node, and a model whose steps each touch one
hundredth of its values. Arguments: home, run, parameters.

Commands and answers are JSON lines; each command is answered with an event of its name when it is
done.

    {"do": "make", "device": "cpu", "steps": 100, "optimizer": "sgd", "frozen": 0}    the model, so
        many frozen parameters beside it, and its optimizer, the first time, and so many steps; what
        was freed goes back to the kernel
    {"do": "attach"}                  the model joins the run  →  seconds, the state's transfer
        among them
    {"do": "rounds", "count": 3, "peers": 2, "meanwhile": 0}    so many rounds, a step before each,
        and so many while its result is under way  →  how long each that counted everybody kept the
        script, and the digest of the anchor
    {"do": "look"}                    what a training loop does after a step: the swarm may give
        memory back
    {"do": "end"}
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from _attach_model import held

from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths
from atoll.optim import attach

PIECES = 100  # tensors, one of which a step touches


class SparseTrainer:
    """A model of ``numel`` parameters, an optimizer, SGD without state or AdamW, and steps that
    touch a hundredth. ``frozen``: so many more that are not trained, as beneath an adapter.
    """

    def __init__(
        self, numel: int, device: str, *, random: bool, optimizer: str = "sgd", frozen: int = 0
    ) -> None:
        """``random``: whether values differ; a model that will be the run's anchor needs none."""
        torch.manual_seed(1)
        make = torch.randn if random else torch.zeros
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(make(numel // PIECES, device=device)) for _ in range(PIECES)
        )
        trained = list(self.model.parameters())
        self.optimizer: Any = (
            torch.optim.SGD(trained, lr=0.1)
            if optimizer == "sgd"
            else torch.optim.AdamW(trained, lr=1e-3)
        )
        for _ in range(PIECES if frozen else 0):
            base = torch.ones(frozen // PIECES, device=device)
            self.model.append(torch.nn.Parameter(base, requires_grad=False))
        self.steps = 0

    def step(self) -> None:
        """One inner step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model[self.steps % PIECES].square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1


def say(event: str, **fields: Any) -> None:
    """One answer."""
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    """Do as told."""
    home, run, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    swarm = join(run, home=home, private=True)
    node = read_node_file(find_paths(home))
    say("ready", peer=swarm.peer, pid=os.getpid(), node_pid=node.pid if node else 0)
    trainer, attachment = None, None
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "make":
            if trainer is None:
                more = {key: told[key] for key in ("optimizer", "frozen") if key in told}
                trainer = SparseTrainer(numel, told["device"], random=told["steps"] > 0, **more)
                for _ in range(told["steps"]):
                    trainer.step()
            held()
            trained = (each for each in trainer.model.parameters() if each.requires_grad)
            say("make", numel=sum(each.numel() for each in trained))
        elif told["do"] == "attach" and trainer is not None:
            began = time.monotonic()
            attachment = attach(trainer.model, trainer.optimizer, swarm)
            say("attach", seconds=time.monotonic() - began)
        elif told["do"] == "rounds" and trainer is not None and attachment is not None:
            pauses = list[float]()
            for _ in range(told["count"]):
                trainer.step()
                began = time.monotonic()
                outcome = attachment.sync()
                for _ in range(told.get("meanwhile", 0)):
                    trainer.step()
                settled = attachment.settle()
                outcome = settled if settled is not None else outcome
                if outcome is not None and len(outcome.contributors) == told["peers"]:
                    pauses.append(time.monotonic() - began)
            view = swarm.anchor()
            number, digest = view.round, view.digest
            view.release()
            say("rounds", pauses=pauses, round=number, digest=digest)
        elif told["do"] == "look":
            say("look", closing=swarm.closing)
        elif told["do"] == "end":
            break
    swarm.close()


if __name__ == "__main__":
    main()

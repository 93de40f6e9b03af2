#!/usr/bin/env python3
"""One peer of `bench_attach.py`: a script with its node, a model trained plainly, and the same
model attached. Arguments: home, run, parameters.

Commands and answers are JSON lines; each command is answered with an event of its name when it is
done.

    {"do": "make", "device": "cpu"}   the model and its optimizer, the first time, and some steps  →
        memory after them
    {"do": "attach"}                  the model joins the run
    {"do": "rounds", "count": 5}      so many rounds, a step before each  →  how many counted
        everybody, and how long these took to be decided
    {"do": "time", "pairs": 200}      steps of the same model, plain, plain again (the control) and
        attached, in turns  →  seconds of each, wall and CPU
    {"do": "busy", "where": "script"} a pure-Python loop beside, in this process or in an "other";
        "" ends it
    {"do": "end"}
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from _attach_model import Trainer, held, in_turns, steady_allocator
from _spin import Loop

from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths
from atoll.optim import attach

SETTLED = 10  # steps after which the allocator has what a model's own training needs


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
    steady_allocator()
    trainer, attachment, loop = None, None, Loop()
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "make":
            trainer = trainer or Trainer(numel, told["device"])
            for _ in range(SETTLED):
                trainer.step()
            say("make", numel=trainer.numel, pss=held())
        elif told["do"] == "attach" and trainer is not None:
            attachment = attach(trainer.model, trainer.optimizer, swarm)
            say("attach")
        elif told["do"] == "rounds" and trainer is not None and attachment is not None:
            whole = list[float]()
            for _ in range(told["count"]):
                trainer.step()
                outcome = attachment.sync()
                attachment.settle()
                if outcome is not None and len(outcome.contributors) == told["peers"]:
                    whole.append(outcome.elapsed_s)
            say("rounds", whole=len(whole), seconds=whole, round=attachment.round)
        elif told["do"] == "time" and trainer is not None and attachment is not None:
            plain = trainer.plainly()
            say(
                "time",
                **in_turns({"plain": plain, "attached": trainer, "control": plain}, told["pairs"]),
            )
        elif told["do"] == "busy":
            loop.run(told["where"])
            say("busy")
        elif told["do"] == "end":
            break
    loop.run("")
    swarm.close()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""One peer of `bench_race.py`: a script with its node. Arguments: home, run, parameters (not used:
the kit's).

    {"zero": SECONDS, "seed": 1, "worker": 0, "lr": 0.002, "step_s": 0.5, "steps": 400,
     "folder": DIR}  →  {"event": "trained", …}, and it goes on answering until {"do": "end"}

Worker 0 saves the anchor after each round that is committed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from _race_task import BATCH, Pace, Task
from _race_worker import say, sent

from atoll.node import join
from atoll.optim import attach


def main() -> None:
    """Train as told."""
    home, run = sys.argv[1], sys.argv[2]
    torch.set_num_threads(1)
    with join(run, home=home, private=True) as swarm:
        say("ready", peer=swarm.peer)
        given = json.loads(sys.stdin.readline())
        if given.get("do") == "end":
            return
        pace = Pace(given["step_s"])
        task = Task(given["seed"], given["worker"], given["lr"], pace)
        sync = attach(task.model, task.optimizer, swarm, batch_size=BATCH)
        say("attached")
        zero = json.loads(sys.stdin.readline())["zero"]
        time.sleep(max(0.0, zero - time.monotonic()))
        before, points, seen = sent(), [(0, 0.0)], sync.round
        for number in range(given["steps"]):
            task.backward(task.model, number)
            task.optimizer.step()
            if sync.round > seen:
                seen = sync.round
                points.append((number + 1, time.monotonic() - zero))
                if not given["worker"]:
                    with sync.evaluate_anchor():
                        task.save(Path(given["folder"]), number + 1)
            if sync.done:
                break
        seconds = time.monotonic() - zero
        say("trained", seconds=seconds, late_s=pace.late_s, points=points, sent=sent() - before)
        sys.stdin.readline()


if __name__ == "__main__":
    main()

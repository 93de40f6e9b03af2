#!/usr/bin/env python3
"""One peer of `bench_wan.py`: a script with its node that trains in steps of a given time.
Arguments: home, run, parameters.

    {"do": "go", "step_s": 0.05, "slice": 50000, "rounds": 10}  →  {"event": "trained", …}, and it
        trains on until {"do": "end"}

A step is real, but small: forward, backward and SGD of a narrow layer, and noise on a slice of the
large tensors, so that a round's progress is as long and as incompressible as a model's; then it
waits for its end. So peers that share few cores train as if each had its own. The n-th step ends
when n times ``step_s`` have gone by outside of optimizer.step(), so that what a sleep takes too
long does not add up; all that optimizer.step() takes, rounds included, is not training. Time counts
from the end of a round in which everybody is counted to that of the last one; a step that ends late
counts as ``step_s`` all the same.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

from atoll.collectives.outcomes import Outcome
from atoll.node import join
from atoll.optim import attach

TENSORS = 32  # of the large part: fragments are whole tensors
WARM_ROUNDS = 2
CAUGHT_UP = 0.1  # of a step by which the next may be shorter


def say(event: str, **fields: Any) -> None:
    """One line to the bench."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Model(torch.nn.Module):
    """A narrow layer that learns, and as many parameters more as are wanted."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.small = torch.nn.Linear(32, 1)
        self.large = torch.nn.ParameterList(torch.zeros(numel // TENSORS) for _ in range(TENSORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The narrow layer's: (batch, 32) to (batch, 1)."""
        return self.small(x)


class Trainer:
    """Steps of one length, and what they took."""

    def __init__(self, swarm: Any, numel: int) -> None:
        self.model = Model(numel)
        self.optimizer = torch.optim.SGD(self.model.small.parameters(), lr=1e-3)
        self.rounds: list[dict[str, Any]] = []
        self.sync = attach(self.model, self.optimizer, swarm, on_round=self._round)
        self.noise = torch.randn(1 << 16) * 1e-3
        self.number = self.late = 0
        self.began, self.inside, self.due = time.monotonic(), 0.0, 0.0

    def _round(self, outcome: Outcome) -> None:
        if outcome.status == "committed":
            fields = {
                "round": outcome.round,
                "contributors": len(outcome.contributors),
                "counted": outcome.counted,
            }
            self.rounds.append(
                {
                    **fields,
                    "elapsed_s": outcome.elapsed_s,
                    "bytes_sent": outcome.bytes_sent,
                    "at": time.monotonic(),
                }
            )

    @torch.no_grad()
    def _progress(self, count: int) -> None:
        """Noise on the next ``count`` elements of the large tensors."""
        while count > 0:
            tensor = self.model.large[self.number % TENSORS]
            for start in range(0, min(count, tensor.numel()), self.noise.numel()):
                part = tensor.data[start : start + min(self.noise.numel(), count)]
                part.add_(self.noise[: part.numel()])
            count -= tensor.numel()
            self.number += 1

    def step(self, step_s: float, touched: int) -> None:
        """One inner step. ``inside``: seconds spent in optimizer.step() so far, atoll's rounds
        among them; the rest is training time.
        """
        x = torch.randn(16, 32)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self._progress(touched)
        left = self.due + step_s - self.trained
        if left > 0:
            time.sleep(left)
        self.late += left < 0
        self.due = max(self.due + step_s, self.trained - CAUGHT_UP * step_s)
        began = time.monotonic()
        self.optimizer.step()
        self.inside += time.monotonic() - began

    @property
    def trained(self) -> float:
        """Seconds of training since the script began."""
        return time.monotonic() - self.began - self.inside


def main() -> None:
    """Train as told."""
    home, run, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    swarm = join(run, home=home, private=True)
    trainer = Trainer(swarm, numel)
    torch.manual_seed(int.from_bytes(swarm.peer.encode()[-4:], "big"))
    say("ready", peer=swarm.peer)
    told, ended = json.loads(sys.stdin.readline()), threading.Event()
    trainer.began = time.monotonic()
    if told["do"] == "end":
        swarm.close()
        return
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    whole = [0]
    steps, began, waited, inside, reported = 0, 0.0, 0.0, 0.0, False
    while not ended.is_set():
        before = len(trainer.rounds)
        trainer.step(told["step_s"], told["slice"])
        steps += 1
        whole += [1] * sum(row["contributors"] == told["peers"] for row in trainer.rounds[before:])
        if began == 0.0 and len(whole) > WARM_ROUNDS and len(trainer.rounds) > before:
            steps, began, waited, trainer.late = (
                0,
                time.monotonic(),
                trainer.sync.stats["waiting_s"],
                0,
            )
            inside = trainer.inside
            trainer.rounds.clear()
        elif (
            began
            and not reported
            and len(trainer.rounds) > before
            and len(trainer.rounds) >= told["rounds"]
        ):
            stats, wall = trainer.sync.stats, time.monotonic() - began
            reported = True
            say(
                "trained",
                steps=steps,
                wall_s=wall,
                training_share=steps * told["step_s"] / wall,
                late_steps=trainer.late,
                waiting_s=stats["waiting_s"] - waited,
                inside_s=trainer.inside - inside,
                rounds=trainer.rounds,
            )
    swarm.close()


if __name__ == "__main__":
    main()

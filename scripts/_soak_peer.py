"""One peer of soak.py: a script that trains a toy, with its node. Says JSON lines, takes JSON
lines.

It says "ready", then "round" after every round it hears of, with the anchor's round and digest;
{"do": "loss"} → "loss" of the newest anchor on held-out data; {"do": "end"} → it leaves the run in
good order and ends.

The toy: a network of two layers learns what a fixed one says, with noise. Its loss comes down to
the noise's and stays there, whoever trained.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

from atoll.collectives.errors import AtollError
from atoll.collectives.outcomes import Outcome
from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths
from atoll.optim import attach

INPUTS, HIDDEN, BATCH = 32, 64, 32
NOISE = 0.3
STEP_S = 0.02  # a step that costs something: rounds are training, not talk
HELD_OUT = 4096
TARGET_SEED, HELD_OUT_SEED = 1, 2


def network() -> nn.Sequential:
    """What learns, and what is learnt."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def target() -> nn.Sequential:
    """The same for everybody."""
    torch.manual_seed(TARGET_SEED)
    return network()


def batch(of: nn.Sequential, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (size, INPUTS) and noisy outputs (size, 1)."""
    x = torch.randn(size, INPUTS, generator=generator)
    with torch.no_grad():
        return x, of(x) + NOISE * torch.randn(size, 1, generator=generator)


class Trainer:
    """Trains until it is told to end."""

    def __init__(self, home: str, run: str) -> None:
        self.home = home
        self.swarm = join(run, home=home, private=True)
        self.target = target()
        torch.manual_seed(0)
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.attachment = attach(self.model, self.optimizer, self.swarm, on_round=self._round)
        self.generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "big"))
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put({"do": "end"})

    def say(self, event: str, **fields: Any) -> None:
        """One line, with the node that is ours now."""
        node = read_node_file(find_paths(self.home))
        print(
            json.dumps({"event": event, "node_pid": node.pid if node else 0, **fields}), flush=True
        )

    def _round(self, outcome: Outcome) -> None:
        try:
            view = self.swarm.anchor()
        except AtollError:  # the node is gone: the next round tells
            return
        round_, digest = view.round, view.digest
        view.release()
        self.say(
            "round", status=outcome.status, counted=outcome.counted, round=round_, digest=digest
        )

    def loss(self) -> None:
        """Mean squared error of the newest anchor on held-out data."""
        x, y = batch(self.target, HELD_OUT, torch.Generator().manual_seed(HELD_OUT_SEED))
        with self.attachment.evaluate_anchor() as view, torch.no_grad():
            self.say("loss", round=view.round, loss=float((self.model(x) - y).square().mean()))

    def train(self) -> None:
        """Steps, and orders between them."""
        self.say("ready", peer=self.swarm.peer)
        while True:
            if not self.orders.empty():
                order = self.orders.get()["do"]
                if order == "end":
                    return
                self.loss()
            x, y = batch(self.target, BATCH, self.generator)
            self.attachment.samples(BATCH)
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            time.sleep(STEP_S)


def main() -> None:
    """HOME RUN."""
    torch.set_num_threads(1)
    trainer = Trainer(sys.argv[1], sys.argv[2])
    trainer.train()
    trainer.attachment.detach()
    trainer.swarm.leave()
    trainer.swarm.close()


if __name__ == "__main__":
    main()

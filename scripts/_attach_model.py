"""The model that `bench_attach.py` trains, in our environment and in hivemind's: linear layers, AdamW, small batches."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

LAYERS, BATCH = 4, 8


def pss(pid: int | str) -> int:
    """Proportional set size of a process, bytes: what it shares with others is divided among them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no Pss")


class Trainer:
    """A model of about ``numel`` parameters, its optimizer, and steps."""

    def __init__(self, numel: int) -> None:
        self.width = max(1, round(math.sqrt(numel / LAYERS)))
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
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


def in_turns(trainers: dict[str, Trainer], turns: int) -> dict[str, list[tuple[float, float]]]:
    """`Trainer.timed` of each, so often, forwards and backwards in turn."""
    for trainer in [*trainers.values()] * 3:
        trainer.step()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for turn in range(turns):
        order = list(trainers.items())
        for name, trainer in order if turn % 2 else reversed(order):
            seconds[name].append(trainer.timed())
    return seconds

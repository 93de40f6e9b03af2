"""The model that `bench_attach.py` trains, in our environment and in hivemind's: linear layers,
AdamW, small batches.
"""

from __future__ import annotations

import copy
import ctypes
import math
import time
from pathlib import Path
from typing import Any

import torch

LAYERS, BATCH = 4, 8


def steady_allocator() -> None:
    """Keep what is freed, until `held`: else the C library gives a step's own tensors to the kernel
    and takes them back, now and then, and two trainers that are alike differ by 5 %."""
    libc = ctypes.CDLL(None)
    for parameter, size in (
        (-3, 32 << 20),
        (-1, (1 << 31) - 1),
    ):  # M_MMAP_THRESHOLD at the most it can be, M_TRIM_THRESHOLD
        if not libc.mallopt(parameter, size):
            raise OSError("mallopt refused")


def held() -> int:
    """`pss` of this process without what was freed and kept."""
    ctypes.CDLL(None).malloc_trim(0)
    return pss("self")


def pss(pid: int | str) -> int:
    """Proportional set size of a process, bytes: what it shares with others is divided among them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no Pss")


class Trainer:
    """A model of about ``numel`` parameters, its optimizer, and steps."""

    def __init__(self, numel: int, device: str = "cpu") -> None:
        self.width = max(1, round(math.sqrt(numel / LAYERS)))
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS))
        ).to(device)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(BATCH, self.width).to(device)

    def plainly(self) -> Trainer:
        """The same model with an optimizer that has the same state, in the same memory, and no
        hooks.
        """
        other = copy.copy(self)
        other.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        other.optimizer.state = self.optimizer.state
        return other

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
        """Wall and CPU seconds of a step; CPU of all threads of this process. On a GPU until it has
        done the step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        if self.data.is_cuda:
            torch.cuda.synchronize()
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

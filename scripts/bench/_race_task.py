"""What all contestants of bench_race.py train, in plain torch: a byte-level GPT of a million
parameters, batches that follow from seed, worker and step, and steps that last as long as they are
told to, whatever the load. Imported inside rivals' environments, too: torch and the standard
library only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 144, 4, 4, 64, 2
BLOCK_BYTES, HELD_OUT_EVERY, LOOKED_AT = 4096, 10, 256  # windows of held-out text
WARM_STEPS = 20  # until the learning rate is whole
FORWARD = 1 / 3  # of a step; the rest is backward


class Pace:
    """A step lasts ``step_s`` seconds: forward and backward wait at the end of each block until its
    share is over, so that whoever exchanges gradients during backward has that time for it.
    ``late_s``: by how much all steps together were longer.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s, self.late_s, self._began = step_s, 0.0, 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def until(self, share: float) -> None:
        """Wait until this share of the step is over."""
        left = self._began + share * self.step_s - time.monotonic()
        if left > 0:
            time.sleep(left)

    def end(self) -> None:
        """Its last gradient is there."""
        self.late_s += max(0.0, time.monotonic() - self._began - self.step_s)


class _Waits(torch.autograd.Function):
    """The identity, which waits in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, forward: float, backward: float) -> Tensor:
        """``x``; ``forward``, ``backward``: shares of the step that are over then."""
        ctx.pace, ctx.share = pace, backward
        pace.until(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient as it is."""
        ctx.pace.until(ctx.share)
        return grad_outputs[0], None, None, None


class Model(nn.Module):
    """Bytes in, logits of the next byte out; (batch, time) int64 to (batch, time, 256)."""

    def __init__(self, seed: int, pace: Pace | None = None) -> None:
        super().__init__()
        self.pace = pace
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(256, WIDTH)
            self.positions = nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(LAYERS)
            )
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
            for embedding in (self.tokens, self.positions):
                nn.init.normal_(embedding.weight, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits; where there is a pace, as slowly as that says."""
        mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf")).triu(1)
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for done, block in enumerate((*self.blocks, None)):
            if self.pace is not None:
                part = done / LAYERS
                shares = FORWARD * part, FORWARD + (1 - FORWARD) * (1 - part)
                x = _Waits.apply(x, self.pace, *shares)
            if block is not None:
                x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Task:
    """One worker's share of the data."""

    def __init__(self, seed: int, worker: int, lr: float, pace: Pace | None = None) -> None:
        text = "\n".join(import_module("pydoc_data.topics").topics.values()).encode()
        blocks = [text[at : at + BLOCK_BYTES] for at in range(0, len(text), BLOCK_BYTES)]
        held_out = b"".join(blocks[::HELD_OUT_EVERY])
        training = b"".join(each for at, each in enumerate(blocks) if at % HELD_OUT_EVERY)
        self.training, self.held_out = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (training, held_out)
        )
        self.seed, self.worker, self.lr, self.pace = seed, worker, lr, pace
        self.model = Model(seed, pace)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, (0.9, 0.99))

    def batch(self, worker: int, step: int) -> Tensor:
        """Windows of a worker's step: (BATCH, CONTEXT + 1) int64, a function of seed, worker and
        step.
        """
        draw = torch.Generator().manual_seed(hash((self.seed, worker, step)) & (2**62 - 1))
        starts = torch.randint(len(self.training) - CONTEXT, (BATCH, 1), generator=draw)
        return self.training[starts + torch.arange(CONTEXT + 1)].long()

    def backward(self, model: nn.Module, step: int, workers: Sequence[int] | None = None) -> None:
        """Gradients of the mean loss over these workers' batches; None: of its own."""
        tokens = torch.cat([self.batch(w, step) for w in workers or (self.worker,)])
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (step + 1) / WARM_STEPS)
        self.optimizer.zero_grad()
        if self.pace is not None:
            self.pace.begin()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if self.pace is not None:
            self.pace.end()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Nats a byte over windows of held-out text at equal distances."""
        starts = torch.linspace(0, len(self.held_out) - CONTEXT - 1, LOOKED_AT).long()[:, None]
        tokens = self.held_out[starts + torch.arange(CONTEXT + 1)].long()
        pace, self.model.pace = self.model.pace, None
        logits = self.model(tokens[:, :-1])
        self.model.pace = pace
        return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    def save(self, folder: Path, step: int) -> None:
        """The weights after so many steps, to be evaluated after the race."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        save_file(weights, folder / f"{step:06}.safetensors")

    def losses(self, folder: Path) -> dict[int, float]:
        """Of all weights in a folder, by step; the files are gone afterwards."""
        found = dict[int, float]()
        for path in sorted(folder.glob("*.safetensors")):
            self.model.load_state_dict(load_file(path))
            found[int(path.stem)] = self.evaluate()
            path.unlink()
        return found


def curve(
    arm: str, seed: int, lr: float, steps: int, every: int, workers: int, look: int
) -> list[tuple[int, float]]:
    """Held-out loss by step of what does not depend on time: "alone", "ddp" (one process with all
    workers' batches) and "local" (AdamW each, and the mean of all weights after ``every`` steps).
    """
    tasks = [Task(seed, worker, lr) for worker in range(workers if arm == "local" else 1)]
    first, found = tasks[0], list[tuple[int, float]]()
    for step in range(steps):
        for task in tasks:
            task.backward(task.model, step, range(workers) if arm == "ddp" else None)
            task.optimizer.step()
        if arm == "local" and (step + 1) % every == 0:
            with torch.no_grad():
                for same in zip(*(task.model.parameters() for task in tasks), strict=True):
                    mean = torch.stack(same).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
        if (step + 1) % (every if arm == "local" else look) == 0:
            found.append((step + 1, first.evaluate()))
    return found

"""What the clients of a simulation learn: a model, samples, and one live copy of the model that
plays every client in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model.flat import FlatVector
from .partition import Indices


@dataclass(frozen=True, slots=True)
class Task:
    """``model()`` makes the model, with the same parameters in every call. Rows of ``x`` are
    samples, ``y``: int64 classes, (n,) or (n, time).

    ``kind``: int64 (n,), by which samples are dealt to clients; None: ``y``. Test rows are no
    client's.
    """

    model: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    kind: Tensor | None = None

    @property
    def labels(self) -> Indices:
        """What partitions go by."""
        return (self.y if self.kind is None else self.kind).numpy()


class Learner:
    """The live model: `live` is its flat vector, parameters first (``parameters`` of them), then
    running statistics; float32 (numel,).
    """

    def __init__(self, task: Task) -> None:
        self.model = task.model()
        flat = FlatVector(self.model)
        self.layout = flat.layout
        self.parameters = sum(
            spec.numel for spec in flat.layout.tensors if spec.role == "parameter"
        )
        self.live, self.gradient = torch.empty(flat.numel), torch.zeros(self.parameters)
        for spec, tensor in zip(flat.layout.tensors, flat.tensors, strict=True):
            mine = self.live[spec.offset : spec.offset + spec.numel].view(spec.shape)
            mine.copy_(tensor.detach())
            tensor.data = mine
            if spec.role == "parameter":
                tensor.grad = self.gradient[spec.offset : spec.offset + spec.numel].view(spec.shape)

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradient of the mean loss at `live`, float32 (parameters,); the next call reuses it."""
        self.gradient.zero_()
        F.cross_entropy(self.model(x).flatten(0, -2), y.flatten()).backward()
        return self.gradient

    @torch.no_grad()
    def measure(self, at: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Accuracy and mean loss of these parameters; `live` is theirs afterwards."""
        self.live.copy_(at)
        self.model.eval()
        logits, wanted = self.model(x).flatten(0, -2), y.flatten()
        self.model.train()
        return float((logits.argmax(-1) == wanted).double().mean()), float(
            F.cross_entropy(logits, wanted)
        )


def endless(rows: int, size: int, key: tuple[int, ...]) -> Iterator[Indices]:
    """Indices of batches of ``size`` of ``rows`` samples: pass after pass in an order drawn from
    ``key``; a smaller set is one batch.
    """
    rng, size = np.random.default_rng(key), min(size, rows)
    while True:
        order = rng.permutation(rows)
        for start in range(0, rows - size + 1, size):
            yield order[start : start + size]


def passes(rows: int, size: int, key: tuple[int, ...]) -> Iterator[Indices]:
    """As `endless`, with what a pass leaves over as its last, shorter batch: an epoch is all."""
    rng = np.random.default_rng(key)
    while True:
        order = rng.permutation(rows)
        yield from (order[start : start + size] for start in range(0, rows, size))

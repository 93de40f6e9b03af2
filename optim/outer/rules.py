"""Outer optimizers: what each does to a range of the anchor. Those that few runs ask for, and a new
one, are in `more_rules`.

Every operation is one separately rounded multiplication, addition, subtraction, division or square
root on a whole range, in one fixed order; nothing fused is used (`add(alpha=)`, `addcmul`,
`addcdiv`, `lerp`), whose rounding differs by CPU and by position in the tensor; nor torch's square
root, whose library rounds some values otherwise than IEEE does: numpy's is the CPU's own. Norms are
sums of squares over whole tensors, as a tree whose shape follows from the length
(`kernels.square_sum`). So neither the instruction set nor the number of threads nor the cuts change
a bit.

g: mean pseudo-gradient, θ: anchor, lr: learning rate, μ: momentum, m and v: state vectors, zero at
first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...collectives.codecs import kernels
from ...collectives.outer_rules import OUTER_RULES, OuterSettings
from .rows import ROWS


def as_float32(value: float) -> float:
    """``value`` rounded to float32, so that scalar factors are the same number everywhere."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


class Rule(Protocol):
    """One outer optimizer. ``vectors``: state vectors as long as the anchor, of which the first
    ``momenta`` hold past steps: a governor restarts these. ``whole``: ranges are whole tensors, of
    which each has ``numbers`` more numbers of state."""

    vectors: int
    momenta: int
    whole: bool
    numbers: int

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        """Write ``new`` from ``old`` and ``g``; update ``state``. All float32 (n,), as are the two
        scratch vectors.
        """


class Sgd:
    """``θ ← θ - lr·g``; no state (FedAvg, arXiv 1602.05629; with lr 1 plain averaging)."""

    vectors, momenta, whole, numbers = 0, 0, False, 0

    def __init__(self, settings: OuterSettings) -> None:
        pass

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        if lr == 1.0:  # the same bits, without a pass
            torch.sub(old, g, out=new)
            return
        update = scratch[0]
        torch.mul(g, lr, out=update)
        torch.sub(old, update, out=new)


class Nesterov:
    """``m ← μ·m + g``; ``θ ← θ - lr·(g + μ·m)``, as in PyTorch (DiLoCo, arXiv 2311.08105)."""

    vectors, momenta, whole, numbers = 1, 1, False, 0

    def __init__(self, settings: OuterSettings) -> None:
        self._mu = as_float32(settings.momentum)

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        momentum, update = state[0], scratch[0]
        momentum.mul_(self._mu)
        momentum.add_(g)
        torch.mul(momentum, self._mu, out=update)
        torch.add(g, update, out=update)
        update.mul_(lr)
        torch.sub(old, update, out=new)


class Momentum(Nesterov):
    """``m ← μ·m + g``; ``θ ← θ - lr·m`` (FedAvgM, arXiv 1909.06335). Not in a manifest yet."""

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        momentum, update = state[0], scratch[0]
        momentum.mul_(self._mu)
        momentum.add_(g)
        torch.mul(momentum, lr, out=update)
        torch.sub(old, update, out=new)


def norm(x: Tensor) -> float:
    """The Euclidean norm of a float32 vector, with the same bits on every machine."""
    scratch = torch.empty(
        1 << max(0, x.numel() - 1).bit_length(), dtype=torch.float64, device="cpu"
    )
    return math.sqrt(kernels.square_sum(x, scratch))


PLAIN_RULES: dict[str, type[Sgd | Nesterov]] = {
    "sgd": Sgd,
    "nesterov": Nesterov,
    "momentum": Momentum,
}
KINDS = (*dict.fromkeys((*PLAIN_RULES, *OUTER_RULES)),)
"""By `OuterSettings.kind`. A name stands for one rule for ever: a changed one gets a new name."""


def make_rule(settings: OuterSettings) -> Rule:
    """The rule of these settings. Raises ConfigError where its kind is not installed."""
    if settings.kind in PLAIN_RULES:
        return PLAIN_RULES[settings.kind](settings)
    return ROWS.load("rules", "RULES", key="outer.optimizer")[settings.kind](settings)

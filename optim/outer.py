"""The outer step: what a committed mean does to the anchor. Pure, on float32, with the same bits on every machine.

Every operation is one separately rounded multiplication, addition or subtraction on whole ranges, in one fixed order. Nothing
fused is used (`add(alpha=)`, `addcmul`, `lerp`): their rounding differs by CPU and by position in the tensor. So neither the
instruction set nor the number of threads nor the ranges in which the step is applied change a bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives.errors import ConfigError
from ..collectives.layout import Layout, Role
from ..collectives.swarm import OuterSettings, RunSettings

BLOCK_ELEMENTS = 65_536  # four float32 arrays of it are 1 MiB: they stay in the L2 cache between the six operations

PLAIN = OuterSettings(kind="sgd", lr=1.0, momentum=0.0)


def effective_outer(settings: RunSettings) -> OuterSettings:
    """The outer optimizer a run really uses: plain averaging for the method "local_sgd", else ``settings.outer``."""
    return PLAIN if settings.method == "local_sgd" else settings.outer


def as_float32(value: float) -> float:
    """``value`` rounded to float32, so that scalar factors are the same number wherever they are applied."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


class OuterStep:
    """Nesterov momentum or plain SGD on the anchor.

    With the mean pseudo-gradient g, momentum m, anchor θ, learning rate lr and factor μ, in this order of operations:

    * "nesterov": ``m ← μ·m + g``; ``θ ← θ - lr·(g + μ·m)`` (the PyTorch convention; DiLoCo, arXiv 2311.08105);
    * "sgd": ``θ ← θ - lr·g``; ``momentum`` is neither read nor written (FedAvg; with lr 1 plain averaging).

    Ranges of running statistics (see `Layout`) take ``θ ← θ - g`` whatever the settings: they are averaged, since momentum would
    carry a variance past zero. A variance is held at or above zero, which a lossy codec could miss.

    A step holds scratch of `BLOCK_ELEMENTS` floats and is used by one thread at a time.
    """

    def __init__(self, settings: OuterSettings, layout: Layout | None = None) -> None:
        """Raises ConfigError for values outside lr > 0, 0 <= momentum < 1. Without a layout all elements are parameters."""
        if not (math.isfinite(settings.lr) and settings.lr > 0):
            raise ConfigError(f"outer learning rate {settings.lr} is not a positive number", key="$.train.outer.lr")
        if not 0 <= settings.momentum < 1:
            raise ConfigError(f"outer momentum {settings.momentum} is not in [0, 1)", key="$.train.outer.momentum")
        self.settings = settings
        self._lr = as_float32(settings.lr)
        self._mu = as_float32(settings.momentum)
        self._special = statistics_ranges(layout) if layout is not None else ()
        self._scratch = torch.empty(BLOCK_ELEMENTS, dtype=torch.float32, device="cpu")

    @property
    def needs_momentum(self) -> bool:
        """Whether a momentum vector is read and written."""
        return self.settings.kind == "nesterov"

    def apply(self, anchor_in: Tensor, mean: Tensor, momentum: Tensor | None, anchor_out: Tensor) -> None:
        """One step on whole vectors, all float32, shape (numel,), contiguous, on the CPU; see `apply_range`."""
        self.apply_range(anchor_in, mean, momentum, anchor_out, 0, anchor_in.numel())

    @torch.no_grad()
    def apply_range(self, anchor_in: Tensor, mean: Tensor, momentum: Tensor | None, anchor_out: Tensor, start: int, stop: int) -> None:
        """One step on elements [start, stop).

        ``anchor_in`` (read), ``momentum`` (updated in place; None for "sgd") and ``anchor_out`` (written) are whole vectors,
        float32, shape (numel,); ``mean`` (read) holds only the range, shape (stop - start,). ``anchor_out`` is another buffer
        than ``anchor_in``. Each element must be covered exactly once a round; order and cuts are free.
        """
        if mean.numel() != stop - start:
            raise ValueError(f"mean of {mean.numel()} elements for a range of {stop - start}")
        if self.needs_momentum and momentum is None:
            raise ValueError("Nesterov needs a momentum vector")
        for first, last, role in self._pieces(start, stop):
            for a in range(first, last, BLOCK_ELEMENTS):
                b = min(a + BLOCK_ELEMENTS, last)
                g, old, new = mean[a - start : b - start], anchor_in[a:b], anchor_out[a:b]
                if role == "parameter":
                    self._step(old, g, momentum[a:b] if momentum is not None else None, new)
                else:
                    torch.sub(old, g, out=new)
                    if role == "variance":
                        new.clamp_(min=0.0)

    def _step(self, old: Tensor, g: Tensor, momentum: Tensor | None, new: Tensor) -> None:
        update = self._scratch[: old.numel()]
        if momentum is not None and self.needs_momentum:
            momentum.mul_(self._mu)
            momentum.add_(g)
            torch.mul(momentum, self._mu, out=update)
            torch.add(g, update, out=update)
            update.mul_(self._lr)
        else:
            torch.mul(g, self._lr, out=update)
        torch.sub(old, update, out=new)

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, Role]]:
        """[start, stop) cut where the role changes."""
        pieces: list[tuple[int, int, Role]] = []
        at = start
        for first, last, role in self._special:
            if last <= at or first >= stop:
                continue
            if first > at:
                pieces.append((at, first, "parameter"))
            pieces.append((max(first, at), min(last, stop), role))
            at = min(last, stop)
        if at < stop:
            pieces.append((at, stop, "parameter"))
        return pieces


def statistics_ranges(layout: Layout) -> Sequence[tuple[int, int, Role]]:
    """The ranges of a layout that are not parameters, in order, neighbours of one role joined."""
    ranges: list[tuple[int, int, Role]] = []
    for spec in layout.tensors:
        if spec.role == "parameter" or spec.numel == 0:
            continue
        stop = spec.offset + spec.numel
        if ranges and ranges[-1][1] == spec.offset and ranges[-1][2] == spec.role:
            ranges[-1] = (ranges[-1][0], stop, spec.role)
        else:
            ranges.append((spec.offset, stop, spec.role))
    return tuple(ranges)

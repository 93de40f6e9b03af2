"""The pseudo-gradient: what a member contributes to a round."""

from __future__ import annotations

import torch
from torch import Tensor

from .vector import ModelVector, RangeSource


@torch.no_grad()
def write_pseudo_gradient(flat: ModelVector, base: RangeSource, out: Tensor) -> None:
    """Write ``base - live`` into ``out``: float32, shape (numel,), on the CPU.

    ``base`` is the anchor the live parameters started from. One subtraction an element, straight
    into ``out``; where the live type is narrower than float32 the anchor is rounded to it first,
    since that is what training started from. The result is a descent direction's negative: outer
    optimizers treat it as a gradient (DiLoCo, arXiv 2311.08105).
    """
    for segment, live in flat.pull():
        part = out[segment.start : segment.stop]
        base.copy_into(part, segment.start)
        flat.round_to_live(segment, part)
        part.sub_(live)

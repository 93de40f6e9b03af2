"""A lost stage of a pipeline from its neighbours (CheckFree: Blagoev, Ersoy and Chen 2025, arXiv
2506.15461).

Stages of a transformer are alike, and residual connections make each close to a mean of the two
beside it. So a stage whose holder is gone for good starts again as that mean, weighted by who
learned more of late; training goes on at a rate a little higher, and no checkpoint was needed.

Nothing in atoll loses a stage, since every peer holds the whole model; the function is here for
scripts that split one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

LEARNING_RATE_AFTER = 1.1
"""By how much the paper raises the learning rate once a stage was recovered."""


def recovered_stage(
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    *,
    norms: tuple[float, float] = (1.0, 1.0),
) -> dict[str, torch.Tensor]:
    """The state of the stage between two others: (w0 before + w1 after) / (w0 + w1).

    Args:
        before, after: the neighbours' state dicts: the same names, shapes and dtypes. What is no
            floating-point tensor (a counter) is taken from ``before``.
        norms: the squared 2-norms w0, w1 of the neighbours' last gradients. Where both are 0, the
            plain mean is taken.

    Raises:
        ValueError: other names, shapes or dtypes; a weight that is negative or not finite.

    Returns:
        New tensors, summed in float32 or wider, on ``before``'s devices.
    """
    if before.keys() != after.keys():
        raise ValueError("stages with other parameters: " + ", ".join(before.keys() ^ after.keys()))
    first, second = norms
    if not 0 <= first + second < float("inf") or min(norms) < 0:
        raise ValueError(f"norms of gradients are finite and not negative, not {norms}")
    share = second / (first + second) if first + second else 0.5
    stage: dict[str, torch.Tensor] = {}
    for name, value in before.items():
        other = after[name]
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"{name}: {value.dtype} {tuple(value.shape)} beside"
                f" {other.dtype} {tuple(other.shape)}"
            )
        if not value.is_floating_point():
            stage[name] = value.clone()
            continue
        wide = torch.promote_types(value.dtype, torch.float32)
        mixed = value.to(wide) * (1 - share) + other.to(value.device, wide) * share
        stage[name] = mixed.to(value.dtype)
    return stage

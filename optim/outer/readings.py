"""What a member says of its contribution beside the vector, and what an outer step makes of it.

The log records each contributor's word (`group.Reading`), so that all members know the same of a
round. A word may be false. What comes of it is therefore bounded: a stretch lies between 1 and √k,
of losses the median counts.
"""

from __future__ import annotations

import math
import statistics
from typing import cast

import msgspec
import torch
from torch import Tensor

from ...collectives.group import Evaluated, Reading
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from .reported import Reported

LARGEST = 1e30


def reading_of(
    vector: Tensor,
    layout: Layout,
    outer: OuterSettings,
    loss: float | Evaluated | None,
    lag: float | None = None,
) -> Reading:
    """What the run wants to know of a contribution, float32 (numel,): of what its outer step does
    not ask for, nothing. What an evaluation found is for members, too.
    """
    norm = None
    if outer.stretch:
        pieces = [
            vector[spec.offset : spec.offset + spec.numel]
            for spec in layout.tensors
            if spec.role == "parameter" and spec.numel
        ]
        norm = _sayable(math.hypot(*(float(torch.linalg.vector_norm(piece)) for piece in pieces)))
    found = loss if isinstance(loss, Evaluated) else None
    mean = found.loss if found is not None else cast("float | None", loss)
    told = _sayable(mean) if outer.governor else None
    return Reading(
        told if found is None else msgspec.structs.replace(found, loss=told), norm, _sayable(lag)
    )


def _sayable(value: float | None) -> float | None:
    # Neither NaN nor infinity.
    return value if value is not None and abs(value) <= LARGEST else None


def stretch(reported: Reported, norm: float) -> float:
    """By what a mean of this norm is to be multiplied, so that it is as long as the contributions
    are on average (by samples).

    At least 1; at most √k for k contributions: what they need that stand at right angles to one
    another.
    """
    norms = [(weight, reading.norm) for weight, reading in reported if reading.norm is not None]
    if not norms or not norm > 0:
        return 1.0
    typical = math.fsum(weight * length for weight, length in norms) / sum(
        weight for weight, _ in norms
    )
    return min(max(1.0, typical / norm), math.sqrt(len(reported)))


def median_loss(reported: Reported) -> float | None:
    losses = [reading.loss for _, reading in reported if reading.loss is not None]
    return statistics.median(losses) if losses else None

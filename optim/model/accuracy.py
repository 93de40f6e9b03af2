"""What a round with a wished error really loses: how far a member's contribution is from what its
encoding says, measured where it is written.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...collectives.codecs.codec import Grid

MOST_CHUNKS = 64
TWICE = math.sqrt(2)  # contributions are encoded, and so is their mean: squares add up


@torch.no_grad()
def realised_error(grid: Grid, contribution: Tensor) -> float:
    """What a round of contributions like this one, float32 (numel,), loses, relative to their
    mean. Of a long vector `MOST_CHUNKS` chunks at equal distances are looked at.

    It is what encoding this one loses times √2, as many members who differ find it; of members
    with equal contributions errors average out, and a round loses less.
    """
    stride = -(-grid.chunks // MOST_CHUNKS)
    wire = memoryview(bytearray(max(grid.wire_bytes(chunk) for chunk in range(grid.chunks))))
    lost = whole = 0.0
    for chunk in range(0, grid.chunks, stride):
        start, codec = chunk * grid.chunk_elements, grid.codec(chunk)
        values = contribution[start : start + grid.elements(chunk)]
        encoded = grid.wire(wire[: grid.wire_bytes(chunk)], chunk)
        decoded = torch.empty_like(values)
        codec.encode(values, encoded)
        codec.decode(encoded, decoded)
        lost += float(torch.linalg.vector_norm(decoded.sub_(values), dtype=torch.float64)) ** 2
        whole += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    return TWICE * math.sqrt(lost / whole) if whole > 0 else 0.0

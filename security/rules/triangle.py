"""Gram matrices whose bits follow from the rows alone, on any machine: what members of a round tell
each other of their parts.

The upper triangle, row by row. Products of float32 values are exact in float64. Value k of a chunk
goes to lane k % 64; each lane adds up its values in order, and lanes are folded in halves. So
whoever holds the same rows gets the same triangle, and the owner of one row its diagonal.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .bounds import check_rows
from .native import KERNEL, LANES, Kernel
from .numbers import Matrix, Vector, total

LARGEST = 1e90  # of a squared norm: 2^34 values of float32 stay below
SLACK = 1 + 2.0**-20  # of what Cauchy and Schwarz allow: far more than roundings come to


def pairs(n: int) -> int:
    """How many numbers the triangle of n rows is."""
    return n * (n + 1) // 2


def triangle(rows: Tensor, compiled: Kernel | None = KERNEL) -> Vector:
    """Of one chunk: float64 (pairs(n),). rows: float32 (n, d), finite, on the CPU, not modified."""
    check_rows(rows)
    if compiled is not None:
        return compiled.triangle(rows)
    n, d = rows.shape
    padded = np.zeros((n, -(-d // LANES) * LANES), dtype=np.float32)
    padded[:, :d] = rows.numpy()
    sums, term = np.zeros((n, n, LANES)), np.empty((n, n, LANES))
    for start in range(0, d, LANES):
        strip = padded[:, start : start + LANES].astype(np.float64)
        sums += np.multiply(strip[:, None], strip, out=term)
    return total(sums)[np.triu_indices(n)]


def square(values: Vector, n: int) -> Matrix:
    """The whole matrix."""
    out = np.zeros((n, n))
    out[np.triu_indices(n)] = values
    return out + np.triu(out, 1).T


def diagonal(n: int) -> list[int]:
    """Where the squared norms of the n rows stand."""
    return [row * n - row * (row - 1) // 2 for row in range(n)]


def impossible(values: Vector, n: int) -> str | None:
    """Why no n rows have this triangle, as far as pairs tell; ``values`` come from a peer."""
    if not np.isfinite(values).all():
        return "not finite"
    norms = values[diagonal(n)]
    if (norms < 0).any() or (norms > LARGEST).any():
        return "a squared norm is negative, or none of float32 values"
    matrix, lengths = square(values, n), np.sqrt(norms) * SLACK
    return (
        "an inner product is larger than the norms allow"
        if (np.abs(matrix) > lengths[:, None] * lengths).any()
        else None
    )

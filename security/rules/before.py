"""Steps before a rule: NNM, bucketing, clipping of norms, ARC. Each is a matrix (m, n) that makes m
new rows of n old ones.

So they work on Gram matrices (`gram.mixed_gram`; a rule's weights of the new rows, times the
matrix, are weights of the old) and on ranges of rows (`gram.mix`).
"""

from __future__ import annotations

import random

import numpy as np
from torch import Tensor

from ...collectives.errors import ConfigError
from .bounds import check_rows, need, positive
from .gram import distances, mix, squares
from .native import KERNEL, Kernel
from .numbers import Matrix, Vector, nearest, uniform


def nnm(products: Matrix, f: int) -> Matrix:
    """Nearest-neighbour mixing: each row becomes the mean of the n - f rows nearest to it, itself
    among them. arXiv 2302.01772 (n >= 2f + 1).
    """
    n = len(products)
    need("NNM", n, f, 2 * f + 1)
    return np.stack([uniform(n, nearest(row, n - f)) for row in distances(products)])


def bucketing(n: int, size: int, rng: random.Random) -> Matrix:
    """Means of random groups of ``size`` rows, the last perhaps smaller. Karimireddy, He and Jaggi
    2022, arXiv 2006.09365.

    Of the new rows as many may be hostile as of the old: f stays, n shrinks. ``rng`` must be
    common to all members and unknown to them before they have committed to their rows.
    """
    need("bucketing", n, 0, 1)
    if size < 1:
        raise ConfigError(
            f"bucketing: groups of {size}", key="size", why="a group has at least one row"
        )
    order = list(range(n))
    rng.shuffle(order)
    return buckets(order, size)


def buckets(order: list[int], size: int) -> Matrix:
    """`bucketing` with the rows in a given order."""
    return np.stack(
        [uniform(len(order), order[at : at + size]) for at in range(0, len(order), size)]
    )


def clipping(norms: Vector, longest: float) -> Matrix:
    """Rows longer than ``longest`` are shortened to it. norms: squared norms (`gram.squares`, or
    the Gram matrix's diagonal).
    """
    lengths = np.sqrt(norms)
    positive("clipping", "longest", longest)
    return np.diag(longest / np.maximum(lengths, longest))


def clip_in_place(rows: Tensor, longest: float, compiled: Kernel | None = KERNEL) -> None:
    """`clipping` of whole rows by who owns them: float32 (n, d), overwritten with what `mix` would
    return, in one pass through the memory.
    """
    check_rows(rows)
    positive("clipping", "longest", longest)
    if compiled is not None and rows.device.type == "cpu":
        compiled.clip(rows, longest)
    else:
        mix(rows, clipping(squares(rows, None, compiled), longest), rows)


def arc(norms: Vector, f: int) -> Matrix:
    """Adaptive clipping: the floor(2 f (n - f) / n) longest rows are shortened to the next longest.
    n >= 2f + 1.

    Allouah et al. 2024, arXiv 2405.14432. norms: squared norms.
    """
    n = len(norms)
    need("ARC", n, f, 2 * f + 1)
    lengths = np.sqrt(norms)
    longest = float(np.sort(lengths)[n - 2 * f * (n - f) // n - 1])
    if longest == 0:
        return np.diag(np.where(lengths > 0, 0.0, 1.0))
    return np.diag(np.where(lengths > longest, longest / np.maximum(lengths, longest), 1.0))

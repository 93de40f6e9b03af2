"""Rules that look at directions: CAF, which filters by variance, and Flag Aggregator, which
projects. Gram matrix -> weights.
"""

from __future__ import annotations

import numpy as np

from ...collectives.errors import ConfigError
from .bounds import need
from .centre import lower_median
from .numbers import Matrix, Vector, eigen, product, top_direction, total

FLAG_ITERATIONS = 10  # at most; each of them is the eigenvectors of an n x n matrix
# of the median norm: the direction of a shorter row counts as none, as no weight of float32 makes
# anything of it
TINY = 1e-30


def caf(products: Matrix, f: int) -> Vector:
    """Covariance-bound agnostic filter. Allouah, Guerraoui and Stephan 2025, arXiv 2505.01874 (n >=
    2f + 1).

    Rows lose weight in proportion to their variance along the direction of the most variance, until
    n - 2f are left; the result is that weighted mean, of those met, whose covariance is the least.
    Each pass takes all weight of a row that still had some, so there are at most n. (byzfl 0.0.11
    measures against rows without weight, too, so that one far row makes it go on for ever; for f =
    0 it returns None, this the mean.)
    """
    n = len(products)
    need("CAF", n, f, 2 * f + 1)
    weights = np.ones(n)
    best, least = weights / n, np.inf
    for _ in range(n):
        left = float(total(weights))
        if left <= n - 2 * f:
            break
        mean = weights / left
        towards = total(products * mean)
        around = products - towards[:, None] - towards + total(mean * towards)
        root = np.sqrt(mean)
        variance, direction = top_direction(root[:, None] * around * root)
        if variance < least:
            best, least = mean, variance
        spread = total(around * (root * direction)) ** 2
        most = float(np.max(np.where(weights > 0, spread, 0.0)))
        if most <= 0:
            break  # all that have weight are equal
        weights = np.where(spread >= most, 0.0, weights * (1 - np.minimum(spread / most, 1.0)))
    return best


def flag(products: Matrix, f: int, *, rank: int | None = None) -> Vector:
    """Flag Aggregator: the mean of the directions of the rows, projected on a subspace near most of
    them. Almasi et al. 2023, arXiv 2302.05865.

    The subspace of dimension ``rank`` (None: (n + 1) // 2) minimises the sum of the sines to the
    rows, by reweighting; without the paper's optional term of pairs. Rows are taken with norm 1;
    the result is scaled by their median norm. n >= 2f + 1; a bound beyond that is not known:
    hostile rows that agree with each other are a direction, too.
    """
    n = len(products)
    need("Flag Aggregator", n, f, 2 * f + 1)
    size = (n + 1) // 2 if rank is None else rank
    if not 1 <= size <= n:
        raise ConfigError(
            f"Flag Aggregator: rank {size} with {n} rows", key="rank", why="it must be 1 to n"
        )
    norms = np.sqrt(np.diagonal(products))
    there = norms > TINY * lower_median(norms)
    scale = np.where(there, 1 / np.where(there, norms, 1.0), 0.0)
    angles = scale[:, None] * products * scale
    shares, last, result = np.ones(n), np.inf, np.zeros(n)
    for _ in range(FLAG_ITERATIONS):
        values, vectors = eigen(shares[:, None] * angles * shares)
        kept = values[:size] > 1e-12 * max(float(values[0]), 1e-300)
        # Of the subspace, in terms of the rows.
        basis = shares[:, None] * vectors[:, :size][:, kept] / np.sqrt(values[:size][kept])
        onto = product(angles, basis)
        squared = np.abs(there - total(onto * onto)) if basis.size else np.ones(n)
        objective = float(total(np.sqrt(squared)))
        if objective >= last - 1e-10:
            break
        result, last = total(basis * total(onto.T)) / n if basis.size else result, objective
        shares = 1 / np.sqrt(np.sqrt(squared + 1e-7))
    return result * scale * lower_median(norms)

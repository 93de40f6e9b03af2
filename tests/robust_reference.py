"""The robust rules again, in plain numpy float64 and without any thought of speed, from the papers
and not from security/rules/.
"""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def squared(x: Array) -> Array:
    """Squared distances between all rows: of whole numbers, exact."""
    return np.array([[((a - b) ** 2).sum() for b in x] for a in x])


def apart(x: Array) -> Array:
    """Distances between all rows."""
    return np.sqrt(squared(x))


def median(x: Array, f: int) -> Array:
    return np.median(x, axis=0)


def trimmed_mean(x: Array, f: int) -> Array:
    return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)


def meamed(x: Array, f: int) -> Array:
    out = []
    for column in x.T:
        middle = np.median(column)
        ranked = sorted(column, key=lambda value: (abs(value - middle), value))
        out.append(np.mean(ranked[: len(x) - f]))
    return np.array(out)


def krum_order(x: Array, f: int, neighbours: int) -> list[int]:
    squares = squared(x)
    scores = [np.sort(np.delete(row, i))[:neighbours].sum() for i, row in enumerate(squares)]
    return sorted(range(len(x)), key=lambda i: (scores[i], i))


def krum(x: Array, f: int) -> Array:
    return x[krum_order(x, f, len(x) - f - 2)[0]]


def multi_krum(x: Array, f: int) -> Array:
    return x[krum_order(x, f, len(x) - f - 2)[: len(x) - f]].mean(axis=0)


def mda(x: Array, f: int) -> Array:
    lengths = apart(x)
    best = min(
        combinations(range(len(x)), len(x) - f),
        key=lambda rows: max([lengths[i, j] for i, j in combinations(rows, 2)], default=0.0),
    )
    return x[list(best)].mean(axis=0)


def monna(x: Array, f: int) -> Array:
    lengths = apart(x)[0]
    return x[sorted(range(len(x)), key=lambda i: (lengths[i], i))[: len(x) - f]].mean(axis=0)


def geometric_loss(x: Array, z: Array) -> float:
    return float(np.sqrt(((x - z) ** 2).sum(axis=1)).sum())


def clipping_residual(x: Array, v: Array, radius: float) -> Array:
    lengths = np.sqrt(((x - v) ** 2).sum(axis=1))
    return ((x - v) * np.minimum(1, radius / np.maximum(lengths, radius))[:, None]).sum(axis=0)


def caf(x: Array, f: int) -> Array:
    weights, least = np.ones(len(x)), np.inf
    best = x.mean(axis=0)
    while weights.sum() > len(x) - 2 * f:
        mean = weights @ x / weights.sum()
        around = x - mean
        values, vectors = np.linalg.eigh((around * weights[:, None]).T @ around / weights.sum())
        if values[-1] < least:
            best, least = mean, values[-1]
        spread = (around @ vectors[:, -1]) ** 2
        most = spread[weights > 0].max()
        if most <= 0:
            break
        weights = np.where(spread >= most, 0, weights * (1 - np.minimum(spread / most, 1)))
    return best


def flag(x: Array, f: int, rank: int, steps: int) -> Array:
    """With singular vectors instead of a Gram matrix."""
    lengths = np.sqrt((x**2).sum(axis=1))
    units, shares, last, result = (
        x / lengths[:, None],
        np.ones(len(x)),
        np.inf,
        np.zeros(x.shape[1]),
    )
    for _ in range(steps):
        left, sizes, _ = np.linalg.svd((units * shares[:, None]).T, full_matrices=False)
        basis = left[:, :rank][:, sizes[:rank] > 1e-6 * sizes[0]]
        misses = np.abs(1 - ((units @ basis) ** 2).sum(axis=1))
        if np.sqrt(misses).sum() >= last - 1e-10:
            break
        last, result = np.sqrt(misses).sum(), basis @ (basis.T @ units.mean(axis=0))
        shares = (misses + 1e-7) ** -0.25
    return result * np.sort(lengths)[(len(x) - 1) // 2]


def nnm(x: Array, f: int) -> Array:
    lengths = apart(x)
    return np.array(
        [
            x[sorted(range(len(x)), key=lambda j: (row[j], j))[: len(x) - f]].mean(axis=0)
            for row in lengths
        ]
    )


def clip(x: Array, longest: float) -> Array:
    return np.array([row * min(1, longest / max(np.linalg.norm(row), 1e-300)) for row in x])


def arc(x: Array, f: int) -> Array:
    lengths = np.array([np.linalg.norm(row) for row in x])
    cut = int(np.floor(2 * f / len(x) * (len(x) - f) + 1e-9))
    return clip(x, np.sort(lengths)[len(x) - cut - 1]) if cut else x


def bucketing(x: Array, size: int, seed: int) -> Array:
    order = list(range(len(x)))
    random.Random(seed).shuffle(order)
    return np.array([x[order[at : at + size]].mean(axis=0) for at in range(0, len(x), size)])

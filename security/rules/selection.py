"""Rules that choose rows by their distances: Krum, Multi-Krum, MDA, MoNNA. Gram matrix -> weights;
among equals the lower index.
"""

from __future__ import annotations

import math

import numpy as np

from ...collectives.errors import ConfigError
from .bounds import need
from .gram import distances
from .numbers import Matrix, Vector, nearest, total, uniform

MAX_SUBSETS = 200_000  # of which MDA finds the best


def krum(products: Matrix, f: int, *, neighbours: int | None = None) -> Vector:
    """The row with the least sum of squared distances to its ``neighbours`` nearest others.
    Blanchard et al. 2017, arXiv 1703.02757.

    neighbours: n - f - 2 as in the paper, which needs n >= 2f + 3; byzfl takes n - f - 1, for which
    n >= 2f + 1 will do.
    """
    return uniform(len(products), nearest(_scores("Krum", products, f, neighbours), 1))


def multi_krum(
    products: Matrix, f: int, *, neighbours: int | None = None, chosen: int | None = None
) -> Vector:
    """The mean of the ``chosen`` rows that Krum likes best (arXiv 1703.02757), 1 to n - f of them.

    chosen: n - f, as byzfl; the paper leaves it open (1 is Krum, n the mean). neighbours: as
    Krum's.
    """
    n = len(products)
    scores = _scores("Multi-Krum", products, f, neighbours)
    count = n - f if chosen is None else chosen
    if not 1 <= count <= n - f:
        raise ConfigError(
            f"Multi-Krum: {count} rows chosen of {n}, f = {f}",
            key="chosen",
            why="it must be 1 to n - f",
        )
    return uniform(n, nearest(scores, count))


def _scores(rule: str, products: Matrix, f: int, neighbours: int | None) -> Vector:
    n = len(products)
    need(rule, n, f, 2 * f + (3 if neighbours is None else 1))
    count = n - f - 2 if neighbours is None else neighbours
    if not 0 <= count <= n - f - 1:
        raise ConfigError(
            f"{rule}: {count} neighbours of {n} rows, f = {f}",
            key="neighbours",
            why="it must be 0 to n - f - 1",
        )
    return total(np.sort(distances(products), axis=1)[:, 1 : count + 1]) if count else np.zeros(n)


def mda(products: Matrix, f: int) -> Vector:
    """The mean of the n - f rows with the least diameter; among equals the first in lexicographic
    order. El Mhamdi et al. 2021, arXiv 2008.00742.

    n >= 2f + 1. Raises ConfigError where there are more than 200,000 sets of n - f rows, since it
    may have to look at all of them.
    """
    n = len(products)
    need("MDA", n, f, 2 * f + 1)
    if math.comb(n, f) > MAX_SUBSETS:
        raise ConfigError(
            f"MDA: {math.comb(n, f)} sets of {n - f} of {n} rows, at most {MAX_SUBSETS}",
            key="rule",
            why="it looks at all of them",
            hint="use MoNNA, Multi-Krum or NNM with a trimmed mean",
        )
    squared = distances(products).tolist()
    size, best, least = n - f, list(range(n - f)), math.inf
    stack: list[tuple[list[int], float]] = [([], -1.0)]
    while stack:  # depth first, in lexicographic order, without what is already as wide as the best
        rows, width = stack.pop()
        if width >= least:
            continue
        if len(rows) == size:
            best, least = rows, width
            continue
        first = rows[-1] + 1 if rows else 0
        for row in range(n - size + len(rows), first - 1, -1):
            stack.append(([*rows, row], max([width, *(squared[row][other] for other in rows)])))
    return uniform(n, best)


def monna(from_mine: Vector, f: int) -> Vector:
    """The mean of the n - f rows nearest to one's own. Farhadkhani et al. 2022, arXiv 2209.10931 (n
    >= 2f + 1).

    from_mine: squared distances of all rows from that row (`gram.squares`), which is as many
    numbers as there are rows.
    """
    n = len(from_mine)
    need("MoNNA", n, f, 2 * f + 1)
    return uniform(n, nearest(from_mine, n - f))

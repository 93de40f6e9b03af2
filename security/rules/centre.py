"""Rules that look for a centre by reweighting: geometric median, centred clipping. Gram matrix ->
weights; iterations are bounded.

Both minimise a convex sum over the rows by a weighted mean whose weights follow from the distances
to the last one. They start at a point that no f < n / 2 rows can drag away: the mean of the
majority nearest to the row that has the least sum of distances.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from .bounds import need, positive
from .gram import distances, from_point
from .numbers import Matrix, Vector, nearest, total, uniform

ITERATIONS = 1000  # at most; ten to fifty are usual
STEP = 1e-9  # of the rows' median distance from the centre: a smaller step is the last


def geometric_median(products: Matrix, f: int, *, nu: float = 1e-6) -> Vector:
    """The point with the least sum of distances to the rows, by smoothed Weiszfeld steps to their
    end. Pillutla et al. 2019, arXiv 1912.13445.

    n >= 2f + 1. nu: distances below it, times the median distance from the start, count as that
    much.
    """
    need("geometric median", len(products), f, 2 * f + 1)
    start = robust_start(products)
    floor = positive("geometric median", "nu", nu) * lower_median(
        np.sqrt(from_point(products, start))
    )
    if floor == 0:
        return start  # most rows are one point
    return _reweighted(products, start, lambda lengths: 1 / np.maximum(lengths, floor))


def centred_clip(products: Matrix, f: int, *, radius: float | None = None) -> Vector:
    """The v with sum of (x_i - v) min(1, radius / |x_i - v|) = 0: clipping about a centre, iterated
    to its fixed point.

    Karimireddy, He and Jaggi 2021, arXiv 2012.10333; the fixed point is Gorbunov et al.'s, arXiv
    2106.11257: it minimises Huber's loss of the distances, whatever the start. n >= 2f + 1. radius:
    a length, as the rows'; None: the rows' median distance from the start. Callers with a memory
    take it from `Radius`.
    """
    need("centred clipping", len(products), f, 2 * f + 1)
    start = robust_start(products)
    bound = (
        lower_median(np.sqrt(from_point(products, start)))
        if radius is None
        else positive("centred clipping", "radius", radius)
    )
    if bound == 0:
        return start  # most rows are one point
    return _reweighted(products, start, lambda lengths: bound / np.maximum(lengths, bound))


def clip_once(norms: Vector, f: int, *, radius: float) -> Vector:
    """One step of centred clipping from the last aggregate: weights of the differences to it, which
    are added to it. arXiv 2012.10333.

    norms: squared norms of the differences (`gram.squares`). n >= 2f + 1; a start far from the rows
    is left by a radius a step only.
    """
    need("centred clipping", len(norms), f, 2 * f + 1)
    lengths = np.sqrt(norms)
    bound = positive("centred clipping", "radius", radius)
    return bound / np.maximum(lengths, bound) / len(norms)


class Radius:
    """The radius of centred clipping: the median over the last rounds of the median distance of the
    rows from the aggregate.

    Members of a run that goes by it keep one each (`node/session/`), and state what it comes to
    with their contributions (`common_radius`).
    """

    def __init__(self, rounds: int = 50) -> None:
        self._seen: deque[float] = deque(maxlen=rounds)

    def __call__(self) -> float | None:
        """The radius for the next round; None before the first."""
        return lower_median(np.array(self._seen)) if self._seen else None

    def saw(self, products: Matrix, weights: Vector) -> None:
        """A round's Gram matrix, and the weights of its aggregate."""
        self.add(spread(products, weights))

    def add(self, distance: float) -> None:
        """A round's median distance (`spread`). 0 and NaN are no radius and left out."""
        if 0 < distance < math.inf:
            self._seen.append(distance)


def spread(products: Matrix, weights: Vector) -> float:
    """The lower median of the rows' distances from the weighted sum."""
    return lower_median(np.sqrt(from_point(products, weights)))


def common_radius(claimed: Sequence[float | None], f: int) -> float | None:
    """The radius that members come to who know what each of them says it is: the lower median. None
    where fewer than 2f + 1 say so, of whom f could decide it, or it is none."""
    radii = [value for value in claimed if value is not None and 0 < value < math.inf]
    return lower_median(np.array(radii)) if len(radii) >= 2 * f + 1 else None


def robust_start(products: Matrix) -> Vector:
    """Weights of the mean of the majority nearest to the row of least sum of distances."""
    n = len(products)
    squared = distances(products)
    centre = nearest(total(np.sqrt(squared)), 1)[0]
    return uniform(n, nearest(squared[centre], n // 2 + 1))


def lower_median(x: Vector) -> float:
    return float(np.sort(x)[(len(x) - 1) // 2])


def _reweighted(products: Matrix, weights: Vector, shares: Callable[[Vector], Vector]) -> Vector:
    """Weights of x = sum of shares_i x_i / sum of shares_i, where the shares follow from the rows'
    distances to x.
    """
    for _ in range(ITERATIONS):
        lengths = np.sqrt(from_point(products, weights))
        found = shares(lengths)
        found = found / total(found)
        change = found - weights
        moved = float(np.sqrt(max(0.0, float(total(change * total(products * change))))))
        weights = found
        if moved <= STEP * lower_median(lengths):
            break
    return weights

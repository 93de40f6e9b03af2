"""Members in clusters by the direction of their updates, whose names stay from one clustering to
the next.

Agglomerative, average linkage (Briggs et al. 2020, arXiv 2004.11791), on 1 - cosine. What is
clustered are contributions in the clear: this does not go with secure aggregation. Hostile members
at worst are clusters of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...collectives.errors import ConfigError
from ...security.rules.gram import gram

# on average, in 1 - cosine: what is nearer is one cluster; two halves of one site's data lie nearer
# in the first rounds
APART = 0.1


def clusters(deltas: Tensor, *, count: int | None = None, apart: float = APART) -> list[int]:
    """The cluster of every row, numbered as they come. deltas: float32 (n, d), finite, none of them
    zero.

    Clusters are joined, the nearest two first, until ``count`` are left. Without a count: where the
    distance at which the next two would be joined grows most, if that is by more than ``apart``;
    else all are one.
    """
    n = len(deltas)
    if count is not None and not 1 <= count <= n:
        raise ConfigError(f"{count} clusters of {n} members", key="count")
    heights, states = _joined(_distances(deltas))
    if count is None:
        growth = np.diff(heights)
        jump = int(growth.argmax()) if len(growth) else 0
        count = n - 1 - jump if len(growth) and growth[jump] > apart else 1
    return states[n - count]


def same_names(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """``after`` with the numbers of ``before``: the pair that has most members in common first;
    clusters that are new get new numbers.
    """
    if len(before) != len(after):
        raise ConfigError(f"{len(after)} members in clusters, {len(before)} before", key="after")
    names: dict[int, int] = {}
    for (new, old), _ in sorted(
        Counter(zip(after, before, strict=True)).items(), key=lambda item: (-item[1], item[0])
    ):
        if new not in names and old not in names.values():
            names[new] = old
    fresh = max(before, default=-1) + 1
    for new in after:
        if new not in names:
            names[new], fresh = fresh, fresh + 1
    return [names[new] for new in after]


def alike(deltas: Tensor, found: Sequence[int]) -> tuple[float | None, float | None]:
    """How clear clusters are: the mean cosine of two rows of one cluster, and of two of different
    ones; None where there are no such two.
    """
    cosines, names = 1 - _distances(deltas), np.asarray(found)
    same = names[:, None] == names[None, :]
    pairs = np.triu(np.ones_like(same), 1).astype(bool)
    within, between = cosines[pairs & same], cosines[pairs & ~same]
    return (float(within.mean()) if within.size else None), (
        float(between.mean()) if between.size else None
    )


def adjusted_rand(a: Sequence[int], b: Sequence[int]) -> float:
    """How far two clusterings agree: 1 where they are the same but for names, 0 on average by
    chance (Hubert and Arabie 1985).
    """

    def pairs(counts: Counter[object]) -> int:
        return sum(count * (count - 1) // 2 for count in counts.values())

    together = pairs(Counter(zip(a, b, strict=True)))
    of_a, of_b, every = pairs(Counter(a)), pairs(Counter(b)), len(a) * (len(a) - 1) // 2
    most, rng = (of_a + of_b) / 2, of_a * of_b / every if every else 0.0
    return 1.0 if most == rng else (together - rng) / (most - rng)


def _distances(deltas: Tensor) -> np.ndarray:
    products = np.asarray(gram(deltas), dtype=np.float64)
    norms = np.sqrt(np.diagonal(products))
    if len(lost := np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))):
        raise ConfigError(
            f"the update of member {lost[0]} is zero or no number, and has no direction",
            key="deltas",
            why=(
                f"So it is with {len(lost)} of {len(deltas)}: it has trained nothing, or "
                "its training diverged."
            ),
            hint="Another learning rate.",
        )
    return 1 - products / np.outer(norms, norms)


def _joined(distance: np.ndarray) -> tuple[list[float], list[list[int]]]:
    """The distance of each joining, and the clustering before the first and after each."""
    groups = [[i] for i in range(len(distance))]
    heights: list[float] = []
    states = [_numbered(groups)]
    while len(groups) > 1:
        pairs = [
            (float(distance[np.ix_(one, other)].mean()), i, i + 1 + j)
            for i, one in enumerate(groups)
            for j, other in enumerate(groups[i + 1 :])
        ]
        height, i, j = min(pairs)
        groups[i] = groups[i] + groups.pop(j)
        heights.append(height)
        states.append(_numbered(groups))
    return heights, states


def _numbered(groups: list[list[int]]) -> list[int]:
    found = [0] * sum(map(len, groups))
    for name, group in enumerate(sorted(groups, key=min)):
        for member in group:
            found[member] = name
    return found

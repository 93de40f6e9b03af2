"""Sorting networks over rows: which rows to compare, whatever is in them, so that a column never
branches.

Batcher's odd-even merge sort (1968), for any number of rows, with what a result does not need taken
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

# Rows i < j; whether the minimum, for i, is needed, and the maximum, for j.
Step = tuple[int, int, bool, bool]


@lru_cache(maxsize=64)
def network(labels: tuple[int, ...]) -> tuple[Step, ...]:
    """Steps after which row i holds the i-th smallest value of each column, as far as the labels
    ask for it.

    ``labels[i]``: 0 where the i-th smallest is not needed; rows of one positive label may hold
    their values in any order.
    """
    wanted = [label != 0 for label in labels]
    # The label of the place where a row's value ends up, or None once a step has touched it.
    last: list[int | None] = list(labels)
    steps: list[Step] = []
    for i, j in reversed(_batcher(len(labels))):
        if last[i] is not None and last[i] == last[j]:
            continue  # both end in one set
        if not (wanted[i] or wanted[j]):
            continue
        steps.append((i, j, wanted[i], wanted[j]))
        wanted[i] = wanted[j] = True
        last[i] = last[j] = None
    return tuple(reversed(steps))


def flat(steps: Sequence[Step]) -> list[int]:
    """The pairs of rows as one list; which half of a step is needed does not matter to the compiled
    kernel.
    """
    return [row for step in steps for row in step[:2]]


def _batcher(n: int) -> list[tuple[int, int]]:
    pairs, p = [], 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return pairs

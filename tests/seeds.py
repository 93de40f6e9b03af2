"""How many seeds of a test run: few by default, more with the mark slow, and as many as somebody asks
for (ATOLL_SEEDS=50). Of the slow ones .ci/run plays each day's share (the mark `rota`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

RARE = (pytest.mark.slow, pytest.mark.rota(7))  # once a week


def seeds(daily: int, slow: int) -> list[Any]:
    """0 … ``slow`` - 1, or as many as the environment variable ATOLL_SEEDS says; all from ``daily``
    on are marked slow, and without ATOLL_SEEDS played once a week.
    """
    asked = os.environ.get("ATOLL_SEEDS")
    marks = RARE if asked is None else pytest.mark.slow
    return [
        seed if seed < daily else pytest.param(seed, marks=marks)
        for seed in range(int(asked or slow))
    ]


def daily(count: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter (tuples, where there are several): all from the ``count``-th on are
    marked slow, and played once a week.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if index < count else RARE,
        )
        for index, value in enumerate(values)
    ]


def trials(count: int, daily: int) -> range:
    """Numbers of trials of a test that draws what it does: ``count``, of which .ci/run plays
    ``daily``, others each day.
    """
    day = os.environ.get("ATOLL_DAY", "")
    if not day:
        return range(count)
    return range(int(day) * daily, int(day) * daily + daily)


def one_in(days: int) -> Iterator[int]:
    """1, 2, 3 and so on, of which .ci/run plays one in so many, others each day."""
    day = os.environ.get("ATOLL_DAY", "")
    return itertools.count(1 + int(day) % days, days) if day else itertools.count(1)

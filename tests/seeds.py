"""How many seeds of a test run: few each day, more with the mark slow, and as many as somebody asks
for (ATOLL_SEEDS=50).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def seeds(daily: int, slow: int) -> list[Any]:
    """0 … ``slow`` - 1, or as many as the environment variable ATOLL_SEEDS says; all from ``daily``
    on are marked slow.
    """
    return [
        seed if seed < daily else pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(int(os.environ.get("ATOLL_SEEDS", slow)))
    ]


def daily(count: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter (tuples, where there are several): all from the ``count``-th on are
    marked slow.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if index < count else pytest.mark.slow,
        )
        for index, value in enumerate(values)
    ]

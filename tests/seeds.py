"""How many seeds of a test run: few each day, more with the mark slow, and as many as somebody asks
for (ATOLL_SEEDS=50).
"""

from __future__ import annotations

import os
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

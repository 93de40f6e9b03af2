"""Robust rules as reducers of a round: what a node passes to its exchange and its sessions, beside those of `collectives.reduce`.

Weights do not count: a member states its own, so each contributor has one voice, whatever it says that it trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from torch import Tensor

from ...collectives.reduce import REDUCERS, Reducer
from ..rule_names import least_contributors, parse_reducer, reducer_name
from .aggregate import BY_COORDINATE


class ByCoordinate:
    """A rule of each coordinate by itself, of which at most f contributions may be anything. A RowsReducer."""

    form: Literal["rows"] = "rows"

    def __init__(self, rule: str, f: int) -> None:
        self.name = reducer_name(rule, f)
        self.least = least_contributors(f)
        self._rule, self._f = BY_COORDINATE[rule], f

    def reduce(self, rows: Tensor, weights: Sequence[int], out: Tensor) -> None:
        """See RowsReducer. The bits depend on the multiset of each column alone: not on the order of rows, nor on where chunks begin."""
        self._rule(rows, self._f, out)


@lru_cache(maxsize=64)  # names may come from peers
def find_reducer(name: str) -> Reducer | None:
    """The reducer that a plan names, robust or not; None where there is none such."""
    found = parse_reducer(name)
    return ByCoordinate(*found) if found is not None else REDUCERS.get(name)

"""Robust rules as reducers of a round: what a node passes to its exchange and its sessions, beside
those of `collectives.reduce`.

Weights do not count: a member states its own, so each contributor has one voice, whatever it says
that it trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from ...collectives.reduce import Factors, Reducer, Statistics, to_float32
from ...collectives.reducers import REDUCERS
from ..rule_names import RUNNING, RuleName, RuleStep, parse_reducer, reducer_name
from .aggregate import BY_COORDINATE, BY_GRAM
from .before import arc, buckets, clipping, nnm
from .centre import common_radius, spread
from .gram import combine, mixed_gram
from .numbers import Matrix, product, total
from .triangle import diagonal, impossible, pairs, square, triangle


class ByCoordinate:
    """A rule of each coordinate by itself, of which at most f contributions may be anything. A
    RowsReducer.
    """

    form: Literal["rows"] = "rows"

    def __init__(self, name: RuleName) -> None:
        self.name = reducer_name(name.rule, name.f)
        self.least = name.least
        self._rule, self._f = BY_COORDINATE[name.rule], name.f

    def reduce(self, rows: Tensor, weights: Sequence[int], out: Tensor) -> None:
        """The bits depend on the multiset of each column alone: not on the order of rows, nor on
        where chunks begin.
        """
        self._rule(rows, self._f, out)


class WeightedSum:
    """What a rule of whole rows comes to. A Weighing."""

    def __init__(self, weights: Sequence[float], spread: float | None = None) -> None:
        self.spread = spread
        # A weight that is not finite: no vectors have such a matrix.
        self.weights = tuple(
            to_float32(weight) if math.isfinite(weight) else 0.0 for weight in weights
        )
        self.factors = Factors(self.weights, 1.0)

    def reduce(self, rows: Tensor, out: Tensor) -> None:
        """Not as the codec rounds it."""
        combine(rows, np.array(self.weights), out)


class OfMixtures:
    """A rule by coordinate of rows that steps have mixed. A Weighing; ``weights``: the share that a
    contribution has in all mixtures.
    """

    factors = None
    spread = None

    def __init__(self, rule: str, f: int, mixing: Matrix) -> None:
        self.weights = tuple((total(mixing.T) / len(mixing)).tolist())
        self._rule, self._f, self._mixing = BY_COORDINATE[rule], f, mixing
        self._mixed: Tensor | None = None

    def reduce(self, rows: Tensor, out: Tensor) -> None:
        """Mixtures are added up in float32, in the order of the rows: no BLAS."""
        count, width = len(self._mixing), rows.shape[1]
        if self._mixed is None or self._mixed.shape[1] < width:
            self._mixed = torch.empty(count, width, dtype=torch.float32, device="cpu")
        mixed = self._mixed[:, :width]
        for weights, target in zip(self._mixing, mixed.unbind(0), strict=True):
            combine(rows, weights, target)
        self._rule(mixed, self._f, out)


class ByGram:
    """A rule of whole rows, or any rule after steps, from the Gram matrix of all contributions. A
    TwoPhaseReducer.
    """

    form: Literal["two-phase"] = "two-phase"

    def __init__(self, name: str, parsed: RuleName) -> None:
        self.name, self.least, self._parsed = name, parsed.least, parsed

    @property
    def running(self) -> bool:
        """Whether it clips at the median distance in rounds before, which members state."""
        return RUNNING in self._parsed.options

    def length(self, contributors: int) -> int:
        """The triangle's."""
        return pairs(contributors)

    def measure(self, rows: Tensor) -> Statistics:
        """The upper triangle of the Gram matrix."""
        return triangle(rows)

    def alone(self, statistics: Statistics, contributors: int, index: int) -> Statistics:
        """Its squared norm."""
        return statistics[[diagonal(contributors)[index]]]

    def impossible(self, statistics: Statistics, contributors: int) -> str | None:
        return impossible(statistics, contributors)

    def weigh(
        self, statistics: Statistics, cids: Sequence[bytes], norms: Sequence[float | None] = ()
    ) -> WeightedSum | OfMixtures:
        with np.errstate(
            all="ignore"
        ):  # owners may state what no vectors have: then any weights will do, the same at all
            return self._weigh(square(statistics, len(cids)), cids, norms)

    def _weigh(
        self, products: Matrix, cids: Sequence[bytes], norms: Sequence[float | None]
    ) -> WeightedSum | OfMixtures:
        rule, f, before, options = self._parsed
        mixing = np.eye(len(cids))
        for step in before:
            one = _mixing(step, products, f, cids)
            mixing, products = product(one, mixing), mixed_gram(products, one)
        if rule in BY_COORDINATE:
            return OfMixtures(rule, f, mixing)
        weights = BY_GRAM[rule](products, f, **_rule_arguments(options, len(products), f, norms))
        of_rows = product(weights[None], mixing)[0].tolist()
        return WeightedSum(of_rows, spread(products, weights) if RUNNING in options else None)


def _rule_arguments(
    options: Sequence[str], n: int, f: int, norms: Sequence[float | None]
) -> dict[str, Any]:
    """A rule's options as its function takes them; ``norms``: what members say that the radius of
    centred clipping is.
    """
    arguments: dict[str, Any] = {}
    if "n1" in options:
        arguments["neighbours"] = n - f - 1
    if "k2" in options:
        arguments["chosen"] = n - f - 2
    if RUNNING in options:
        arguments["radius"] = common_radius(norms, f)
    return arguments


def _mixing(step: RuleStep, products: Matrix, f: int, cids: Sequence[bytes]) -> Matrix:
    """What a step makes of the rows. Buckets follow from the ids of all contributions, which nobody
    knows before all have offered theirs.
    """
    if step.kind == "nnm":
        return nnm(products, f)
    if step.kind == "arc":
        return arc(np.diagonal(products), f)
    if step.kind == "clipping":
        return clipping(np.diagonal(products), step.number)
    seed = blake3(b"atoll/buckets/1" + b"".join(sorted(cids))).digest()
    order = sorted(
        range(len(products)), key=lambda row: blake3(seed + row.to_bytes(2, "big")).digest()
    )
    return buckets(order, int(step.number))


@lru_cache(maxsize=64)  # names may come from peers
def find_reducer(name: str) -> Reducer | None:
    """The reducer that a plan names, robust or not; None where there is none such."""
    parsed = parse_reducer(name)
    if parsed is None:
        return REDUCERS.get(name)
    return ByCoordinate(parsed) if parsed.by_coordinate else ByGram(name, parsed)

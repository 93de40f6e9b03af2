"""Reducers: the contributions to a chunk → its result. Four forms, because they need different
things from the data plane.

* streaming: (sum of m_i x_i) / d with factors from the weights alone; runs on encoded chunks, in
  place (mean, sum).
* own: what the owner of a part has contributed itself (copy, gather); nothing is sent to owners.
* rows: needs all contributions to a chunk decoded side by side (maximum, minimum, product, numbers
  of 64 bits, sums of integers, robust rules by coordinate).
* two-phase: needs statistics over the *whole* vector (a Gram matrix, summed over the parts) before
  it can weigh (Krum, NNM before a median).

A reducer is chosen by the plan's name for it (`FindReducer`); `security` has others than those of
`reducers`, and a node passes them in. All work with separately rounded elementwise operations in
the order of the plan's contributors, so every owner gets the same bits from the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .rows import ROWS


@dataclass(frozen=True, slots=True)
class Factors:
    """What a streaming reducer computes: (sum over i of multipliers[i] * x[i]) / divisor."""

    multipliers: tuple[float, ...]
    divisor: float


class StreamingReducer(Protocol):
    """Linear in the contributions, with factors that follow from the weights."""

    name: str
    form: Literal["streaming"]

    def factors(self, weights: Sequence[int], total: int | None = None) -> Factors:
        """Factors for contributions of these weights, in the plan's order. Each is exactly a
        float32.

        ``total``: the weight of all that is added up, where partial sums with weights of their own
        are among them.
        """
        ...

    def partial(self, weights: Sequence[int], total: int) -> tuple[Factors, int]:
        """Factors of a partial sum over contributions (or partial sums) of these weights, and its
        own weight in the next sum.

        Its values are no larger than the largest of those added up (a sum's: than their sum), and
        its divisor rounds nothing.
        """
        ...


class Own:
    """The result of a part is its owner's contribution: owners are contributors, and which part is
    whose decides the result. `copy`: all contributors hold the same bytes, each sends its part of
    them. `gather`: to each member its own part.
    """

    form: Literal["own"] = "own"

    def __init__(self, name: Literal["copy", "gather"]) -> None:
        self.name = name


class RowsReducer(Protocol):
    """Needs every contribution to a chunk at once. ``least``: how many contributors it needs; fewer
    are no plan and no entry.
    """

    name: str
    form: Literal["rows"]
    least: int

    def reduce(self, rows: Tensor, weights: Sequence[int], out: Tensor) -> None:
        """rows: float32 (contributors, elements), may be overwritten; out: float32 (elements,)."""


Statistics = NDArray[np.float64]
"""What a two-phase reducer says of a range of all contributions: float64 (k,). Those of
neighbouring ranges add up.
"""


class Weighing(Protocol):
    """What the statistics of the whole vector come to. ``weights``: a number a contributor, for
    people to see.
    """

    weights: tuple[float, ...]

    @property
    def spread(self) -> float | None:
        """The contributions' median distance from the result, where the reducer goes by that of
        rounds before; else None.
        """
        ...

    @property
    def factors(self) -> Factors | None:
        """The result is this sum; contributions with multiplier 0 are not in it. None: it is
        `reduce` that makes it.
        """
        ...

    def reduce(self, rows: Tensor, out: Tensor) -> None:
        """rows: float32 (contributors, elements), not modified; out: float32 (elements,)."""


class TwoPhaseReducer(Protocol):
    """Weighs whole vectors by statistics that are sums over the parts.

    Owners tell each other those of their parts, and all must come to the same: so everything here
    has the same bits on every machine.
    """

    name: str
    form: Literal["two-phase"]
    least: int

    def length(self, contributors: int) -> int:
        """How many numbers the statistics of so many contributions are."""
        ...

    def measure(self, rows: Tensor) -> Statistics:
        """Of one chunk; rows: float32 (contributors, elements), finite, not modified. Chunks of a
        part are added up in order, then parts.
        """
        ...

    def alone(self, statistics: Statistics, contributors: int, index: int) -> Statistics:
        """What one contributor knows of a part's statistics by itself: `measure` of its row alone
        comes to the same.
        """
        ...

    def impossible(self, statistics: Statistics, contributors: int) -> str | None:
        """Why no contributions have these statistics, which a peer states of its part; None where
        nothing speaks against it.
        """
        ...

    def weigh(
        self, statistics: Statistics, cids: Sequence[bytes], norms: Sequence[float | None] = ()
    ) -> Weighing:
        """From the statistics of the whole vector, of the contributions with these ids, and what
        their members say of norms (`Reading.norm`; (): nothing). May take a while; always ends."""
        ...


Reducer = StreamingReducer | Own | RowsReducer | TwoPhaseReducer
FindReducer = Callable[[str], Reducer | None]
"""A plan's name for a reducer -> the reducer; None where there is none such. Names may come from
peers.
"""


class WeightedMean:
    """sum(w_i x_i) / sum(w_i)."""

    name = "mean"
    form: Literal["streaming"] = "streaming"

    def factors(self, weights: Sequence[int], total: int | None = None) -> Factors:
        """Weights without their common divisor, so that equal weights cost no multiplication.

        Sums above 2^20 are scaled down by a power of two (which rounds nothing), so that finite
        values do not overflow.
        """
        multipliers, shift, divisor = _scaled(weights)
        return Factors(
            multipliers, to_float32((sum(weights) if total is None else total) / divisor * shift)
        )

    def partial(self, weights: Sequence[int], total: int) -> tuple[Factors, int]:
        """The sum over the smallest power of two (times the weights' common divisor) that is not
        below the total weight.
        """
        multipliers, shift, divisor = _scaled(weights)
        power = 1 << (-(-total // divisor) - 1).bit_length()
        return Factors(multipliers, power * shift), power * divisor


class Sum:
    """x_1 + x_2 + …; weights do not count."""

    name = "sum"
    form: Literal["streaming"] = "streaming"

    def factors(self, weights: Sequence[int], total: int | None = None) -> Factors:
        """All 1."""
        return Factors((1.0,) * len(weights), 1.0)

    def partial(self, weights: Sequence[int], total: int) -> tuple[Factors, int]:
        """A sum is a sum."""
        return self.factors(weights), 1


MEAN = WeightedMean()


def least_of(reducer: Reducer) -> int:
    """How many contributors it needs."""
    return reducer.least if reducer.form == "rows" or reducer.form == "two-phase" else 1


def _scaled(weights: Sequence[int]) -> tuple[tuple[float, ...], float, int]:
    """(multipliers, their power of two, common divisor taken out); about 2^20 at most together."""
    divisor = math.gcd(*weights)
    small = [weight // divisor for weight in weights]
    shift = 2.0 ** -max(0, sum(small).bit_length() - 20)
    return tuple(to_float32(weight * shift) for weight in small), shift, divisor


def to_float32(x: float) -> float:
    """The nearest float32, so that factors are the same numbers wherever they are computed."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


ROUND_REDUCERS: dict[str, Reducer] = {
    reducer.name: reducer for reducer in (MEAN, Sum(), Own("copy"), Own("gather"))
}
"""Those of rounds whose members only crash. `reducers.REDUCERS` has more."""


def find_reducer(name: str) -> Reducer | None:
    """A reducer by its name, those of operations too; None where there is none such."""
    return ROUND_REDUCERS.get(name) or (ROWS.find("reducers", "REDUCERS") or {}).get(name)

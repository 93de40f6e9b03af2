"""All reducers but the robust rules, by name: those of rounds (`reduce`), and those that only
free-standing operations ask for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .reduce import MEAN, ROUND_REDUCERS, Own, Reducer
from .script_swarm import Reduction


class Extreme:
    """The largest or the smallest value of each element."""

    form: Literal["rows"] = "rows"
    least = 1

    def __init__(self, name: Literal["max", "min"]) -> None:
        self.name = name
        self._reduce = torch.amax if name == "max" else torch.amin

    def reduce(self, rows: Tensor, weights: Sequence[int], out: Tensor) -> None:
        self._reduce(rows, dim=0, out=out)


class Product:
    """x_1 · x_2 · …, in the order of the rows."""

    name = "product"
    form: Literal["rows"] = "rows"
    least = 1

    def reduce(self, rows: Tensor, weights: Sequence[int], out: Tensor) -> None:
        out.copy_(rows[0])
        for row in rows[1:]:
            out.mul_(row)


class WrappingSum:
    """Sum of integers modulo 2^bits, two's complement, packed into words: for codec bits only."""

    form: Literal["rows"] = "rows"
    least = 1

    def __init__(self, bits: Literal[8, 16, 32, 64]) -> None:
        self.name = f"wrap{bits}"
        self._dtype = np.dtype(f"<u{bits // 8}")

    def reduce(self, rows: Tensor, weights: Sequence[int], out: Tensor) -> None:
        """Numpy's unsigned integers wrap by definition."""
        total = out.numpy().view(self._dtype)
        total[:] = rows[0].numpy().view(self._dtype)
        for row in rows[1:]:
            np.add(total, row.numpy().view(self._dtype), out=total)


class OfWords64:
    """A reduction of numbers of 64 bits, two words each, in the order of the rows: for codec bits
    only. Products of integers wrap, as their sums do.
    """

    form: Literal["rows"] = "rows"
    least = 1

    def __init__(self, kind: Literal["f64", "i64"], op: Reduction) -> None:
        self.name, self._mean = f"{kind}{op}", op == "mean"
        self._dtype = np.dtype("<f8" if kind == "f64" else "<i8")
        self._add = {"max": np.maximum, "min": np.minimum, "product": np.multiply}.get(op, np.add)

    def reduce(self, rows: Tensor, weights: Sequence[int], out: Tensor) -> None:
        """Of peers' bits, which may be any: NaN and infinity come out as they do in numpy."""
        total, divisor = out.numpy().view(self._dtype), math.gcd(*weights)
        with np.errstate(all="ignore"):
            for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
                values = row.numpy().view(self._dtype)
                if self._mean and weight != divisor:
                    values = values * (weight // divisor)
                if index:
                    self._add(total, values, out=total)
                else:
                    total[:] = values
            if self._mean:
                total /= sum(weights) // divisor


REDUCERS: dict[str, Reducer] = {
    reducer.name: reducer
    for reducer in (
        MEAN,
        ROUND_REDUCERS["sum"],
        Extreme("max"),
        Extreme("min"),
        Product(),
        WrappingSum(8),
        WrappingSum(16),
        WrappingSum(32),
        WrappingSum(64),
        OfWords64("f64", "mean"),
        OfWords64("f64", "sum"),
        OfWords64("f64", "max"),
        OfWords64("f64", "min"),
        OfWords64("f64", "product"),
        OfWords64("i64", "max"),
        OfWords64("i64", "min"),
        OfWords64("i64", "product"),
        ROUND_REDUCERS["copy"],
        ROUND_REDUCERS["gather"],
    )
}


def works_on_bits(reducer: str) -> bool:
    """Whether a reducer is for the codec "bits"; the others are for all codecs but this one."""
    return isinstance(REDUCERS.get(reducer), (WrappingSum, OfWords64, Own))


def words_each(reducer: str) -> int:
    """How many words of 32 bits a number of a reducer is."""
    return 2 if reducer == "wrap64" or isinstance(REDUCERS.get(reducer), OfWords64) else 1


def operation_codec(reducer: str, codec: str) -> str:
    """The codec of a free-standing operation that asks for ``codec``: "" is the one that keeps
    every bit, whatever the codec of the run's rounds.
    """
    return codec or ("bits" if works_on_bits(reducer) else "fp32")


def codec_fault(reducer: str, codec: str) -> str | None:
    """Why a reducer cannot work on values of a codec, or None."""
    if works_on_bits(reducer) != (codec == "bits"):
        return f"{reducer} does not work with codec {codec}"
    if reducer in ("max", "min", "product") and codec != "fp32":
        return f"a {reducer} is exact: it takes no codec but fp32, not {codec}"
    return None

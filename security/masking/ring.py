"""Vectors of float32 as whole numbers modulo 2^bits, so that masks hide them and their sum is
exact.

A value is clipped to -clip … clip, rounded to a multiple of the step, up or down by chance so that
its mean is the value, and multiplied by the member's weight; the weight itself is one more element,
so that it is hidden, too. The step follows from the room: the heaviest members' sum of the largest
values must not wrap. A member that lies about its weight can spoil the sum, as with any mean;
nobody can see that it does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...collectives.errors import ConfigError, LocalProtocolError, SecurityError
from .keys import Words

# float32 has no more digits; where there is room, small values have theirs, too
_MOST_LEVELS = {32: 1 << 24, 64: 1 << 32}
_LEAST_LEVELS = 1 << 7
_FINE_LEVELS = 1 << 16  # with fewer a step is as long as what a round moves


def bits_for(members: int, weight: int) -> Literal[32, 64]:
    """Of a ring for so many members who count up to ``weight`` each, without noise: 64 where 32
    leave fewer than 65,536 steps between 0 and the largest value.
    """
    return 32 if ((1 << 31) - 1) // (members * weight) >= _FINE_LEVELS else 64


@dataclass(frozen=True, slots=True)
class Ring:
    """How ``numel`` values of up to ``members`` members are encoded. Raises ConfigError where
    nothing would be left of them.

    ``clip``: the largest absolute value an element can have. ``weight``: the largest weight a
    member can have (1: all count the same). ``spare``: share of the room that is left to noise.
    """

    numel: int
    clip: float
    members: int
    weight: int = 1
    bits: Literal[32, 64] = 32
    spare: float = 0.0

    def __post_init__(self) -> None:
        if not (
            self.clip > 0
            and np.isfinite(self.clip)
            and self.numel > 0
            and self.members > 0
            and self.weight > 0
            and 0 <= self.spare < 1
        ):
            raise ConfigError(
                "secure aggregation: a ring needs a clip range, elements, "
                "members and weights above 0"
            )
        if self.bits not in (32, 64) or self.levels < _LEAST_LEVELS:
            why = (
                f"{self.members} members of weight {self.weight} leave {self.levels} steps for a "
                f"value, and {_LEAST_LEVELS} are the least"
            )
            raise ConfigError(
                f"secure aggregation: {self.bits} bits are too few",
                key="bits",
                why=why,
                hint="64 bits, or smaller weights",
            )

    @property
    def length(self) -> int:
        """Elements of an encoded vector: one more, for the weight."""
        return self.numel + 1

    @property
    def levels(self) -> int:
        """Steps between 0 and ``clip``."""
        return min(
            _MOST_LEVELS[self.bits],
            int((1 - self.spare) * ((1 << (self.bits - 1)) - 1)) // (self.members * self.weight),
        )

    @property
    def step(self) -> float:
        """What a mean can be wrong by at most, beside clipping; half of that is usual."""
        return self.clip / self.levels

    def quantise(self, values: NDArray[np.float32], rng: random.Random) -> NDArray[np.int64]:
        """Multiples of `step`: int64 (numel,). Raises LocalProtocolError for another length and
        values that are not finite.
        """
        if values.shape != (self.numel,) or not bool(np.isfinite(values).all()):
            raise LocalProtocolError(
                f"secure aggregation of {values.shape} values: not {self.numel} finite ones"
            )
        exact = np.clip(values.astype(np.float64), -self.clip, self.clip) / self.step
        drawn = np.frombuffer(rng.randbytes(4 * self.numel), "<u4") * 2.0**-32
        return np.clip(np.floor(exact + drawn).astype(np.int64), -self.levels, self.levels)

    def encode(self, multiples: NDArray[np.int64], weight: int) -> Words:
        """What is masked: (length,), unsigned. ``multiples`` of the step, noise included. Raises
        LocalProtocolError for a weight out of range.
        """
        if not 1 <= weight <= self.weight or multiples.shape != (self.numel,):
            raise LocalProtocolError(
                f"secure aggregation: weight {weight} is not 1 to {self.weight}, "
                "or the length is wrong"
            )
        words = np.empty(self.length, np.dtype(f"<u{self.bits // 8}"))
        # Two's complement: wraps as the sum does.
        words[:-1] = (multiples * weight).astype(words.dtype)
        words[-1] = weight
        return words

    def decode(self, total: Words) -> tuple[NDArray[np.float64], int]:
        """The weighted mean (numel,) and the sum of the weights, from a sum without masks.

        Raises SecurityError for a sum of weights that honest members cannot have.
        """
        if total.shape != (self.length,) or total.dtype.itemsize * 8 != self.bits:
            raise LocalProtocolError(
                f"secure aggregation: {total.shape} {total.dtype} is no sum on this ring"
            )
        weights = int(total[-1])
        if not 1 <= weights <= self.members * self.weight:
            raise SecurityError(
                f"secure aggregation: the weights add up to {weights}",
                why=f"{self.members} members have at most {self.weight} each",
            )
        return total[:-1].view(np.dtype(f"<i{self.bits // 8}")) * (self.step / weights), weights

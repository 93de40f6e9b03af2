"""Where the vectors of an outer rule's state lie: all in float32, or its momenta in two bytes each.

A state is one float32 vector, whatever it holds: so it travels, is hashed and is saved as bytes,
and only the step knows more. With momenta in bf16 it begins with these, one after another, two
elements in the room of one float32, little-endian, and a zero where their number is odd; then come
the rule's other vectors, which stay float32.

bf16 is the upper half of a float32, **rounded to the nearest, ties to even, by arithmetic on
integers** (`rounded`): every machine has the same bits, which the conversions of processors do not
promise (some take numbers below 2⁻¹²⁶ for zero). A step reads momenta exactly, computes in float32,
and rounds them once when it stores them.

Why momenta and no other vector: μ·m changes m by 1 - μ of it, far more than the 2⁻⁹ at which
rounding stands still; (1-β)·g² may be less, and a second moment would stop following.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK_ELEMENTS = 65_536
NAN = 0x7FC0
_HALF, _ONE, _SIXTEEN = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)


@dataclass(frozen=True, slots=True)
class StateVectors:
    """Those of an anchor of ``numel`` elements: ``count`` vectors, of which the first ``halves``
    are bf16.
    """

    numel: int
    count: int
    halves: int

    @property
    def front(self) -> int:
        """Length of the bf16 vectors, in float32 elements."""
        return -(-self.halves * self.numel // 2)

    @property
    def length(self) -> int:
        """Length of all, in float32 elements."""
        return self.front + (self.count - self.halves) * self.numel

    def load(
        self, state: Tensor, first: int, last: int, spaces: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Elements [first, last) of each vector, float32: those that are bf16 in ``spaces``, or in
        new memory, the others as they lie.
        """
        found = list[Tensor]()
        for index in range(self.halves):
            out = (
                spaces[index][: last - first]
                if spaces
                else torch.empty(last - first, dtype=torch.float32, device="cpu")
            )
            widen(self._half(state, index, first, last), out.numpy())
            found.append(out)
        for index in range(self.count - self.halves):
            begin = self.front + index * self.numel
            found.append(state[begin + first : begin + last])
        return found

    def store(self, state: Tensor, first: int, last: int, vectors: Sequence[Tensor]) -> None:
        """Put back what `load` gave, and the step changed."""
        for index in range(self.halves):
            half = self._half(state, index, first, last)
            values = vectors[index].numpy()
            for at in range(0, len(half), BLOCK_ELEMENTS):
                half[at : at + BLOCK_ELEMENTS] = rounded(values[at : at + BLOCK_ELEMENTS])

    def _half(self, state: Tensor, index: int, first: int, last: int) -> np.ndarray:
        halves = state[: self.front].numpy().view(np.uint16)
        return halves[index * self.numel + first : index * self.numel + last]


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 (n,) to the bits of bf16, uint16 (n,): nearest, ties to even; beyond the largest
    finite it is infinite, NaN is one NaN.

    >>> [hex(bits) for bits in rounded(np.array([1.0, 1.00390625, 1.01171875, -3e38], np.float32))]
    ['0x3f80', '0x3f80', '0x3f82', '0xff62']
    """
    bits = values.view(np.uint32)
    found = bits >> _SIXTEEN
    found &= _ONE
    found += _HALF
    found += bits  # a NaN may pass the end: see below
    found >>= _SIXTEEN
    if np.isnan(values).any():
        found[np.isnan(values)] = NAN
    return found.astype(np.uint16)


def widen(half: np.ndarray, out: np.ndarray) -> None:
    """Bits of bf16, uint16 (n,), to float32 (n,): exact."""
    bits = out.view(np.uint32)
    np.copyto(bits, half)
    bits <<= _SIXTEEN

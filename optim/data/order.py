"""The order of samples: position p of an endless sequence is sample ``order(p)``, every sample once
an epoch, shuffled anew in each.

A Feistel network over the smallest even number of bits that holds a sample's number, walked until
it is one (format-preserving encryption by cycle walking, Black and Rogaway 2002). So any position's
sample is computed by itself, with the same result on every machine: nothing is stored, sent or
shuffled in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from .spans import Span

ROUNDS = 4
MOST_POSITIONS = 1 << 62
_GOLDEN, _FIRST, _SECOND = (
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # splitmix64's


class Order:
    """Of ``size`` samples, by ``name`` (a run's id)."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        key = blake3(b"atoll/order/1" + name.encode()).digest(8 * ROUNDS)
        self._keys = np.frombuffer(key, dtype="<u8").astype(np.uint64)

    def positions(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """The positions of these spans. What members claim may have brought them beyond what numpy
        counts: there they begin again.
        """
        whole = MOST_POSITIONS // self.size * self.size
        return np.concatenate(
            [np.arange(stop - start, dtype=np.int64) + start % whole for start, stop in spans]
        )

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at these positions."""
        epochs, values = (part.astype(np.uint64) for part in np.divmod(positions, self.size))
        values = self._mix(values, epochs)
        while (outside := values >= self.size).any():
            values[outside] = self._mix(values[outside], epochs[outside])
        return values.astype(np.int64)

    def _mix(self, values: NDArray[np.uint64], epochs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_scrambled(right + epochs * _GOLDEN ^ key) & self._mask)
        return left << self._half | right


def _scrambled(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ value >> np.uint64(30)) * _FIRST
    value = (value ^ value >> np.uint64(27)) * _SECOND
    return value ^ value >> np.uint64(31)

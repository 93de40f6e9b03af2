"""The kernels of robust rules, compiled (`native.c`): the same bits as torch's and numpy's in a
fifth of the time. None where the package was installed without a C compiler; nothing but speed
depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...collectives import compiled
from ...collectives.compiled import address, address_of_rows

STRIP, LANES, TILE = 64, 64, 512  # as in native.c
_ADDRESS, _LENGTH = ctypes.c_void_p, ctypes.c_size_t


class Kernel:
    """The library's functions, for CPU memory. They release the interpreter lock meanwhile."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._sorted_mean, self._squares = library.atoll_sorted_mean, library.atoll_squares
        self._clip, self._product, self._triangle = (
            library.atoll_clip,
            library.atoll_product,
            library.atoll_triangle,
        )
        self._sorted_mean.argtypes = [
            _ADDRESS,
            *[_LENGTH] * 3,
            _ADDRESS,
            *[_LENGTH] * 4,
            _ADDRESS,
            _ADDRESS,
        ]
        self._squares.argtypes = [_ADDRESS, *[_LENGTH] * 3, _ADDRESS, _ADDRESS]
        self._clip.argtypes = [_ADDRESS, *[_LENGTH] * 3, ctypes.c_double]
        self._product.argtypes = [_ADDRESS, _ADDRESS, *[_LENGTH] * 3, _ADDRESS]
        self._triangle.argtypes = [_ADDRESS, *[_LENGTH] * 3, _ADDRESS, _ADDRESS]
        for function in (
            self._sorted_mean,
            self._squares,
            self._clip,
            self._product,
            self._triangle,
        ):
            function.restype = None

    def sorted_mean(
        self, rows: Tensor, steps: Sequence[int], low: int, high: int, window: int, out: Tensor
    ) -> None:
        """See coordinate.py. rows: (n, d), each row contiguous; steps: pairs of rows; out:
        contiguous (d,).
        """
        (first, stride), (n, d) = address_of_rows(rows), rows.shape
        program = (ctypes.c_uint16 * len(steps))(*steps)
        scratch = torch.zeros(n * STRIP, dtype=torch.float32, device="cpu")
        self._sorted_mean(
            first,
            stride,
            n,
            d,
            program,
            len(steps) // 2,
            low,
            high,
            window,
            scratch.data_ptr(),
            address(out, d),
        )

    def squares(self, rows: Tensor, origin: Tensor | None) -> NDArray[np.float64]:
        """See gram.py: (n, STRIP). rows: (n, d), each row contiguous; origin: contiguous (d,)."""
        (first, stride), (n, d) = address_of_rows(rows), rows.shape
        sums = np.empty((n, STRIP))
        start = address(origin, d) if origin is not None else None
        self._squares(first, stride, n, d, start, sums.ctypes.data)
        return sums

    def clip(self, rows: Tensor, longest: float) -> None:
        """See before.py. rows: (n, d), each row contiguous."""
        self._clip(*address_of_rows(rows), *rows.shape, longest)

    def product(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        """See numbers.py: (m, n), of any a (m, k) and b (k, n)."""
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"a product of {a.shape} and {b.shape}")
        a, b = np.ascontiguousarray(a, np.float64), np.ascontiguousarray(b, np.float64)
        out = np.zeros((a.shape[0], b.shape[1]))
        self._product(a.ctypes.data, b.ctypes.data, *a.shape, b.shape[1], out.ctypes.data)
        return out

    def triangle(self, rows: Tensor) -> NDArray[np.float64]:
        """See triangle.py. rows: (n, d), each row contiguous."""
        (first, stride), (n, d) = address_of_rows(rows), rows.shape
        pairs = n * (n + 1) // 2
        scratch, out = np.empty(n * TILE + pairs * LANES), np.empty(pairs)
        self._triangle(first, stride, n, d, scratch.ctypes.data, out.ctypes.data)
        return out


def load(folder: Path) -> Kernel | None:
    """The library in ``folder``, if there is one that can be used."""
    return compiled.load(folder, Kernel, "robust rules are")


KERNEL = load(Path(__file__).parent)

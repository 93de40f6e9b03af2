"""The kernel of rules by coordinate, compiled (`native.c`): the same bits as torch's in a fifth of the time. None where the package was installed
without a C compiler; nothing but speed depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...collectives import compiled

STRIP = 64  # as in native.c
_ADDRESS, _LENGTH = ctypes.c_void_p, ctypes.c_size_t


class Kernel:
    """The library's function, for float32 tensors on the CPU. It gives up the interpreter lock meanwhile."""

    def __init__(self, path: Path) -> None:
        self._sorted_mean = ctypes.CDLL(str(path)).atoll_sorted_mean
        self._sorted_mean.argtypes = [_ADDRESS, *[_LENGTH] * 3, _ADDRESS, *[_LENGTH] * 4, _ADDRESS, _ADDRESS]
        self._sorted_mean.restype = None

    def sorted_mean(self, rows: Tensor, steps: Sequence[int], low: int, high: int, window: int, out: Tensor) -> None:
        """See coordinate.py. rows: (n, d), each row contiguous; steps: pairs of rows; out: contiguous (d,)."""
        n, d = rows.shape
        program = (ctypes.c_uint16 * len(steps))(*steps)
        scratch = torch.zeros(n * STRIP)
        stride = rows.stride(0) if n > 1 else d
        self._sorted_mean(rows.data_ptr(), stride, n, d, program, len(steps) // 2, low, high, window, scratch.data_ptr(), out.data_ptr())


def load(folder: Path) -> Kernel | None:
    """The library in ``folder``, if there is one that can be used."""
    return compiled.load(folder, Kernel, "robust rules are")


KERNEL = load(Path(__file__).parent)

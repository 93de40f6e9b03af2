"""int8's kernels, compiled (`native.c`): the same bits as those of `kernels` in a third of the time. None where the package was installed
without a C compiler; nothing but speed depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import cast

from torch import Tensor

from .wire import LazyWire, Wire

BLOCK = 256
_ADDRESS, _LENGTH, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float


class Kernels:
    """The library's functions, for float32 tensors on the CPU, contiguous, and int8 wires. They give up the interpreter lock meanwhile."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._within = ctypes.PyDLL(str(path)).atoll_within  # too short to be worth giving up the lock
        self._encode, self._decode, self._mean = library.atoll_encode, library.atoll_decode, library.atoll_mean
        self._within.argtypes = [_ADDRESS, _LENGTH, _FLOAT]
        self._encode.argtypes = [_ADDRESS, _LENGTH, _FLOAT, _FLOAT, _ADDRESS]
        self._decode.argtypes = [_ADDRESS, _LENGTH, _ADDRESS]
        self._mean.argtypes = [_ADDRESS, _ADDRESS, _LENGTH, _LENGTH, _FLOAT, _FLOAT, _FLOAT, _ADDRESS]
        self._decode.restype = None

    def within(self, wire: LazyWire, limit: float) -> bool:
        """Whether no scale is NaN or beyond ±limit."""
        return bool(self._within(wire.address, wire.elements, limit))

    def encode(self, x: Tensor, share: float, limit: float, out: LazyWire) -> bool:
        """Scales of ``share`` of each block's largest magnitude, and codes. Whether all scales are `within` the limit."""
        return bool(self._encode(x.data_ptr(), out.elements, share, limit, out.address))

    def decode(self, wire: LazyWire, out: Tensor) -> None:
        """Codes times scales."""
        self._decode(wire.address, wire.elements, out.data_ptr())

    def mean(self, wires: Sequence[Wire], weights: Sequence[float], divisor: float, share: float, limit: float, out: LazyWire) -> bool:
        """Encode (sum of weights[i] * decoded i) / divisor; whether the result is `within` the limit."""
        count = len(wires)
        sources = (_ADDRESS * count)(*[cast(LazyWire, wire).address for wire in wires])
        return bool(self._mean(sources, (_FLOAT * count)(*weights), count, out.elements, share, divisor, limit, out.address))


def _load() -> Kernels | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_native" + suffix)
        if path.exists():
            return Kernels(path)
    return None


KERNELS = _load()

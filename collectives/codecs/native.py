"""int8's kernels, compiled (`native.c`): the same bits as those of `kernels` in a third of the time. None where the package was installed
without a C compiler; nothing but speed depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from torch import Tensor

from .wire import Wire

BLOCK = 256
_ADDRESS, _LENGTH, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float


class Kernels:
    """The library's functions on tensors: float32 or int8, contiguous, on the CPU. They give up the interpreter lock while they work."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._within = ctypes.PyDLL(str(path)).atoll_within  # too short to be worth giving up the lock
        self._encode, self._decode, self._mean = library.atoll_encode, library.atoll_decode, library.atoll_mean
        self._within.argtypes = [_ADDRESS, _LENGTH, _FLOAT]
        self._encode.argtypes = [_ADDRESS, _LENGTH, _FLOAT, _FLOAT, _ADDRESS, _ADDRESS]
        self._decode.argtypes = [_ADDRESS, _ADDRESS, _LENGTH, _ADDRESS]
        self._mean.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _LENGTH, _LENGTH, _FLOAT, _FLOAT, _ADDRESS, _ADDRESS]
        self._encode.restype = self._decode.restype = self._mean.restype = None

    def within(self, scales: Tensor, limit: float) -> bool:
        """Whether no scale is NaN or beyond ±limit."""
        return bool(self._within(scales.data_ptr(), scales.shape[0], limit))

    def encode(self, x: Tensor, share: float, codes: Tensor, scales: Tensor) -> None:
        """Scales of ``share`` of each block's largest magnitude, and codes."""
        self._encode(x.data_ptr(), x.shape[0], share, 1.0, codes.data_ptr(), scales.data_ptr())

    def decode(self, wire: Wire, out: Tensor) -> None:
        """Codes times scales."""
        assert wire.scales is not None
        self._decode(wire.values.data_ptr(), wire.scales.data_ptr(), wire.elements, out.data_ptr())

    def mean(self, wires: Sequence[Wire], weights: Sequence[float], divisor: float, share: float, out: Wire) -> None:
        """Encode (sum of weights[i] * decoded i) / divisor."""
        count = len(wires)
        codes = (_ADDRESS * count)(*[wire.values.data_ptr() for wire in wires])
        scales = (_ADDRESS * count)(*[_scales(wire) for wire in wires])
        factors = (_FLOAT * count)(*weights)
        self._mean(codes, scales, factors, count, out.elements, share, divisor, out.values.data_ptr(), _scales(out))


def _scales(wire: Wire) -> int:
    assert wire.scales is not None
    return wire.scales.data_ptr()


def _load() -> Kernels | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_native" + suffix)
        if path.exists():
            return Kernels(path)
    return None


KERNELS = _load()

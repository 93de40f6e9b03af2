"""Kernels of int8, int8_dither, fp32, stat2 and the sparse codecs, compiled (`native.c`): the same
bits as torch's in a third of the time or less. None where the package was installed without a C
compiler; nothing but speed depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from torch import Tensor

from .. import compiled
from ..compiled import address
from .wire import EncodedChunk, LazyWire

_ADDRESS, _LENGTH, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
_FLAG = ctypes.c_int


class Kernels:
    """The library's functions, for float32 tensors on the CPU, contiguous, and lazy wires. They
    give up the interpreter lock meanwhile.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        # Too short to be worth giving up the lock.
        self._within = ctypes.PyDLL(str(path)).atoll_within
        self._encode = library.atoll_blocks_encode
        self._decode = library.atoll_decode
        self._mean = library.atoll_blocks_mean
        self._within.argtypes = [_ADDRESS, _LENGTH, _FLOAT]
        self._encode.argtypes = [_ADDRESS, _LENGTH, _FLOAT, _FLOAT, _FLAG, _ADDRESS]
        self._decode.argtypes = [_ADDRESS, _LENGTH, _ADDRESS, ctypes.c_int]
        self._mean.argtypes = [
            _ADDRESS,
            _ADDRESS,
            _LENGTH,
            _LENGTH,
            _FLOAT,
            _FLOAT,
            _FLOAT,
            _FLAG,
            _ADDRESS,
        ]
        self._encode_chunks = library.atoll_blocks_encode_chunks
        self._decode_chunks = library.atoll_decode_chunks
        self._encode_chunks.argtypes = [
            _ADDRESS,
            _LENGTH,
            _LENGTH,
            _FLOAT,
            _FLOAT,
            _FLAG,
            _ADDRESS,
        ]
        self._decode_chunks.argtypes = [_ADDRESS, _LENGTH, _LENGTH, _ADDRESS, ctypes.c_int]
        self._decode.restype = self._decode_chunks.restype = None
        self._finite = library.atoll_finite
        self._copy = library.atoll_copy
        self._float_mean = library.atoll_float_mean
        self._finite.argtypes = [_ADDRESS, _LENGTH]
        self._copy.argtypes = [_ADDRESS, _LENGTH, _ADDRESS]
        self._float_mean.argtypes = [_ADDRESS, _ADDRESS, _LENGTH, _LENGTH, _FLOAT, _ADDRESS]
        self._records_encode = library.atoll_records_encode
        self._records_add = library.atoll_records_add
        self._records_sound = library.atoll_records_sound
        self._records_encode.argtypes = [_ADDRESS, _LENGTH, _LENGTH, _ADDRESS]
        self._records_add.argtypes = [_ADDRESS, _LENGTH, _LENGTH, _FLOAT, ctypes.c_int, _ADDRESS]
        self._records_sound.argtypes = [_ADDRESS, _LENGTH, _LENGTH]
        self._records_add.restype = None

    # ---- int8, and with ``dither`` int8_dither

    def within(self, wire: LazyWire, limit: float) -> bool:
        """Whether no scale is NaN or beyond ±limit."""
        return bool(self._within(wire.address, wire.elements, limit))

    def encode(self, x: Tensor, share: float, limit: float, dither: bool, out: LazyWire) -> bool:
        """Scales of ``share`` of each block's largest magnitude, and codes. Whether all scales are
        `within` the limit.
        """
        return bool(
            self._encode(address(x, out.elements), out.elements, share, limit, dither, out.address)
        )

    def decode(self, wire: LazyWire, out: Tensor, *, cold: bool) -> None:
        """Codes times scales; ``cold``: past the caches."""
        self._decode(wire.address, wire.elements, address(out, wire.elements), cold)

    def encode_chunks(
        self, x: Tensor, chunks: int, share: float, limit: float, dither: bool, first: LazyWire
    ) -> bool:
        """`encode` of chunks as long as the first, whose wires lie one after another."""
        return bool(
            self._encode_chunks(
                address(x, chunks * first.elements),
                first.elements,
                chunks,
                share,
                limit,
                dither,
                first.address,
            )
        )

    def decode_chunks(self, first: LazyWire, chunks: int, out: Tensor, *, cold: bool) -> None:
        """`decode` of chunks as long as the first, whose wires lie one after another."""
        to = address(out, chunks * first.elements)
        self._decode_chunks(first.address, first.elements, chunks, to, cold)

    def mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        share: float,
        limit: float,
        dither: bool,
        out: LazyWire,
    ) -> bool:
        """Encode (sum of weights[i] * decoded i) / divisor; whether it is `within` the limit."""
        count, factors = len(wires), (_FLOAT * len(weights))(*weights)
        return bool(
            self._mean(
                _addresses(wires),
                factors,
                count,
                out.elements,
                share,
                divisor,
                limit,
                dither,
                out.address,
            )
        )

    # ---- fp32
    def finite(self, wire: LazyWire) -> bool:
        return bool(self._finite(wire.address, wire.elements))

    def copy_in(self, x: Tensor, elements: int, first: LazyWire) -> bool:
        """Copy values to the wires from ``first`` on, past the caches; whether all are finite."""
        return bool(self._copy(address(x, elements), elements, first.address))

    def copy_out(self, first: LazyWire, elements: int, out: Tensor) -> None:
        """Copy values from the wires that begin with ``first``, past the caches."""
        self._copy(first.address, elements, address(out, elements))

    def float_mean(
        self, wires: Sequence[EncodedChunk], weights: Sequence[float], divisor: float, out: LazyWire
    ) -> bool:
        """(sum of weights[i] * values i) / divisor; whether the result is finite."""
        factors = (_FLOAT * len(weights))(*weights)
        return bool(
            self._float_mean(
                _addresses(wires), factors, len(wires), out.elements, divisor, out.address
            )
        )

    # ---- stat2 (``keep`` 0) and the sparse codecs, which keep so many values of a tile
    def records_encode(self, x: Tensor, keep: int, out: LazyWire) -> bool:
        """Write records; whether they are sound."""
        return bool(self._records_encode(address(x, out.elements), out.elements, keep, out.address))

    def records_add(
        self, wire: LazyWire, keep: int, weight: float, acc: Tensor, *, first: bool
    ) -> None:
        """acc += weight * decoded; ``first``: acc = weight * decoded."""
        to = address(acc, wire.elements)
        self._records_add(wire.address, wire.elements, keep, weight, first, to)

    def records_sound(self, wire: LazyWire, keep: int) -> bool:
        """Whether an encoder could have made them."""
        return bool(self._records_sound(wire.address, wire.elements, keep))


def _addresses(wires: Sequence[EncodedChunk]) -> ctypes.Array[ctypes.c_void_p]:
    return (_ADDRESS * len(wires))(*[cast(LazyWire, wire).address for wire in wires])


def load(folder: Path) -> Kernels | None:
    """The library in ``folder``, if there is one that can be used."""
    return compiled.load(folder, Kernels, "encoding is")


KERNELS = load(Path(__file__).parent)

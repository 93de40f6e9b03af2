"""fp32 and bf16: values in a floating-point format of their own, rounded to nearest even.

Bytes: the values, padding to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..rows import ROWS
from . import kernels
from .wire import Codec, EncodedChunk, LazyWire, Scratch, check_length, padded, tail_of, view

KERNELS: Any = ROWS.find("native", "KERNELS")
"""The same arithmetic compiled, as `native.Kernels`; None where there was no compiler."""

DTYPES = {32: torch.float32, 16: torch.bfloat16}  # by bits


class FloatCodec:
    """A codec of one floating-point format. A value that rounds to infinity counts as not finite.
    ``compiled``: kernels for fp32 on the CPU."""

    def __init__(self, name: str, bits: int, *, compiled: Any = KERNELS) -> None:
        self.name = name
        dtype = DTYPES[bits]
        self.zero_copy = dtype == torch.float32
        self._dtype = dtype
        self._compiled = compiled if self.zero_copy else None
        self._scratch = Scratch(lambda elements, device: _FloatSpace(elements, device))

    @property
    def results(self) -> Codec:
        """Itself."""
        return self

    def wire_bytes(self, elements: int) -> int:
        """Length of ``elements`` encoded values, padded to 4 bytes."""
        return padded(elements * self._dtype.itemsize)

    def wire(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        """Views of a buffer."""
        check_length(self, data, elements)
        if self._compiled is not None and isinstance(data, memoryview):
            return LazyWire(data, elements, self._views)
        return self._views(data, elements)

    def _views(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        return EncodedChunk(
            data,
            elements,
            view(data, self._dtype, elements),
            tail=tail_of(data, elements * self._dtype.itemsize),
        )

    def encode(self, x: Tensor, out: EncodedChunk) -> bool:
        """Round every value; False when one is or becomes infinite or NaN."""
        if self._compiled is not None and isinstance(out, LazyWire):
            return self._compiled.copy_in(x.contiguous(), out.elements, out)
        out.values.copy_(x)
        if out.tail is not None:
            out.tail.zero_()
        return self.finite(out)

    def decode(self, wire: EncodedChunk, out: Tensor, *, cold: bool = False) -> None:
        """Widen to float32; exact."""
        if cold and self._compiled is not None and isinstance(wire, LazyWire):
            self._compiled.copy_out(wire, wire.elements, out)
        else:
            out.copy_(wire.values)

    def encode_chunks(self, x: Tensor, first: EncodedChunk, chunks: int) -> bool | None:
        """`encode` of chunks as long as the first, whose wires lie one after another, in one step;
        None where there is none.
        """
        if self._compiled is not None and isinstance(first, LazyWire):
            return self._compiled.copy_in(x.contiguous(), chunks * first.elements, first)
        return None

    def decode_chunks(self, first: EncodedChunk, chunks: int, out: Tensor) -> bool:
        """`decode` in one step, past the caches; False where there is none."""
        if self._compiled is None or not isinstance(first, LazyWire):
            return False
        self._compiled.copy_out(first, chunks * first.elements, out)
        return True

    def accumulate(
        self, wire: EncodedChunk, weight: float, acc: Tensor, *, first: bool = False
    ) -> None:
        """acc += weight * decoded."""
        if first:
            acc.copy_(wire.values)
            if weight != 1.0:
                acc.mul_(weight)
        elif weight == 1.0 and self.zero_copy:
            acc.add_(wire.values)
        else:  # widening first is faster than adding mixed formats
            widened = self._space(wire).widened
            widened.copy_(wire.values)
            acc.add_(widened if weight == 1.0 else widened.mul_(weight))

    def weighted_mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        out: EncodedChunk,
    ) -> bool:
        """fp32 accumulates in the result's own memory."""
        if self._compiled is not None and isinstance(out, LazyWire):
            return self._compiled.float_mean(wires, weights, divisor, out)
        space = self._space(out)
        acc = out.values if self.zero_copy else space.total
        start = 1
        if len(wires) > 1 and weights[0] == weights[1] == 1.0 and self.zero_copy:
            # Saves the pass that copies the first.
            torch.add(wires[0].values, wires[1].values, out=acc)
            start = 2
        else:
            self.accumulate(wires[0], weights[0], acc, first=True)
        for index in range(start, len(wires)):
            self.accumulate(wires[index], weights[index], acc)
        if divisor != 1.0:
            acc.div_(space.number.fill_(divisor))
        return self.finite(out) if self.zero_copy else self.encode(acc, out)

    def finite(self, wire: EncodedChunk) -> bool:
        """One pass over the values."""
        if self._compiled is not None and isinstance(wire, LazyWire):
            return self._compiled.finite(wire)
        return kernels.all_finite(wire.values)

    def _space(self, wire: EncodedChunk) -> _FloatSpace:
        return self._scratch.get(wire.elements, wire.values.device)


class _FloatSpace:
    """Float32 work space for one chunk; memory that a format never touches is never backed."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.widened = torch.empty(elements, dtype=torch.float32, device=device)
        self.total = torch.empty(elements, dtype=torch.float32, device=device)
        self.number = torch.empty(1, dtype=torch.float32, device=device)

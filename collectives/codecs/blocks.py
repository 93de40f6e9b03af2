"""int8, int8_dither and int4: integers with a scale a block of values.

    int8        1.016 bytes a value
                [float32 scale a block of 256][int8 values][padding to 4]
    int8_dither the same bytes; values are rounded up or down by chance, and right on average
    int4        0.531 bytes a value
                [float32 unit][fp16 scale a block of 64, in units][two values a byte][padding]

The unit is the largest scale of the chunk, so that fp16's narrow range does not matter. A scale
below 2^-14 units is taken as that: what such blocks lose is far below what the chunk's largest
block loses anyway.

Rounding to the nearest integer loses a value of less than half a scale, in every round if its
neighbours' updates are always that much longer: rare rows of an embedding would never move. A
dithered value moves by a whole scale once in a while. Its chance follows from the block's bits
(`kernels.Chance`), so that whoever encodes the same values makes the same bytes.
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

# values by bits. 256: +1.6 % wire against 0.4 % for 1024, no measurable time, and half the damage
# of an outlier; 64: 10 % error on Gaussian values; 256 has 12 %, 32 has 9.5 % and 6 % more wire
BLOCKS = {8: 256, 4: 64}
SMALLEST_RATIO = 2.0**-14  # of fp16's normal numbers: below them a scale would lose its precision


class BlockCodec:
    """A codec of so many ``bits`` a value: 8, with scales of four bytes, or 4, two values a byte
    with scales of two. ``dither``, of 8 bits: no value is rounded to the nearest code, but all are
    right on average. ``compiled``: kernels for 8 bits, used on the CPU.
    """

    zero_copy = False

    def __init__(
        self,
        name: str,
        bits: int,
        *,
        dither: bool = False,
        compiled: Any = KERNELS,
    ) -> None:
        self.name = name
        self._block = block = BLOCKS[bits]
        self._packed = packed = bits == 4
        self._dither = dither
        self._share = 1 / (2 ** (bits - 1) - 1)
        # A scale beyond it could decode to infinity.
        self._limit = kernels.FLOAT_MAX / 2 ** (bits - 1)
        self._compiled = None if packed else compiled
        self._scratch = Scratch(
            lambda elements, device: _BlockSpace(elements, block, packed, dither, device)
        )
        # The length asked for last, and its bytes: nearly all chunks are equally long.
        self._last = (
            0,
            0,
        )

    @property
    def results(self) -> Codec:
        """Itself."""
        return self

    def wire_bytes(self, elements: int) -> int:
        """Scales and values, padded to 4 bytes."""
        if self._last[0] != elements:
            self._last = elements, padded(self._head(elements) + self._body(elements))
        return self._last[1]

    def wire(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        """Views of a buffer."""
        check_length(self, data, elements)
        if self._compiled is not None and isinstance(data, memoryview):
            return LazyWire(data, elements, self._views)
        return self._views(data, elements)

    def _views(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        blocks, head, body = -(-elements // self._block), self._head(elements), self._body(elements)
        values, tail = view(data, torch.int8, body, head), tail_of(data, head + body)
        if self._packed:
            return EncodedChunk(
                data,
                elements,
                values,
                view(data, torch.float16, blocks, 4),
                unit=view(data, torch.float32, 1),
                tail=tail,
            )
        scales = view(data, torch.float32, blocks)
        return EncodedChunk(
            data, elements, values, scales, _columns(scales, elements, self._block), tail=tail
        )

    def encode(self, x: Tensor, out: EncodedChunk) -> bool:
        """Quantise; False if a value is not finite or within 1 % (int4: 13 %) of fp32's limit."""
        if self._compiled is not None and isinstance(out, LazyWire):
            return self._compiled.encode(
                x.contiguous(), self._share, self._limit, self._dither, out
            )
        return self._encode(x.contiguous(), out, 1.0)

    def decode(self, wire: EncodedChunk, out: Tensor, *, cold: bool = False) -> None:
        """Value times scale, one rounding."""
        if self._compiled is not None and isinstance(wire, LazyWire):
            self._compiled.decode(wire, out, cold=cold)
        else:
            self.accumulate(wire, 1.0, out, first=True)

    def encode_chunks(self, x: Tensor, first: EncodedChunk, chunks: int) -> bool | None:
        """`encode` of chunks as long as the first, whose wires lie one after another, in one step;
        None where there is none.
        """
        if self._compiled is not None and isinstance(first, LazyWire):
            return self._compiled.encode_chunks(
                x.contiguous(), chunks, self._share, self._limit, self._dither, first
            )
        return None

    def decode_chunks(self, first: EncodedChunk, chunks: int, out: Tensor) -> bool:
        """`decode` in one step, past the caches; False where there is none."""
        if self._compiled is None or not isinstance(first, LazyWire):
            return False
        self._compiled.decode_chunks(first, chunks, out, cold=True)
        return True

    def accumulate(
        self, wire: EncodedChunk, weight: float, acc: Tensor, *, first: bool = False
    ) -> None:
        """The weight goes into the scales: no pass over the values for it."""
        space = self._space(wire)
        columns = self._scales(wire, space, weight)
        target = acc if first else space.codes
        if self._packed:
            kernels.unpack(wire.values, space.half, space.high, target)
        else:
            target.copy_(wire.values)
        for rows, scale in zip(
            _rows(target, self._block) if first else space.rows, columns, strict=True
        ):
            rows.mul_(scale)
        if not first:
            acc.add_(target)

    def weighted_mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        out: EncodedChunk,
    ) -> bool:
        """Sum in float32, then one quantisation; the division goes into the scales."""
        if self._compiled is not None and isinstance(out, LazyWire):
            return self._compiled.mean(
                wires, weights, divisor, self._share, self._limit, self._dither, out
            )
        total = self._space(out).total
        for index, wire in enumerate(wires):
            self.accumulate(wire, weights[index], total, first=index == 0)
        return self._encode(total, out, divisor)

    def finite(self, wire: EncodedChunk) -> bool:
        """The scales tell."""
        if self._compiled is not None and isinstance(wire, LazyWire):
            return self._compiled.within(wire, self._limit)
        if not self._packed:
            return kernels.within(_need(wire.scales), self._limit)
        space = self._space(wire)
        self._scales(wire, space, 1.0)
        return kernels.within(space.scales, self._limit)

    def _head(self, elements: int) -> int:
        blocks = -(-elements // self._block)
        return 4 + 2 * blocks if self._packed else 4 * blocks

    def _body(self, elements: int) -> int:
        return -(-elements // 2) if self._packed else elements

    def _encode(self, x: Tensor, out: EncodedChunk, divisor: float) -> bool:
        space = self._space(out)
        columns, rows = (space.columns if self._packed else out.columns), _rows(x, self._block)
        for values, scale, low in zip(rows, columns, space.spare_columns, strict=True):
            kernels.absmax(values, self._share, scale, low)
        if self._packed:
            self._write_scales(space, out)
        for values, scale, factor, codes, chance in zip(
            rows, columns, space.spare_columns, space.rows, space.chances, strict=True
        ):
            kernels.to_codes(values, scale, factor, codes, chance)
        if self._packed:
            kernels.pack(space.padded, space.half, out.values)
        else:
            out.values.copy_(space.codes)
        if divisor != 1.0:
            _need(out.unit if self._packed else out.scales).div_(space.number.fill_(divisor))
        if out.tail is not None:
            out.tail.zero_()
        return self.finite(out)

    def _write_scales(self, space: _BlockSpace, out: EncodedChunk) -> None:
        """Store exact scales as unit and ratios; afterwards ``space.scales`` are those that a
        decoder will see.
        """
        unit, ratios = _need(out.unit), _need(out.scales)
        torch.amax(space.scales, 0, keepdim=True, out=unit)
        space.scales.div_(unit)
        ratios.copy_(space.scales.clamp_min_(SMALLEST_RATIO))
        space.scales.copy_(ratios)
        space.scales.mul_(unit)

    def _scales(self, wire: EncodedChunk, space: _BlockSpace, weight: float) -> tuple[Tensor, ...]:
        """The decoded scales times ``weight``, as columns."""
        scales, columns = _need(wire.scales), wire.columns
        if self._packed:
            space.scales.copy_(scales)
            space.scales.mul_(_need(wire.unit))
            scales, columns = space.scales, space.columns
        if weight != 1.0:
            torch.mul(scales, weight, out=space.spare)
            columns = space.spare_columns
        return columns

    def _space(self, wire: EncodedChunk) -> _BlockSpace:
        return self._scratch.get(wire.elements, wire.values.device)


class _BlockSpace:
    """Work space for one chunk: two float32 copies and a few values a block."""

    def __init__(
        self, elements: int, block: int, packed: bool, dither: bool, device: torch.device
    ) -> None:
        blocks = -(-elements // block)
        # An unpaired last value has a zero beside it.
        self.padded = torch.zeros(elements + elements % 2, dtype=torch.float32, device=device)
        self.codes = self.padded[:elements]
        self.rows = _rows(self.codes, block)
        self.chances = [kernels.Chance(rows) if dither else None for rows in self.rows]
        self.total = torch.empty(elements, dtype=torch.float32, device=device)
        self.scales = torch.empty(blocks, dtype=torch.float32, device=device)
        self.columns = _columns(self.scales, elements, block)
        self.spare = torch.empty(blocks, dtype=torch.float32, device=device)
        self.spare_columns = _columns(self.spare, elements, block)
        self.number = torch.empty(1, dtype=torch.float32, device=device)
        pairs = self.padded.shape[0] // 2 if packed else 0
        self.half = torch.empty(pairs, dtype=torch.float32, device=device)
        self.high = torch.empty(pairs, dtype=torch.float32, device=device)


def _rows(x: Tensor, block: int) -> tuple[Tensor, ...]:
    """x as (rows, block), and what is left as (1, rest)."""
    rows, rest = divmod(x.shape[0], block)
    if not rest:
        return (x.view(rows, block),)
    return (
        (x[: rows * block].view(rows, block), x[rows * block :].view(1, rest))
        if rows
        else (x.view(1, rest),)
    )


def _columns(scales: Tensor, elements: int, block: int) -> tuple[Tensor, ...]:
    """One value a block, in the shapes that fit `_rows`."""
    rows, rest = divmod(elements, block)
    if not rest or not rows:
        return (scales.view(-1, 1),)
    return (scales[:rows].view(rows, 1), scales[rows:].view(1, 1))


def _need(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor

"""Codecs: a chunk of a float32 vector ⇄ the bytes that travel. Named, versioned by name, any length.

    get_codec("int8")      block-wise int8, 256 values a scale: [float32 scales][int8 values][padding to 4 bytes]
    get_codec("bf16"), get_codec("fp16"), get_codec("fp32")

Buffers are wrapped once in a `Wire` (typed views of the bytes) and used often; nothing is allocated in the loop. A codec owns
scratch memory, so it belongs to one thread: call `get_codec` again for another thread.

What decides the bits of a result (decode, accumulate, mean) uses only separately rounded elementwise operations, in a fixed order:
the same bytes give the same result on every CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import quantize
from .errors import ConfigError

CODECS = ("fp32", "fp16", "bf16", "int8")
DEFAULT_CHUNK_ELEMENTS = {"fp32": 65_536, "fp16": 131_072, "bf16": 131_072, "int8": 131_072, "bits": 65_536}
"""Chunk lengths that keep the working set of a reduction inside a second-level cache (measured)."""


class Wire:
    """Typed views of one encoded chunk. ``data``: its bytes, writable, exactly ``wire_bytes(elements)``."""

    __slots__ = ("data", "elements", "values", "scales", "pieces")

    def __init__(self, data: memoryview, elements: int, values: Tensor, scales: Tensor | None, pieces: tuple[Piece, ...]) -> None:
        self.data = data
        self.elements = elements
        self.values = values  # what must be finite unless there are scales: (elements,)
        self.scales = scales  # float32 (blocks,), int8 only
        self.pieces = pieces  # int8 only


Piece = tuple[int, int, int, Tensor, Tensor]
"""start, stop, rows; int8 values (rows, width), float32 scales (rows, 1). A chunk has one of whole blocks and at most one shorter block."""


class Codec(Protocol):
    """A chunk of float32 values ⇄ wire bytes. Lossy or not, decoding depends on the bytes alone."""

    name: str
    zero_copy: bool
    """Whether the wire bytes of a float32 chunk are that chunk's own memory."""

    def wire_bytes(self, elements: int) -> int:
        """Length of ``elements`` encoded values, a multiple of 4."""
        ...

    def wire(self, data: memoryview, elements: int) -> Wire:
        """Views of a writable buffer of exactly ``wire_bytes(elements)`` bytes, aligned to 4. Makes no copy."""
        ...

    def encode(self, x: Tensor, out: Wire) -> bool:
        """Encode x (float32, shape (elements,), contiguous). False when an encoded value is not finite: such bytes must not be sent."""
        ...

    def decode(self, wire: Wire, out: Tensor) -> None:
        """Decode into out (float32, shape (elements,), contiguous)."""
        ...

    def accumulate(self, wire: Wire, weight: float, acc: Tensor, *, first: bool = False) -> None:
        """acc += weight * decoded, two roundings a value; ``first``: acc = weight * decoded. acc: float32 (elements,)."""
        ...

    def weighted_mean(self, wires: Sequence[Wire], weights: Sequence[float], divisor: float, out: Wire) -> bool:
        """Encode (sum over i of weights[i] * decoded(wires[i])) / divisor, in this order. False when the result is not finite."""
        ...

    def finite(self, wire: Wire) -> bool:
        """Whether all values of an encoded chunk are finite."""
        ...


class FloatCodec:
    """Values in a floating-point format of their own: fp32, fp16 or bf16, rounded to nearest even."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.zero_copy = dtype == torch.float32
        self._dtype = dtype
        self._width = dtype.itemsize
        self._scratch: dict[int, Tensor] = {}
        self._sum: dict[int, Tensor] = {}

    def wire_bytes(self, elements: int) -> int:
        """Length of ``elements`` encoded values, padded to 4 bytes."""
        return -(-elements * self._width // 4) * 4

    def wire(self, data: memoryview, elements: int) -> Wire:
        """Views of a writable buffer."""
        _check_length(self, data, elements)
        return Wire(data, elements, torch.frombuffer(data, dtype=self._dtype, count=elements), None, ())

    def encode(self, x: Tensor, out: Wire) -> bool:
        """Round every value; False when one is or becomes infinite or NaN."""
        out.values.copy_(x)
        out.data[out.elements * self._width :] = bytes(len(out.data) - out.elements * self._width)
        return self.finite(out)

    def decode(self, wire: Wire, out: Tensor) -> None:
        """Widen to float32; exact."""
        out.copy_(wire.values)

    def accumulate(self, wire: Wire, weight: float, acc: Tensor, *, first: bool = False) -> None:
        """acc += weight * decoded."""
        if first:
            acc.copy_(wire.values)
            if weight != 1.0:
                acc.mul_(weight)
        elif weight == 1.0 and self.zero_copy:
            acc.add_(wire.values)
        else:  # widening first is faster than adding mixed formats
            scratch = self._buffer(self._scratch, wire.elements)
            scratch.copy_(wire.values)
            acc.add_(scratch if weight == 1.0 else scratch.mul_(weight))

    def weighted_mean(self, wires: Sequence[Wire], weights: Sequence[float], divisor: float, out: Wire) -> bool:
        """fp32 accumulates in the result's own memory."""
        acc = out.values if self.zero_copy else self._buffer(self._sum, out.elements)
        start = 1
        if len(wires) > 1 and weights[0] == weights[1] == 1.0 and self.zero_copy:
            torch.add(wires[0].values, wires[1].values, out=acc)  # saves the pass that copies the first
            start = 2
        else:
            self.accumulate(wires[0], weights[0], acc, first=True)
        for index in range(start, len(wires)):
            self.accumulate(wires[index], weights[index], acc)
        if divisor != 1.0:
            acc.div_(divisor)
        return self.finite(out) if self.zero_copy else self.encode(acc, out)

    def finite(self, wire: Wire) -> bool:
        """One pass over the values."""
        return quantize.all_finite(wire.values)

    @staticmethod
    def _buffer(buffers: dict[int, Tensor], elements: int) -> Tensor:
        buffer = buffers.get(elements)
        if buffer is None:
            _bound(buffers)
            buffer = buffers[elements] = torch.empty(elements)
        return buffer


class Int8Codec:
    """Block-wise int8: 1.016 bytes a value."""

    name = "int8"
    zero_copy = False

    def __init__(self, block: int = quantize.BLOCK) -> None:
        self._block = block
        self._scratch: dict[tuple[int, int], quantize.BlockScratch] = {}
        self._sum: dict[int, Tensor] = {}

    def wire_bytes(self, elements: int) -> int:
        """4 bytes a started block, 1 byte a value, padded to 4."""
        return 4 * -(-elements // self._block) + -(-elements // 4) * 4

    def wire(self, data: memoryview, elements: int) -> Wire:
        """Views of a writable buffer: scales, then values."""
        _check_length(self, data, elements)
        rows, rest = divmod(elements, self._block)
        blocks = rows + (rest > 0)
        scales = torch.frombuffer(data, dtype=torch.float32, count=blocks)
        values = torch.frombuffer(data, dtype=torch.int8, offset=4 * blocks, count=elements)
        whole = rows * self._block
        pieces: list[Piece] = []
        if rows:
            pieces.append((0, whole, rows, values[:whole].view(rows, self._block), scales[:rows].view(rows, 1)))
        if rest:
            pieces.append((whole, elements, 1, values[whole:].view(1, rest), scales[rows:].view(1, 1)))
        return Wire(data, elements, values, scales, tuple(pieces))

    def encode(self, x: Tensor, out: Wire) -> bool:
        """Quantise; False when a value is infinite or NaN."""
        return self._encode(x, out, 1.0)

    def decode(self, wire: Wire, out: Tensor) -> None:
        """Value times scale, one rounding."""
        for start, stop, rows, q, scale in wire.pieces:
            quantize.dequantize(q, scale, _rows(out, start, stop, rows))

    def accumulate(self, wire: Wire, weight: float, acc: Tensor, *, first: bool = False) -> None:
        """The weight goes into the scales: no pass over the values for it."""
        for start, stop, rows, q, scale in wire.pieces:
            quantize.accumulate(q, scale, weight, _rows(acc, start, stop, rows), self._space(q), first=first)

    def weighted_mean(self, wires: Sequence[Wire], weights: Sequence[float], divisor: float, out: Wire) -> bool:
        """Sum in float32, then one quantisation; the division goes into the scales."""
        acc = self._sum.get(out.elements)
        if acc is None:
            _bound(self._sum)
            acc = self._sum[out.elements] = torch.empty(out.elements)
        for index, wire in enumerate(wires):
            self.accumulate(wire, weights[index], acc, first=index == 0)
        return self._encode(acc, out, divisor)

    def finite(self, wire: Wire) -> bool:
        """The scales tell."""
        assert wire.scales is not None
        return quantize.all_finite(wire.scales)

    def _encode(self, x: Tensor, out: Wire, divisor: float) -> bool:
        for start, stop, rows, q, scale in out.pieces:
            quantize.quantize(_rows(x, start, stop, rows), q, scale, self._space(q), divisor)
        used = out.elements + 4 * -(-out.elements // self._block)
        if used != len(out.data):
            out.data[used:] = bytes(len(out.data) - used)  # hashed like the rest, so never left to chance
        return self.finite(out)

    def _space(self, q: Tensor) -> quantize.BlockScratch:
        key = (q.shape[0], q.shape[1])
        space = self._scratch.get(key)
        if space is None:
            _bound(self._scratch)
            space = self._scratch[key] = quantize.BlockScratch.make(*key)
        return space


def get_codec(name: str) -> Codec:
    """A codec of its own for the calling thread. Raises ConfigError for an unknown name."""
    if name == "int8":
        return Int8Codec()
    if name == "bits":
        from .bits import BitsCodec

        return BitsCodec()
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"unknown codec {name!r}", key="codec", hint=f"one of {', '.join(CODECS)}")
    return FloatCodec(name, dtypes[name])


def encoded_bytes(codec: Codec, numel: int, chunk_elements: int) -> int:
    """Length of a whole encoded vector: its chunks one after another."""
    whole, rest = divmod(numel, chunk_elements)
    return whole * codec.wire_bytes(chunk_elements) + (codec.wire_bytes(rest) if rest else 0)


def chunk_span(codec: Codec, numel: int, chunk_elements: int, chunk: int) -> tuple[int, int, int]:
    """(first byte, last byte + 1, elements) of a chunk of an encoded vector."""
    elements = min(chunk_elements, numel - chunk * chunk_elements)
    start = chunk * codec.wire_bytes(chunk_elements)
    return start, start + codec.wire_bytes(elements), elements


def decode_chunks(
    codec: Codec, data: memoryview, numel: int, chunk_elements: int, out: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Decode an encoded vector chunk by chunk: yields (first element, float32 values).

    ``data`` must be writable memory (it is not written to). With ``out`` (float32, shape (numel,)) the chunks are decoded in place
    there, otherwise into one buffer that the next step overwrites.
    """
    buffer = torch.empty(min(chunk_elements, numel)) if out is None else None
    for chunk in range(-(-numel // chunk_elements)):
        start, stop, elements = chunk_span(codec, numel, chunk_elements, chunk)
        first = chunk * chunk_elements
        target = out[first : first + elements] if out is not None else _need(buffer)[:elements]
        codec.decode(codec.wire(data[start:stop], elements), target)
        yield first, target


def _need(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer


def _rows(x: Tensor, start: int, stop: int, rows: int) -> Tensor:
    if start == 0 and stop == x.shape[0]:
        return x.view(rows, -1)
    return x[start:stop].view(rows, -1)


def _bound(buffers: dict[int, Tensor] | dict[tuple[int, int], quantize.BlockScratch]) -> None:
    if len(buffers) >= 8:  # a run has one chunk length and one shorter last chunk
        buffers.clear()


def _check_length(codec: Codec, data: memoryview, elements: int) -> None:
    if elements < 1 or len(data) != codec.wire_bytes(elements):
        raise ValueError(f"{len(data)} bytes cannot hold {elements} values of {codec.name}")

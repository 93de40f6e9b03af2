"""stat2: a sign and one of two levels a value; and what it has in common with the sparse codecs
(`sparse`).

    stat2       0.281 bytes a value; for each block of 256 values:
                [float32 low, high][four values a byte][padding to 4]

Magnitudes above their block's mean decode to the mean of those, the others to the mean of the
others: levels are statistics of the values and no steps of a scale, with which two bits lose too
much (arXiv 2505.23725). Of n bytes, byte j holds the codes of values j, j + n, j + 2n and j + 3n.

A mean over contributions fits no such chunks, so it travels in another codec (``results``). What a
contribution loses is large, so it is carried into the next one (`optim.model.feedback`).

Means are sums of integers (magnitudes in units of 2^-20 of the largest), which have the same bits
in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..codec_names import CodecFacts
from . import kernels, native
from .wire import Codec, EncodedChunk, LazyWire, Scratch, check_length, padded, view

BLOCK = 256
HEAD = 8  # bytes of the two levels
FINE = 2.0**-20


class RecordCodec(ABC):
    """Blocks of values as records that begin with two levels: whole blocks' are alike, a shorter
    one is the last.

    ``results``: the codec of means. Bytes that no encoder makes are not `finite`; what they decode
    to means nothing. The compiled kernels know ``keep``, how many values of a block are in its
    record; 0: all.
    """

    zero_copy = False

    def __init__(
        self,
        name: str,
        block: int,
        results: Codec,
        *,
        keep: int = 0,
        compiled: native.Kernels | None = native.KERNELS,
    ) -> None:
        self.name = name
        self.results = results
        self._block = block
        self._keep = keep
        self._compiled = compiled
        self._scratch = Scratch(_LevelSpace)

    def wire_bytes(self, elements: int) -> int:
        """Whole records and the last one's, each padded to 4."""
        blocks, rest = divmod(elements, self._block)
        return blocks * self._record(self._block) + (self._record(rest) if rest else 0)

    def wire(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        """Views of a buffer."""
        check_length(self, data, elements)
        if self._compiled is not None and isinstance(data, memoryview):
            return LazyWire(data, elements, _views)
        return _views(data, elements)

    def encode(self, x: Tensor, out: EncodedChunk) -> bool:
        """Quantise; False when a value is infinite or NaN."""
        if self._compiled is not None and isinstance(out, LazyWire):
            return self._compiled.records_encode(x.contiguous(), self._keep, out)
        for part, rows, records in self._rows(out):
            # Padding is hashed like the rest.
            self._encode(x[part].reshape(rows, -1), records.zero_())
        return self.finite(out)

    def decode(self, wire: EncodedChunk, out: Tensor, *, cold: bool = False) -> None:
        """Levels by their codes."""
        self.accumulate(wire, 1.0, out, first=True)

    def accumulate(
        self, wire: EncodedChunk, weight: float, acc: Tensor, *, first: bool = False
    ) -> None:
        """acc += weight * decoded; the weight is multiplied into the levels. A value that is not in
        its record leaves acc as it is.
        """
        if self._compiled is not None and isinstance(wire, LazyWire):
            return self._compiled.records_add(wire, self._keep, weight, acc, first=first)
        if first:
            acc.zero_()
        for part, rows, records in self._rows(wire):
            self._add(records, weight, acc[part].view(rows, -1), first)
        return None

    def weighted_mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        out: EncodedChunk,
    ) -> bool:
        """Sum in float32, then encode once by ``results``. False also if a wire is not `finite`."""
        if not all(self.finite(wire) for wire in wires):
            return False
        space = self._scratch.get(
            out.elements, torch.device("cpu") if len(out.data) else out.values.device
        )
        for index, wire in enumerate(wires):
            self.accumulate(wire, weights[index], space.total, first=index == 0)
        if divisor != 1.0:
            space.total.div_(space.number.fill_(divisor))
        return self.results.encode(space.total, out)

    def finite(self, wire: EncodedChunk) -> bool:
        """Whether an encoder could have made it, of finite values."""
        if self._compiled is not None and isinstance(wire, LazyWire):
            return self._compiled.records_sound(wire, self._keep)
        return all(
            self._sound(records, (part.stop - part.start) // rows)
            for part, rows, records in self._rows(wire)
        )

    def _rows(self, wire: EncodedChunk) -> Iterator[tuple[slice, int, Tensor]]:
        """(which values, number of blocks, their records as rows): whole blocks, then the rest."""
        blocks, rest = divmod(wire.elements, self._block)
        edge, at = blocks * self._block, blocks * self._record(self._block)
        if blocks:
            yield slice(0, edge), blocks, wire.values[:at].view(blocks, -1)
        if rest:
            yield slice(edge, wire.elements), 1, wire.values[at:].view(1, -1)

    @abstractmethod
    def _record(self, width: int) -> int:
        """Length of the record of ``width`` values."""

    @abstractmethod
    def _encode(self, x: Tensor, records: Tensor) -> None:
        """Rows of values to records of zeros."""

    @abstractmethod
    def _add(self, records: Tensor, weight: float, acc: Tensor, first: bool) -> None:
        """Rows += weight * decoded; ``first``: they are zeros, and set."""

    @abstractmethod
    def _sound(self, records: Tensor, width: int) -> bool:
        """Whether an encoder could have made records of rows of ``width`` values."""


class LevelsCodec(RecordCodec):
    """stat2."""

    def __init__(
        self, name: str, results: Codec, *, compiled: native.Kernels | None = native.KERNELS
    ) -> None:
        super().__init__(name, BLOCK, results, compiled=compiled)

    def _record(self, width: int) -> int:
        return padded(HEAD + packed(width))

    def _encode(self, x: Tensor, records: Tensor) -> None:
        to_levels(x, records, HEAD)

    def _add(self, records: Tensor, weight: float, acc: Tensor, first: bool) -> None:
        values = from_levels(records, HEAD, acc.shape[1], weight)
        if first:
            acc.copy_(values)
        else:
            acc.add_(values)

    def _sound(self, records: Tensor, width: int) -> bool:
        return sound(records)


def make_codec(facts: CodecFacts, results: Codec) -> Codec:
    """The codec of these facts."""
    return LevelsCodec(facts.name, results)


def packed(count: int) -> int:
    """Bytes of so many codes."""
    return -(-count // 4)


def to_levels(x: Tensor, records: Tensor, at: int) -> None:
    """Levels of each row of x (float32 (rows, width)) to the head of its record, codes to byte
    ``at``. records: uint8 (rows, length), zeros.
    """
    width, scale, low = x.shape[1], x.new_empty(x.shape[0], 1), x.new_empty(x.shape[0], 1)
    kernels.absmax(x, 1.0, scale, low)
    finite = scale <= kernels.FLOAT_MAX
    x = torch.where(finite, x, 0.0)
    unit = torch.where(finite, scale, 1.0).mul_(FINE)
    fine = (x.abs() * unit.reciprocal()).round_().to(torch.int64)
    total = fine.sum(1, keepdim=True)
    high = fine * width > total
    above, count = (fine * high).sum(1, keepdim=True), high.sum(1, keepdim=True)
    lows = (total - above).float() / (width - count).float() * unit
    highs = torch.where(count > 0, above.float() / count.float() * unit, lows)
    levels = torch.where(finite, torch.cat((lows, highs), 1), torch.nan)
    records[:, :HEAD] = levels.view(torch.uint8)
    codes = torch.zeros(x.shape[0], 4 * packed(width), dtype=torch.uint8, device=x.device)
    codes[:, :width] = 2 * high + (x < 0)
    quarters = codes.view(x.shape[0], 4, -1).unbind(1)
    records[:, at : at + packed(width)] = (
        quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    )


def from_levels(records: Tensor, at: int, width: int, weight: float) -> Tensor:
    """The values times the weight, float32 (rows, width), of what `to_levels` wrote."""
    levels = _levels(records) * weight
    data = records[:, at : at + packed(width)]
    codes = torch.cat([data >> shift & 3 for shift in (0, 2, 4, 6)], 1)[:, :width]
    values = torch.where(codes >= 2, levels[:, 1:], levels[:, :1])
    return torch.where(codes & 1 > 0, -values, values)


def sound(records: Tensor) -> bool:
    """Whether the levels of all records are finite and not negative."""
    low, high = torch.aminmax(_levels(records))
    return bool(low.item() >= 0.0 and high.item() <= kernels.FLOAT_MAX)


def _levels(records: Tensor) -> Tensor:
    return records[:, :HEAD].contiguous().view(torch.float32)


def _views(data: memoryview | Tensor, elements: int) -> EncodedChunk:
    return EncodedChunk(data, elements, view(data, torch.uint8, len(data)))


class _LevelSpace:
    """Work space for one chunk."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.total = torch.empty(elements, dtype=torch.float32, device=device)
        self.number = torch.empty(1, dtype=torch.float32, device=device)

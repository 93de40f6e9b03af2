"""A chunk whose elements have several codecs: the encoded pieces one after another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .wire import Codec, EncodedChunk, check_length


class MixedCodec:
    """Pieces of one chunk, each (codec, elements). Bytes: those of the pieces, in order."""

    zero_copy = False

    def __init__(self, pieces: Sequence[tuple[Codec, int]]) -> None:
        self.name = "+".join(f"{codec.name}:{count}" for codec, count in pieces)
        self._pieces = tuple(pieces)
        self._sizes = [count for _, count in pieces]

    @property
    def results(self) -> MixedCodec:
        """Pieces as long, each in its codec's."""
        alike = all(codec.results is codec for codec, _ in self._pieces)
        return (
            self if alike else MixedCodec([(codec.results, count) for codec, count in self._pieces])
        )

    def wire_bytes(self, elements: int) -> int:
        """Sum over the pieces; 0 for any other length than theirs."""
        return (
            sum(codec.wire_bytes(count) for codec, count in self._pieces)
            if elements == sum(self._sizes)
            else 0
        )

    def wire(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        """Views of the pieces."""
        check_length(self, data, elements)
        parts, at = list[EncodedChunk](), 0
        for codec, count in self._pieces:
            size = codec.wire_bytes(count)
            parts.append(codec.wire(data[at : at + size], count))
            at += size
        return EncodedChunk(data, elements, parts[0].values, parts=tuple(parts))

    def encode(self, x: Tensor, out: EncodedChunk) -> bool:
        return all(codec.encode(piece, part) for codec, piece, part in self._of(x, out))

    def decode(self, wire: EncodedChunk, out: Tensor, *, cold: bool = False) -> None:
        for codec, piece, part in self._of(out, wire):
            codec.decode(part, piece, cold=cold)

    def accumulate(
        self, wire: EncodedChunk, weight: float, acc: Tensor, *, first: bool = False
    ) -> None:
        for codec, piece, part in self._of(acc, wire):
            codec.accumulate(part, weight, piece, first=first)

    def weighted_mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        out: EncodedChunk,
    ) -> bool:
        return all(
            codec.weighted_mean(
                [wire.parts[index] for wire in wires], weights, divisor, out.parts[index]
            )
            for index, (codec, _) in enumerate(self._pieces)
        )

    def finite(self, wire: EncodedChunk) -> bool:
        return all(
            codec.finite(part) for (codec, _), part in zip(self._pieces, wire.parts, strict=True)
        )

    def _of(self, x: Tensor, wire: EncodedChunk) -> list[tuple[Codec, Tensor, EncodedChunk]]:
        pieces = zip(self._pieces, x.split(self._sizes), wire.parts, strict=True)
        return [(codec, piece, part) for (codec, _), piece, part in pieces]

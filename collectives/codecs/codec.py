"""Codecs: a chunk of a float32 vector ⇄ the bytes that travel. Named, versioned by name, any
length.

    get_codec("int8")                         # one codec, of those that `codec_names` lists
    Chunking("bf16:40960+int8", numel, 131_072)   # a vector's chunks: their codecs and bytes

What decides the bits of a result (encode, decode, accumulate, mean) uses only separately rounded
elementwise operations, in a fixed order: the same input gives the same bytes on every CPU and on a
GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codec_names import (
    BITS,
    CODECS,
    DEFAULT_CHUNK_ELEMENTS,
    FACTS,
    chunk_elements,
    unknown_codec,
)
from ..rows import ROWS
from .blocks import BlockCodec
from .floats import FloatCodec
from .ranges import Range, ranges_of
from .wire import Codec, EncodedChunk

__all__ = [
    "CODECS",
    "DEFAULT_CHUNK_ELEMENTS",
    "Codec",
    "Chunking",
    "EncodedChunk",
    "chunk_elements",
    "get_codec",
]


def get_codec(name: str) -> Codec:
    """A codec of its own for the calling thread. Raises ConfigError for an unknown name."""
    facts = BITS if name == BITS.name else FACTS.get(name)
    if facts is None:
        raise unknown_codec(name)
    if facts.family == "floats":
        return FloatCodec(facts.name, facts.size)
    if facts.family == "blocks":
        return BlockCodec(facts.name, facts.size, dither=facts.dither)
    results = get_codec(facts.results) if facts.results else None
    return ROWS.load(facts.family, "make_codec", key=f"codec {name!r}")(facts, results)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring chunks of one codec and length."""

    chunk: int
    start: int
    nbytes: int
    elements: int
    codec: Codec


class Chunking:
    """The chunks of an encoded vector: chunk c holds elements [c * chunk_elements, (c + 1) *
    chunk_elements), the last one fewer.

    ``name``: the codec, or a mixture of them (`codecs/mixtures.py`). A chunk in which the codec
    changes holds its pieces one after another. Codecs come from ``make``: by default they are the
    chunking's own, for one thread. This is the chunking of contributions; `results` that of their
    mean, which is another where a codec says so. Raises ConfigError for a name that means nothing
    for this length.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        chunk_elements: int,
        make: Callable[[str], Codec] = get_codec,
        *,
        of_results: bool = False,
    ) -> None:
        self.name = name
        self.numel = numel
        self.chunk_elements = chunk_elements
        self.chunks = -(-numel // chunk_elements)
        ranges = ranges_of(name, numel)
        codecs = {codec: make(codec) for codec in dict.fromkeys(codec for codec, _, _ in ranges)}
        self._of_results = of_results
        alike = of_results or all(codec.results is codec for codec in codecs.values())
        self.results: Chunking = (
            self if alike else Chunking(name, numel, chunk_elements, make, of_results=True)
        )
        """How a mean over vectors in these chunks is encoded."""
        if of_results:
            codecs = {name: codec.results for name, codec in codecs.items()}
        self._runs: list[_Run] = []
        at = nbytes = 0
        while at < numel:
            count, elements, codec = _next_run(ranges, codecs, at, numel, chunk_elements)
            run = _Run(
                -(-at // chunk_elements), nbytes, codec.wire_bytes(elements), elements, codec
            )
            self._runs.append(run)
            at, nbytes = at + count * elements, nbytes + count * run.nbytes
        self._first = [run.chunk for run in self._runs]
        self._stride = self._runs[0].nbytes
        # Chunks of the first run: nearly always nearly all.
        self._whole = self._first[1] if len(self._first) > 1 else self.chunks
        self.nbytes = nbytes
        """Length of the encoded vector."""

    @property
    def meaning(self) -> tuple[str, int, int]:
        """What chunkings are equal in: name, length and chunk length."""
        return self.name, self.numel, self.chunk_elements

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunking) and (self.meaning, self._of_results) == (
            other.meaning,
            other._of_results,
        )

    def __hash__(self) -> int:
        return hash(self.meaning)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each chunk's bytes begin, and where the last one ends."""
        return (*(self.span(chunk)[0] for chunk in range(self.chunks)), self.nbytes)

    def codec(self, chunk: int) -> Codec:
        return self._run(chunk).codec

    def elements(self, chunk: int) -> int:
        """Number of values of a chunk."""
        return self._run(chunk).elements

    def wire_bytes(self, chunk: int) -> int:
        """Number of bytes of a chunk."""
        return self._run(chunk).nbytes

    def span(self, chunk: int) -> tuple[int, int]:
        """First byte and last byte + 1 of a chunk in the encoded vector."""
        if 0 <= chunk < self._whole:  # asked several times a record
            start = chunk * self._stride
            return start, start + self._stride
        run = self._run(chunk)
        start = run.start + (chunk - run.chunk) * run.nbytes
        return start, start + run.nbytes

    def runs(self) -> Iterator[tuple[Codec, int, int, int]]:
        """(codec, elements a chunk, first chunk, last chunk + 1) of alike neighbouring chunks."""
        for run, stop in zip(self._runs, [*self._first[1:], self.chunks], strict=True):
            yield run.codec, run.elements, run.chunk, stop

    def wire(self, data: memoryview, chunk: int) -> EncodedChunk:
        """Views of a chunk's bytes; ``data``: writable, exactly `wire_bytes` long."""
        run = self._run(chunk)
        return run.codec.wire(data, run.elements)

    def views(self, data: memoryview) -> list[memoryview]:
        """An encoded vector's chunks."""
        return [data[slice(*self.span(chunk))] for chunk in range(self.chunks)]

    def decode(self, data: memoryview, out: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Decode an encoded vector chunk by chunk: yields (first element, float32 values).

        ``data`` must be writable memory (it is not written to). With ``out`` (float32, shape
        (numel,)) the chunks are decoded in place there, otherwise into one buffer that the next
        step overwrites.
        """
        buffer = (
            torch.empty(min(self.chunk_elements, self.numel), dtype=torch.float32, device="cpu")
            if out is None
            else out
        )
        for run, stop in zip(self._runs, [*self._first[1:], self.chunks], strict=True):
            for chunk in range(run.chunk, stop):
                start = run.start + (chunk - run.chunk) * run.nbytes
                first = chunk * self.chunk_elements
                at = 0 if out is None else first
                target = buffer[at : at + run.elements]
                run.codec.decode(
                    run.codec.wire(data[start : start + run.nbytes], run.elements), target
                )
                yield first, target

    def _run(self, chunk: int) -> _Run:
        if 0 <= chunk < self._whole:
            return self._runs[0]
        if not 0 <= chunk < self.chunks:
            raise IndexError(f"chunk {chunk} of {self.chunks}")
        return self._runs[bisect.bisect_right(self._first, chunk) - 1]


def _next_run(
    ranges: tuple[Range, ...], codecs: dict[str, Codec], at: int, numel: int, chunk_elements: int
) -> tuple[int, int, Codec]:
    """(chunks, elements a chunk, codec) of the longest run that begins at element ``at``, the start
    of a chunk.
    """
    name, stop = next((name, stop) for name, _, stop in ranges if at < stop)
    count = (stop - at) // chunk_elements
    if count:
        return count, chunk_elements, codecs[name]
    end = min(at + chunk_elements, numel)
    if end == stop:
        return 1, end - at, codecs[name]
    inside = [
        (codecs[name], min(stop, end) - max(first, at))
        for name, first, stop in ranges
        if first < end and at < stop
    ]
    make = ROWS.load("mixed", "MixedCodec", key="codecs")
    return 1, end - at, make(inside)

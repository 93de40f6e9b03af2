"""Buffers for encoded chunks: made once per codec and length, used again in every round.

A buffer's typed views cost more than the bookkeeping of a whole record, so they stay with it.
Memory comes in slabs of anonymous mappings, which the system only backs once they are written to.
"""

from __future__ import annotations

import mmap

from ..codecs.codec import Codec, EncodedChunk, get_codec

SLAB_BYTES = 4 << 20
ALIGNMENT = 64
# a run has two lengths, and a few more where its tensors have several codecs; after a change of
# settings old ones go
MAX_POOLS = 32


class WirePool:
    """Wires of one codec and length."""

    def __init__(self, codec: Codec, elements: int) -> None:
        self.codec = codec
        self.elements = elements
        self._stride = -(-codec.wire_bytes(elements) // ALIGNMENT) * ALIGNMENT
        self._free: list[EncodedChunk] = []
        self._slab = memoryview(b"")

    def take(self) -> EncodedChunk:
        """A wire; its content is undefined."""
        if self._free:
            return self._free.pop()
        if len(self._slab) < self._stride:
            count = max(1, min(64, SLAB_BYTES // self._stride))
            self._slab = memoryview(mmap.mmap(-1, count * self._stride))
        data = self._slab[: self.codec.wire_bytes(self.elements)]
        self._slab = self._slab[self._stride :]
        return self.codec.wire(data, self.elements)

    def give(self, wire: EncodedChunk) -> None:
        """Take a wire back. Nobody may hold on to its data."""
        self._free.append(wire)


class Pools:
    """One pool per codec and chunk length, and one codec per name: the codecs' scratch memory is
    shared by all rounds of an exchange.
    """

    def __init__(self) -> None:
        self._codecs: dict[str, Codec] = {}
        self._pools: dict[tuple[str, int], WirePool] = {}

    def get(self, codec: Codec, elements: int) -> WirePool:
        """The pool for a codec of a chunking and a chunk length."""
        key = (codec.name, elements)
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= MAX_POOLS:
                del self._pools[next(iter(self._pools))]
            pool = self._pools[key] = WirePool(codec, elements)
        return pool

    def codec(self, name: str) -> Codec:
        """The codec of a name. Raises ConfigError for an unknown one."""
        codec = self._codecs.get(name)
        if codec is None:
            codec = self._codecs[name] = get_codec(name)
        return codec


class Workspace:
    """Room for one encoded chunk: the same memory for every length, so it stays in cache."""

    def __init__(self) -> None:
        self._data = memoryview(b"")
        self._wires: dict[tuple[str, int], EncodedChunk] = {}

    def wire(self, codec: Codec, elements: int) -> EncodedChunk:
        """A wire on that memory; the one before it is overwritten."""
        key = (codec.name, elements)
        wire = self._wires.get(key)
        if wire is None:
            size = codec.wire_bytes(elements)
            if size > len(self._data) or len(self._wires) >= MAX_POOLS:
                self._data = memoryview(bytearray(max(size, len(self._data))))
                self._wires.clear()
            wire = self._wires[key] = codec.wire(self._data[:size], elements)
        return wire

"""Buffers for received contributions: made once per chunk length, used again in every round.

A buffer's typed views cost more than the bookkeeping of a whole record, so they stay with it. Memory comes in slabs of anonymous
mappings, which the system only backs once they are written to.
"""

from __future__ import annotations

import mmap

from ..codec import Codec, Wire, get_codec

SLAB_BYTES = 4 << 20
ALIGNMENT = 64


class WirePool:
    """Wires of whole chunks of one codec and length."""

    def __init__(self, codec: Codec, elements: int) -> None:
        self.codec = codec
        self.elements = elements
        self._stride = -(-codec.wire_bytes(elements) // ALIGNMENT) * ALIGNMENT
        self._free: list[Wire] = []
        self._slab = memoryview(b"")

    def take(self, elements: int) -> Wire:
        """A wire for a chunk of ``elements`` values; its content is undefined."""
        if elements != self.elements:  # the shorter last chunk: one a contribution, not worth pooling
            return self.codec.wire(memoryview(bytearray(self.codec.wire_bytes(elements))), elements)
        if self._free:
            return self._free.pop()
        if len(self._slab) < self._stride:
            count = max(1, min(64, SLAB_BYTES // self._stride))
            self._slab = memoryview(mmap.mmap(-1, count * self._stride))
        data, self._slab = self._slab[: self.codec.wire_bytes(elements)], self._slab[self._stride :]
        return self.codec.wire(data, elements)

    def give(self, wire: Wire) -> None:
        """Take a wire back. Nobody may hold on to its data."""
        if wire.elements == self.elements:
            self._free.append(wire)


class Pools:
    """One pool per (codec, chunk length), and one codec per name: the codecs' scratch memory is shared by all rounds of an exchange."""

    def __init__(self) -> None:
        self._codecs: dict[str, Codec] = {}
        self._pools: dict[tuple[str, int], WirePool] = {}

    def get(self, codec_name: str, elements: int) -> WirePool:
        """The pool for a codec and chunk length. Raises ConfigError for an unknown codec."""
        key = (codec_name, elements)
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= 4:  # a run uses one; after a change of settings the old ones are let go
                del self._pools[next(iter(self._pools))]
            pool = self._pools[key] = WirePool(self._codec(codec_name), elements)
        return pool

    def _codec(self, name: str) -> Codec:
        codec = self._codecs.get(name)
        if codec is None:
            codec = self._codecs[name] = get_codec(name)
        return codec

"""One float32 vector as its codec encodes it: its chunks one after another in one block of memory."""

from __future__ import annotations

from torch import Tensor

from .codec import Codec, Wire, chunk_span, encoded_bytes
from .errors import LocalProtocolError


class EncodedVector:
    """``data``: flat, writable, aligned to 4, exactly as long as the encoded vector. The typed views of a chunk are made once, when needed.

    Belongs to one thread at a time, as its codec does. Raises LocalProtocolError when memory and length do not fit each other.
    """

    def __init__(self, codec: Codec, numel: int, chunk_elements: int, data: memoryview) -> None:
        if len(data) != encoded_bytes(codec, numel, chunk_elements):
            raise LocalProtocolError(f"{len(data)} bytes do not hold {numel} values of {codec.name} in chunks of {chunk_elements}")
        self.codec, self.chunk_elements, self.data = codec, chunk_elements, data
        self._numel = numel
        self._wires: list[Wire | None] = [None] * -(-numel // chunk_elements)

    def numel(self) -> int:
        """Number of values, as of a tensor."""
        return self._numel

    def wire(self, chunk: int) -> Wire:
        """Views of one chunk."""
        wire = self._wires[chunk]
        if wire is None:
            start, stop, elements = chunk_span(self.codec, self._numel, self.chunk_elements, chunk)
            wire = self._wires[chunk] = self.codec.wire(self.data[start:stop], elements)
        return wire

    def encode(self, flat: Tensor) -> bool:
        """Write float32 (numel,), contiguous. False when an encoded value is not finite: others must not get these bytes."""
        finite = True
        for chunk, values in enumerate(flat.split(self.chunk_elements)):
            finite &= self.codec.encode(values, self.wire(chunk))
        return finite

    def decode(self, out: Tensor) -> None:
        """Read into float32 (numel,), contiguous."""
        for chunk, values in enumerate(out.split(self.chunk_elements)):
            self.codec.decode(self.wire(chunk), values)

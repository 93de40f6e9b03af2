"""One float32 vector as its codec encodes it: its chunks one after another in one block of memory."""

from __future__ import annotations

from torch import Tensor

from .codec import Grid, Wire
from .errors import LocalProtocolError


class EncodedVector:
    """``data``: flat, writable, aligned to 4, exactly as long as the encoded vector. The typed views of a chunk are made once, when needed.

    Belongs to one thread at a time, as its grid does. Raises LocalProtocolError when memory and grid do not fit each other.
    """

    def __init__(self, grid: Grid, data: memoryview) -> None:
        if len(data) != grid.nbytes:
            raise LocalProtocolError(f"{len(data)} bytes do not hold {grid.numel} values of {grid.name} in chunks of {grid.chunk_elements}")
        self.grid, self.data = grid, data
        self._wires: list[Wire | None] = [None] * grid.chunks

    def numel(self) -> int:
        """Number of values, as of a tensor."""
        return self.grid.numel

    def wire(self, chunk: int) -> Wire:
        """Views of one chunk."""
        wire = self._wires[chunk]
        if wire is None:
            start, stop = self.grid.span(chunk)
            wire = self._wires[chunk] = self.grid.wire(self.data[start:stop], chunk)
        return wire

    def encode(self, flat: Tensor) -> bool:
        """Write float32 (numel,), contiguous. False when an encoded value is not finite: others must not get these bytes."""
        finite = True
        for chunk, values in enumerate(flat.split(self.grid.chunk_elements)):
            finite &= self.grid.codec(chunk).encode(values, self.wire(chunk))
        return finite

    def decode(self, out: Tensor) -> None:
        """Read into float32 (numel,), contiguous."""
        for chunk, values in enumerate(out.split(self.grid.chunk_elements)):
            self.grid.codec(chunk).decode(self.wire(chunk), values)

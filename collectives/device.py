"""Encoded vectors whose values lie in a device's memory: encoded and decoded there, so that only
encoded bytes cross to the host.

The codecs are the host's, on views of device memory; their bits are the same (`codec`), so nobody
can tell where a peer has encoded. A device holds `SLAB_BYTES` of encoded bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .codec import Wire

if TYPE_CHECKING:
    from .encoded import EncodedVector

SLAB_BYTES = 8 << 20


def encode(vector: EncodedVector, flat: Tensor) -> bool:
    """Encode float32 (numel,), contiguous, where it lies; the bytes come into ``vector``. False
    when an encoded value is not finite.
    """
    finite = True
    for slab, host, wires in _slabs(vector, flat.device):
        for chunk, wire in wires:
            finite &= vector.grid.codec(chunk).encode(_values(vector, flat, chunk), wire)
        host.copy_(slab)
    return finite


def decode(vector: EncodedVector, out: Tensor) -> None:
    """Decode into float32 (numel,), contiguous, where it lies."""
    for slab, host, wires in _slabs(vector, out.device):
        slab.copy_(host)
        for chunk, wire in wires:
            vector.grid.codec(chunk).decode(wire, _values(vector, out, chunk))


def _values(vector: EncodedVector, flat: Tensor, chunk: int) -> Tensor:
    first = chunk * vector.grid.chunk_elements
    return flat[first : first + vector.grid.elements(chunk)]


def _slabs(
    vector: EncodedVector, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, list[tuple[int, Wire]]]]:
    """Memory of the device, the host's memory for the same bytes, and the chunks with their wires
    there; slab after slab.
    """
    grid, chunk = vector.grid, 0
    space = torch.empty(min(grid.nbytes, SLAB_BYTES), dtype=torch.uint8, device=device)
    while chunk < grid.chunks:
        begin, wires = grid.span(chunk)[0], list[tuple[int, Wire]]()
        if grid.wire_bytes(chunk) > len(space):
            space = torch.empty(grid.wire_bytes(chunk), dtype=torch.uint8, device=device)
        while chunk < grid.chunks and grid.span(chunk)[1] - begin <= len(space):
            start, stop = (at - begin for at in grid.span(chunk))
            wires.append((chunk, grid.codec(chunk).wire(space[start:stop], grid.elements(chunk))))
            chunk += 1
        used = grid.span(chunk - 1)[1] - begin
        yield (
            space[:used],
            torch.frombuffer(vector.data, dtype=torch.uint8, count=used, offset=begin),
            wires,
        )

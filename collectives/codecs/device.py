"""Encoded vectors whose values lie in a device's memory: encoded and decoded there, so that only
encoded bytes cross to the host.

The codecs are the host's, on views of device memory; their bits are the same (`codec`), so nobody
can tell where a peer has encoded. A device holds `SLAB_BYTES` of encoded bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .codec import Chunking, EncodedChunk

SLAB_BYTES = 8 << 20


def encode(chunking: Chunking, flat: Tensor, data: memoryview) -> bool:
    """Encode float32 (numel,), contiguous, where it lies; the bytes come into ``data``
    (chunking.nbytes). False when an encoded value is not finite.
    """
    finite = True
    for slab, host, wires in _slabs(chunking, data, flat.device):
        for chunk, wire in wires:
            finite &= chunking.codec(chunk).encode(_values(chunking, flat, chunk), wire)
        host.copy_(slab)
    return finite


def decode(chunking: Chunking, data: memoryview, out: Tensor) -> None:
    """Decode ``data`` into float32 (numel,), contiguous, where it lies."""
    for slab, host, wires in _slabs(chunking, data, out.device):
        slab.copy_(host)
        for chunk, wire in wires:
            chunking.codec(chunk).decode(wire, _values(chunking, out, chunk))


def _values(chunking: Chunking, flat: Tensor, chunk: int) -> Tensor:
    first = chunk * chunking.chunk_elements
    return flat[first : first + chunking.elements(chunk)]


def _slabs(
    chunking: Chunking, data: memoryview, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, list[tuple[int, EncodedChunk]]]]:
    """Memory of the device, the host's memory for the same bytes, and the chunks with their wires
    there; slab after slab.
    """
    chunk = 0
    space = torch.empty(min(chunking.nbytes, SLAB_BYTES), dtype=torch.uint8, device=device)
    while chunk < chunking.chunks:
        begin, wires = chunking.span(chunk)[0], list[tuple[int, EncodedChunk]]()
        if chunking.wire_bytes(chunk) > len(space):
            space = torch.empty(chunking.wire_bytes(chunk), dtype=torch.uint8, device=device)
        while chunk < chunking.chunks and chunking.span(chunk)[1] - begin <= len(space):
            start, stop = (at - begin for at in chunking.span(chunk))
            wires.append(
                (chunk, chunking.codec(chunk).wire(space[start:stop], chunking.elements(chunk)))
            )
            chunk += 1
        used = chunking.span(chunk - 1)[1] - begin
        yield (
            space[:used],
            torch.frombuffer(data, dtype=torch.uint8, count=used, offset=begin),
            wires,
        )

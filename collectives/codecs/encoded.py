"""One float32 vector as its codec encodes it: its chunks one after another in one block of memory;
and why one cannot be encoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import LocalProtocolError
from ..layout import Layout
from ..rows import ROWS
from . import kernels
from .blocks import BlockCodec
from .codec import Chunking, EncodedChunk, get_codec
from .floats import FloatCodec
from .ranges import ranges_of


class EncodedVector:
    """``data``: flat, writable, aligned to 4, exactly as long as the encoded vector. The typed
    views of a chunk are made once, when needed. Where there are compiled kernels, neighbouring
    chunks are one step: between two steps a thread may wait long for the interpreter's lock.

    Belongs to one thread at a time, as its chunking does. Raises LocalProtocolError when memory and
    chunking do not fit each other.
    """

    def __init__(self, chunking: Chunking, data: memoryview) -> None:
        if len(data) != chunking.nbytes:
            raise LocalProtocolError(
                f"{len(data)} bytes do not hold {chunking.numel} values of {chunking.name} in "
                f"chunks of {chunking.chunk_elements}"
            )
        self.chunking, self.data = chunking, data
        self._wires: list[EncodedChunk | None] = [None] * chunking.chunks

    def numel(self) -> int:
        """Number of values, as of a tensor."""
        return self.chunking.numel

    def wire(self, chunk: int) -> EncodedChunk:
        """Views of one chunk."""
        wire = self._wires[chunk]
        if wire is None:
            start, stop = self.chunking.span(chunk)
            wire = self._wires[chunk] = self.chunking.wire(self.data[start:stop], chunk)
        return wire

    def encode(self, flat: Tensor) -> bool:
        """Write float32 (numel,), contiguous, on any device. False when an encoded value is not
        finite: others must not get these bytes.
        """
        if flat.device.type != "cpu":
            return ROWS.load("device", "encode", key="device")(self.chunking, flat, self.data)
        finite = True
        for codec, elements, first, stop in self.chunking.runs():
            start = first * self.chunking.chunk_elements
            values = flat[start : start + (stop - first) * elements]
            done = (
                codec.encode_chunks(values, self.wire(first), stop - first)
                if isinstance(codec, BlockCodec | FloatCodec)
                else None
            )
            if done is None:
                for chunk, part in enumerate(values.split(elements), first):
                    finite &= codec.encode(part, self.wire(chunk))
            else:
                finite &= done
        return finite

    def decode(self, out: Tensor) -> None:
        """Read into float32 (numel,), contiguous, on any device."""
        if out.device.type != "cpu":
            return ROWS.load("device", "decode", key="device")(self.chunking, self.data, out)
        for codec, elements, first, stop in self.chunking.runs():
            start = first * self.chunking.chunk_elements
            values = (
                out
                if stop - first == self.chunking.chunks
                else out[start : start + (stop - first) * elements]
            )
            if not (
                isinstance(codec, BlockCodec | FloatCodec)
                and codec.decode_chunks(self.wire(first), stop - first, values)
            ):
                for chunk, part in enumerate(values.split(elements), first):
                    codec.decode(self.wire(chunk), part, cold=True)
        return None


def why_refused(flat: Tensor, layout: Layout, codec: str) -> str:
    """Why a contribution (float32, (numel,), contiguous) cannot be sent: the first tensor that
    holds NaN or infinity, or else a value that its codec cannot hold. "" when it can be sent. Slow:
    reads everything once or twice."""
    for spec in layout.tensors:
        values = flat[spec.offset : spec.offset + spec.numel]
        if spec.numel and not kernels.all_finite(values):
            element = int(torch.isfinite(values).logical_not_().nonzero()[0].item())
            what = "NaN" if bool(values[element].isnan().item()) else "infinity"
            return f"{spec.name} holds {what} (element {element} of {spec.numel})"
    step = 1 << 20
    for name, first, stop in ranges_of(codec, layout.numel):
        coder = get_codec(name)
        for start in range(first, stop, step):
            values = flat[start : min(start + step, stop)]
            if not coder.encode(
                values,
                coder.wire(memoryview(bytearray(coder.wire_bytes(len(values)))), len(values)),
            ):
                at = start + int(values.abs().argmax().item())
                spec = next(
                    spec for spec in layout.tensors if spec.offset <= at < spec.offset + spec.numel
                )
                return (
                    f"{spec.name} holds {flat[at].item():.6g}, too much for {name} (element "
                    f"{at - spec.offset} of {spec.numel})"
                )
    return ""

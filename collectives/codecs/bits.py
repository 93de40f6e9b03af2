"""bits: words of 32 bits that must arrive as they are: whole tensors of any type, masked integers,
digests. Never a run's own codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec_names import CodecFacts
from ..errors import LocalProtocolError
from .wire import Codec, EncodedChunk, check_length, view


class BitsCodec:
    """Words in float32 tensors that nobody calculates with: every bit pattern is allowed."""

    name = "bits"
    zero_copy = True

    @property
    def results(self) -> Codec:
        """Itself."""
        return self

    def wire_bytes(self, elements: int) -> int:
        """4 bytes a word."""
        return 4 * elements

    def wire(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        """A view of a buffer."""
        check_length(self, data, elements)
        return EncodedChunk(data, elements, view(data, torch.float32, elements))

    def encode(self, x: Tensor, out: EncodedChunk) -> bool:
        """Copy."""
        _words(out.values).copy_(_words(x))
        return True

    def decode(self, wire: EncodedChunk, out: Tensor, *, cold: bool = False) -> None:
        """Copy."""
        _words(out).copy_(_words(wire.values))

    def accumulate(
        self, wire: EncodedChunk, weight: float, acc: Tensor, *, first: bool = False
    ) -> None:
        """Bits have no sum."""
        raise LocalProtocolError("bits cannot be added up as floats")

    def weighted_mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        out: EncodedChunk,
    ) -> bool:
        """Of one contribution: its copy."""
        if len(wires) != 1:
            raise LocalProtocolError("bits have no mean")
        return self.encode(wires[0].values, out)

    def finite(self, wire: EncodedChunk) -> bool:
        """They are no numbers."""
        return True


def make_codec(facts: CodecFacts, results: Codec | None) -> Codec:
    """The codec."""
    return BitsCodec()


def _words(x: Tensor) -> Tensor:
    return x.view(torch.int32)

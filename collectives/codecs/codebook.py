"""codebook8: PRIME's quantiser (arXiv 2412.01152; the same as hivemind's UNIFORM_8BIT), as a
compatibility codec.

    [256 float32 means][uint8 bucket of each value][padding to 4]

256 buckets of equal width span 6 σ about zero, from -3 σ to +3 σ, where σ = |x| / sqrt(n - 1) over
the chunk; what lies outside falls into the outermost ones. A bucket decodes to the mean of the
values in it, so their sum is kept. Values in a heavy tail lose their detail: `int8` is better for
those, and faster.

The means are sums of integers (values in units of 2^-20 buckets), which have the same bits in any
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import kernels
from .wire import Codec, EncodedChunk, Scratch, check_length, padded, tail_of, view

BUCKETS = 256
SPAN = 6.0  # of all buckets, in σ
FINE = 2.0**20  # a sum of 2^22 values, each at most sqrt(2^22) σ, stays below 2^60


class CodebookCodec:
    """The one codec of this kind."""

    name = "codebook8"
    zero_copy = False

    def __init__(self) -> None:
        self._scratch = Scratch(_CodebookSpace)

    @property
    def results(self) -> Codec:
        """Itself."""
        return self

    def wire_bytes(self, elements: int) -> int:
        """The codebook and a byte a value, padded to 4."""
        return 4 * BUCKETS + padded(elements)

    def wire(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        """Views of a buffer."""
        check_length(self, data, elements)
        values = view(data, torch.uint8, elements, 4 * BUCKETS)
        return EncodedChunk(
            data,
            elements,
            values,
            view(data, torch.float32, BUCKETS),
            tail=tail_of(data, 4 * BUCKETS + elements),
        )

    def encode(self, x: Tensor, out: EncodedChunk) -> bool:
        """Quantise; False when a value is infinite or NaN."""
        assert out.scales is not None
        space = self._space(out)
        if out.tail is not None:
            out.tail.zero_()
        total = kernels.square_sum(x, space.squares)
        if not math.isfinite(total):
            out.values.zero_()
            out.scales.fill_(math.nan)
            return False
        sigma = math.sqrt(total / max(1, out.elements - 1))
        width = float(
            space.number.fill_(max(SPAN * sigma / BUCKETS, kernels.TINY)).item()
        )  # a float32 number from here on
        inverse = float(space.number.fill_(1 / width).item())
        torch.mul(x, inverse, out=space.values)
        space.values.round_().add_(BUCKETS / 2).clamp_(0, BUCKETS - 1)
        out.values.copy_(space.values)
        space.bucket.copy_(space.values)
        torch.mul(x, inverse * FINE, out=space.values)
        space.fine.copy_(space.values.round_())
        space.sums.zero_().scatter_add_(0, space.bucket, space.fine)
        space.counts.zero_().scatter_add_(0, space.bucket, space.one)
        space.means.copy_(space.sums)
        space.means.div_(space.counts.clamp_min_(1)).mul_(width / FINE)
        out.scales.copy_(space.means)
        return self.finite(out)

    def decode(self, wire: EncodedChunk, out: Tensor, *, cold: bool = False) -> None:
        """Look every bucket up."""
        assert wire.scales is not None
        bucket = self._space(wire).bucket
        bucket.copy_(wire.values)
        torch.index_select(wire.scales, 0, bucket, out=out)

    def accumulate(
        self, wire: EncodedChunk, weight: float, acc: Tensor, *, first: bool = False
    ) -> None:
        """acc += weight * decoded."""
        target = acc if first else self._space(wire).values
        self.decode(wire, target)
        if weight != 1.0:
            target.mul_(weight)
        if not first:
            acc.add_(target)

    def weighted_mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        out: EncodedChunk,
    ) -> bool:
        """Sum in float32, then one quantisation."""
        space = self._space(out)
        for index, wire in enumerate(wires):
            self.accumulate(wire, weights[index], space.total, first=index == 0)
        if divisor != 1.0:
            space.total.div_(space.number.fill_(divisor))
        return self.encode(space.total, out)

    def finite(self, wire: EncodedChunk) -> bool:
        """The codebook tells."""
        assert wire.scales is not None
        return kernels.within(wire.scales, kernels.FLOAT_MAX)

    def _space(self, wire: EncodedChunk) -> _CodebookSpace:
        return self._scratch.get(wire.elements, wire.values.device)


class _CodebookSpace:
    """Work space for one chunk; 32 bytes a value, most of it for exact sums."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.squares = torch.empty(
            1 << max(0, elements - 1).bit_length(), dtype=torch.float64, device=device
        )
        self.values = torch.empty(elements, dtype=torch.float32, device=device)
        self.total = torch.empty(elements, dtype=torch.float32, device=device)
        self.bucket = torch.empty(elements, dtype=torch.int64, device=device)
        self.fine = torch.empty(elements, dtype=torch.int64, device=device)
        self.one = torch.ones(1, dtype=torch.int64, device=device).expand(elements)
        self.sums = torch.empty(BUCKETS, dtype=torch.int64, device=device)
        self.counts = torch.empty(BUCKETS, dtype=torch.int64, device=device)
        self.means = torch.empty(BUCKETS, dtype=torch.float64, device=device)
        self.number = torch.empty(1, dtype=torch.float32, device=device)

"""The arithmetic of codecs: pure torch, `out=` everywhere, no allocation in the loop.

A block of values shares one scale, absmax/levels (arXiv 2110.02861 calls it block-wise absmax
quantisation). The error is at most half a scale a value; an outlier only coarsens its own block.

Every operation is elementwise and rounded by itself, or its result does not depend on the order (a
maximum, a sum of integers): no fused multiply-add, no floating-point sum over many values. So the
same input gives the same bits on every CPU and on a GPU. Divisors are tensors, since a GPU
multiplies by the reciprocal of a Python number. A NaN or an infinity makes its block's scale
non-finite, which is how it is found without a pass of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# smallest scale: a block of zeros (or of denormals) decodes to zeros instead of dividing by zero
TINY = 1e-30
FLOAT_MAX = torch.finfo(torch.float32).max
NIBBLE = 16.0
PLACE = 0x9E3779B9
# shifts and factors that mix 32 bits (the second, 0x846ca68b, as an int32)
MIXED = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))


def absmax(x: Tensor, share: float, scale: Tensor, low: Tensor) -> None:
    """scale = max(largest magnitude of each row times ``share``, TINY). x: float32 (rows, width);
    scale and scratch low: (rows, 1).
    """
    torch.amax(x, 1, keepdim=True, out=scale)
    torch.amin(x, 1, keepdim=True, out=low)
    torch.maximum(scale, low.neg_(), out=scale)
    scale.mul_(share)
    scale.clamp_min_(TINY)


class Chance:
    """Work space to draw by: as many values as the codes it is made for, float32 (rows, width)."""

    def __init__(self, codes: Tensor) -> None:
        width, device = codes.shape[1], codes.device
        self.bits = torch.empty(codes.shape, dtype=torch.int32, device=device)
        self.spare = torch.empty_like(self.bits)
        self.offsets = torch.empty_like(codes)
        places = torch.arange(width, dtype=torch.int64, device=device)
        self.places = _int32(places * PLACE).to(torch.int32)  # of each column

    def draw(self, x: Tensor) -> Tensor:
        """A number from -1/2 to 1/2 for each value of x: float32 (rows, width), contiguous. All
        2^16 are as likely; they follow from the bits of the value, its place in the row, and the
        sum of the bits of the row, so they are others as soon as one value of the row is.
        """
        bits, values = self.bits, x.view(torch.int32)
        row = _int32(values.sum(1, keepdim=True, dtype=torch.int64)).to(torch.int32)
        torch.add(row, self.places, out=bits)
        bits.bitwise_xor_(values)
        for shift, factor in MIXED:
            self._fold(shift)
            bits.mul_(factor)
        bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        self.offsets.copy_(bits)
        return self.offsets.sub_(32767.5).mul_(2.0**-16)

    def _fold(self, shift: int) -> None:
        """bits ^= bits >> shift, of bits without a sign."""
        torch.bitwise_right_shift(self.bits, shift, out=self.spare)
        self.spare.bitwise_and_((1 << (32 - shift)) - 1)
        self.bits.bitwise_xor_(self.spare)


def _int32(numbers: Tensor) -> Tensor:
    """int64 modulo 2^32, as an int32 would have it."""
    return ((numbers + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def to_codes(
    x: Tensor, scale: Tensor, factor: Tensor, codes: Tensor, chance: Chance | None = None
) -> None:
    """codes = x / scale, rounded to integers (float32): to the nearest, or with ``chance`` up or
    down, such that the mean is right. x, codes: (rows, width); scale and scratch factor: (rows, 1).
    """
    torch.reciprocal(scale, out=factor)
    torch.mul(x, factor, out=codes)
    if chance is not None:
        codes.add_(chance.draw(x))
    codes.round_()
    if chance is not None:
        codes.clamp_(-127, 127)


def pack(codes: Tensor, half: Tensor, out: Tensor) -> None:
    """Two codes of -7 to 7 a byte: the first half of them in the low nibbles, as low + 16 * high.
    Exact in float32.

    codes: float32 (2 k,); scratch half: float32 (k,); out: int8 (k,).
    """
    count = half.shape[0]
    torch.mul(codes[count:], NIBBLE, out=half)
    half.add_(codes[:count])
    out.copy_(half)


def unpack(packed: Tensor, half: Tensor, high: Tensor, out: Tensor) -> None:
    """The codes again, float32 (n,) with n in (2 k - 1, 2 k). Bytes that `pack` never makes decode
    to codes of -8 to 8.
    """
    count = half.shape[0]
    half.copy_(packed)
    torch.mul(half, 1 / NIBBLE, out=high)
    high.round_()
    out[count:].copy_(high[: out.shape[0] - count])
    high.mul_(NIBBLE)
    torch.sub(half, high, out=out[:count])


def square_sum(x: Tensor, scratch: Tensor) -> float:
    """Sum of squares in float64, added up as a tree whose shape follows from the length alone.
    scratch: float64, 2^k >= len(x).
    """
    count = x.shape[0]
    scratch[:count].copy_(x)
    scratch[count:].zero_()
    scratch.mul_(scratch)
    return tree_sum(scratch)


def tree_sum(scratch: Tensor) -> float:
    """The sum of 2^k float64 values, as a tree; it overwrites them."""
    width = scratch.shape[0]
    while width > 1:
        width //= 2
        scratch[:width].add_(scratch[width : 2 * width])
    return float(scratch[0].item())


def within(x: Tensor, limit: float) -> bool:
    """Whether no element is NaN or beyond ±limit. For short tensors."""
    low, high = torch.aminmax(x)  # NaN spreads to both, and compares false
    return bool(low.item() >= -limit and high.item() <= limit)


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite. One pass: a sum is finite only if all its terms are;
    only an overflow looks twice.
    """
    if math.isfinite(x.sum(dtype=torch.float32).item()):
        return True
    return bool(torch.isfinite(x).all().item())

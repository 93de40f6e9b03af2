"""sparse32 to sparse256: so many values of each 4,096, the largest, with two levels as in stat2
(`levels`); the rest is zero.

    sparse64    0.0293 bytes a value; for each tile of 4,096 values:
                [float32 low, high][64 indices of 12 bits][four values a byte][padding to 4]

The contribution of SparseLoCo (arXiv 2508.15706). A shorter last tile keeps its share, rounded up.
Indices ascend; two of them are three bytes, the first in the low bits. Of equal magnitudes the
first are kept. What is not sent is carried into the next contribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codec_names import CodecFacts
from . import native
from .levels import HEAD, RecordCodec, from_levels, packed, sound, to_levels
from .wire import Codec, padded

TILE = 4096  # 2^12


class SparseCodec(RecordCodec):
    """``keep``: how many values of a whole tile."""

    def __init__(
        self,
        name: str,
        keep: int,
        results: Codec,
        *,
        compiled: native.Kernels | None = native.KERNELS,
    ) -> None:
        super().__init__(name, TILE, results, keep=keep, compiled=compiled)

    def _kept(self, width: int) -> int:
        return -(-self._keep * width // TILE)

    def _record(self, width: int) -> int:
        kept = self._kept(width)
        return padded(HEAD + _index_bytes(kept) + packed(kept))

    def _encode(self, x: Tensor, records: Tensor) -> None:
        kept = self._kept(x.shape[1])
        order = x.abs().sort(dim=1, descending=True, stable=True).indices
        indices = order[:, :kept].sort(dim=1).values
        to_levels(x.gather(1, indices), records, HEAD + _index_bytes(kept))
        pairs = torch.zeros(x.shape[0], kept + kept % 2, dtype=torch.int64, device=x.device)
        pairs[:, :kept] = indices
        words = pairs[:, ::2] | pairs[:, 1::2] << 12
        data = torch.stack((words & 255, words >> 8 & 255, words >> 16), 2).view(x.shape[0], -1)
        records[:, HEAD : HEAD + _index_bytes(kept)] = data[:, : _index_bytes(kept)]

    def _add(self, records: Tensor, weight: float, acc: Tensor, first: bool) -> None:
        indices = self._indices(records, acc.shape[1])
        values = from_levels(
            records, HEAD + _index_bytes(indices.shape[1]), indices.shape[1], weight
        )
        inside = indices < acc.shape[1]
        indices, values = torch.where(inside, indices, 0), torch.where(inside, values, 0.0)
        if first:
            acc.scatter_(1, indices, values)  # not added to zero: a negative zero stays one
        else:
            acc.scatter_add_(1, indices, values)

    def _sound(self, records: Tensor, width: int) -> bool:
        indices = self._indices(records, width)
        ascending = bool((indices[:, 1:] > indices[:, :-1]).all().item())
        return ascending and bool((indices[:, -1] < width).all().item()) and sound(records)

    def _indices(self, records: Tensor, width: int) -> Tensor:
        kept = self._kept(width)
        data = torch.zeros(
            records.shape[0], 3 * -(-kept // 2), dtype=torch.int64, device=records.device
        )
        data[:, : _index_bytes(kept)] = records[:, HEAD : HEAD + _index_bytes(kept)]
        first, second, third = data.view(records.shape[0], -1, 3).unbind(2)
        return torch.stack((first | (second & 15) << 8, second >> 4 | third << 4), 2).view(
            records.shape[0], -1
        )[:, :kept]


def make_codec(facts: CodecFacts, results: Codec) -> Codec:
    """The codec of these facts."""
    return SparseCodec(facts.name, facts.size, results)


def _index_bytes(kept: int) -> int:
    """12 bits each."""
    return -(-3 * kept // 2)

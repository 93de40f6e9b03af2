"""The wished error of a round as a setting: which of two codecs each tensor has (the idea is
MGARD's: the user says how much may be lost, not how).

The choice is a function of the layout and the manifest alone, so that all members make the same
and the genesis can name it. It takes values to be alike in size, as updates of Adam are, and
normally distributed; what a member's contributions really lose it measures
(`optim.model.accuracy`). No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..codec_names import BYTES_PER_VALUE, ROUND_ERROR


class Ladder(NamedTuple):
    """The two neighbouring codecs between which a wished error lies; ``coarse`` is None where
    ``fine`` is the last.
    """

    fine: str
    coarse: str | None


def ladder(error: float) -> Ladder:
    """The coarsest codec that loses no more than ``error``, and the next one."""
    codecs = list(ROUND_ERROR)
    at = max(index for index, codec in enumerate(codecs) if ROUND_ERROR[codec] <= error)
    return Ladder(codecs[at], codecs[at + 1] if at + 1 < len(codecs) else None)


def coarse_share(error: float) -> float:
    """The share of values that may have the coarser codec: squares of errors add up."""
    fine, coarse = ladder(error)
    if coarse is None:
        return 0.0
    least = ROUND_ERROR[fine] ** 2
    return (error**2 - least) / (ROUND_ERROR[coarse] ** 2 - least)


def bytes_per_value(error: float) -> float:
    """Of a long encoded vector, where tensors are small beside it."""
    (fine, coarse), share = ladder(error), coarse_share(error)
    return BYTES_PER_VALUE[fine] * (1 - share) + BYTES_PER_VALUE[coarse or fine] * share


def expected_error(lengths: Iterable[tuple[str, int]]) -> float:
    """What a round of these codecs and numbers of values loses."""
    found = list(lengths)
    squares = math.fsum(count * ROUND_ERROR[codec] ** 2 for codec, count in found)
    return math.sqrt(squares / max(1, sum(count for _, count in found)))


def choose_codecs(error: float, lengths: Iterable[int]) -> Iterator[str]:
    """The codec of each tensor of so many values, in the order of the flat vector: the coarser one
    from the first on for as long as the error allows. So there are two ranges, whatever part of a
    vector this is.
    """
    counts = list(lengths)
    fine, coarse = ladder(error)
    left = coarse_share(error) * sum(counts)
    for count in counts:
        left -= count
        if left < 0 or coarse is None:
            coarse = None
        yield coarse or fine

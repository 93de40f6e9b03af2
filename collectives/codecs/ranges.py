"""Which elements of a flat vector have which codec, as text that travels in plans and entries: no
torch, no layout needed to read it.

    int8                    all elements
    bf16:40960+int8         the first 40,960 elements bf16, the rest int8

`mixtures.mixture_of` makes the text.
"""

from __future__ import annotations

import re

from ..codec_names import DEFAULT_CHUNK_ELEMENTS, RESULTS, unknown_codec
from ..errors import ConfigError

Range = tuple[str, int, int]
"""codec, first element, last element + 1"""


_PIECE = re.compile(r"([a-z0-9_]+)(?::([1-9][0-9]{0,13}))?")


def has_partial_sums(text: str) -> bool:
    """Whether the sum of some contributions can travel like a contribution."""
    return not any(piece.partition(":")[0] in RESULTS for piece in text.split("+"))


def ranges_of(text: str, numel: int) -> tuple[Range, ...]:
    """The ranges that a text means for a vector of ``numel`` elements. Raises ConfigError when it
    means none.
    """
    found, at = list[Range](), 0
    pieces = text.split("+")
    for index, piece in enumerate(pieces):
        match = _PIECE.fullmatch(piece)
        last = index == len(pieces) - 1
        if match is None or (match[2] is None) != last or (found and found[-1][0] == match[1]):
            raise unknown_codec(text)
        if match[1] not in DEFAULT_CHUNK_ELEMENTS:
            raise unknown_codec(match[1])
        stop = numel if last else at + int(match[2])
        if at >= stop or stop > numel:
            raise ConfigError(
                f"codec {text!r} does not fit a vector of {numel} elements", key="codec"
            )
        found.append((match[1], at, stop))
        at = stop
    return tuple(found)

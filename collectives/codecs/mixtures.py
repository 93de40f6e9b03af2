"""Which elements of a flat vector have which codec, as text that travels in plans and entries: no
torch, no layout needed to read it.

    int8                    all elements
    bf16:40960+int8         the first 40,960 elements bf16, the rest int8

A layout that is arranged by codec (`arranged`) gives a short text whatever the size of the model.
`mixture_of` makes the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ..codec_names import CODECS, DEFAULT_CHUNK_ELEMENTS, MASKED_CODEC, RESULTS, unknown_codec
from ..errors import ConfigError
from ..group import MAX_CODEC_NAME
from ..layout import Layout, TensorSpec
from .accuracy import chosen

Range = tuple[str, int, int]
"""codec, first element, last element + 1"""

_PIECE = re.compile(r"([a-z0-9_]+)(?::([1-9][0-9]{0,13}))?")


def codec_of(name: str, default: str, patterns: Mapping[str, str]) -> str:
    """The codec of a tensor. Patterns are shell patterns of names; of several that match, the
    longest decides, then the last in the alphabet.
    """
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
    return (
        patterns[max(matching, key=lambda pattern: (len(pattern), pattern))]
        if matching
        else default
    )


def codecs_of(
    layout: Layout, default: str, patterns: Mapping[str, str], error: float | None = None
) -> list[str]:
    """The codec of each tensor. With a wished ``error`` those that no pattern names have what
    `accuracy.chosen` says, in place of ``default``.
    """
    named = [codec_of(spec.name, "", patterns) for spec in layout.tensors]
    if error is None:
        return [codec or default for codec in named]
    free = [spec.numel for spec, codec in zip(layout.tensors, named, strict=True) if not codec]
    choice = chosen(error, free)
    return [codec or next(choice) for codec in named]


def mixture_of(
    layout: Layout, default: str, patterns: Mapping[str, str], error: float | None = None
) -> str:
    """The text for a layout. Raises ConfigError when its tensors change codec too often for one."""
    runs: list[tuple[str, int]] = []
    for spec, codec in zip(
        layout.tensors, codecs_of(layout, default, patterns, error), strict=True
    ):
        if runs and runs[-1][0] == codec:
            runs[-1] = (codec, runs[-1][1] + spec.numel)
        elif spec.numel:
            runs.append((codec, spec.numel))
    text = "+".join([*(f"{codec}:{count}" for codec, count in runs[:-1]), runs[-1][0]])
    if len(text) > MAX_CODEC_NAME:
        raise ConfigError(
            f"the model's tensors change codec {len(runs) - 1} times",
            key="$.exchange.codecs",
            why="Tensors of one codec must be neighbours in the flat vector.",
            hint=(
                "attach() arranges them; a layout of your own is arranged by "
                "atoll.collectives.codecs.mixtures.arranged"
            ),
        )
    return text


def has_partial_sums(text: str) -> bool:
    """Whether the sum of some contributions can travel like a contribution."""
    return not any(piece.partition(":")[0] in RESULTS for piece in text.split("+"))


def arranged(
    specs: Iterable[TensorSpec],
    default: str,
    patterns: Mapping[str, str],
    error: float | None = None,
) -> list[TensorSpec]:
    """Tensors in an order in which those of one role and codec are neighbours, offsets to match;
    otherwise as they came. With a wished ``error``, those to be encoded coarsely first: matrices
    before vectors, small ones before large ones. Raises ConfigError for a codec that is none."""
    known = (*CODECS, MASKED_CODEC)
    if unknown := [codec for codec in (default, *patterns.values()) if codec not in known]:
        raise unknown_codec(unknown[0], "$.exchange.codec")

    def place(spec: TensorSpec) -> tuple[int, ...]:
        other, named = spec.role != "parameter", codec_of(spec.name, "", patterns)
        if error is None:
            return other, known.index(named or default)
        if named:
            return other, 1, known.index(named)
        return other, 0, len(spec.shape) < 2, spec.numel

    ordered = sorted(specs, key=place)
    offset, found = 0, list[TensorSpec]()
    for spec in ordered:
        found.append(TensorSpec(spec.name, spec.shape, offset, spec.role))
        offset += spec.numel
    return found


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

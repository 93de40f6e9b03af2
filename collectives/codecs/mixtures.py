"""Which codec each tensor of a model has, and the text that says it (`ranges`).

A layout that is arranged by codec (`arranged`) gives a short text whatever the size of the model.

Blocks of values share a scale, and do not end where a tensor ends. Running statistics of channels
differ by orders of magnitude, and so do updates of tensors: what is small next to its neighbours
would be rounded away, in every round. So statistics and small tensors are sent in fp32, whatever
the codec, unless a pattern names them (`exact_of`). A run made before that was so (``exact`` is
False in its settings) goes on as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..codec_costs import EXACT_CODEC, EXACT_LEAST, most_exact
from ..codec_names import CODECS, MASKED_CODEC, unknown_codec
from ..errors import ConfigError
from ..group import MAX_CODEC_NAME
from ..layout import Layout, TensorSpec, pattern_of
from .accuracy import choose_codecs

SMALL_ELEMENTS = 16_384
"""The longest tensor that is small: of a longer one at most 2 of 64 blocks have values of
another."""


def codec_of(name: str, default: str, patterns: Mapping[str, str]) -> str:
    """The codec of a tensor. Patterns are shell patterns of names; of several that match, the
    longest decides, then the last in the alphabet.
    """
    pattern = pattern_of(name, patterns)
    return default if pattern is None else patterns[pattern]


def exact_of(specs: Sequence[TensorSpec], default: str, patterns: Mapping[str, str]) -> list[bool]:
    """Which tensors are sent in fp32, of those that no pattern names: all that are no parameters,
    and of parameters small ones, the smallest first (of equal ones the last), as many as
    `most_exact` allows. A parameter without another as a neighbour keeps the run's codec, and all
    keep that of masked contributions.
    """
    if default == MASKED_CODEC:
        return [False] * len(specs)
    free = [not codec_of(spec.name, "", patterns) for spec in specs]
    lengths = [spec.numel if spec.role == "parameter" else 0 for spec in specs]
    found = [spec.role != "parameter" and mine for spec, mine in zip(specs, free, strict=True)]
    if sum(length > 0 for length in lengths) < 2:
        return found
    left = most_exact(default, sum(lengths))
    small = sorted((n, -at) for at, n in enumerate(lengths) if 0 < n <= SMALL_ELEMENTS and free[at])
    for length, last in small:
        left -= length
        if left < 0:
            break
        found[-last] = True
    return found


def codecs_of(
    layout: Layout,
    default: str,
    patterns: Mapping[str, str],
    error: float | None = None,
    *,
    exact: bool = True,
) -> list[str]:
    """The codec of each tensor: what a pattern says, else fp32 for what `exact_of` names (with
    ``exact``), else ``default``. With a wished ``error``, what `accuracy.choose_codecs` says in
    place of ``default``.
    """
    named = [codec_of(spec.name, "", patterns) for spec in layout.tensors]
    if exact:
        for at, alone in enumerate(exact_of(layout.tensors, default, patterns)):
            if alone:
                named[at] = EXACT_CODEC
    if error is None:
        return [codec or default for codec in named]
    free = [spec.numel for spec, codec in zip(layout.tensors, named, strict=True) if not codec]
    choice = choose_codecs(error, free)
    return [codec or next(choice) for codec in named]


def mixture_of(
    layout: Layout,
    default: str,
    patterns: Mapping[str, str],
    error: float | None = None,
    *,
    exact: bool = True,
) -> str:
    """The text for a layout. Of one that is not `arranged`, and whose statistics and small tensors
    lie too scattered, they have the codec of their neighbours. Raises ConfigError when the tensors
    change codec too often even so.
    """
    runs = _runs(layout, codecs_of(layout, default, patterns, error, exact=exact))
    if len(text := _text(runs)) > MAX_CODEC_NAME:
        runs = _runs(layout, codecs_of(layout, default, patterns, error, exact=False))
        text = _text(runs)
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


def _runs(layout: Layout, codecs: Sequence[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for spec, codec in zip(layout.tensors, codecs, strict=True):
        if runs and runs[-1][0] == codec:
            runs[-1] = (codec, runs[-1][1] + spec.numel)
        elif spec.numel:
            runs.append((codec, spec.numel))
    return runs


def _text(runs: Sequence[tuple[str, int]]) -> str:
    return "+".join([*(f"{codec}:{count}" for codec, count in runs[:-1]), runs[-1][0]])


def arranged(
    specs: Iterable[TensorSpec],
    default: str,
    patterns: Mapping[str, str],
    error: float | None = None,
    *,
    exact: bool = True,
) -> list[TensorSpec]:
    """Tensors in an order in which those of one role and codec are neighbours, offsets to match;
    otherwise as they came. Small ones that are sent in fp32 are the last parameters. With a wished
    ``error``, those to be encoded coarsely first: matrices before vectors, small ones before large
    ones. Raises ConfigError for a codec that is none.
    """
    known = (*CODECS, MASKED_CODEC)
    if unknown := [codec for codec in (default, *patterns.values()) if codec not in known]:
        raise unknown_codec(unknown[0], "$.exchange.codec")
    given = list(specs)
    apart = [False] * len(given)
    if exact and default != EXACT_CODEC:
        apart = exact_of(given, default, patterns)
    small = sum(
        spec.numel
        for spec, mine in zip(given, apart, strict=True)
        if mine and spec.role == "parameter"
    )

    def place(at: int) -> tuple[int, ...]:
        spec, named = given[at], codec_of(given[at].name, "", patterns)
        if spec.role != "parameter":
            return 1, not apart[at], known.index(named or default)
        if apart[at]:  # next to statistics, which have the same codec
            # of a fragment, which is shorter, perhaps only the last ones are small
            return 0, 2, -spec.numel if small > EXACT_LEAST else 0
        if error is None:
            return 0, 0, known.index(named or default)
        if named:
            return 0, 1, known.index(named)
        return 0, 0, len(spec.shape) < 2, spec.numel

    offset, found = 0, list[TensorSpec]()
    for spec in (given[at] for at in sorted(range(len(given)), key=place)):
        found.append(TensorSpec(spec.name, spec.shape, offset, spec.role))
        offset += spec.numel
    return found

"""Names of codecs, and what is known of them without torch.

A name stands for one format for ever: the bytes of a codec never change under its name
(tests/unit/test_codec.py pins them); a changed format gets a new name, such as ``int8_2``. So
manifests, plans and entries that carry a name carry its version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError

CodecFamily = Literal["floats", "blocks", "levels", "sparse", "bits"]


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """A codec. ``family``: the file of `codecs` that has its format; ``size``: bits of a value of
    floats and blocks, values that a sparse codec keeps of each 4,096.

    ``bytes_per_value``: length of a long encoded vector over its number of values. ``round_error``:
    the norm of a round's error over that of the mean, of normal values, from encoding contributions
    and their mean. ``price``: the loss of a model over that of fp32
    (scripts/bench/bench_methods.py).

    ``results``: the codec of the mean over contributions, where that is another. A run of such a
    codec carries what encoding loses into the next contribution, whether its manifest asks for it
    or not. ``dither``: values of blocks are rounded up or down by chance, so that none stands
    still next to longer ones. ``by_error``: a wished error may choose it; ``planned``: a plan may.

    ``chunk_elements``: the chunk length of long vectors. Measured for int8 and fp32: a record costs
    the engine as much Python whatever its length, so half as long ones cost a tenth more CPU time;
    twice as long ones gain little, since they leave the cache.
    """

    name: str
    family: CodecFamily
    size: int
    bytes_per_value: float
    round_error: float
    price: float
    results: str = ""
    dither: bool = False
    by_error: bool = False
    planned: bool = False
    chunk_elements: int = 131_072


def _sparse(
    keep: int, round_error: float, price: float, suffix: str = "", *, planned: bool = False
) -> CodecFacts:
    name, length = f"sparse{keep}", (8 + keep * 14 / 8) / 4096
    results = name if suffix else "int4"
    return CodecFacts(
        name + suffix, "sparse", keep, length, round_error, price, results, planned=planned
    )


_STAT2 = 1 / 4 + 8 / 256
FACTS = {
    facts.name: facts
    for facts in (
        CodecFacts("fp32", "floats", 32, 4.0, 0.0, 1.0, by_error=True, chunk_elements=262_144),
        CodecFacts("bf16", "floats", 16, 2.0, 0.00235, 1.0, by_error=True),
        CodecFacts(
            "int8", "blocks", 8, 1 + 4 / 256, 0.0099, 1.0, by_error=True, chunk_elements=262_144
        ),
        CodecFacts(
            "int4", "blocks", 4, 1 / 2 + 2 / 64, 0.1525, 1.0003, by_error=True, planned=True
        ),
        # its price: 0.9986 was measured, which is no gain but noise
        CodecFacts("stat2", "levels", 2, _STAT2, 0.364, 1.001, "int4", planned=True),
        _sparse(32, 0.965, 1.06),  # the price was not measured: as much more as from 128 to 64
        _sparse(64, 0.939, 1.038, planned=True),
        _sparse(128, 0.896, 1.0198, planned=True),
        _sparse(256, 0.825, 1.008, planned=True),
        # results as coarse as contributions, which the outer rate was tuned for
        CodecFacts("stat2_both", "levels", 2, _STAT2, 0.476, 1.002, "stat2", planned=True),
        _sparse(64, 0.986, 1.05, "_both"),
        CodecFacts(
            "int8_dither",
            "blocks",
            8,
            1 + 4 / 256,
            0.0140,
            1.0,
            dither=True,
            planned=True,
            chunk_elements=262_144,
        ),
    )
}
"""The codecs that a run can have."""

BITS = CodecFacts("bits", "bits", 32, 4.0, 0.0, 1.0, chunk_elements=65_536)
"""For operations, not for runs."""

CODECS = tuple(FACTS)
DEFAULT_CODEC = "int8_dither"
BYTES_PER_VALUE = {name: facts.bytes_per_value for name, facts in FACTS.items()}
RESULTS = {name: facts.results for name, facts in FACTS.items() if facts.results}
DEFAULT_CHUNK_ELEMENTS = {facts.name: facts.chunk_elements for facts in (*FACTS.values(), BITS)}

ROUND_ERROR = {name: facts.round_error for name, facts in FACTS.items() if facts.by_error}
"""Codecs that a wished error chooses from, finest first. Coarser ones lose so much that members
carry it into the next round: whoever wants one names it."""


LARGEST_ERROR = ROUND_ERROR["int4"]

REMOVED = {
    "fp16": "bf16 or int8",
    "int8_fp16": "int8",
    "codebook8": "int8",
    "sparse128_both": "sparse128",
    "sparse256_both": "sparse256",
}
"""Codecs that earlier manifests and scripts may name, and which to use in their place."""


MASKED_CODEC, MASKED_MEAN_BYTES = BITS.name, 2.0
"""Of runs with secure rounds; and bytes a value each way, on average, for the mean: beside the
words of the masked sum, up and down."""

MANY_CHUNKS, LEAST_ELEMENTS = 128, 16_384
# a chunk as long as this is worth more to the processor than a few more chunks to a link: half as
# many do
LONG_ELEMENTS = 262_144


def unknown_codec(
    codec: str, key: str = "codec", place: str = "", code: str | None = None
) -> ConfigError:
    """What to raise for a name that is no codec's. ``key``: where it stands; ``place``: the same in
    words that begin the message.
    """
    if codec in REMOVED:
        return ConfigError(
            f"{place}codec {codec!r} was removed: use {REMOVED[codec]}", key=key, code=code
        )
    return ConfigError(
        f"{place}unknown codec {codec!r}",
        key=key,
        code=code,
        why="Codecs turn vectors into bytes.",
        hint=f"Choose one of: {', '.join(CODECS)}",
    )


def chunk_elements(codec: str, numel: int) -> int:
    """The chunk length for a vector: the codec's, or less where the vector would have few chunks.

    On a slow link nothing comes back before the first chunk has come from everybody, and parts are
    whole numbers of chunks: with few of them, links stand idle at both ends of a reduction.
    """
    elements = DEFAULT_CHUNK_ELEMENTS[codec]
    while elements > LEAST_ELEMENTS:
        if numel >= (MANY_CHUNKS // 2 if elements >= LONG_ELEMENTS else MANY_CHUNKS) * elements:
            break
        elements //= 2
    return elements

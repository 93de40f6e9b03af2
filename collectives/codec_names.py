"""Names of codecs, and what is known of them without torch.

A name stands for one format for ever: the bytes of a codec never change under its name
(tests/unit/test_codec.py pins them); a changed format gets a new name, such as ``int8_2``. So
manifests, plans and entries that carry a name carry its version.
"""

from __future__ import annotations

from .errors import ConfigError

_LEVELS = {
    "stat2": 1 / 4 + 8 / 256,
    **{f"sparse{keep}": (8 + keep * 14 / 8) / 4096 for keep in (32, 64, 128, 256)},
}
BOTH = {"stat2_both": "stat2", "sparse64_both": "sparse64"}
"""Codecs whose results are encoded as coarsely as contributions, and which format that is."""

BYTES_PER_VALUE = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1 + 4 / 256,
    "int4": 1 / 2 + 2 / 64,
    **_LEVELS,
    **{both: _LEVELS[name] for both, name in BOTH.items()},
}
"""Length of a long encoded vector over its number of values."""

RESULTS = dict.fromkeys(_LEVELS, "int4") | BOTH
"""The codec in which the mean over contributions travels, where that is another. Such a run carries
what encoding loses into the next contribution, whether its manifest asks for it or not."""

ROUND_ERROR = {"fp32": 0.0, "bf16": 0.00235, "int8": 0.0099, "int4": 0.1525}
"""Codecs that a wished error chooses from, finest first, and what a round loses with each: the norm
of the error over that of the mean, of normal values, from encoding contributions and their mean.
Coarser ones lose so much that members carry it into the next round: whoever wants one names it."""

LARGEST_ERROR = ROUND_ERROR["int4"]

CODECS = tuple(BYTES_PER_VALUE)
"""Those a run can have."""

REMOVED = {
    "fp16": "bf16 or int8",
    "int8_fp16": "int8",
    "codebook8": "int8",
    "sparse128_both": "sparse128",
    "sparse256_both": "sparse256",
}
"""Codecs that earlier manifests and scripts may name, and which to use in their place."""

DEFAULT_CHUNK_ELEMENTS = dict.fromkeys(CODECS, 131_072) | {
    "int8": 262_144,
    "fp32": 262_144,
    "bits": 65_536,
}
"""Chunk lengths of long vectors. Measured for int8 and fp32: a record costs the engine as much
Python whatever its length, so half as long ones cost a tenth more CPU time; twice as long ones gain
little, since they leave the cache. `bits`: for operations, not for runs."""

MASKED_CODEC, MASKED_BYTES = "bits", 6.0
"""Of runs with secure rounds; and bytes a value each way: words of 4 bytes up and down for the
masked sum, and the half of that once more for the mean."""

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


def round_bytes_per_value(codec: str) -> float:
    """Mean of what a contribution and a result have a value."""
    return (BYTES_PER_VALUE[codec] + BYTES_PER_VALUE[RESULTS.get(codec, codec)]) / 2


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

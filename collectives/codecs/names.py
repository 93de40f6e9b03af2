"""Names of codecs, and what is known of them without torch.

A name stands for one format for ever: the bytes of a codec never change under its name (tests/unit/test_codec.py pins them); a changed
format gets a new name, such as ``int8_2``. So manifests, plans and entries that carry a name carry its version.
"""

from __future__ import annotations

BYTES_PER_VALUE = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1 + 4 / 256,
    "int8_fp16": 1 + 2 / 256,
    "int4": 1 / 2 + 2 / 64,
    "codebook8": 1.0 + 1024 / 131_072,
}
"""Length of a long encoded vector over its number of values."""

CODECS = tuple(BYTES_PER_VALUE)
"""Those a run can have."""

DEFAULT_CHUNK_ELEMENTS = dict.fromkeys(CODECS, 131_072) | {"fp32": 65_536, "bits": 65_536}
"""Chunk lengths that keep the working set of a reduction inside a second-level cache (measured). `bits`: for operations, not for runs."""

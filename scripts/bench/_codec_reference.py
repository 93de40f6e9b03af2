"""The codecs again, in plain numpy and without any thought of speed: what bench_codec.py and the
tests compare bits with.

Written from the formats' descriptions (collectives/codecs/), not from their code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
F = np.float32
TINY = F(1e-30)
BLOCKS = {"int8": (256, 127), "int8_dither": (256, 127), "int4": (64, 7)}
"""Values that have one scale, and the largest code."""

PINNED = {
    "fp32": "c0ce004e146743d6",
    "bf16": "ea5eee729f461512",
    "int8": "81cbe16cf361e1de",
    "int8_dither": "355b32244386accf",
    "int4": "dbaed639c2ecfe58",
    "stat2": "ed897190cc9df3c6",
    "sparse32": "c08fe02846410a42",
    "sparse64": "26dd196d638c0662",
    "sparse128": "d4c7a8ca0a8b5241",
    "sparse256": "ca23bcd4367c9fa3",
}
"""The hash of one encoded vector (tests/unit/test_codec.py): a name stands for one format for
ever."""


def encode(codec: str, x: Array, divisor: float = 1.0) -> bytes:
    """The bytes of x / divisor; where the scales take the division, it falls on them."""
    x = x.astype(F)
    if (keep := keep_of(codec)) is not None:
        return _encode_records(x, keep)
    if codec in BLOCKS:
        raw = _encode_blocks(codec, x, F(divisor))
    else:
        raw = _encode_float(codec, x / F(divisor) if divisor != 1.0 else x)
    return raw + bytes(-len(raw) % 4)


def decode(codec: str, raw: bytes, n: int, weight: float = 1.0) -> Array:
    """weight * the decoded values; where there are scales of blocks, the weight is multiplied into
    them.
    """
    if (keep := keep_of(codec)) is not None:
        return _decode_records(raw, n, keep, weight)
    if codec in BLOCKS:
        scales, codes = _open_blocks(codec, raw, n)
        return (codes * np.repeat(scales * F(weight), BLOCKS[codec][0])[:n]).astype(F)
    if codec == "fp32":
        values = np.frombuffer(raw, F, n)
    else:
        values = (np.frombuffer(raw, np.uint16, n).astype(np.uint32) << 16).view(F)
    return values * F(weight)


def mean(codec: str, encoded: list[bytes], weights: list[float], divisor: float, n: int) -> bytes:
    """The encoded weighted mean of encoded vectors, summed up in their order."""
    total = decode(codec, encoded[0], n, weights[0])
    for raw, weight in zip(encoded[1:], weights[1:], strict=True):
        total = total + decode(codec, raw, n, weight)
    if keep_of(codec) is not None:
        return encode(result_of(codec), total / F(divisor))
    return encode(codec, total, divisor)


def keep_of(codec: str) -> int | None:
    """How many values of a tile a sparse codec keeps; 0: stat2, which keeps all of a block; None:
    another codec.
    """
    codec = codec.removesuffix("_both")
    return 0 if codec == "stat2" else int(codec[6:]) if codec.startswith("sparse") else None


def result_of(codec: str) -> str:
    """The codec of means."""
    if keep_of(codec) is None or codec.endswith("_both"):
        return codec.removesuffix("_both")
    return "int4"


def _records(n: int, keep: int) -> list[tuple[int, int, int, int]]:
    """(first value, values, values kept, length of the record) of each block or tile."""
    size, found = 4096 if keep else 256, []
    for at in range(0, n, size):
        width = min(size, n - at)
        kept = -(-keep * width // 4096) if keep else width
        length = 8 + ((3 * kept + 1) // 2 if keep else 0) + (kept + 3) // 4
        found.append((at, width, kept, length + -length % 4))
    return found


def _encode_records(x: Array, keep: int) -> bytes:
    raw = b""
    for at, width, kept, length in _records(len(x), keep):
        block = x[at : at + width]
        chosen = sorted(np.lexsort((np.arange(width), -np.abs(block)))[:kept].tolist())
        number = sum(index << 12 * place for place, index in enumerate(chosen))
        body = number.to_bytes((3 * kept + 1) // 2, "little") if keep else b""
        record = _encode_levels(block[chosen], body)
        raw += record + bytes(length - len(record))
    return raw


def _encode_levels(values: Array, body: bytes) -> bytes:
    unit = max(np.abs(values).max(), TINY) * F(2.0**-20)
    fine = np.rint(np.abs(values) * (F(1) / unit)).astype(np.int64)
    high = fine * len(fine) > fine.sum()
    low_level = F(fine[~high].sum()) / F((~high).sum()) * unit
    high_level = F(fine[high].sum()) / F(high.sum()) * unit if high.any() else low_level
    codes = np.zeros((4, -(-len(fine) // 4)), np.uint8)
    codes.ravel()[: len(fine)] = 2 * high + (values < 0)
    packed = codes[0] + 4 * codes[1] + 16 * codes[2] + 64 * codes[3]
    return np.array([low_level, high_level], F).tobytes() + body + packed.astype(np.uint8).tobytes()


def _decode_records(raw: bytes, n: int, keep: int, weight: float) -> Array:
    out, start = np.zeros(n, F), 0
    for at, _, kept, length in _records(n, keep):
        record, start = raw[start : start + length], start + length
        split = 8 + ((3 * kept + 1) // 2 if keep else 0)
        number = int.from_bytes(record[8:split], "little")
        chosen = (
            [number >> 12 * place & 4095 for place in range(kept)] if keep else list(range(kept))
        )
        packed = np.frombuffer(record, np.uint8, (kept + 3) // 4, split)
        codes = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)])[:kept]
        level = np.frombuffer(record, F, 2) * F(weight)
        values = np.where(codes >= 2, level[1], level[0])
        out[at + np.array(chosen)] = np.where(codes & 1, -values, values)
    return out


def _encode_float(codec: str, y: Array) -> bytes:
    if codec == "fp32":
        return y.tobytes()
    bits = y.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _encode_blocks(codec: str, x: Array, divisor: F) -> bytes:
    width, largest = BLOCKS[codec]
    blocks, share = [x[at : at + width] for at in range(0, len(x), width)], F(1 / largest)
    scales = np.array([max(F(np.abs(block).max()) * share, TINY) for block in blocks], F)
    head = (scales / divisor).astype(F).tobytes()
    if codec == "int4":
        unit = scales.max()
        ratios = np.maximum(scales / unit, F(2.0**-14)).astype(np.float16)
        scales = ratios.astype(F) * unit
        head = (unit / divisor).astype(F).tobytes() + ratios.tobytes()
    codes = np.concatenate(
        [
            np.rint(block * (F(1) / scale) + (_offsets(block) if codec == "int8_dither" else F(0)))
            for block, scale in zip(blocks, scales, strict=True)
        ]
    ).clip(-largest, largest)
    if codec != "int4":
        return head + codes.astype(np.int8).tobytes()
    pairs = -(-len(x) // 2)
    codes = np.pad(codes, (0, 2 * pairs - len(x)))
    return head + (codes[:pairs] + 16 * codes[pairs:]).astype(np.int8).tobytes()


def _offsets(block: Array) -> Array:
    """What is added to a value over its scale before it is rounded: each of 2^16 numbers from -1/2
    to 1/2, by the bits of the value, its place, and the sum of the block's bits.
    """
    bits = [int(word) for word in block.view(np.uint32)]
    offsets = []
    for place, word in enumerate(bits):
        mixed = word ^ (sum(bits) + place * 0x9E3779B9) % 2**32
        mixed = (mixed ^ mixed >> 16) * 0x7FEB352D % 2**32
        mixed = (mixed ^ mixed >> 15) * 0x846CA68B % 2**32
        offsets.append((mixed // 2**16 - 32767.5) / 2**16)
    return np.array(offsets, F)


def _open_blocks(codec: str, raw: bytes, n: int) -> tuple[Array, Array]:
    count = -(-n // BLOCKS[codec][0])
    if codec != "int4":
        return np.frombuffer(raw, F, count), np.frombuffer(raw, np.int8, n, 4 * count).astype(F)
    scales = np.frombuffer(raw, np.float16, count, 4).astype(F) * np.frombuffer(raw, F, 1)
    packed = np.frombuffer(raw, np.int8, -(-n // 2), 4 + 2 * count).astype(np.int64)
    high = np.rint(packed / 16).astype(np.int64)
    return scales, np.concatenate([packed - 16 * high, high])[:n].astype(F)

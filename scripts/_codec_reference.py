"""The codecs again, in plain numpy and without any thought of speed: what bench_codec.py and the tests compare bits with.

Written from the formats' descriptions (collectives/codecs/), not from their code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
F = np.float32
TINY = F(1e-30)
BLOCKS = {"int8": 256, "int8_fp16": 256, "int4": 64}


def encode(codec: str, x: Array, divisor: float = 1.0) -> bytes:
    """The bytes of x / divisor; where the scales take the division, it falls on them."""
    x = x.astype(F)
    if codec in BLOCKS:
        raw = _encode_blocks(codec, x, F(divisor))
    else:
        y = x / F(divisor) if divisor != 1.0 else x
        raw = _encode_codebook(y) if codec == "codebook8" else _encode_float(codec, y)
    return raw + bytes(-len(raw) % 4)


def decode(codec: str, raw: bytes, n: int, weight: float = 1.0) -> Array:
    """weight * the decoded values; where there are scales of blocks, the weight is multiplied into them."""
    if codec in BLOCKS:
        scales, codes = _open_blocks(codec, raw, n)
        return (codes * np.repeat(scales * F(weight), BLOCKS[codec])[:n]).astype(F)
    if codec == "fp32":
        values = np.frombuffer(raw, F, n)
    elif codec == "fp16":
        values = np.frombuffer(raw, np.float16, n).astype(F)
    elif codec == "bf16":
        values = (np.frombuffer(raw, np.uint16, n).astype(np.uint32) << 16).view(F)
    else:
        values = np.frombuffer(raw, F, 256)[np.frombuffer(raw, np.uint8, n, 1024)]
    return values * F(weight)


def mean(codec: str, encoded: list[bytes], weights: list[float], divisor: float, n: int) -> bytes:
    """The encoded weighted mean of encoded vectors, summed up in their order."""
    total = decode(codec, encoded[0], n, weights[0])
    for raw, weight in zip(encoded[1:], weights[1:], strict=True):
        total = total + decode(codec, raw, n, weight)
    return encode(codec, total, divisor)


def _encode_float(codec: str, y: Array) -> bytes:
    if codec == "fp32":
        return y.tobytes()
    if codec == "fp16":
        with np.errstate(over="ignore"):
            return y.astype(np.float16).tobytes()
    bits = y.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _encode_blocks(codec: str, x: Array, divisor: F) -> bytes:
    blocks = [x[at : at + BLOCKS[codec]] for at in range(0, len(x), BLOCKS[codec])]
    share = F(1 / 7) if codec == "int4" else F(1 / 127)
    scales = np.array([max(F(np.abs(block).max()) * share, TINY) for block in blocks], F)
    head = (scales / divisor).astype(F).tobytes()
    if codec != "int8":
        unit = scales.max()
        ratios = np.maximum(scales / unit, F(2.0**-14)).astype(np.float16)
        scales = ratios.astype(F) * unit
        head = (unit / divisor).astype(F).tobytes() + ratios.tobytes()
    codes = np.concatenate([np.rint(block * (F(1) / scale)) for block, scale in zip(blocks, scales, strict=True)])
    if codec != "int4":
        return head + codes.astype(np.int8).tobytes()
    pairs = -(-len(x) // 2)
    codes = np.pad(codes, (0, 2 * pairs - len(x)))
    return head + (codes[:pairs] + 16 * codes[pairs:]).astype(np.int8).tobytes()


def _open_blocks(codec: str, raw: bytes, n: int) -> tuple[Array, Array]:
    count = -(-n // BLOCKS[codec])
    if codec == "int8":
        return np.frombuffer(raw, F, count), np.frombuffer(raw, np.int8, n, 4 * count).astype(F)
    scales = np.frombuffer(raw, np.float16, count, 4).astype(F) * np.frombuffer(raw, F, 1)
    if codec == "int8_fp16":
        return scales, np.frombuffer(raw, np.int8, n, 4 + 2 * count).astype(F)
    packed = np.frombuffer(raw, np.int8, -(-n // 2), 4 + 2 * count).astype(np.int64)
    high = np.rint(packed / 16).astype(np.int64)
    return scales, np.concatenate([packed - 16 * high, high])[:n].astype(F)


def _encode_codebook(y: Array) -> bytes:
    squares: Any = np.zeros(1 << max(0, len(y) - 1).bit_length())
    squares[: len(y)] = y.astype(np.float64) ** 2
    while len(squares) > 1:
        squares = squares[: len(squares) // 2] + squares[len(squares) // 2 :]
    width = F(max(6.0 * math.sqrt(squares[0] / max(1, len(y) - 1)) / 256, 1e-30))
    inverse = F(1 / float(width))
    codes = np.clip(np.rint(y * inverse) + F(128), 0, 255).astype(np.uint8)
    fine = np.rint(y * F(float(inverse) * 2.0**20)).astype(np.int64)
    means = np.zeros(256, F)
    for bucket in range(256):
        inside = fine[codes == bucket]
        if len(inside):
            means[bucket] = F(float(inside.sum()) / len(inside) * (float(width) / 2.0**20))
    return means.tobytes() + codes.tobytes()

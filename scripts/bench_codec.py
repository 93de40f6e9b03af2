"""How fast the codecs are, on one core, in GB/s of the float32 values that go through them (by CPU time).

Every codec works chunk by chunk, as in a round: quantise (encode), dequantise (decode), accumulate (weight * decoded, added up), and a
plain float32 copy beside them as the bound of memory. `exact`: the encoded bytes and the accumulated sums have the bits of a
plain numpy implementation with the same rounding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _bench import emit, progress
from numpy.typing import NDArray

from atoll.collectives.codec import CODECS, DEFAULT_CHUNK_ELEMENTS, Codec, Wire, get_codec
from atoll.collectives.quantize import BLOCK, TINY

Array = NDArray[np.float32]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000, help="length of the vector")
    parser.add_argument("--codec", choices=CODECS, action="append", help="only this one (may be given again)")
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0))
    out = torch.zeros_like(x)
    table: dict[str, dict[str, Any]] = {}
    runs: list[dict[str, Any]] = []
    for name in options.codec or CODECS:
        samples = [measure(name, x, out) for _ in range(options.reps + 1)][1:]  # the first touches the memory
        runs += [{"codec": name, **sample} for sample in samples]
        table[name] = {key: round(4e-9 * options.elements / statistics.median(s[key] for s in samples), 2) for key in samples[0]}
        table[name] = {key.replace("_s", "_gb_s"): value for key, value in table[name].items()} | {"exact": exact(name)}
        progress(f"{name:5} {table[name]}")
    emit("bench_codec", {"elements": options.elements, "reps": options.reps, "threads": 1}, runs, **table)


def measure(name: str, x: torch.Tensor, out: torch.Tensor) -> dict[str, float]:
    """Seconds of each kernel over the whole vector."""
    codec, chunk = get_codec(name), DEFAULT_CHUNK_ELEMENTS[name]
    pieces = list(zip(x.split(chunk), out.split(chunk), strict=True))
    wires = [_wire(codec, values.shape[0]) for values, _ in pieces]

    def encode() -> None:
        for (values, _), wire in zip(pieces, wires, strict=True):
            codec.encode(values, wire)

    def decode() -> None:
        for (_, target), wire in zip(pieces, wires, strict=True):
            codec.decode(wire, target)

    def accumulate() -> None:
        for (_, target), wire in zip(pieces, wires, strict=True):
            codec.accumulate(wire, 3.0, target)

    def copy() -> None:
        for values, target in pieces:
            target.copy_(values)

    return {"quantise_s": _time(encode), "dequantise_s": _time(decode), "accumulate_s": _time(accumulate), "copy_s": _time(copy)}


def exact(name: str) -> bool:
    """Compare bits with numpy on a vector with outliers, zeros and a partial block."""
    codec = get_codec(name)
    values = np.random.default_rng(1).standard_normal(100 * BLOCK + 77).astype(np.float32)
    values[::1000] *= 100
    values[:BLOCK] = 0
    wire = _wire(codec, len(values))
    codec.encode(torch.from_numpy(values), wire)
    decoded = _reference(name, values)
    acc = np.ones_like(values)
    codec.accumulate(wire, 3.0, torch.from_numpy(acc))
    out = torch.empty(len(values))
    codec.decode(wire, out)
    tripled = _reference(name, values, 3.0) if name == "int8" else decoded * np.float32(3)
    return bool(np.array_equal(out.numpy(), decoded) and np.array_equal(acc, np.float32(1) + tripled))


def _reference(name: str, x: Array, weight: float = 1.0) -> Array:
    """What an encoded and decoded vector is, computed the plain way."""
    if name == "fp32":
        return x
    if name == "fp16":
        return x.astype(np.float16).astype(np.float32)
    if name == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    out = np.empty_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        scale = max(np.abs(block).max() * np.float32(1 / 127), np.float32(TINY))
        out[start : start + BLOCK] = np.rint(block * (np.float32(1) / scale)).astype(np.int8) * (scale * np.float32(weight))
    return out


def _wire(codec: Codec, elements: int) -> Wire:
    return codec.wire(memoryview(bytearray(codec.wire_bytes(elements))), elements)


def _time(work: Callable[[], None]) -> float:
    start = time.thread_time()  # torch computes in this thread; what else the machine does shall not count
    work()
    return time.thread_time() - start


if __name__ == "__main__":
    main()

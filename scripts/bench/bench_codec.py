"""How fast and how exact the codecs are: on one core, in GB/s of the float32 values that go through
them (by CPU time).

Every codec works chunk by chunk, as in a round: quantise (encode), dequantise (decode), accumulate
(weight * decoded, added up), and a plain float32 copy beside them as the bound of memory. `exact`:
the encoded bytes and the accumulated sums have the bits of a plain numpy implementation with the
same rounding. `relative_error`: of the mean of eight vectors of Gaussian values, as a round makes
it, against the mean in float32 (`_2`: of two vectors; `_outliers`: of the other values, when one in
a million is 100 times as large); with --no-errors that part is left out. `zstd_ratio`: how much
shorter zstd makes encoded Gaussian values. int8 is compiled where there is a C compiler; int8_torch
is the same without. With --device cuda the kernels run there, and `exact` compares them with the
CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import _codec_reference as reference
import numpy as np
import torch
import zstandard
from _bench import emit, progress

from atoll.collectives.codecs import codec as codecs
from atoll.collectives.codecs.blocks import BlockCodec
from atoll.collectives.codecs.codec import CODECS, DEFAULT_CHUNK_ELEMENTS, Codec, EncodedChunk

PEERS = 8
NAMES = (*CODECS, "int8_torch")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=25_000_000, help="length of the vector")
    parser.add_argument(
        "--codec", choices=NAMES, action="append", help="only this one (may be given again)"
    )
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--no-errors", action="store_true", help="speed only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0)).to(options.device)
    out = torch.zeros_like(x)
    table: dict[str, dict[str, Any]] = {}
    runs: list[dict[str, Any]] = []
    for name in options.codec or NAMES:
        samples = [measure(name, x, out) for _ in range(options.reps + 1)][
            1:
        ]  # the first touches the memory
        runs += [{"codec": name, **sample} for sample in samples]
        speeds = {
            key: round(4e-9 * options.elements / statistics.median(s[key] for s in samples), 2)
            for key in samples[0]
        }
        table[name] = {key.replace("_s", "_gb_s"): value for key, value in speeds.items()} | {
            "exact": exact(name, options.device)
        }
        wire = _wire(get_codec(name), chunk_of(name), torch.device("cpu"))
        get_codec(name).encode(
            torch.randn(chunk_of(name), generator=torch.Generator().manual_seed(1)), wire
        )
        table[name]["bytes_per_value"] = len(wire.data) / chunk_of(name)
        table[name]["zstd_ratio"] = round(
            len(wire.data) / len(zstandard.ZstdCompressor(level=1).compress(wire.data)), 3
        )
        if not options.no_errors:
            table[name] |= errors(name, options.elements)
        progress(f"{name:10} {table[name]}")
    settings = {
        "elements": options.elements,
        "reps": options.reps,
        "threads": 1,
        "device": options.device,
    }
    emit("bench_codec", settings, runs, **table)


def get_codec(name: str) -> Codec:
    """One of NAMES."""
    return codecs.get_codec(name) if name in CODECS else BlockCodec("int8", 8, compiled=None)


def chunk_of(name: str) -> int:
    """Its chunk length in a round."""
    return DEFAULT_CHUNK_ELEMENTS[name.removesuffix("_torch")]


def measure(name: str, x: torch.Tensor, out: torch.Tensor) -> dict[str, float]:
    """Seconds of each kernel over the whole vector."""
    codec, chunk = get_codec(name), chunk_of(name)
    pieces = list(zip(x.split(chunk), out.split(chunk), strict=True))
    wires = [_wire(codec, values.shape[0], x.device) for values, _ in pieces]

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

    work = {
        "quantise_s": encode,
        "dequantise_s": decode,
        "accumulate_s": accumulate,
        "copy_s": copy,
    }
    return {key: _time(kernel, x.device) for key, kernel in work.items()}


def exact(name: str, device: str = "cpu") -> bool:
    """Compare bits with numpy on a vector with outliers, zeros and a partial block."""
    codec, rng = get_codec(name), np.random.default_rng(1)
    n = 100 * 256 + 77
    values = rng.standard_normal(n).astype(np.float32)
    values[::1000] *= 100
    values[:256] = 0
    data = torch.zeros(codec.wire_bytes(n), dtype=torch.uint8, device=device)
    wire = codec.wire(data, n)
    acc = torch.ones(n, device=device)
    if not codec.encode(torch.from_numpy(values).to(device), wire):
        return False
    codec.accumulate(wire, 3.0, acc)
    raw = data.cpu().numpy().tobytes()
    meaning, sums = name.removesuffix("_torch"), acc.cpu().numpy()
    return raw == reference.encode(meaning, values) and np.array_equal(
        sums, np.float32(1) + reference.decode(meaning, raw, n, 3.0)
    )


def errors(name: str, elements: int) -> dict[str, float]:
    """Relative error of a round's result, chunk by chunk so that no more than a few chunks are in
    memory.
    """
    codec, chunk = get_codec(name), chunk_of(name)
    found: dict[str, float] = {}
    for key, peers, outliers in (
        ("relative_error", PEERS, False),
        ("relative_error_2", 2, False),
        ("relative_error_outliers", PEERS, True),
    ):
        wrong = right = 0.0
        generator = torch.Generator().manual_seed(2)
        for first in range(0, elements, chunk):
            n = min(chunk, elements - first)
            vectors = [torch.randn(n, generator=generator) for _ in range(peers)]
            large = torch.zeros(n, dtype=torch.bool)
            if outliers:
                for vector in vectors:
                    where = torch.rand(n, generator=generator, dtype=torch.float64) < 1e-6
                    vector[where] *= 100
                    large |= where
            wires = [_wire(codec, n, vector.device) for vector in vectors]
            for vector, wire in zip(vectors, wires, strict=True):
                codec.encode(vector, wire)
            result, decoded = _wire(codec.results, n, vectors[0].device), torch.empty(n)
            codec.weighted_mean(wires, [1.0] * peers, float(peers), result)
            codec.results.decode(result, decoded)
            mean = torch.stack(vectors).sum(0) / peers
            wrong += float((decoded - mean)[~large].double().square().sum())
            right += float(mean[~large].double().square().sum())
        found[key] = float(f"{(wrong / right) ** 0.5:.4g}")
    return found


def _wire(codec: Codec, elements: int, device: torch.device) -> EncodedChunk:
    size = codec.wire_bytes(elements)
    return codec.wire(
        memoryview(bytearray(size))
        if device.type == "cpu"
        else torch.zeros(size, dtype=torch.uint8, device=device),
        elements,
    )


def _time(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        start = (
            time.thread_time()
        )  # torch computes in this thread; what else the machine does shall not count
        work()
        return time.thread_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

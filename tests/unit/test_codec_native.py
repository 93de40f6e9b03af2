"""int8's compiled kernels give the bits of the torch kernels, for every length, weight and kind of value. Compiled here, whatever is installed."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from house import ROOT

from atoll.collectives.codecs.blocks import BLOCK, BlockCodec
from atoll.collectives.codecs.native import Kernels
from atoll.collectives.codecs.wire import Wire

LENGTHS = (1, 2, 3, 5, 255, 256, 257, 511, 512, 1000, 131_072 + 7)
WEIGHTS = (((1.0, 1.0, 1.0, 1.0), 4.0), ((1.0, 2.0, 3.0, 5.0), 11.0), ((0.1, 0.7, 1e5, 3.0), 7.0))


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> tuple[BlockCodec, BlockCodec]:
    """int8 with the compiled kernels, and without."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (extension,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["ext-modules"]
    library = tmp_path_factory.mktemp("native") / "native.so"
    command = [compiler, *extension["extra-compile-args"], "-shared", "-fPIC", *extension["sources"], "-o", library]
    subprocess.run(command, cwd=ROOT, check=True)
    return BlockCodec("int8", BLOCK, compiled=Kernels(Path(library))), BlockCodec("int8", BLOCK, compiled=None)


def wires(codec: BlockCodec, elements: int, count: int) -> list[Wire]:
    """Buffers of bytes that must all be overwritten."""
    return [codec.wire(memoryview(bytearray(b"\x55" * codec.wire_bytes(elements))), elements) for _ in range(count)]


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-38, 1e-20, 1.0, 1e30, "halves"])
def test_the_bits_are_those_of_torch(codecs: tuple[BlockCodec, BlockCodec], magnitude: float | str) -> None:
    generator = torch.Generator().manual_seed(7)
    for elements in LENGTHS:
        vectors = [torch.randn(elements, generator=generator) * (magnitude if isinstance(magnitude, float) else 1.0) for _ in range(4)]
        if magnitude == "halves":  # scale 1, and values halfway between two integers
            vectors = [torch.randint(-253, 254, (elements,), generator=generator) / 2 for _ in range(4)]
            for vector in vectors:
                vector[::BLOCK] = 127.0
        found: list[list[bytes]] = []
        for codec in codecs:
            encoded, decoded = wires(codec, elements, 4), torch.empty(elements)
            bits: list[bytes] = []
            for vector, wire in zip(vectors, encoded, strict=True):
                assert codec.encode(vector, wire)
                codec.decode(wire, decoded)
                bits += [bytes(wire.data), decoded.numpy().tobytes()]
            for weights, divisor in WEIGHTS:
                (out,) = wires(codec, elements, 1)
                assert codec.weighted_mean(encoded, weights, divisor, out)
                bits.append(bytes(out.data))
            found.append(bits)
        assert found[0] == found[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_cannot_be_encoded_is_found(codecs: tuple[BlockCodec, BlockCodec], bad: float) -> None:
    for codec in codecs:
        for place in (0, 300, 999):
            vector, (wire, out) = torch.randn(1000), wires(codec, 1000, 2)
            assert codec.encode(vector, wire)
            assert codec.finite(wire)
            vector[place] = bad
            assert not codec.encode(vector, wire)
            assert not codec.finite(wire)
            assert not codec.weighted_mean([wire], (1.0,), 1.0, out)

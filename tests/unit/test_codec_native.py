"""The compiled kernels give the bits of torch's, for every length, weight and kind of value.
Compiled here, whatever is installed.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from compiled_kit import compiled

from atoll.collectives.codecs.blocks import BLOCKS, BlockCodec
from atoll.collectives.codecs.codec import get_codec
from atoll.collectives.codecs.floats import FloatCodec
from atoll.collectives.codecs.levels import LevelsCodec
from atoll.collectives.codecs.native import Kernels, load
from atoll.collectives.codecs.sparse import SparseCodec
from atoll.collectives.codecs.wire import Codec, EncodedChunk

LENGTHS = (1, 2, 3, 5, 255, 256, 257, 511, 512, 1000, 4095, 4097, 131_072 + 7)
WEIGHTS = (((1.0, 1.0, 1.0, 1.0), 4.0), ((1.0, 2.0, 3.0, 5.0), 11.0), ((0.1, 0.7, 1e5, 3.0), 7.0))

OTHER = find_spec("msgspec._core")  # a library, but not ours


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The compiled kernels."""
    return Kernels(compiled("atoll.collectives.codecs._native", tmp_path_factory.mktemp("native")))


@pytest.fixture(params=["int8", "int8_dither", "fp32", "stat2", "sparse32", "sparse256"])
def codecs(request: pytest.FixtureRequest, library: Kernels) -> tuple[Codec, Codec]:
    """A codec with the compiled kernels, and without."""
    name, results = request.param, get_codec("int4")
    if name == "stat2":
        return LevelsCodec(name, results, compiled=library), LevelsCodec(
            name, results, compiled=None
        )
    if name.startswith("sparse"):
        keep = int(name.removeprefix("sparse"))
        return SparseCodec(name, keep, results, compiled=library), SparseCodec(
            name, keep, results, compiled=None
        )
    if request.param == "fp32":
        return FloatCodec("fp32", 32, compiled=library), FloatCodec("fp32", 32, compiled=None)
    dither = name == "int8_dither"
    return BlockCodec(name, 8, dither=dither, compiled=library), BlockCodec(
        name, 8, dither=dither, compiled=None
    )


def wires(codec: Codec, elements: int, count: int) -> list[EncodedChunk]:
    """Buffers of bytes that must all be overwritten."""
    return [
        codec.wire(memoryview(bytearray(b"\x55" * codec.wire_bytes(elements))), elements)
        for _ in range(count)
    ]


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-38, 1e-20, 1.0, 1e30, "halves"])
def test_the_bits_are_those_of_torch(codecs: tuple[Codec, Codec], magnitude: float | str) -> None:
    generator = torch.Generator().manual_seed(7)
    for elements in LENGTHS:
        vectors = [
            torch.randn(elements, generator=generator)
            * (magnitude if isinstance(magnitude, float) else 1.0)
            for _ in range(4)
        ]
        if magnitude == "halves":  # scale 1, and values halfway between two integers
            vectors = [
                torch.randint(-253, 254, (elements,), generator=generator) / 2 for _ in range(4)
            ]
            for vector in vectors:
                vector[:: BLOCKS[8]] = 127.0
        found: list[list[bytes]] = []
        for codec in codecs:
            encoded, decoded = wires(codec, elements, 4), torch.empty(elements)
            bits: list[bytes] = []
            for vector, wire in zip(vectors, encoded, strict=True):
                assert codec.encode(vector, wire)
                bits.append(bytes(wire.data))
                for cold in (False, True):
                    codec.decode(wire, decoded.fill_(-7.0), cold=cold)
                    bits.append(decoded.numpy().tobytes())
                codec.accumulate(wire, 3.0, decoded)
                bits.append(decoded.numpy().tobytes())
            for weights, divisor in WEIGHTS:
                (out,) = wires(codec.results, elements, 1)
                assert codec.weighted_mean(encoded, weights, divisor, out)
                bits.append(bytes(out.data))
            found.append(bits)
        assert found[0] == found[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_cannot_be_encoded_is_found(codecs: tuple[Codec, Codec], bad: float) -> None:
    for codec in codecs:
        for place in (0, 300, 999):
            vector, (wire,), (out,) = (
                torch.randn(1000),
                wires(codec, 1000, 1),
                wires(codec.results, 1000, 1),
            )
            assert codec.encode(vector, wire)
            assert codec.finite(wire)
            vector[place] = bad
            assert not codec.encode(vector, wire)
            assert not codec.finite(wire)
            assert not codec.weighted_mean([wire], (1.0,), 1.0, out)


@pytest.mark.parametrize("codecs", ["int8", "fp32"], indirect=True)
def test_a_mean_beyond_the_range_is_found(codecs: tuple[Codec, Codec]) -> None:
    for codec in codecs:
        large, out = wires(codec, 700, 1)[0], wires(codec, 700, 1)[0]
        assert codec.encode(torch.full((700,), 3.3e38), large)
        assert codec.weighted_mean([large], (1.0,), 1.0, out)
        assert not codec.weighted_mean([large, large], (1.0, 1.0), 1.0, out)


@pytest.mark.parametrize("codecs", ["int8", "fp32"], indirect=True)
@pytest.mark.parametrize("elements", [256, 257, 1001])
def test_chunks_that_lie_one_after_another_are_one_step_with_the_same_bytes(
    codecs: tuple[Codec, Codec], elements: int
) -> None:
    compiled, plain = codecs
    assert isinstance(compiled, BlockCodec | FloatCodec)
    assert isinstance(plain, BlockCodec | FloatCodec)
    x, size = torch.randn(5 * elements), compiled.wire_bytes(elements)
    data, expected = bytearray(b"\x55" * 5 * size), wires(plain, elements, 5)
    first = compiled.wire(memoryview(data)[:size], elements)
    assert compiled.encode_chunks(x, first, 5) is True
    for vector, wire in zip(x.split(elements), expected, strict=True):
        assert plain.encode(vector, wire)
    assert bytes(data) == b"".join(bytes(wire.data) for wire in expected)
    out, chunk = torch.empty(5 * elements), torch.empty(elements)
    assert compiled.decode_chunks(first, 5, out)
    for number, wire in enumerate(expected):
        plain.decode(wire, chunk)
        assert torch.equal(out[number * elements : (number + 1) * elements], chunk)
    x[3 * elements + 7] = float("nan")
    assert compiled.encode_chunks(x, first, 5) is False
    assert plain.encode_chunks(x, expected[0], 5) is None
    assert not plain.decode_chunks(expected[0], 5, out)


@pytest.mark.parametrize(
    "library",
    [b"garbage", Path(str(OTHER and OTHER.origin)).read_bytes()],
    ids=["of another machine", "of an older source"],
)
def test_a_library_that_does_not_fit_is_left_out_and_said(
    library: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tmp_path) is None
    assert caplog.messages == []  # installed without a compiler
    path = tmp_path / f"_native{EXTENSION_SUFFIXES[0]}"
    path.write_bytes(library)
    assert load(tmp_path) is None
    (line,) = caplog.messages
    assert "fast kernels are off" in line
    assert str(path) in line
    assert "pip install" in line

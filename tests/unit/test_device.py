"""Vectors encoded and decoded where their values lie have the bits of those that the host encodes
(compiled kernels) and of plain numpy.

The code of the device path runs here on memory of the CPU too: kernels that differ between devices
are all that a GPU adds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_kit import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.collectives.codecs import device
from atoll.collectives.codecs.codec import CODECS, Chunking, chunk_elements
from atoll.collectives.codecs.encoded import EncodedVector

NAMES = [name for name in CODECS if name != "bits"]
CHUNK = 1024
SMALL = 6.1e-5  # a scale below it were denormal in fp16
SPECIAL = [0.0, -0.0, 1e-42, -1e-40, 1e-31, -1e-30, 1e-25, SMALL, -SMALL / 3, 65504.0, 2.5, -3.5]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest) -> str:
    """A device to compute on."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return request.param


def vector(name: str, numel: int) -> EncodedVector:
    """Memory that holds something else so far."""
    chunking = Chunking(name, numel, CHUNK)
    return EncodedVector(chunking, memoryview(bytearray(b"\xaa" * chunking.nbytes)))


@st.composite
def values(draw: st.DrawFn) -> np.ndarray:
    """Any length; outliers, blocks of zeros, denormals and both zeros."""
    n = draw(st.one_of(st.integers(1, 700), st.sampled_from([1023, 1024, 1025, 3 * CHUNK + 77])))
    x = np.random.default_rng(draw(st.integers(0, 1 << 32))).standard_normal(n).astype(np.float32)
    x *= np.float32(draw(st.sampled_from([1.0, 1e-3, 100.0, 1e-28])))
    few = draw(hnp.arrays(np.int64, 12, elements=st.integers(0, n - 1)))
    x[few] = np.array(SPECIAL, np.float32)
    start = draw(st.integers(0, n))
    x[start : start + draw(st.sampled_from([0, 64, 300]))] = draw(
        st.sampled_from([0.0, -0.0, 1e-39])
    )
    return x


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_host(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @given(x=values(), slab=st.sampled_from([1, 3000, device.SLAB_BYTES]))
    @settings(max_examples=25)
    def check(x: np.ndarray, slab: int) -> None:
        monkeypatch.setattr(device, "SLAB_BYTES", slab)
        flat = torch.from_numpy(x)
        here, there = vector(name, len(x)), vector(name, len(x))
        assert here.encode(flat)
        assert device.encode(there.chunking, flat.to(place), there.data)
        assert bytes(there.data) == bytes(here.data)
        chunks = [reference.encode(name, x[at : at + CHUNK]) for at in range(0, len(x), CHUNK)]
        assert bytes(there.data) == b"".join(chunks)
        out, out_there = torch.full((len(x),), 7.0), torch.full((len(x),), 7.0, device=place)
        here.decode(out)
        device.decode(there.chunking, there.data, out_there)
        assert torch.equal(out.view(torch.int32), out_there.cpu().view(torch.int32))

    check()


@pytest.mark.parametrize("name", ["int8:700+bf16", "fp32:1024+int4:1100+bf16:5+int8"])
def test_codecs_that_change_within_a_chunk(place: str, name: str) -> None:
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    here, there = vector(name, 5000), vector(name, 5000)
    assert here.encode(flat)
    assert device.encode(there.chunking, flat.to(place), there.data)
    assert bytes(there.data) == bytes(here.data)
    out = torch.empty(5000, device=place)
    device.decode(there.chunking, there.data, out)
    assert torch.equal(
        out.cpu(), torch.cat([values.clone() for _, values in here.chunking.decode(here.data)])
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_noticed_in_any_chunk(place: str, name: str, bad: float) -> None:
    for where in (0, CHUNK - 1, CHUNK, 3 * CHUNK + 76):
        flat = torch.ones(3 * CHUNK + 77, device=place)
        flat[where] = bad
        there = vector(name, flat.numel())
        assert not device.encode(there.chunking, flat, there.data)


@pytest.mark.gpu
def test_a_vector_on_a_gpu_is_encoded_there_without_being_asked() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    flat = torch.randn(100_000)
    here, there = vector("int8", 100_000), vector("int8", 100_000)
    assert here.encode(flat)
    assert there.encode(flat.cuda())
    assert bytes(there.data) == bytes(here.data)
    out = torch.empty(100_000, device="cuda")
    there.decode(out)
    assert torch.equal(
        out.cpu(), torch.cat([values.clone() for _, values in here.chunking.decode(here.data)])
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "numel"), [*((name, 8_000_077) for name in NAMES), ("int8", 250_000_000)]
)
def test_long_vectors_have_the_same_bits(name: str, numel: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    flat = torch.randn(numel, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    flat[:: numel // 1000] *= 100.0
    flat[numel // 2 : numel // 2 + 5000] *= 1e-40
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL)
    chunking = Chunking(name, numel, chunk_elements(name, numel))
    here, there = (
        EncodedVector(chunking, memoryview(bytearray(chunking.nbytes))) for _ in range(2)
    )
    host = flat.cpu()
    assert here.encode(host)
    assert there.encode(flat)
    assert here.data == there.data
    out, out_there = torch.empty(numel), torch.empty(numel, device="cuda")
    here.decode(out)
    there.decode(out_there)
    assert torch.equal(out.view(torch.int32), out_there.cpu().view(torch.int32))
    flat[numel - 1] = float("nan")
    assert not there.encode(flat)

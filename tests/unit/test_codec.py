"""Codecs: any length, bits against numpy, bounds of the error, what is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exchange_kit import ref_decode, ref_encode
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.collectives.codec import CODECS, chunk_span, decode_chunks, encoded_bytes, get_codec
from atoll.collectives.errors import ConfigError

lengths = st.one_of(st.integers(1, 600), st.sampled_from([255, 256, 257, 511, 512, 513, 1024, 4099]))
LARGE = float(np.float32(1e30))
finite = st.floats(-LARGE, LARGE, width=32).filter(lambda x: x == 0 or abs(x) > 1e-25)


def fresh(codec, n):
    return codec.wire(memoryview(bytearray(b"\xaa" * codec.wire_bytes(n))), n)


@st.composite
def arrays(draw, elements=finite):
    n = draw(lengths)
    return draw(hnp.arrays(np.float32, n, elements=elements, fill=st.nothing() if n < 50 else finite))


@pytest.mark.parametrize("name", CODECS)
@given(x=arrays())
@settings(max_examples=60)
def test_bits_and_error(name, x):
    if name == "fp16":
        x = np.clip(x, -60_000, 60_000)
    codec = get_codec(name)
    n = len(x)
    wire = fresh(codec, n)
    assert codec.encode(torch.from_numpy(x), wire)
    assert bytes(wire.data) == ref_encode(name, x)
    assert len(wire.data) == codec.wire_bytes(n)
    assert len(wire.data) % 4 == 0
    out = torch.empty(n)
    codec.decode(wire, out)
    assert np.array_equal(out.numpy(), ref_decode(name, bytes(wire.data), n))
    error = np.abs(out.numpy() - x)
    if name == "int8":
        for start in range(0, n, 256):
            block = x[start : start + 256]
            assert error[start : start + 256].max() <= np.abs(block).max() / 127 * 0.5001 + 1e-30
    else:
        assert (error <= np.abs(x) * {"fp32": 0, "fp16": 2**-10, "bf16": 2**-8}[name] + (6e-5 if name == "fp16" else 0)).all()
    assert codec.finite(wire)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data(), n=lengths, count=st.integers(1, 5), divisor=st.sampled_from([1.0, 3.0, 8.0, 11.0]))
@settings(max_examples=40)
def test_accumulate_and_weighted_mean(name, data, n, count, divisor):
    codec = get_codec(name)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    weights = [float(w) for w in rng.integers(1, 4, count)]
    wires, acc, manual = [], torch.empty(n), None
    for index, weight in enumerate(weights):
        wire = fresh(codec, n)
        codec.encode(torch.from_numpy(rng.standard_normal(n).astype(np.float32)), wire)
        wires.append(wire)
        codec.accumulate(wire, weight, acc, first=index == 0)
        raw = bytes(wire.data)
        if name == "int8":
            blocks = -(-n // 256)
            raw = (np.frombuffer(raw, np.float32, blocks) * np.float32(weight)).astype(np.float32).tobytes() + raw[4 * blocks :]
            y = ref_decode(name, raw, n)
        else:
            y = ref_decode(name, raw, n) * np.float32(weight)
        manual = y if manual is None else manual + y
    assert np.array_equal(acc.numpy(), manual)
    before = [bytes(w.data) for w in wires]
    out = fresh(codec, n)
    assert codec.weighted_mean(wires, weights, divisor, out)
    assert bytes(out.data) == ref_encode(name, manual, divisor)
    assert [bytes(w.data) for w in wires] == before


@pytest.mark.parametrize("name", CODECS)
@given(n=lengths, bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]), where=st.integers(0, 1 << 20))
@settings(max_examples=40)
def test_not_finite_is_always_noticed(name, n, bad, where):
    codec = get_codec(name)
    x = torch.ones(n)
    x[where % n] = bad
    wire = fresh(codec, n)
    assert not codec.encode(x, wire)
    assert not codec.finite(wire)
    good = fresh(codec, n)
    codec.encode(torch.ones(n), good)
    assert not codec.weighted_mean([good, wire], [1.0, 1.0], 2.0, fresh(codec, n))


def test_values_a_format_cannot_hold():
    half = get_codec("fp16")
    assert not half.encode(torch.tensor([70_000.0]), fresh(half, 1))
    for name in ("fp32", "bf16", "int8"):
        codec = get_codec(name)
        big = torch.full((600,), 3e38)  # the sum overflows, the values do not
        wire = fresh(codec, 600)
        assert codec.encode(big, wire)
        assert codec.finite(wire)


def test_zeros_denormals_and_outliers():
    codec = get_codec("int8")
    for value in (0.0, 1e-40, -1e-39):
        wire = fresh(codec, 300)
        assert codec.encode(torch.full((300,), value), wire)
        out = torch.ones(300)
        codec.decode(wire, out)
        assert (out == 0).all()
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    x[0] = 1e6
    wire = fresh(codec, 512)
    codec.encode(x, wire)
    out = torch.empty(512)
    codec.decode(wire, out)
    assert (out[256:] - x[256:]).abs().max() < 0.02  # the other block does not notice


@given(numel=st.integers(1, 5_000), chunk=st.integers(1, 700), name=st.sampled_from(CODECS))
@settings(max_examples=60)
def test_encoded_vectors(numel, chunk, name):
    codec = get_codec(name)
    data = memoryview(bytearray(encoded_bytes(codec, numel, chunk)))
    x = torch.from_numpy(np.random.default_rng(numel).standard_normal(numel).astype(np.float32))
    position = 0
    for index in range(-(-numel // chunk)):
        start, stop, elements = chunk_span(codec, numel, chunk, index)
        assert start == position
        position = stop
        codec.encode(x[index * chunk : index * chunk + elements], codec.wire(data[start:stop], elements))
    assert position == len(data)
    whole = torch.empty(numel)
    pieces = [(first, values.clone()) for first, values in decode_chunks(codec, data, numel, chunk)]
    for _ in decode_chunks(codec, data, numel, chunk, whole):
        pass
    assert torch.equal(torch.cat([values for _, values in pieces]), whole)
    assert [first for first, _ in pieces] == list(range(0, numel, chunk))
    assert torch.allclose(whole, x, atol=0.05)


def test_unknown_codec_and_wrong_buffers():
    with pytest.raises(ConfigError) as caught:
        get_codec("int7")
    assert "int8" in caught.value.hint
    for name in CODECS:
        codec = get_codec(name)
        with pytest.raises(ValueError):
            codec.wire(memoryview(bytearray(codec.wire_bytes(10) + 1)), 10)
        with pytest.raises(ValueError):
            codec.wire(memoryview(bytearray(0)), 0)

"""Codecs: any length, bits against numpy, bounds of the error, what is not finite, formats that
never change.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3
from codec_kit import reference
from house import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.collectives.codec_names import (
    BYTES_PER_VALUE,
    FACTS,
    REMOVED,
    RESULTS,
    chunk_elements,
)
from atoll.collectives.codecs.codec import CODECS, DEFAULT_CHUNK_ELEMENTS, Chunking, get_codec
from atoll.collectives.codecs.kernels import Chance
from atoll.collectives.errors import ConfigError

lengths = st.one_of(
    st.integers(1, 600), st.sampled_from([255, 256, 257, 511, 512, 513, 1024, 4099])
)
LARGE = float(np.float32(1e30))
finite = st.floats(-LARGE, LARGE, width=32).filter(lambda x: x == 0 or abs(x) > 1e-25)


def fresh(codec, n):
    return codec.wire(memoryview(bytearray(b"\xaa" * codec.wire_bytes(n))), n)


def decoded(codec, wire):
    out = torch.empty(wire.elements)
    codec.decode(wire, out)
    return out


def gaussian(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n).astype(np.float32))


@st.composite
def arrays(draw, elements=finite):
    n = draw(lengths)
    return draw(
        hnp.arrays(np.float32, n, elements=elements, fill=st.nothing() if n < 50 else finite)
    )


@pytest.mark.parametrize("name", CODECS)
@given(x=arrays())
@settings(max_examples=30)
def test_bits(name, x):
    codec, n = get_codec(name), len(x)
    wire = fresh(codec, n)
    assert codec.encode(torch.from_numpy(x), wire)
    assert bytes(wire.data) == reference.encode(name, x)
    assert len(wire.data) == codec.wire_bytes(n)
    assert len(wire.data) % 4 == 0
    assert np.array_equal(decoded(codec, wire).numpy(), reference.decode(name, bytes(wire.data), n))
    assert codec.finite(wire)


@pytest.mark.parametrize("name", CODECS)
@given(x=arrays())
@settings(max_examples=25)
def test_error_of_every_value(name, x):
    codec = get_codec(name)
    wire = fresh(codec, len(x))
    codec.encode(torch.from_numpy(x), wire)
    error = np.abs(decoded(codec, wire).numpy().astype(np.float64) - x)
    if name in RESULTS:
        return two_levels(x, decoded(codec, wire).numpy(), reference.keep_of(name))
    if name in reference.BLOCKS:
        width, largest = reference.BLOCKS[name]
        floor = np.abs(x).max() * (
            2.0**-14 if FACTS[name].size < 8 else 0
        )  # no scale is smaller than that share of the largest
        for start in range(0, len(x), width):
            block = np.abs(x[start : start + width])
            assert (
                error[start : start + width].max()
                <= max(block.max(), floor) / largest * (1.01 if FACTS[name].dither else 0.51)
                + 1e-30
            )
    else:
        assert (error <= np.abs(x) * {"fp32": 0, "bf16": 2**-8}[name]).all()


def two_levels(x, y, keep):
    """y holds the largest values of each tile of x (all of a block, where ``keep`` is 0), with
    their signs, and the sum of their magnitudes.
    """
    size = 4096 if keep else 256
    for at in range(0, len(x), size):
        values, found = x[at : at + size].astype(np.float64), y[at : at + size].astype(np.float64)
        kept = -(-keep * len(values) // 4096) if keep else len(values)
        order = np.argsort(-np.abs(values), kind="stable")
        assert (found[order[kept:]] == 0).all()
        values, found = values[order[:kept]], found[order[:kept]]
        assert (found * values >= 0).all()
        assert len(set(np.abs(found))) <= 2
        assert (
            abs(np.abs(found).sum() - np.abs(values).sum())
            <= kept * 2**-19 * np.abs(values).max() + 1e-35
        )


@pytest.mark.parametrize("name", CODECS)
@given(
    data=st.data(),
    n=lengths,
    count=st.integers(1, 5),
    divisor=st.sampled_from([1.0, 3.0, 8.0, 11.0]),
)
@settings(max_examples=25)
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
        y = reference.decode(name, bytes(wire.data), n, weight)
        manual = y if manual is None else manual + y
    assert np.array_equal(acc.numpy(), manual)
    before = [bytes(w.data) for w in wires]
    out = fresh(codec.results, n)
    assert codec.weighted_mean(wires, weights, divisor, out)
    assert bytes(out.data) == reference.mean(name, before, weights, divisor, n)
    assert [bytes(w.data) for w in wires] == before


@pytest.mark.parametrize("name", CODECS)
@given(
    n=lengths,
    bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    where=st.integers(0, 1 << 20),
)
@settings(max_examples=25)
def test_not_finite_is_always_noticed(name, n, bad, where):
    codec = get_codec(name)
    x = torch.ones(n)
    x[where % n] = bad
    wire = fresh(codec, n)
    assert not codec.encode(x, wire)
    assert not codec.finite(wire)
    good = fresh(codec, n)
    codec.encode(torch.ones(n), good)
    assert not codec.weighted_mean([good, wire], [1.0, 1.0], 2.0, fresh(codec.results, n))


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data(), n=lengths)
@settings(max_examples=30)
def test_any_bytes_decode_to_finite_values_or_are_refused(name, data, n):
    """Bytes from a peer: whatever they are, nothing raises, and `finite` tells the truth."""
    codec = get_codec(name)
    raw = np.random.default_rng(data.draw(st.integers(0, 1 << 30))).bytes(codec.wire_bytes(n))
    head = data.draw(st.binary(max_size=min(16, len(raw))))  # hypothesis chooses where scales are
    wire = codec.wire(memoryview(bytearray(head + raw[len(head) :])), n)
    assert codec.finite(wire) <= bool(torch.isfinite(decoded(codec, wire)).all())


def test_values_a_format_cannot_hold():
    half = get_codec("bf16")
    assert not half.encode(torch.tensor([3.4e38]), fresh(half, 1))  # rounds to infinity
    for name in CODECS:
        codec = get_codec(name)
        big = torch.full((600,), 2.9e38)  # the sum overflows, the values do not
        wire = fresh(codec, 600)
        assert codec.encode(big, wire)
        assert codec.finite(wire)
        assert torch.isfinite(decoded(codec, wire)).all()


@pytest.mark.parametrize("name", reference.BLOCKS)
def test_zeros_denormals_and_outliers(name):
    codec = get_codec(name)
    for value in (0.0, 1e-40, -1e-39):
        wire = fresh(codec, 300)
        assert codec.encode(torch.full((300,), value), wire)
        assert (decoded(codec, wire) == 0).all()
    x = gaussian(512)
    x[0] = 1e4
    wire = fresh(codec, 512)
    codec.encode(x, wire)
    error = (decoded(codec, wire)[256:] - x[256:]).abs().max()
    most = 5.2 if FACTS[name].dither else 2.6
    assert error < most / reference.BLOCKS[name][1]  # the other blocks do not notice


def result_error(name, peers, n, outliers):
    """Relative error of a round's result against the float32 mean, over the values that are no
    outliers.
    """
    codec = get_codec(name)
    vectors = [gaussian(n, seed) for seed in range(peers)]
    large = torch.zeros(n, dtype=torch.bool)
    for seed in range(outliers):
        vectors[seed % peers][97 + seed * (n // outliers)] *= 100
        large[97 + seed * (n // outliers)] = True
    wires = [fresh(codec, n) for _ in vectors]
    assert all(codec.encode(vector, wire) for vector, wire in zip(vectors, wires, strict=True))
    out = fresh(codec.results, n)
    assert codec.weighted_mean(wires, [1.0] * peers, float(peers), out)
    mean = torch.stack(vectors).sum(0) / peers
    return ((decoded(codec.results, out) - mean)[~large].norm() / mean[~large].norm()).item()


@pytest.mark.parametrize("peers", [1, 2, 5])
@pytest.mark.parametrize("ratio", [3.0, 300.0, 30_000.0])
def test_short_values_next_to_long_ones_are_right_on_average(ratio, peers):
    """Of contributions and of their mean, the same whether they are encoded by torch or compiled
    kernels; int8 loses all of them.
    """
    codec, n, rounds = get_codec("int8_dither"), 4096, 400
    short = torch.arange(n) % 2 == 1
    found, given, wires, out = torch.zeros(n), torch.zeros(n), [], fresh(codec, n)
    for seed in range(rounds):
        wires = [fresh(codec, n) for _ in range(peers)]
        for peer, wire in enumerate(wires):
            x = 1 + 0.3 * gaussian(n, seed * peers + peer)
            x[short] /= ratio
            assert codec.encode(x, wire)
            given += x / peers
        assert codec.weighted_mean(wires, [1.0] * peers, float(peers), out)
        found += decoded(codec, out)
    moved, way = found[short].double().sum(), given[short].double().sum()
    # sums of so many values that are each off by a scale at most
    noise = 2 * 2 / 127 * (rounds * n / 2) ** 0.5
    assert abs(moved - way) < 2 * noise
    if ratio < 1000:
        assert 0.97 < moved / way < 1.03


def test_what_is_zero_or_a_whole_code_is_exact():
    codec = get_codec("int8_dither")
    x = torch.arange(-127, 128).float().repeat(4)
    for factor in (1.0, 2.0**-40, 2.0**40):
        wire = fresh(codec, len(x))
        assert codec.encode(x * factor, wire)
        assert torch.allclose(decoded(codec, wire), x * factor, rtol=1e-6, atol=0.0)


def test_what_is_added_is_spread_evenly_and_depends_on_the_whole_block():
    x = gaussian(1 << 20).view(-1, 256)
    drawn = Chance(x).draw(x).clone()
    assert -0.5 < drawn.min() < -0.4999
    assert 0.4999 < drawn.max() < 0.5
    counts = torch.histc(drawn, 64, -0.5, 0.5)
    assert (counts / (x.numel() / 64) - 1).abs().max() < 0.05
    assert (
        abs(
            float(
                torch.corrcoef(torch.stack((drawn[:, :-1].flatten(), drawn[:, 1:].flatten())))[0, 1]
            )
        )
        < 0.005
    )
    other = x.clone()
    other[:, 7] += 1e-3
    again = Chance(other).draw(other)
    assert abs(float(torch.corrcoef(torch.stack((drawn.flatten(), again.flatten())))[0, 1])) < 0.005


@pytest.mark.parametrize("name", CODECS)
def test_error_of_a_result(name):
    n = 1 << 20
    few, many = result_error(name, 2, n, 0), result_error(name, 8, n, 0)
    assert many == pytest.approx(FACTS[name].round_error, rel=0.01, abs=1e-6)
    if name != "fp32":
        assert many <= 1.1 * few  # one encoding up and one down, whatever the number of peers
    if name == "int8":
        assert (
            result_error(name, 8, n, 8) <= 1.3e-2
        )  # the other values, beside an outlier a million


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_is_whole(name):
    """What stands beside its record: the rest of this file has its format, bits and figures."""
    assert get_codec(name).name == name
    assert get_codec(name).results.name in (FACTS[name].results, name)
    assert FACTS[name].price >= 1.0
    assert name.removesuffix("_both") in reference.PINNED, "scripts/bench/_codec_reference.py"
    page = "docs/operating/links.md"
    rows = [row for row in (ROOT / page).read_text().splitlines() if row[:2] == "| "]
    assert any(f"`{name}`" in row.split("|")[1] for row in rows), f"{page} has no row of {name}"


@pytest.mark.parametrize("name", CODECS)
def test_length(name):
    codec, n = get_codec(name), DEFAULT_CHUNK_ELEMENTS[name]
    assert codec.wire_bytes(n) / n == pytest.approx(BYTES_PER_VALUE[name], rel=1e-4)


@pytest.mark.parametrize(("name", "digest"), reference.PINNED.items())
def test_a_format_never_changes_under_its_name(name, digest):
    """If this fails, old and new members of a run no longer understand each other: give the new
    format a new name.
    """
    codec, n = get_codec(name), 5_001
    x = torch.from_numpy(
        ((np.arange(n) * 7919 % 20_011 - 10_000) / 3000).astype(np.float32)
    )  # the same everywhere
    x[100] = 300
    wire = fresh(codec, n)
    assert codec.encode(x, wire)
    assert blake3(wire.data).hexdigest(8) == digest


@pytest.mark.parametrize("name", [name for name in CODECS if name.endswith("_both")])
def test_both_ways_in_the_formats_of_one(name):
    """Contributions are those of the name without `_both`, and so is their mean."""
    codec, one, n = get_codec(name), get_codec(name.removesuffix("_both")), 5_001
    assert codec.results.name == one.name
    wires = [fresh(codec, n) for _ in range(3)]
    for seed, wire in enumerate(wires):
        x, alone = gaussian(n, seed), fresh(one, n)
        assert codec.encode(x, wire)
        assert one.encode(x, alone)
        assert bytes(wire.data) == bytes(alone.data)
    mean, found, expected = torch.zeros(n), fresh(codec.results, n), fresh(one, n)
    for index, wire in enumerate(wires):
        one.accumulate(wire, 2.0, mean, first=index == 0)
    assert codec.weighted_mean(wires, [2.0] * 3, 6.0, found)
    assert one.encode(mean / 6.0, expected)
    assert bytes(found.data) == bytes(expected.data)


def test_unknown_codec_and_wrong_buffers():
    with pytest.raises(ConfigError) as caught:
        get_codec("int7")
    assert "int8" in caught.value.hint
    for name, instead in REMOVED.items():
        for text in (name, f"int8:5+{name}"):
            with pytest.raises(ConfigError) as caught:
                Chunking(text, 10, 10)
            assert caught.value.message == f"codec {name!r} was removed: use {instead}"
        assert all(each in CODECS for each in instead.split(" or "))
    for name in CODECS:
        codec = get_codec(name)
        with pytest.raises(ValueError):
            codec.wire(memoryview(bytearray(codec.wire_bytes(10) + 4)), 10)
        with pytest.raises(ValueError):
            codec.wire(memoryview(bytearray(0)), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [1, 255, 4099, 131_072])
def test_a_gpu_makes_the_same_bits(name, n):
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    codec, x = get_codec(name), gaussian(n)
    x[::1000] *= 100
    x[: n // 8] = 0
    both = (codec, codec.results)
    here, there = (
        fresh(codec, n),
        [torch.zeros(made.wire_bytes(n), dtype=torch.uint8, device="cuda") for made in both],
    )
    wires = [made.wire(data, n) for made, data in zip(both, there, strict=True)]
    assert codec.encode(x, here)
    assert codec.encode(x.cuda(), wires[0])
    assert bytes(here.data) == there[0].cpu().numpy().tobytes()
    acc, acc_there = torch.ones(n), torch.ones(n, device="cuda")
    codec.accumulate(here, 3.0, acc)
    codec.accumulate(wires[0], 3.0, acc_there)
    assert torch.equal(acc, acc_there.cpu())
    mean = fresh(codec.results, n)
    assert codec.weighted_mean([here, here], [1.0, 2.0], 3.0, mean)
    assert codec.weighted_mean([wires[0], wires[0]], [1.0, 2.0], 3.0, wires[1])
    assert bytes(mean.data) == there[1].cpu().numpy().tobytes()


def test_chunks_are_shorter_where_a_vector_has_few():
    lengths = {
        numel: chunk_elements("int8", numel)
        for numel in (1_000, 4_000_000, 1 << 23, 1 << 24, 25_000_000, 100_000_000)
    }
    assert list(lengths.values()) == [16_384, 16_384, 65_536, 262_144, 262_144, 262_144]
    assert chunk_elements("fp32", 25_000_000) == 262_144

"""The chunking of an encoded vector: chunks, their codecs and bytes, whatever the mixture; and how
a model's tensors get their codecs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs.codec import CODECS, Chunking, get_codec
from atoll.collectives.codecs.encoded import EncodedVector
from atoll.collectives.codecs.mixtures import arranged, codec_of, mixture_of
from atoll.collectives.codecs.ranges import ranges_of
from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.collectives.layout import Layout, TensorSpec, make_layout


@st.composite
def mixtures(draw):
    """(text, numel, chunk_elements)"""
    counts = draw(st.lists(st.integers(1, 900), min_size=1, max_size=4))
    names, last = [], None
    for _ in counts:
        last = draw(st.sampled_from([name for name in CODECS if name != last]))
        names.append(last)
    text = "+".join(
        [
            *(f"{name}:{count}" for name, count in zip(names[:-1], counts[:-1], strict=True)),
            names[-1],
        ]
    )
    return text, sum(counts), draw(st.integers(1, 700))


@given(mixture=mixtures(), seed=st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_any_mixture_on_any_grid(mixture, seed):
    text, numel, chunk = mixture
    chunking = Chunking(text, numel, chunk)
    assert chunking.chunks == -(-numel // chunk)
    assert [chunking.elements(c) for c in range(chunking.chunks)] == [
        min(chunk, numel - c * chunk) for c in range(chunking.chunks)
    ]
    assert [chunking.span(c) for c in range(chunking.chunks)] == list(
        zip(chunking.bounds, chunking.bounds[1:], strict=False)
    )
    assert chunking.bounds[0] == 0
    assert chunking.bounds[-1] == chunking.nbytes
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))
    vector = EncodedVector(chunking, memoryview(bytearray(chunking.nbytes)))
    assert vector.encode(x)
    at, want = 0, []
    for index in range(
        chunking.chunks
    ):  # every chunk holds its pieces one after another, each as its codec encodes it alone
        for name, first, stop in ranges_of(text, numel):
            piece = (
                x[max(first, index * chunk) : min(stop, (index + 1) * chunk)]
                if first < (index + 1) * chunk
                else x[:0]
            )
            if not len(piece):
                continue
            codec = get_codec(name)
            wire = codec.wire(memoryview(bytearray(codec.wire_bytes(len(piece)))), len(piece))
            codec.encode(piece, wire)
            assert bytes(vector.data[at : at + len(wire.data)]) == bytes(wire.data)
            at += len(wire.data)
            want.append(torch.empty(len(piece)))
            codec.decode(wire, want[-1])
    assert at == chunking.nbytes
    out = torch.empty(numel)
    vector.decode(out)
    assert torch.equal(out, torch.cat(want))
    pieces = [(first, values.clone()) for first, values in chunking.decode(vector.data)]
    assert [first for first, _ in pieces] == list(range(0, numel, chunk))
    assert torch.equal(torch.cat([values for _, values in pieces]), out)
    again = torch.empty(numel)
    for _ in chunking.decode(vector.data, again):
        pass
    assert torch.equal(again, out)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int7",
        "int8:10",
        "bf16+int8",
        "bf16:0+int8",
        "bf16:010+int8",
        "bf16:-1+int8",
        "bf16:1e3+int8",
        "int8:5+int8",
        "bf16:100+int8",
        "fp32:60+bf16:50+int8",
        "bf16:5+",
        "+int8",
        "bf16:5 + int8",
        "BF16:5+int8",
        "bf16:99999999999999999+int8",
        "bf16:٣+int8",
    ],
)
def test_texts_that_mean_nothing(text):
    with pytest.raises(ConfigError, match="codec"):
        Chunking(text, 100, 10)


def test_a_grid_has_no_other_chunks_and_no_other_memory():
    chunking = Chunking("bf16:5+int8", 100, 30)
    for chunk in (-1, 4):
        with pytest.raises(IndexError):
            chunking.span(chunk)
    with pytest.raises(LocalProtocolError, match="100 values"):
        EncodedVector(chunking, memoryview(bytearray(chunking.nbytes + 4)))
    assert chunking == Chunking("bf16:5+int8", 100, 30)
    assert chunking != Chunking("bf16:6+int8", 100, 30)
    assert chunking != Chunking("bf16:5+int8", 100, 31)


def test_the_longest_pattern_decides():
    patterns = {"*.norm.*": "bf16", "*.norm.bias": "fp32", "head.*": "int4"}
    assert codec_of("layers.0.norm.weight", "int8", patterns) == "bf16"
    assert codec_of("layers.0.norm.bias", "int8", patterns) == "fp32"
    assert codec_of("head.weight", "int8", patterns) == "int4"
    assert codec_of("layers.0.mlp.weight", "int8", patterns) == "int8"
    assert (
        codec_of("abc", "int8", {"a*c": "fp32", "ab*": "bf16"})
        == codec_of("abc", "int8", {"ab*": "bf16", "a*c": "fp32"})
        == "bf16"
    )


def test_the_mixture_of_a_model():
    shapes = [
        (f"layers.{i}.{name}", shape)
        for i in range(40)
        for name, shape in (("mlp", (300, 70)), ("norm.weight", (7,)), ("empty", (0,)))
    ]
    layout, patterns = make_layout(shapes), {"*.norm.*": "bf16"}
    assert mixture_of(layout, "int8", {}) == "int8"  # as it lies, it has no place for another
    assert mixture_of(layout, "int8", {"*": "bf16"}) == "bf16"
    with pytest.raises(ConfigError, match="change codec") as caught:
        mixture_of(layout, "int8", patterns)
    assert caught.value.key == "$.exchange.codecs"
    specs = [
        *layout.tensors,
        TensorSpec("layers.1.norm.running_mean", (3,), layout.numel, "mean"),
        TensorSpec("v", (2,), layout.numel + 3, "variance"),
    ]
    ordered = Layout(tuple(arranged(specs, "int8", patterns)), layout.numel + 5)
    assert ordered.check() is None
    assert mixture_of(ordered, "int8", patterns) == "bf16:280+int8:840000+fp32:2+bf16"
    assert [spec.name for spec in ordered.tensors if spec.role != "parameter"] == [
        "v",
        "layers.1.norm.running_mean",
    ]
    plain = Layout(tuple(arranged(specs, "int8", {})), layout.numel + 5)
    assert mixture_of(plain, "int8", {}) == "int8:840000+fp32"  # norms and statistics
    assert mixture_of(plain, "int8", {"*": "int8"}) == "int8"
    assert mixture_of(plain, "bits", {}) == "bits"  # masked
    assert [spec.name for spec in ordered.tensors if "mlp" in spec.name] == [
        f"layers.{i}.mlp" for i in range(40)
    ]
    assert arranged(specs, "fp32", {}) == specs
    assert arranged(specs, "bits", {}) == specs  # of a run whose contributions are masked

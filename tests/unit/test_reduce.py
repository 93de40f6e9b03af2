"""Reducers: the weighted mean, and the other two forms of the seam."""

from __future__ import annotations

import math

import numpy as np
import torch
from exchange_kit import cid_of, make_plan, peers_of
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs.codec import get_codec
from atoll.collectives.digest import chunk_hash, merkle_root, part_digest
from atoll.collectives.group import Entry, Part
from atoll.collectives.reduce import MEAN, Factors

weights = st.lists(st.integers(1, 1 << 48), min_size=1, max_size=30)


@given(weights)
def test_mean_factors(values):
    factors = MEAN.factors(values)
    for m, w in zip(factors.multipliers, values, strict=True):
        assert math.isclose(m / factors.divisor, w / sum(values), rel_tol=1e-6)
        assert np.float32(m) == m
    assert sum(factors.multipliers) <= 1 << 21
    assert MEAN.factors([w * 6 for w in values[:3]]) == MEAN.factors(values[:3])


def test_small_weights_are_exact():
    assert MEAN.factors([100, 100, 100]) == Factors((1.0, 1.0, 1.0), 3.0)
    assert MEAN.factors([10, 20, 30]) == Factors((1.0, 2.0, 3.0), 6.0)
    assert MEAN.factors([1 << 48]) == Factors((1.0,), 1.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(-1000, 1000)), min_size=1, max_size=8))
@settings(max_examples=40)
def test_the_mean_of_integers_is_rounded_once(items):
    codec = get_codec("fp32")
    wires = []
    for _, value in items:
        wire = codec.wire(memoryview(bytearray(codec.wire_bytes(3))), 3)
        codec.encode(torch.full((3,), float(value)), wire)
        wires.append(wire)
    out = codec.wire(memoryview(bytearray(12)), 3)
    factors = MEAN.factors([w for w, _ in items])
    assert codec.weighted_mean(wires, factors.multipliers, factors.divisor, out)
    total = sum(w * v for w, v in items), sum(w for w, _ in items)
    assert out.values.tolist() == [np.float32(total[0] / total[1])] * 3


@given(
    st.lists(st.binary(min_size=32, max_size=32), max_size=20),
    st.integers(0, 19),
    st.integers(0, 255),
)
def test_merkle_root_binds_every_hash_their_order_and_count(hashes, index, bit):
    root = merkle_root(hashes)
    assert len(root) == 32
    assert merkle_root(tuple(hashes)) == root
    assert merkle_root([*hashes, bytes(32)]) != root
    if hashes:
        index %= len(hashes)
        changed = list(hashes)
        changed[index] = bytes([changed[index][0] ^ (1 << bit % 8)]) + changed[index][1:]
        assert merkle_root(changed) != root
        assert merkle_root(hashes[:-1]) != root
        assert merkle_root([root]) != root
    if len(set(hashes)) > 1:
        assert merkle_root(hashes[::-1]) != root or hashes == hashes[::-1]


def test_part_digest_binds_its_meaning():
    a, b = peers_of(2)
    base = [(a, cid_of(0), 1), (b, cid_of(1), 2)]
    plan = make_plan(base, [a, b], 1000, 10, "int8")
    hashes = [chunk_hash(bytes([i])) for i in range(50)]
    digest = part_digest(plan, plan.parts[0], hashes)
    entry = Entry(
        plan.log,
        plan.round,
        plan.base,
        bytes(32),
        plan.contributors,
        plan.parts,
        (),
        plan.numel,
        plan.chunk_elements,
        plan.codec,
        plan.reducer,
        (),
    )
    assert part_digest(entry, plan.parts[0], hashes) == digest
    again = make_plan(base, [a, b], 1000, 10, "int8", ballot=3, revision=2)
    assert part_digest(again, Part(b, 0, 50), hashes) == digest
    others = [
        make_plan(base[::-1], [a, b], 1000, 10, "int8"),
        make_plan([(a, cid_of(0), 1), (b, cid_of(1), 3)], [a, b], 1000, 10, "int8"),
        make_plan([(a, cid_of(0), 1), (b, cid_of(2), 2)], [a, b], 1000, 10, "int8"),
        make_plan(base[:1], [a, b], 1000, 10, "int8"),
        make_plan(base, [a, b], 1000, 10, "bf16"),
        make_plan(base, [a, b], 1000, 10, "int8", reducer="median"),
        make_plan(base, [a, b], 1000, 10, "int8", round_=2),
        make_plan(base, [a, b], 1000, 10, "int8", log="other"),
    ]
    seen = {
        digest,
        part_digest(plan, plan.parts[1], hashes),
        part_digest(plan, plan.parts[0], hashes[::-1]),
    }
    seen |= {part_digest(other, other.parts[0], hashes) for other in others}
    assert len(seen) == len(others) + 3

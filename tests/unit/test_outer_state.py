"""Momenta in bf16: rounding by integers, every rule's step, and what a state then is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from atoll.collectives.errors import ConfigError, DigestMismatchError
from atoll.collectives.group import Reading
from atoll.collectives.layout import Layout, TensorSpec, make_layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.node.session.replica import ModelReplica, PlainSlots
from atoll.optim import OuterStep
from atoll.optim.outer import BLOCK_ELEMENTS
from atoll.optim.outer.more_rules import RULES
from atoll.optim.outer.state import NAN, StateVectors, rounded, widen

WITH_MOMENTA = [kind for kind, rule in RULES.items() if rule.momenta]
SPECS = (
    TensorSpec("a", (5, 7), 0),
    TensorSpec("m", (4,), 35, "mean"),
    TensorSpec("b", (30,), 39),
)
LAYOUT = Layout(SPECS, 69)  # odd: two momenta share a float32
SAID = [(3, Reading(2.5, 5.0)), (5, Reading(2.25, 9.0))]


def as_bf16(values: torch.Tensor) -> torch.Tensor:
    """float32 values that were rounded once."""
    out = np.empty(values.numel(), np.float32)
    widen(rounded(values.contiguous().numpy()), out)
    return torch.from_numpy(out)


@given(npst.arrays(np.uint32, 64))
def test_rounding_is_to_the_nearest_and_to_even(bits: np.ndarray) -> None:
    """Against the two neighbours, compared in double precision."""
    values = bits.view(np.float32)
    for value, found in zip(values, rounded(values), strict=True):
        low = int(value.view(np.uint32)) >> 16
        if np.isnan(value):
            assert found == NAN
            continue
        around = np.array([low << 16, (low + 1) << 16], np.uint32).view(np.float32)
        first, second = around.astype(np.float64)
        if np.isinf(value):
            assert found == low
        elif np.isinf(second):  # as if exponents went on
            second = np.copysign(2.0**128, first)
        if np.isinf(value):
            continue
        below, above = abs(float(value) - first), abs(second - float(value))
        nearest = low if below < above or (below == above and low % 2 == 0) else low + 1
        assert found == nearest


def test_rounding_is_that_of_torch_where_the_processor_has_no_say() -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
    assert torch.equal(as_bf16(values), values.to(torch.bfloat16).float())
    tiny = torch.tensor([1e-39, -1e-39, 2e-40])  # some processors make these zero
    assert as_bf16(tiny).ne(0).all()


def halved(kind: str, **more: object) -> OuterSettings:
    return OuterSettings(kind=kind, lr=0.3, momentum=0.8, momentum_dtype="bf16", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("governor", [False, True])
@pytest.mark.parametrize("kind", WITH_MOMENTA)
def test_a_step_is_float32s_with_momenta_that_were_rounded_once(kind: str, governor: bool) -> None:
    outer = halved(kind, governor=governor, stretch=governor, every=3)
    plain = OuterSettings(
        kind=outer.kind, lr=0.3, momentum=0.8, governor=governor, stretch=governor, every=3
    )
    step, reference = OuterStep(outer, LAYOUT), OuterStep(plain, LAYOUT)
    state, other = torch.zeros(step.state_numel(69)), torch.zeros(reference.state_numel(69))
    lie = StateVectors(69, RULES[kind].vectors, RULES[kind].momenta)
    assert len(other) - len(state) == 69 * lie.halves // 2
    anchor, rng = torch.zeros(69), np.random.default_rng(4)
    for round_ in range(25):
        mean = torch.from_numpy(rng.standard_normal(69, dtype=np.float32))
        if round_ == 20:
            mean *= 100.0  # the governor restarts what momenta hold
        out, expected = torch.empty(69), torch.empty(69)
        step.apply(anchor, mean.clone(), state, out, SAID)
        reference.apply(anchor, mean.clone(), other, expected, SAID)
        assert torch.equal(out, expected)
        for first, last in ((0, 35), (39, 69)):  # statistics have no momenta
            for index, vector in enumerate(lie.load(state, first, last)):
                held = other[index * 69 + first : index * 69 + last]
                if index < lie.halves:
                    held.copy_(as_bf16(held))
                assert torch.equal(vector, held)
        assert torch.equal(state[lie.length :], other[RULES[kind].vectors * 69 :])
        anchor = out
    assert anchor.isfinite().all()


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2 * BLOCK_ELEMENTS + 101), max_size=5))
def test_ranges_in_any_order_give_the_same_bits(cuts: list[int]) -> None:
    numel = 2 * BLOCK_ELEMENTS + 101
    rng = np.random.default_rng(5)
    anchor, mean = (torch.from_numpy(rng.standard_normal(numel, np.float32)) for _ in range(2))
    step = OuterStep(halved("adam"))
    first, whole, parts = (
        torch.zeros(step.state_numel(numel)),
        torch.empty(numel),
        torch.empty(numel),
    )
    step.apply(anchor, mean, first, whole)
    second = first.clone()
    step.apply(anchor, mean, first, whole)
    edges = [0, *sorted(cuts), numel]
    for start, stop in reversed(list(pairwise(edges))):
        step.apply_range(anchor, mean[start:stop].clone(), second, parts, start, stop)
    assert torch.equal(parts, whole)
    assert torch.equal(first, second)


def test_a_state_of_six_bytes_a_parameter_moves_whole() -> None:
    """A snapshot, as who joins fetches it; one of float32 momenta is refused, and the other way."""
    layout = make_layout([("w", (1001,))])
    replica = ModelReplica(layout, halved("nesterov"), PlainSlots(1001))
    replica.initialise(torch.linspace(-1, 1, 1001))
    replica.publish(0)
    bits = np.random.default_rng(6).integers(0, 0x7F00, 1002).astype(np.uint16)
    replica.momentum.copy_(torch.from_numpy(bits.view(np.float32)))
    copy = replica.snapshot()
    assert len(copy) == 4 * 1001 + 2 * 1002
    joiner = ModelReplica(layout, halved("nesterov"), PlainSlots(1001))
    joiner.install(copy, 7)
    assert joiner.hashes() == replica.hashes()
    assert torch.equal(joiner.momentum, replica.momentum)
    plain = ModelReplica(layout, OuterSettings("nesterov", 0.7, 0.9), PlainSlots(1001))
    with pytest.raises(DigestMismatchError):
        plain.install(copy, 7)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_a_rule_without_momentum_has_none_to_keep(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OuterStep(halved(kind))
    assert caught.value.key == "$.train.outer.momentum_dtype"

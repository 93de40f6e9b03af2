"""Outer lr and momentum that warm up by round: their values and bits, and where they are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.layout import Layout, TensorSpec
from atoll.collectives.outer_rules import MOST_WARMUP, PLAIN_MEAN, WARMING, OuterSettings
from atoll.collectives.telemetry import subscribe
from atoll.node.manifest import decode_manifest, parse_manifest
from atoll.node.manifest.form import as_toml
from atoll.optim import OuterStep
from atoll.optim.outer import BLOCK_ELEMENTS
from atoll.optim.outer.governor import Governed
from atoll.optim.outer.more_rules import RULES
from atoll.optim.outer.step import warmed

COLD = OuterSettings("nesterov", 0.9, 0.6, warmup=20)
NUMEL = 2 * BLOCK_ELEMENTS + 101  # which a run steps in pieces
Kind = Literal["nesterov", "momentum"]


def expected(outer: OuterSettings, anchor: np.ndarray, means: list[np.ndarray]) -> np.ndarray:
    """The anchor after a step with each mean, in numpy, which rounds every operation by itself."""
    f, m = np.float32, np.zeros_like(anchor)
    for index, g in enumerate(means):
        part = min(1.0, (index + 1) / (outer.warmup + 1))
        lr, mu = f(1 + (outer.lr - 1) * part), f(outer.momentum * part)
        m = mu * m + g
        anchor = anchor - lr * (g + mu * m if outer.kind == "nesterov" else m)
    return anchor


def test_values_by_round() -> None:
    """Linear from the plain mean's 1 and 0, of which the first step has a part already; then as
    they are set, to the last bit."""
    found = [warmed(COLD, steps) for steps in range(30)]
    assert found[0] == pytest.approx((1 - 0.1 / 21, 0.6 / 21), abs=1e-15)
    assert found[10] == pytest.approx((1 - 1.1 / 21, 6.6 / 21), abs=1e-15)
    assert found[20:] == [(0.9, 0.6)] * 10
    assert all(a[0] > b[0] and a[1] < b[1] for a, b in pairwise(found[:21]))
    for lr in (0.1, 0.3, 1.7, 1e-9):
        assert warmed(OuterSettings("nesterov", lr, 0.9, warmup=3), 3) == (lr, 0.9)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(WARMING),
    lr=st.floats(0.01, 2),
    mu=st.floats(0, 0.99),
    warmup=st.integers(1, 8),
    rounds=st.integers(1, 12),
    restart=st.integers(0, 11),
    cuts=st.lists(st.integers(0, NUMEL), max_size=3),
    numel=st.sampled_from([1, 65, NUMEL]),
)
def test_bits_are_those_of_a_plain_loop_whatever_the_cuts_and_restarts(
    kind: Kind,
    lr: float,
    mu: float,
    warmup: int,
    rounds: int,
    restart: int,
    cuts: list[int],
    numel: int,
) -> None:
    """A state of bytes is all that a restarted node, or a newcomer, has."""
    outer = OuterSettings(kind, lr, mu, warmup=warmup)
    rng = np.random.default_rng(rounds)
    first, *means = (rng.standard_normal(numel, dtype=np.float32) for _ in range(rounds + 1))
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    step, anchor, out = OuterStep(outer), torch.from_numpy(first.copy()), torch.empty(numel)
    state = torch.zeros(step.state_numel(numel))
    assert len(state) == numel + 1
    for index, mean in enumerate(means):
        if index == restart:
            step, state = OuterStep(outer), torch.frombuffer(bytearray(state.numpy()), dtype=torch.float32)  # fmt: skip
        pieces = [(start, torch.from_numpy(mean[start:stop])) for start, stop in pairwise(edges)]
        step.run(anchor, pieces, state, out)
        anchor, out = out, anchor
        assert state[-1] == min(index + 1, warmup)
    found = anchor.numpy().view(np.int32)
    assert np.array_equal(found, expected(outer, first, means).view(np.int32))


def test_ranges_take_the_values_of_one_round_and_only_a_whole_step_is_counted() -> None:
    step, anchor, mean = OuterStep(COLD), torch.zeros(4), torch.ones(4)
    state, whole, parts = torch.zeros(5), torch.empty(4), torch.empty(4)
    for start, stop in ((2, 4), (0, 2)):
        step.apply_range(anchor, mean[start:stop], state, parts, start, stop)
    assert state[-1] == 0
    state[:4] = 0.0
    step.apply(anchor, mean, state, whole)
    assert torch.equal(whole, parts)
    assert state[-1] == 1


def test_statistics_are_averaged_and_momenta_in_bf16_lie_before_the_count() -> None:
    layout = Layout((TensorSpec("w", (3,), 0), TensorSpec("m", (2,), 3, "mean")), 5)
    outer = msgspec.structs.replace(COLD, momentum_dtype="bf16")
    step, plain = OuterStep(outer, layout), OuterStep(COLD, layout)
    state, other = torch.zeros(step.state_numel(5)), torch.zeros(plain.state_numel(5))
    assert (len(state), len(other)) == (3 + 1, 5 + 1)
    anchor, out, known = torch.zeros(5), torch.empty(5), torch.empty(5)
    for count in (1, 2, 3):
        step.apply(anchor, torch.ones(5), state, out)
        plain.apply(anchor, torch.ones(5), other, known)
        assert state[-1] == other[-1] == count
        assert torch.allclose(out, known, rtol=1e-2)
        assert out[3:].tolist() == [-1.0, -1.0]


def test_a_governor_halves_the_rate_of_the_round_and_the_warm_up_goes_on() -> None:
    seen: list[object] = []
    off = subscribe(seen.append)
    outer = OuterSettings("nesterov", 0.5, 0.5, governor=True, warmup=9)
    step, anchor, out = OuterStep(outer), torch.zeros(2), torch.empty(2)
    state = torch.zeros(step.state_numel(2))
    moved = list[float]()
    for size in (1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0):
        step.apply(anchor, torch.full((2,), size), state, out)
        moved.append((anchor - out)[0].item())
        anchor, out = out, anchor
    off()
    assert [type(each) for each in seen] == [Governed]
    assert state[-1] == 7
    lr, mu = 1 - 0.5 * 0.6, 0.5 * 0.6  # of the sixth step, whose momentum restarts
    assert moved[5] == pytest.approx(0.5 * lr * 9 * (1 + mu))
    lr, mu = 1 - 0.5 * 0.7, 0.5 * 0.7
    assert moved[6] == pytest.approx(0.5 * lr * (1 + mu * (1 + mu * 9)))


@pytest.mark.parametrize("kind", sorted(RULES.keys() - set(WARMING)))
def test_a_rule_that_does_not_begin_as_the_plain_mean_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OuterStep(OuterSettings(kind, 0.5, warmup=3))  # type: ignore[arg-type]
    assert caught.value.key == "$.train.outer.warmup"
    with pytest.raises(ConfigError) as caught:
        OuterStep(OuterSettings(kind, 0.5, hold=3))  # type: ignore[arg-type]
    assert caught.value.key == "$.train.outer.hold"


@pytest.mark.parametrize("warmup", [-1, MOST_WARMUP + 1])
def test_a_warm_up_that_cannot_be_counted_is_refused(warmup: int) -> None:
    with pytest.raises(ConfigError):
        OuterStep(OuterSettings("nesterov", 0.5, warmup=warmup))
    assert OuterStep(PLAIN_MEAN).state_numel(7) == 7  # and nobody else's state is longer


OWN = "lr = 0.9\nmomentum = 0.6\nwarmup = 20"


def manifest(outer: str, train: str = "", more: str = "") -> str:
    return f'schema = 1\nname = "x"\n[train]\n{train}\n[train.outer]\n{outer}\n{more}'


def test_a_manifest_says_it_and_its_bytes_and_text_keep_it() -> None:
    found = parse_manifest(manifest(OWN))
    assert found.settings().outer == COLD
    assert decode_manifest(found.encode()) == parse_manifest(as_toml(found)) == found
    cold = parse_manifest(manifest('preset = "cold"'))
    assert cold == parse_manifest(manifest(OWN.replace("20", "40\nhold = 40"), "growth = 20"))
    assert b"hold" not in found.encode()
    assert b"warmup" not in parse_manifest(manifest("lr = 0.9\nmomentum = 0.6")).encode()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (manifest(OWN.replace("20", "-1")), "$.train.outer.warmup"),
        (manifest(OWN.replace("20", "1_000_001")), "$.train.outer.warmup"),
        (manifest("warmup = 20"), "$.train.outer.lr"),
        (manifest("hold = 20"), "$.train.outer.lr"),
        (manifest(OWN.replace("warmup", "hold"), 'overlap = "late"'), "$.train.outer.hold"),
        (manifest(OWN.replace("warmup = 20", "hold = -1")), "$.train.outer.hold"),
        (manifest('preset = "cold"\nwarmup = 10'), "$.train.outer.warmup"),
        (manifest(f'optimizer = "adam"\n{OWN}'), "$.train.outer.warmup"),
        (manifest('optimizer = "sgd"\nlr = 1.0\nwarmup = 20'), "$.train.outer.warmup"),
        (manifest(OWN, 'overlap = "late"'), "$.train.outer.warmup"),
        (manifest(OWN, 'overlap = "eager"'), "$.train.outer.warmup"),
        (manifest(OWN, 'method = "gradient_averaging"'), "$.train.outer.warmup"),
        (manifest(OWN, 'method = "local_sgd"'), "$.train.outer.warmup"),
        (manifest(OWN, "", "[exchange.arrivals]\nquorum = 2"), "$.train.outer.warmup"),
    ],
)
def test_what_was_not_measured_is_refused_by_key(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    assert caught.value.key == key
    assert caught.value.code in ("E413", "E414")

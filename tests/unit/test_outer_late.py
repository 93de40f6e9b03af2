"""Outer rules for contributions that come late and one at a time: Delayed Nesterov and HeLoCo,
against their papers' formulas in float64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.layout import Layout, TensorSpec
from atoll.collectives.outer_rules import OuterSettings
from atoll.optim import OuterStep

LAYOUT = Layout(
    (
        TensorSpec("a", (40,), 0),
        TensorSpec("b", (25,), 40),
        TensorSpec("statistic", (3,), 65, "mean"),
    ),
    68,
)
PIECES = (slice(0, 40), slice(40, 65))


def gradients(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 68)).astype(np.float32)


def stepped(outer: OuterSettings, means: np.ndarray) -> list[np.ndarray]:
    """The anchor after each step, from zero."""
    step = OuterStep(outer, LAYOUT)
    state, anchor, found = torch.zeros(step.state_numel(68)), torch.zeros(68), list[np.ndarray]()
    for mean in means:
        out = torch.empty(68)
        step.apply(anchor, torch.from_numpy(mean.copy()), state, out)
        anchor = out
        found.append(out.numpy().copy())
    return found


def delayed_nesterov(
    means: np.ndarray, lr: float, mu: float, every: int, c: float
) -> list[np.ndarray]:
    """Algorithm 3 of arXiv 2401.09135."""
    theta, m, buffer, found = np.zeros(68), np.zeros(68), np.zeros(68), list[np.ndarray]()
    for t, g in enumerate(means.astype(np.float64)):
        buffer = buffer + g
        if (t + 1) % every:
            theta = theta - lr * (c * mu * m + g / every)
        else:
            m = mu * m + buffer / every
            theta = theta - lr * ((1 - c * every + c) * mu * m + g / every)
            buffer = np.zeros(68)
        found.append(theta)
    return found


@pytest.mark.parametrize(("every", "spread"), [(1, 0.0), (3, 0.0), (4, 0.5), (5, 1.0)])
def test_delayed_nesterov_is_the_papers(every: int, spread: float) -> None:
    means = gradients(13)
    outer = OuterSettings("delayed_nesterov", 0.6, 0.8, every=every, spread=spread)
    for ours, theirs in zip(
        stepped(outer, means),
        delayed_nesterov(means, 0.6, 0.8, every, spread / every),
        strict=True,
    ):
        assert np.allclose(ours[:65], theirs[:65], rtol=0, atol=2e-5)
    total = -means[:, 65:].astype(np.float64).sum(0)
    assert np.allclose(stepped(outer, means)[-1][65:], total, atol=1e-5)  # statistics: averaged


def test_delayed_nesterov_of_every_step_has_nesterovs_bits() -> None:
    means = gradients(6)
    plain = stepped(OuterSettings("nesterov", 0.7, 0.9), means)
    assert np.array_equal(
        np.array(stepped(OuterSettings("delayed_nesterov", 0.7, 0.9, every=1), means)),
        np.array(plain),
    )


@given(every=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_n_arrivals_in_any_order_are_one_nesterov_step_on_their_mean(every: int, seed: int) -> None:
    means = gradients(2 * every, seed)
    outer = OuterSettings("delayed_nesterov", 0.5, 0.7, every=every)
    once = stepped(
        OuterSettings("nesterov", 0.5, 0.7), means.reshape(2, every, 68).mean(1, dtype=np.float32)
    )
    shuffled = np.concatenate([means[:every][::-1], means[every:][::-1]])
    for order in (means, shuffled):
        assert np.allclose(stepped(outer, order)[-1][:65], once[-1][:65], atol=2e-5)


def corrected(g: np.ndarray, m: np.ndarray, agreement: float) -> np.ndarray:
    """Equations of arXiv 2606.00271 for one block: k_s = 1, beta_max = 1, k_d = 1/2, kappa = 1."""
    size, usual = np.linalg.norm(g), np.linalg.norm(m)
    if size == 0 or usual == 0:
        return g
    u, v = g / size, m / usual
    c = float(u @ v)
    trust = size / (size + usual)
    if c >= agreement:
        return g
    if c < 0:
        return g - min(-c * trust, 1.0) * c * size * v
    turn = min(0.5 * (1 - c) * trust, 1.0)
    turned = (1 - turn) * u + turn * v
    return size * turned / np.linalg.norm(turned)


@pytest.mark.parametrize("agreement", [0.0, 0.3, 1.0])
def test_heloco_is_the_papers_tensor_by_tensor(agreement: float) -> None:
    drift = gradients(1, 7)
    means = gradients(12, 3) + 0.3 * drift
    means[5, :40] = -means[4, :40]  # goes against what was
    means[8, 40:65] = 0.0
    theta, m = np.zeros(68), np.zeros(68)
    outer = OuterSettings("heloco", 0.6, 0.8, agreement=agreement)
    kept = 0
    for ours, mean in zip(stepped(outer, means), means.astype(np.float64), strict=True):
        found = mean.copy()
        for piece in PIECES:
            found[piece] = corrected(mean[piece], m[piece], agreement)
            kept += bool(np.array_equal(found[piece], mean[piece]))
        m = 0.8 * m + 0.2 * found
        theta = theta - 0.6 * (found + 0.8 * m)
        assert np.allclose(ours[:65], theta[:65], rtol=0, atol=2e-5)
    assert 2 <= kept < 23  # of 24: some are corrected, some are not


@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]),
    lean=st.floats(-3, 3),
    agreement=st.floats(0, 1),
)
@settings(max_examples=80, deadline=None)
def test_heloco_never_lengthens_a_contribution_nor_turns_it_away(
    seed: int, scale: float, lean: float, agreement: float
) -> None:
    """With momentum 0 a step of lr 1 moves by the corrected contribution itself; the momentum is
    the corrected one before."""
    first, second = gradients(2, seed)
    second = (scale * (second + np.float32(lean) * first)).astype(np.float32)
    outer = OuterSettings("heloco", 1.0, 0.0, agreement=agreement)
    before, after = stepped(outer, np.array([first, second]))
    assert np.array_equal(before, -first)  # without momentum nothing is corrected
    for piece in PIECES:
        g, m = second[piece].astype(np.float64), first[piece].astype(np.float64)
        moved = before[piece].astype(np.float64) - after[piece]
        slack = 1e-5 * (np.linalg.norm(g) + np.linalg.norm(m))
        assert np.linalg.norm(moved) <= np.linalg.norm(g) + slack
        assert moved @ m >= g @ m - slack * np.linalg.norm(m)
        if g @ m < 0:
            assert moved @ m <= slack * np.linalg.norm(m)  # a conflict is not turned round


def test_what_is_no_number_of_these_rules_is_refused_and_huge_ones_stay_finite() -> None:
    for wrong in ({"every": 0}, {"spread": 1.5}, {"agreement": -0.1}, {"agreement": math.nan}):
        with pytest.raises(ConfigError, match=rf"outer {next(iter(wrong))} "):
            OuterStep(OuterSettings("nesterov", 0.7, **wrong))  # type: ignore[arg-type]
    huge = np.full((2, 68), 1e38, dtype=np.float32)
    huge[1] = -huge[1]
    assert np.isfinite(np.array(stepped(OuterSettings("heloco", 0.1, 0.5), huge))).all()

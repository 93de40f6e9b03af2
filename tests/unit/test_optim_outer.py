"""The outer step: its values against plain formulas, and its bits against cuts, threads and
instruction sets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch
from house import ROOT
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.layout import Layout, TensorSpec
from atoll.collectives.outer_rules import OuterRule, OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.collectives.telemetry import subscribe
from atoll.optim import OuterStep
from atoll.optim.outer import BLOCK_ELEMENTS
from atoll.optim.outer.governor import Governed
from atoll.optim.outer.more_rules import RULES

NUMEL = 2 * BLOCK_ELEMENTS + 12_345
NESTEROV = OuterSettings(kind="nesterov", lr=0.7, momentum=0.9)


def test_a_name_is_of_a_rule_and_of_a_row_of_the_page() -> None:
    assert set(get_args(get_type_hints(OuterSettings)["kind"])) == RULES.keys()
    page = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    assert [name for name in get_args(OuterRule) if f"`{name}`" not in page] == []


def vectors(numel: int = NUMEL, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An anchor, a mean and a momentum."""
    rng = np.random.default_rng(seed)
    anchor, mean, momentum = (
        torch.from_numpy(rng.standard_normal(numel, dtype=np.float32)) for _ in range(3)
    )
    return anchor, mean * 1e-3, momentum * 1e-3


def reference(
    anchor: np.ndarray, mean: np.ndarray, momentum: np.ndarray, lr: float, mu: float
) -> tuple[np.ndarray, np.ndarray]:
    """Nesterov in numpy, which rounds every operation by itself."""
    lr32, mu32 = np.float32(lr), np.float32(mu)
    momentum = mu32 * momentum + mean
    return anchor - lr32 * (mean + mu32 * momentum), momentum


def test_nesterov_matches_numpy_bit_for_bit_over_several_rounds() -> None:
    anchor, mean, momentum = vectors()
    expected, expected_momentum = anchor.numpy().copy(), momentum.numpy().copy()
    step, other = OuterStep(NESTEROV), torch.empty_like(anchor)
    for _ in range(3):
        step.apply(anchor, mean, momentum, other)
        anchor, other = other, anchor
        expected, expected_momentum = reference(expected, mean.numpy(), expected_momentum, 0.7, 0.9)
    assert np.array_equal(anchor.numpy().view(np.int32), expected.view(np.int32))
    assert np.array_equal(momentum.numpy().view(np.int32), expected_momentum.view(np.int32))


def test_the_first_step_is_lr_times_one_plus_mu() -> None:
    out = torch.empty(2)
    OuterStep(NESTEROV).apply(torch.zeros(2), torch.ones(2), torch.zeros(2), out)
    assert out.tolist() == pytest.approx([-1.33, -1.33])


def test_plain_sgd_with_lr_one_is_averaging_and_leaves_momentum_alone() -> None:
    anchor, mean, momentum = vectors(1000)
    before, out = momentum.clone(), torch.empty(1000)
    step = OuterStep(RunSettings(method="local_sgd").effective_outer)
    step.apply(anchor, mean, momentum, out)
    assert torch.equal(out, anchor - mean)
    assert torch.equal(momentum, before)
    step.apply(anchor, mean, None, out)
    assert torch.equal(out, anchor - mean)


@given(st.lists(st.integers(0, NUMEL), max_size=6))
def test_ranges_in_any_order_give_the_same_bits(cuts: list[int]) -> None:
    anchor, mean, momentum = vectors()
    whole, whole_momentum = torch.empty(NUMEL), momentum.clone()
    OuterStep(NESTEROV).apply(anchor, mean, whole_momentum, whole)
    edges = [0, *sorted(cuts), NUMEL]
    parts, step = torch.empty(NUMEL), OuterStep(NESTEROV)
    for start, stop in reversed(list(pairwise(edges))):
        step.apply_range(anchor, mean[start:stop].clone(), momentum, parts, start, stop)
    assert torch.equal(parts, whole)
    assert torch.equal(momentum, whole_momentum)


def test_running_statistics_are_averaged_and_a_variance_stays_at_or_above_zero() -> None:
    layout = Layout(
        (
            TensorSpec("w", (4,), 0),
            TensorSpec("m", (2,), 4, "mean"),
            TensorSpec("v", (2,), 6, "variance"),
        ),
        8,
    )
    anchor, mean = torch.ones(8), torch.tensor([0.5, 0.5, 0.5, 0.5, 3.0, 0.5, 3.0, 0.5])
    momentum, out = torch.zeros(8), torch.empty(8)
    step = OuterStep(NESTEROV, layout)
    step.apply(anchor, mean, momentum, out)
    assert out.tolist() == pytest.approx([1 - 0.5 * 1.33] * 4 + [-2.0, 0.5, 0.0, 0.5])
    assert momentum.tolist() == [0.5] * 4 + [0.0] * 4
    cut = torch.empty(8)
    fresh = torch.zeros(8)
    for start, stop in [(5, 7), (0, 5), (7, 8)]:
        step.apply_range(anchor, mean[start:stop], fresh, cut, start, stop)
    assert torch.equal(cut, out)
    assert torch.equal(fresh, momentum)


PROBE = """
import numpy as np, torch
from blake3 import blake3
from atoll.collectives.group import Reading
from atoll.collectives.swarm import OuterSettings
from atoll.optim import OuterStep
for threads in (1, 2, 4):
    torch.set_num_threads(threads)
    digest, rng = blake3(), np.random.default_rng(3)
    anchor, mean = (torch.from_numpy(rng.standard_normal(300_001, dtype=np.float32)) for _ in range(2))
    for kind in ("nesterov", "sgd", "adam", "yogi", "adagrad", "co2", "adamw", "delayed_nesterov", "heloco",
                 "nesterov16", "adam16", "heloco16", "delayed_nesterov16"):
        step = OuterStep(OuterSettings(
            kind.removesuffix("16"), 0.7, 0.9, governor=kind == "nesterov",
            stretch=kind in ("nesterov", "co2"), momentum_dtype="bf16" if kind.endswith("16") else "fp32"))
        said = [(3, Reading(2.5, 0.7 * 300_001**0.5)), (5, Reading(2.25, 1.9 * 300_001**0.5)), (2, Reading())]
        state, out = torch.zeros(step.state_numel(300_001)), torch.empty_like(anchor)
        for _ in range(3):
            step.apply(anchor, mean.clone(), state, out, said)
            anchor, out = out, anchor
            digest.update(anchor.numpy().tobytes() + state.numpy().tobytes())
    print(torch.backends.cpu.get_cpu_capability(), threads, digest.hexdigest())
"""


def _instruction_sets() -> list[str]:
    """Those of torch's that this machine has: it does not check what it is told, and dies by one
    that is missing.
    """
    levels, best = ["default", "avx2", "avx512"], torch.backends.cpu.get_cpu_capability().lower()
    return levels[: levels.index(best) + 1] if best in levels else ["default", best]


def test_bits_do_not_depend_on_instruction_set_or_threads() -> None:
    sets = _instruction_sets()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "passive"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for capability in sets
    ]
    printed = [child.communicate(timeout=100)[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0] * len(sets)
    found = [line.split() for lines in printed for line in lines]
    assert [threads for _, threads, _ in found] == ["1", "2", "4"] * len(sets)
    assert len({digest for _, _, digest in found}) == 1
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            anchor, mean, momentum = vectors()
            out = torch.empty(NUMEL)
            OuterStep(NESTEROV).apply(anchor, mean, momentum, out)
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (OuterSettings("nesterov", 0.0), "$.train.outer.lr"),
        (OuterSettings("nesterov", float("nan")), "$.train.outer.lr"),
        (OuterSettings("nesterov", 0.7, 1.0), "$.train.outer.momentum"),
        (OuterSettings("nesterov", 0.7, -0.1), "$.train.outer.momentum"),
        (OuterSettings("adam", 0.7, beta2=1.0), "$.train.outer.beta2"),
        (OuterSettings("yogi", 0.7, epsilon=0.0), "$.train.outer.epsilon"),
        (OuterSettings("co2", 0.7, clip=-1.0), "$.train.outer.clip"),
        (OuterSettings("lion", 0.7), "$.train.outer.optimizer"),  # type: ignore[arg-type]
    ],
)
def test_impossible_values_are_refused_by_key(settings: OuterSettings, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        OuterStep(settings)
    assert error.value.key == key


def adaptive(
    kind: str, settings: OuterSettings, anchor: np.ndarray, means: list[np.ndarray]
) -> np.ndarray:
    """FedAdam, FedYogi and FedAdagrad in numpy, which rounds every operation by itself."""
    f = np.float32
    m, v = np.zeros_like(anchor), np.zeros_like(anchor)
    for g in means:
        m = f(settings.momentum) * m + f(1 - settings.momentum) * g
        if kind == "adam":
            v = f(settings.beta2) * v + f(1 - settings.beta2) * (g * g)
        elif kind == "yogi":
            v = v - f(1 - settings.beta2) * (g * g) * np.sign(v - g * g)
        else:
            m, v = g, v + g * g
        anchor = anchor - f(settings.lr) * m / (np.sqrt(v) + f(settings.epsilon))
    return anchor


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_adaptive_rules_match_numpy_bit_for_bit_whatever_the_cuts(kind: str) -> None:
    settings = OuterSettings(kind=kind, lr=0.05, momentum=0.8, beta2=0.95, epsilon=1e-4)  # type: ignore[arg-type]
    first, _, _ = vectors(BLOCK_ELEMENTS + 1001)
    means = [vectors(first.numel(), seed)[1] for seed in (5, 6, 7)]
    step, one, other = OuterStep(settings), first.clone(), torch.empty_like(first)
    state = torch.zeros(step.state_numel(first.numel()))
    assert state.numel() == (1 if kind == "adagrad" else 2) * first.numel()
    for mean in means:
        step.run(
            one,
            [(start, mean[start : start + 7001]) for start in range(0, mean.numel(), 7001)],
            state,
            other,
        )
        one, other = other, one
    expected = adaptive(kind, settings, first.numpy(), [mean.numpy() for mean in means])
    assert np.array_equal(one.numpy().view(np.int32), expected.view(np.int32))


def test_nesterov_follows_torch_and_a_sequence_made_by_hand() -> None:
    """torch's SGD(nesterov=True) on the same gradients; and μ = 0.5, lr = 1: m = 1, 1.5, 1.75;
    steps 1.5, 1.75, 1.875.
    """
    anchor = torch.zeros(3)
    theirs = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    ours, hand, step, plain = (
        anchor.clone(),
        torch.zeros(1),
        OuterStep(NESTEROV),
        OuterStep(OuterSettings("nesterov", 1.0, 0.5)),
    )
    state, small = torch.zeros(3), torch.zeros(1)
    seen = []
    for seed in range(3):
        theirs.grad = torch.from_numpy(
            np.random.default_rng(seed).standard_normal(3, dtype=np.float32)
        )
        out = torch.empty(3)
        step.apply(ours, theirs.grad, state, out)
        sgd.step()
        ours = out
        after = torch.empty(1)
        plain.apply(hand, torch.ones(1), small, after)
        hand = after
        seen.append(hand.item())
    assert torch.allclose(ours, theirs.detach(), rtol=3e-7, atol=0)
    assert seen == [-1.5, -3.25, -5.125]


def test_co2_slows_down_by_the_gap_and_clips_a_jump_of_the_momentum() -> None:
    layout = Layout(
        (TensorSpec("a", (4,), 0), TensorSpec("b", (4,), 4), TensorSpec("m", (1,), 8, "mean")), 9
    )
    step = OuterStep(OuterSettings(kind="co2", lr=1.0, momentum=0.0, clip=2.0), layout)
    state, anchor, out = torch.zeros(step.state_numel(9)), torch.zeros(9), torch.empty(9)
    assert state.numel() == 9 + 2 * 3
    step.apply(anchor, torch.ones(9), state, out)
    assert out.tolist() == [-1.0] * 9  # no gap yet, nothing to clip by
    step.apply(out, torch.ones(9), state, anchor)
    assert (anchor - out).tolist() == [-0.5] * 8 + [
        -1.0
    ]  # the gap is as usual: Λ = 2; statistics are averaged
    jump = torch.tensor([100.0] * 4 + [1.0] * 5)
    step.apply(anchor, jump, state, out)
    change = (out - anchor).tolist()
    usual = 0.9 * 2 + 0.1 * 1  # mean norm of the momentum: 2, then 1
    assert change[:4] == pytest.approx(
        [-2 * usual / 2] * 4
    )  # clipped: ‖m‖ = 2 · usual, over four elements
    assert (
        -1 < change[4] < -0.5
    )  # the other tensor is not touched by it; its gap has become smaller


def test_a_jump_restarts_momentum_and_halves_the_rate_for_a_while() -> None:
    seen: list[object] = []
    off = subscribe(seen.append)
    settings = OuterSettings("nesterov", 1.0, 0.5, governor=True)
    step, tame = OuterStep(settings), OuterStep(OuterSettings("nesterov", 1.0, 0.5))
    state, other = torch.zeros(step.state_numel(4)), torch.zeros(4)
    anchor, plain, out = torch.zeros(4), torch.zeros(4), torch.empty(4)
    for size in (1.0, 1.1, 0.9, 1.0, 1.2, 1.0):
        step.apply(anchor, torch.full((4,), size), state, out)
        anchor = out.clone()
        tame.apply(plain, torch.full((4,), size), other, out)
        plain = out.clone()
    assert torch.equal(anchor, plain)  # a quiet run is left alone
    assert seen == []
    step.apply(anchor, torch.full((4,), 50.0), state, out)
    off()
    assert seen == [Governed("norm", value=100.0, median=2.0)]
    assert (anchor - out).tolist() == [0.5 * 1.5 * 50.0] * 4
    rates = []
    for _ in range(9):
        state[:4] = 0.0
        anchor = out.clone()
        step.apply(anchor, torch.ones(4), state, out)
        rates.append(round((anchor - out)[0].item() / 1.5, 3))
    assert rates == [0.5] * 7 + [1.0] * 2


@pytest.mark.parametrize(
    ("kind", "momenta"), [("adam", 1), ("yogi", 1), ("adamw", 1), ("adagrad", 0)]
)
def test_a_jump_restarts_momentum_and_nothing_else(
    kind: Literal["adam", "yogi", "adamw", "adagrad"], momenta: int
) -> None:
    """Second moments stay: without them the next steps of Adagrad would be as large as its first
    ones.
    """
    governed, plain = (
        OuterStep(OuterSettings(kind, lr=0.1, governor=governor)) for governor in (True, False)
    )
    one, other = (torch.zeros(step.state_numel(2)) for step in (governed, plain))
    anchor, out, expected = torch.zeros(2), torch.empty(2), torch.empty(2)
    for size in (1.0, 1.0, 1.0, 1.0, 1.0, 9.0):
        if size > 1:
            other[: 2 * momenta] = 0.0
        governed.apply(anchor, torch.full((2,), size), one, out)
        plain.apply(anchor, torch.full((2,), size), other, expected)
    vectors = slice(0, 2 if kind == "adagrad" else 4)
    assert torch.equal(one[vectors], other[vectors])
    assert out[0].item() == pytest.approx(expected[0].item() / 2)

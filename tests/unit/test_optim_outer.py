"""The outer step: its values against plain formulas, and its bits against cuts, threads and instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.layout import Layout, TensorSpec
from atoll.collectives.swarm import OuterSettings, RunSettings
from atoll.optim import OuterStep, outer_preset
from atoll.optim.outer import BLOCK_ELEMENTS, effective_outer

NUMEL = 2 * BLOCK_ELEMENTS + 12_345
NESTEROV = OuterSettings(kind="nesterov", lr=0.7, momentum=0.9)


def vectors(numel: int = NUMEL, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An anchor, a mean and a momentum."""
    rng = np.random.default_rng(seed)
    anchor, mean, momentum = (torch.from_numpy(rng.standard_normal(numel, dtype=np.float32)) for _ in range(3))
    return anchor, mean * 1e-3, momentum * 1e-3


def reference(anchor: np.ndarray, mean: np.ndarray, momentum: np.ndarray, lr: float, mu: float) -> tuple[np.ndarray, np.ndarray]:
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
    step = OuterStep(effective_outer(RunSettings(method="local_sgd")))
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
    layout = Layout((TensorSpec("w", (4,), 0), TensorSpec("m", (2,), 4, "mean"), TensorSpec("v", (2,), 6, "variance")), 8)
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
from atoll.collectives.swarm import OuterSettings
from atoll.optim import OuterStep
torch.set_num_threads({threads})
rng = np.random.default_rng(3)
anchor, mean, momentum = (torch.from_numpy(rng.standard_normal(300_001, dtype=np.float32)) for _ in range(3))
out = torch.empty_like(anchor)
OuterStep(OuterSettings()).apply(anchor, mean, momentum, out)
print(torch.backends.cpu.get_cpu_capability(), blake3(out.numpy().tobytes() + momentum.numpy().tobytes()).hexdigest())
"""


def test_bits_do_not_depend_on_instruction_set_or_threads() -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROBE.format(threads=threads)],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            stdout=subprocess.PIPE,
            text=True,
        )
        for capability, threads in [("default", 1), ("avx2", 2)]
    ]
    printed = [child.communicate(timeout=100)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert printed[0][1] == printed[1][1]
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
        (OuterSettings(lr=0.0), "$.train.outer.lr"),
        (OuterSettings(lr=float("nan")), "$.train.outer.lr"),
        (OuterSettings(momentum=1.0), "$.train.outer.momentum"),
        (OuterSettings(momentum=-0.1), "$.train.outer.momentum"),
    ],
)
def test_impossible_values_are_refused_by_key(settings: OuterSettings, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        OuterStep(settings)
    assert error.value.key == key


def test_presets() -> None:
    assert outer_preset(49) == OuterSettings("nesterov", 0.9, 0.6)
    assert outer_preset(50) == outer_preset(None) == OuterSettings("nesterov", 0.7, 0.9)

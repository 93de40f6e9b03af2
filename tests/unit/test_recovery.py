"""A lost stage from its neighbours: the values, what is refused, and a small model that goes on."""

from __future__ import annotations

import copy
from statistics import fmean

import pytest
import torch
from torch import nn

from atoll.optim.lab.recovery import LEARNING_RATE_AFTER, recovered_stage

WIDTH, STAGES = 24, 5


def test_the_mean_is_weighted_by_the_neighbours_gradients() -> None:
    before = {"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(7)}
    after = {"w": torch.tensor([5.0, -2.0]), "steps": torch.tensor(9)}
    stage = recovered_stage(before, after, norms=(3.0, 1.0))
    assert stage["w"].tolist() == [2.0, 1.0]
    assert stage["steps"].item() == 7
    assert recovered_stage(before, after, norms=(0.0, 0.0))["w"].tolist() == [3.0, 0.0]
    assert before["w"].tolist() == [1.0, 2.0]


def test_half_precision_is_summed_wider_and_returned_as_it_was() -> None:
    large = {"w": torch.tensor([60000.0], dtype=torch.float16)}
    stage = recovered_stage(large, large)
    assert (stage["w"].dtype, stage["w"].item()) == (torch.float16, 60000.0)


def test_stages_that_are_not_alike_are_refused() -> None:
    one, two = {"w": torch.zeros(2)}, {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"w: torch.float32 \(2,\) beside torch.float32 \(3,\)"):
        recovered_stage(one, two)
    with pytest.raises(ValueError, match="other parameters: b"):
        recovered_stage(one, one | {"b": torch.zeros(1)})
    for norms in ((-1.0, 2.0), (float("nan"), 1.0), (float("inf"), 1.0)):
        with pytest.raises(ValueError, match="finite and not negative"):
            recovered_stage(one, one, norms=norms)


class Stage(nn.Module):
    """A residual block, as those of a transformer are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def train(model: nn.Sequential, teacher: nn.Module, first: int, steps: int, rate: float) -> None:
    """On batches that follow from their number, so that runs can be compared."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(first, first + steps):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - teacher(x)).square().mean().backward()
        optimizer.step()


def loss(model: nn.Sequential, teacher: nn.Module) -> float:
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(10**6))
    with torch.no_grad():
        return float((model(x) - teacher(x)).square().mean())


@pytest.mark.slow
def test_a_recovered_model_is_as_good_as_one_restarted_from_a_checkpoint() -> None:
    """A stage is lost after 300 of 450 steps; the checkpoint is 100 steps old, which a restart
    repeats. In the mean over the three inner stages and two seeds."""
    recovered, restarted = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        teacher = nn.Sequential(*(Stage() for _ in range(STAGES)))
        for p in teacher.parameters():
            p.requires_grad_(False).mul_(2)
        start = nn.Sequential(*(Stage() for _ in range(STAGES)))
        train(start, teacher, 0, 200, 3e-3)
        checkpoint = copy.deepcopy(start)
        train(start, teacher, 200, 100, 3e-3)
        train(checkpoint, teacher, 200, 50, 3e-3)  # of the 150 that were left, 100 are repeated
        restarted.append(loss(checkpoint, teacher))
        for lost in (1, 2, 3):
            norms = tuple(
                sum(
                    float(p.grad.square().sum())
                    for p in start[k].parameters()
                    if p.grad is not None
                )
                for k in (lost - 1, lost + 1)
            )
            model = copy.deepcopy(start)
            model[lost].load_state_dict(
                recovered_stage(
                    start[lost - 1].state_dict(),
                    start[lost + 1].state_dict(),
                    norms=(norms[0], norms[1]),
                )
            )
            train(model, teacher, 300, 150, 3e-3 * LEARNING_RATE_AFTER)
            recovered.append(loss(model, teacher))
    assert fmean(recovered) < fmean(restarted)

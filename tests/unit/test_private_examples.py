"""DP-SGD for a site's own steps: one example moves the sum by its bound at most, noise as
accounted, and an end before epsilon is passed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver

from atoll.collectives.errors import ConfigError, StateError
from atoll.optim.model.flat import FlatVector
from atoll.optim.modes.privacy import ghost
from atoll.optim.modes.privacy.examples import PrivateExamples
from atoll.security.privacy import Accountant


def model_of(inputs: int) -> nn.Linear:
    model = nn.Linear(inputs, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def gradient(model: nn.Linear) -> torch.Tensor:
    assert model.weight.grad is not None
    return model.weight.grad.view(-1)


def private(**changes: Any) -> PrivateExamples:
    settings: dict[str, Any] = {
        "rate": 0.1,
        "noise": 0.01,
        "bound": 1.0,
        "delta": 1e-5,
        "rng": Random(3),
    }
    return PrivateExamples(100, **{**settings, **changes})


def test_examples_are_clipped_one_by_one_and_divided_by_the_expected_batch() -> None:
    model = model_of(4)
    rows = [torch.tensor([30.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.5, 0.0, 0.0])]
    private().step(model, rows, lambda row: model(row).sum())
    assert torch.allclose(gradient(model), torch.tensor([0.1, 0.05, 0.0, 0.0]), atol=0.01)


def test_the_noise_has_the_deviation_that_is_accounted_also_without_examples() -> None:
    model = model_of(20_000)
    private(noise=2.0).step(model, [], lambda row: model(row).sum())
    assert float((gradient(model) * 10).std()) == pytest.approx(2.0, rel=0.03)


def test_batches_are_poisson_samples_and_the_last_step_stays_within_epsilon() -> None:
    examples, model = private(noise=1.0, stop_at_epsilon=3.0), model_of(2)
    sizes = [len(examples.batch()) for _ in range(200)]
    assert sum(sizes) / 200 == pytest.approx(10, abs=1)
    assert len(set(sizes)) > 5
    while examples.allows:
        examples.step(model, [], lambda row: model(row).sum())
    steps = examples.accountant.steps
    assert 0 < examples.accountant.epsilon <= 3.0 < examples.accountant.after(0.1, 1.0)
    with pytest.raises(ConfigError, match="is spent"):
        examples.step(model, [], lambda row: model(row).sum())
    assert not private(noise=1.0, stop_at_epsilon=3.0, steps=steps).allows


def test_what_is_not_finite_or_promises_nothing_is_refused() -> None:
    model = model_of(2)
    with pytest.raises(ValueError, match="not finite"):
        private().step(model, [torch.tensor([float("nan"), 1.0])], lambda row: model(row).sum())
    for wrong in ({"rate": 0.0}, {"noise": 0.0}, {"bound": 0.0}, {"delta": 0.0}):
        with pytest.raises(ConfigError):
            private(**wrong)


def test_parameters_that_an_example_does_not_meet_get_noise_all_the_same() -> None:
    """Which they are would tell something of the example."""
    met, unmet = model_of(2), model_of(2000)
    private(noise=2.0).step(
        nn.ModuleList([met, unmet]), [torch.tensor([1.0, 0.0])], lambda row: met(row).sum()
    )
    assert float((gradient(unmet) * 10).std()) == pytest.approx(2.0, rel=0.1)


@pytest.mark.slow
def test_what_is_spent_survives_five_kills(tmp_path: Path) -> None:
    """Never below the truth, and by less than a fiftieth above it."""
    kept, made, model = tmp_path / "patients.json", 0, model_of(2)
    for steps in (310, *Random(17).choices(range(1, 420), k=4)):
        if (child := os.fork()) == 0:
            life = private(noise=1.0, kept=kept)
            for _ in range(steps):
                life.step(model, [], lambda row: model(row).sum())
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        made += steps
    told = private(noise=1.0, kept=kept).accountant
    truth = Accountant(1e-5)
    truth.spend(0.1, 1.0, made)
    assert truth.epsilon <= told.epsilon <= 1.02 * truth.epsilon
    assert made <= told.steps


def test_a_ledger_is_of_one_process_and_gives_back_what_was_not_made(tmp_path: Path) -> None:
    kept, model = tmp_path / "patients.json", model_of(2)
    first = private(noise=1.0, kept=kept)
    with pytest.raises(ConfigError, match="another process"):
        private(noise=1.0, kept=kept)
    for _ in range(700):
        first.step(model, [], lambda row: model(row).sum())
    first.close()
    assert private(noise=1.0, kept=kept).accountant.steps == 700
    (tmp_path / "damaged.json").write_text("{}")
    with pytest.raises(StateError, match="no ledger"):
        private(noise=1.0, kept=tmp_path / "damaged.json")


def test_two_calls_before_a_step_are_added_and_both_are_paid() -> None:
    """The second does not take the place of the first one's gradient."""
    model, examples = model_of(4), private()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row = torch.tensor([0.0, 0.5, 0.0, 0.0])
    for _ in range(2):
        examples.step(model, [row], lambda row: model(row).sum())
    assert torch.allclose(gradient(model), torch.tensor([0.0, 0.1, 0.0, 0.0]), atol=0.01)
    assert examples.accountant.steps == 2
    optimizer.step()
    examples.step(model, [row], lambda row: model(row).sum())  # of the new point alone
    assert torch.allclose(gradient(model), torch.tensor([0.0, 0.05, 0.0, 0.0]), atol=0.01)


class Tokens(nn.Module):
    """A little of everything: an embedding, a parameter of its own, layers, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.mix, self.conv, self.unmet = nn.Linear(6, 6), nn.Conv1d(6, 4, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.mix(self.embed(x)).tanh())
        return self.conv(found.transpose(1, 2)).amax(2)


def test_a_batch_at_once_gives_what_its_examples_give_one_by_one() -> None:
    """By ghost clipping, where opacus is; some examples are clipped, others are not."""
    torch.manual_seed(0)
    model, x, y = Tokens(), torch.randint(0, 11, (9, 5)), torch.randint(0, 4, (9,))

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    found, quiet = list[torch.Tensor](), {"noise": 1e-4, "bound": 1.5}
    for at_once in (True, False):
        if at_once:
            private(**quiet).step_batch(model, [x, y], losses)
        else:
            rows = [(x[at : at + 1], y[at : at + 1]) for at in range(9)]
            private(**quiet).step(model, rows, lambda row: losses(*row).sum())
        found.append(
            torch.cat([each.grad.view(-1) for each in model.parameters() if each.grad is not None])
        )
    assert len(found[0]) == sum(each.numel() for each in model.parameters())
    assert float(found[1].norm()) > 0.1
    assert float((found[0] - found[1]).norm()) < 4e-3 * float(found[1].norm())
    private(**quiet).step_batch(model, [x[:0], y[:0]], losses)
    assert 0 < float(model.mix.weight.grad.abs().max()) < 1e-3  # type: ignore[union-attr]


def test_ghost_clipping_keeps_gradients_that_are_there_and_refuses_what_it_cannot() -> None:
    pytest.importorskip("opacus")
    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    tied = nn.Sequential(model, nn.Linear(1, 3), model)
    examples = private(noise=1e-4)
    examples.step_batch(model, [x], lambda x: model(x).sum(1))
    before = model.weight.grad
    assert before is not None
    kept = before.clone()
    with pytest.raises(ConfigError, match="losses of shape"):
        examples.step_batch(model, [x], lambda x: model(x).sum())
    with pytest.raises(ConfigError, match="does not go with this model"):
        private().step_batch(tied, [x], lambda x: tied(x).sum(1))
    with pytest.raises(ValueError, match="not finite"):
        examples.step_batch(model, [x * float("nan")], lambda x: model(x).sum(1))
    assert model.weight.grad is before
    assert torch.equal(before, kept)
    assert examples.accountant.steps == 1
    examples.step_batch(
        model, [x], lambda x: model(x).sum(1)
    )  # before a step: both are paid, and count
    assert float((model.weight.grad - 2 * kept).abs().max()) < 1e-2


@pytest.mark.parametrize("cast", [False, True])
def test_ghost_clipping_refuses_half_precision(cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There one example more moves the sum by more than its bound: by so much is shown, too."""
    pytest.importorskip("opacus")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    x = torch.randn(257, 64)

    def losses(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return 100 * model(x).sum(1).float()

    if not cast:
        model, x = model.bfloat16(), x.bfloat16()
    with pytest.raises(ConfigError, match="bfloat16"):
        private().step_batch(model, [x], losses)

    monkeypatch.setattr(ghost, "_HALVES", frozenset[torch.dtype]())
    sums = [
        ghost.clipped_sum(model, [*model.parameters()], lambda part=part: losses(part), 1.0)
        for part in (x, x[1:])
    ]
    moved = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(*sums, strict=True))
    assert moved > 1.0


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.BatchNorm1d(3), "1 layers keep statistics of the examples, or mix those of a batch: 1"),
        (nn.BatchNorm1d(3, track_running_stats=False), "1 layers"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "1 layers"),
        (MinMaxObserver(), "2 buffers are learnt from the examples: 1.min_val, 1.max_val"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_learns_from_examples_beside_their_gradients_is_refused(
    layer: nn.Module, told: str, at_once: bool
) -> None:
    """It would go out as it is, without a bound and without noise."""
    model, x = nn.Sequential(nn.Linear(3, 3), layer), torch.ones(4, 3, 3)
    examples = private()

    def step() -> None:
        if at_once:
            examples.step_batch(model, [x], lambda x: model(x).sum((1, 2)))
        else:
            examples.step(model, [each[None] for each in x], lambda each: model(each).sum())

    with pytest.raises(ConfigError, match=told):
        step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert examples.accountant.steps == 0


def test_layers_that_keep_nothing_of_the_examples_are_not_refused() -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    frozen = nn.InstanceNorm1d(3, track_running_stats=True).eval()
    model = nn.Sequential(spectral, nn.GroupNorm(3, 3), frozen)
    private().step(model, [torch.ones(1, 3, 3)], lambda each: model(each).sum())
    assert spectral.bias.grad is not None


def test_a_model_that_opacus_has_wrapped_is_the_same_model() -> None:
    """Of sites with and without it, in one run."""
    opacus = pytest.importorskip("opacus")
    plain = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    wrapped = opacus.GradSampleModule(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert FlatVector(wrapped).layout == FlatVector(plain).layout

"""A script's evaluate function: when it is called, that training does not notice, and what becomes
of one that fails.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.group import Evaluated
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import EvaluateSettings, RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim import DiLoCo, SoloSwarm, attach
from atoll.optim.script.evaluation import AHEAD, TOGETHER, Evaluations, drawn_of, undisturbed

ASKED = RunSettings(sync_every=2, rounds=6, evaluate=EvaluateSettings())
A, B, C = (PeerId(name) for name in "abc")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def everything(model: nn.Module) -> list[Any]:
    """All that an evaluation may not change, by value, and tensors and gradients by identity."""
    return [
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()],
        torch.is_grad_enabled(),
        [(name, module.training) for name, module in model.named_modules()],
        [(name, id(each), each.tolist()) for name, each in model.named_buffers()],
        [
            (name, each.tolist(), each.requires_grad, id(each.grad), _values(each.grad))
            for name, each in model.named_parameters()
        ],
    ]


def _values(tensor: Tensor | None) -> Any:
    return tensor.tolist() if tensor is not None else None


def draws(model: nn.Module) -> None:
    torch.rand(3), random.random(), np.random.rand()


def sets_train(model: nn.Module) -> None:
    model.train()


def moves_statistics(model: nn.Module) -> None:
    model.train()
    model(torch.randn(8, 4))


def replaces_a_buffer(model: nn.Module) -> None:
    model[1].running_mean = torch.ones(4)  # type: ignore[index]


def clears_gradients(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)
    model.zero_grad()


def makes_gradients(model: nn.Module) -> None:
    with torch.enable_grad():
        model(torch.ones(8, 4)).sum().backward()


def turns_gradients_on(model: nn.Module) -> None:
    torch.set_grad_enabled(True)


def writes_past_versions(model: nn.Module) -> None:
    model[1].running_var.data.fill_(7.0)  # type: ignore[index]


def raises(model: nn.Module) -> None:
    moves_statistics(model)
    raise ValueError("no data")


@pytest.mark.parametrize(
    "what",
    [
        draws,
        sets_train,
        moves_statistics,
        replaces_a_buffer,
        clears_gradients,
        makes_gradients,
        turns_gradients_on,
        writes_past_versions,
        raises,
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_training_does_not_notice(what: Callable[[nn.Module], None], frozen: bool) -> None:
    """Some modules may be in evaluation mode on purpose, and some parameters have no gradient."""
    torch.manual_seed(1)
    model = net()
    model[1].eval() if frozen else model.train()  # type: ignore[index]
    model(torch.randn(8, 4)).sum().backward()
    model[3].bias.grad = None  # type: ignore[index]
    before = everything(model)
    try:
        with undisturbed(model):
            what(model)
    except ValueError:
        assert what is raises
    assert everything(model) == before


def test_within_there_is_one_seed_evaluation_mode_and_no_gradient() -> None:
    model, seen = net().train(), list[Any]()
    for _ in range(2):
        torch.rand(1)
        with undisturbed(model):
            seen.append((torch.rand(2).tolist(), random.random(), np.random.rand()))
            assert not torch.is_grad_enabled()
            assert not any(module.training for module in model.modules())
            assert all(each.grad is None for each in model.parameters())
    assert seen[0] == seen[1]


def test_a_training_run_has_the_same_bits_with_an_evaluation_and_without() -> None:
    """With dropout, batch normalisation and a shuffle: nothing of it moves."""

    def script(swarm: Any, evaluate: Any) -> Any:
        torch.manual_seed(3)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = attach(model, optimizer, swarm, batch_size=8, clock=swarm.clock, evaluate=evaluate)
        torch.manual_seed(100 + swarm.index)
        losses = list[float]()
        while not sync.done:
            loss = model(torch.randn(8, 4)).square().mean() + 0.001 * random.random()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, [each.tolist() for each in model.state_dict().values()]

    calls = list[int]()

    def evaluate(model: nn.Module) -> Tensor:
        calls.append(1)
        moves_statistics(model)
        clears_gradients(model)
        return torch.rand(1) + model(torch.ones(8, 4)).square().mean()

    random.seed(5)
    with_it = LocalSwarm(2, settings=ASKED, seed=1).run(lambda s: script(s, evaluate), step_s=1.0)
    random.seed(5)
    without = LocalSwarm(2, settings=ASKED, seed=1).run(lambda s: script(s, None), step_s=1.0)
    assert len(calls) >= 2 * 6 * 2
    assert with_it == without


# ---- what goes wrong


class Steps:
    """A clock that is told what passes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def evaluations(evaluate: Any, clock: Callable[[], float] | None = None) -> Evaluations:
    found = Evaluations(net(), evaluate, SoloSwarm(ASKED), clock or Steps())
    found.begin(0)
    return found


def fails(model: nn.Module) -> float:
    raise ZeroDivisionError("a batch without samples")


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        (fails, "evaluate raised ZeroDivisionError: a batch without samples"),
        (lambda model: None, "evaluate raised TypeError"),
        (lambda model: torch.zeros(2), "evaluate raised TypeError"),
        (lambda model: torch.optim.SGD(model.parameters(), -1.0), "evaluate raised ValueError"),
        (lambda model: "0.5", "evaluate raised TypeError"),
    ],
)
def test_an_exception_is_told_once_and_ends_evaluations(
    evaluate: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = evaluations(evaluate)
    with caplog.at_level(logging.WARNING, "atoll"):
        assert found.own() is None
        assert found.own() is None
    assert not found.on
    (record,) = caplog.records
    assert record.getMessage().startswith(said)
    assert record.getMessage().endswith("Training goes on without evaluations")


def test_an_evaluation_that_cannot_be_repeated_is_no_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Batches that go on from call to call: two weights would be held against each other by other
    samples.
    """
    values = iter([1.0, 1.1, 1.2, 1.3])
    found = evaluations(lambda model: next(values))
    own = found.own()
    assert own == 1.0
    assert found.adopted(own) is None
    assert not found.on
    assert "evaluate gave 1.1 and 1.2 for the same weights" in caplog.text


def test_what_is_no_number_is_the_worst_one() -> None:
    values = iter([2.0, float("nan"), float("inf")])
    found = evaluations(lambda model: next(values))
    assert found.adopted(found.own() or 0.0) == Evaluated(None, 1e30, 2.0)


def test_a_reading_has_the_anchor_that_was_evaluated_before_it() -> None:
    values = iter([2.0, 1.0, 1.0, 0.9, 0.8])
    found = evaluations(lambda model: torch.tensor(next(values), dtype=torch.float64))
    assert found.adopted(found.own() or 0.0) == Evaluated(None, 1.0, 2.0)
    assert found.newest == {"held_out": 1.0, "held_out_own": 2.0, "averaging_gains": 0.5}
    assert found.adopted(found.own() or 0.0) == Evaluated(None, 0.8, 0.9, 1.0)


def test_what_cannot_be_called_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="evaluate is a float, which cannot be called"):
        attach(model, None, SoloSwarm(), evaluate=0.5)  # type: ignore[arg-type]


def optimizer_of(model: nn.Module, swarm: Any) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    DiLoCo(model.parameters(), inner, swarm=swarm, model=model, evaluate=0.5)  # type: ignore[arg-type]


def callback_of_trainer(model: nn.Module, swarm: Any) -> None:
    from atoll.optim.integrations.trainer import AtollCallback

    inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    callback: Any = AtollCallback(swarm, evaluate=0.5)  # type: ignore[arg-type]
    callback.on_train_begin(None, None, None, model=model, optimizer=inner)


def callback_of_lightning(model: nn.Module, swarm: Any) -> None:
    import lightning

    from atoll.optim.integrations.lightning import AtollLightningCallback

    callback: Any = AtollLightningCallback(swarm, evaluate=0.5)  # type: ignore[arg-type]
    trainer: Any = lightning.Trainer(accelerator="cpu", logger=False, max_epochs=1)
    trainer.strategy.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    callback.on_train_start(trainer, model)


@pytest.mark.parametrize("of", [optimizer_of, callback_of_trainer, callback_of_lightning])
def test_optimizers_and_callbacks_hand_it_on(of: Callable[[nn.Module, Any], None]) -> None:
    with pytest.raises(ConfigError, match="evaluate is a float, which cannot be called"):
        of(nn.Linear(2, 1), SoloSwarm(RunSettings(outer=OuterSettings("nesterov", 0.7, 0.9))))


def test_the_model_is_not_trained_in_an_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    """Neither by the optimizer nor through the attachment: it is named, and training goes on."""

    def script(swarm: Any) -> int:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def steps(model: nn.Module) -> float:
            optimizer.step() if swarm.index else sync.sync()
            return 1.0

        sync = attach(model, optimizer, swarm, batch_size=1, clock=swarm.clock, evaluate=steps)
        while not sync.done:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return sync.round

    assert LocalSwarm(2, settings=ASKED).run(script, step_s=1.0) == [6, 6]
    assert "evaluate raised ConfigError: optimizer.step() inside evaluate" in caplog.text
    assert "evaluate raised ConfigError: sync() inside evaluate" in caplog.text


# ---- when


def called(
    cost_s: float,
    rounds: int,
    settings: RunSettings = ASKED,
    live: tuple[PeerId, ...] = (A, B),
    round_s: float = 100.0,
) -> list[int]:
    """The rounds in which this member, ``a``, evaluates twice, each taking so long."""
    clock = Steps()

    def evaluate(model: nn.Module) -> float:
        clock.now += cost_s
        return 1.0

    swarm, when = SoloSwarm(settings), list[int]()
    found = Evaluations(nn.Linear(1, 1), evaluate, swarm, clock)
    found.begin(0)
    for round_ in range(1, rounds + 1):
        clock.now += round_s
        if found.due("run", A, live, round_):
            when.append(round_)
            found.adopted(found.own() or 0.0)
    return when


ENDLESS = RunSettings(evaluate=EvaluateSettings())


def test_an_evaluation_that_costs_little_is_made_every_round() -> None:
    assert called(0.1, 100, ENDLESS) == list(range(1, 101))


@pytest.mark.parametrize("cost_s", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("rounds", [50, 1000])
def test_evaluations_take_one_percent_of_the_time(cost_s: float, rounds: int) -> None:
    """The rounds ahead counted in, and the first one, whose cost nobody knows before."""
    when = called(cost_s, rounds, ENDLESS)
    spent = cost_s * (2 * len(when) + 1)
    assert spent <= max(0.01 * 100.0 * max(rounds, AHEAD) * 1.1, 3 * cost_s)
    assert when[0] == 1
    assert called(cost_s, 5, ENDLESS) == when[: len([each for each in when if each <= 5])]


def test_a_run_of_few_rounds_spends_no_more_than_its_own_time() -> None:
    settings = RunSettings(rounds=6, evaluate=EvaluateSettings())
    assert called(1.0, 6, settings) == [1, 2]  # 5 of 6 s: another would make it 7


def test_costs_that_differ_meet_in_the_same_rounds() -> None:
    """After the first twenty rounds, so that a round has readings of several members."""
    cheap, dear = (
        [each for each in called(cost_s, 4000, ENDLESS) if each > 200] for cost_s in (1.2, 4.5)
    )
    assert set(dear) <= set(cheap)
    assert len(cheap) > len(dear) > 50


@pytest.mark.parametrize(
    ("settings", "live"),
    [
        (RunSettings(), (A, B)),
        (ENDLESS, (A,)),
        (ENDLESS, (B, C)),
    ],
)
def test_nothing_is_evaluated_where_nothing_is_averaged(
    settings: RunSettings, live: tuple[PeerId, ...]
) -> None:
    assert called(0.0, 9, settings, live) == []


def test_rounds_apart() -> None:
    settings = RunSettings(evaluate=EvaluateSettings(every=4))
    assert called(0.0, 12, settings) == [4, 8, 12]


def test_of_many_members_the_same_few_are_drawn_for_some_rounds() -> None:
    names = [PeerId(f"p{number}") for number in range(40)]
    spans = [drawn_of("run", round_, names, 5) for round_ in range(60 * TOGETHER)]
    assert all(len(set(each)) == 5 for each in spans)
    assert all(spans[at] == spans[at - at % TOGETHER] for at in range(len(spans)))
    assert {peer for span in spans for peer in span} == set(names)
    assert drawn_of("other", 0, names, 5) != spans[0]

"""Optimizers as their makers publish them: what they remember of positions is found, and moving it
is the cure; steps of those that are written in two halves are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from remembering_kit import MastersOf
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.optim import SoloSwarm, attach
from atoll.optim.model.flat import FlatVector
from atoll.optim.script.checks import hooked
from atoll.optim.script.consent import Consent
from atoll.optim.script.probe import probe

H = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def trained(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Schedule-free ones ask for train()."""

    def made(params: Any) -> Any:
        optimizer = make(params)
        optimizer.train()
        return optimizer

    return made


def flagged_muon(params: Any) -> Any:
    both = list(params)
    matrices, others = ([p for p in both if (p.dim() == 2) is two] for two in (True, False))
    return pytorch_optimizer.Muon(
        [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    )


MAKES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "Lookahead": (lambda p: pytorch_optimizer.Lookahead(adamw(p)), {"state.slow_params"}),
    "Ranger": (lambda p: pytorch_optimizer.Ranger(p, lr=1e-2), {"state.slow_buffer"}),
    "TRAC": (lambda p: pytorch_optimizer.TRAC(adamw(p)), {"optimizer.state.trac"}),
    "Prodigy": (lambda p: pytorch_optimizer.Prodigy(p), {"state.p0"}),
    "AdamWScheduleFree": (
        trained(lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-2)),
        {"state.z"},
    ),
    "SGDScheduleFree": (trained(lambda p: schedulefree.SGDScheduleFree(p, lr=0.2)), {"state.z"}),
    "RAdamScheduleFree": (
        trained(lambda p: schedulefree.RAdamScheduleFree(p, lr=1e-2)),
        {"state.z"},
    ),
    "AdEMAMix": (lambda p: pytorch_optimizer.AdEMAMix(p, lr=1e-2), set()),
    "Lion": (lambda p: pytorch_optimizer.Lion(p, lr=1e-3), set()),
    "Muon": (flagged_muon, set()),
    "Lookahead of masters": (
        lambda p: MastersOf(p, lambda copies: pytorch_optimizer.Lookahead(adamw(copies))),
        {"copies", "inner.state.slow_params"},
    ),
}


@pytest.mark.parametrize("name", MAKES)
def test_what_they_remember_is_found(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, positions = MAKES[name]
    model = net()
    optimizer = make(model.parameters())
    found = probe(optimizer, optimizer.param_groups)
    assert (found.positions, found.fault, found.harmless) == (positions, "", True)
    attach(model, optimizer, SoloSwarm(RunSettings(sync_every=H)), batch_size=1)
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw)
    optimizer.step()


@pytest.mark.parametrize("name", [name for name, (_, positions) in MAKES.items() if positions])
def test_none_of_them_takes_an_anchor_back(name: str) -> None:
    def run(jump: float) -> tuple[Tensor, Tensor]:
        model = net()
        optimizer = MAKES[name][0](model.parameters())
        vector = FlatVector(model)
        consent = Consent(model, vector, [optimizer], [hooked(optimizer)], None)
        for number in range(13):
            step(model, optimizer, number)
        with consent.adopting():
            for segment, values in vector.pull():
                vector.push(segment, values.add_(jump))
        at = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        for number in range(13, 40):
            step(model, optimizer, number)
        return at, torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    still, moved = run(0.0), run(0.5)
    torch.testing.assert_close(moved[1] - still[1], moved[0] - still[0], rtol=0, atol=2e-3)


def test_a_step_in_two_halves_is_one_step() -> None:
    model = net()
    optimizer = pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, lr=0.05)
    sync = attach(model, optimizer, SoloSwarm(RunSettings(sync_every=H)), batch_size=1)
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(2 * H):
        backward()
        optimizer.step(backward)
    assert (sync.stats["steps"], sync.round) == (2 * H, 2)


def test_a_wrapper_that_steps_elsewhere_than_at_the_parameters_is_refused() -> None:
    """Its inner optimizer's hook runs while the parameters hold another sequence."""
    model = net()
    wrapper: Any = schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(model.parameters(), lr=0.1), momentum=0.9
    )
    with pytest.raises(ConfigError, match="ScheduleFreeWrapper is not a torch") as told:
        attach(model, wrapper, SoloSwarm(RunSettings(sync_every=H)), batch_size=1)
    assert told.value.key == "optimizer"

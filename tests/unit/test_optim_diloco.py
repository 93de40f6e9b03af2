"""DiLoCo and LocalSGD are true optimizers and do what attach does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.optim import DiLoCo, LocalSGD, SoloSwarm, attach

SETTINGS = RunSettings(sync_every=2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    scheduler: torch.optim.lr_scheduler.LambdaLR | None = None,
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def diloco(model: nn.Module) -> DiLoCo:
    return DiLoCo(model.parameters(), adamw(model), swarm=SoloSwarm(SETTINGS), model=model)


def test_it_is_an_optimizer_and_equals_attach_bit_for_bit_under_a_scheduler() -> None:
    model, other = net(), net()
    optimizer, plain = diloco(model), adamw(other)
    assert isinstance(optimizer, torch.optim.Optimizer)
    attach(other, plain, SoloSwarm(SETTINGS))
    halve = lambda step: 0.5**step  # noqa: E731
    train(model, optimizer, range(5), torch.optim.lr_scheduler.LambdaLR(optimizer, halve))
    train(other, plain, range(5), torch.optim.lr_scheduler.LambdaLR(plain, halve))
    assert same(model, other)
    assert optimizer.param_groups[0]["lr"] == optimizer.inner.param_groups[0]["lr"] == 1e-2 / 32
    assert (optimizer.attachment.round, optimizer.attachment.stats["steps"]) == (2, 5)


def test_state_dict_is_the_inner_optimizers_and_passes_distributed_checkpoint() -> None:
    model = net()
    optimizer = diloco(model)
    names = get_optimizer_state_dict(model, optimizer)
    assert set(names) == {"state", "param_groups"}
    assert set(names["state"]) == {name for name, _ in model.named_parameters()}
    assert optimizer.attachment.stats["steps"] == 0
    train(model, optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 4))
    assert optimizer.attachment.round == 2
    other = net()
    again = diloco(other)
    again.attachment.load_state_dict({**again.attachment.state_dict()})
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, again, saved)
    assert again.state is again.inner.state
    assert again.param_groups is again.inner.param_groups
    for state, expected in zip(
        again.state_dict()["state"].values(), saved["state"].values(), strict=True
    ):
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert again.state_dict()["param_groups"] == adamw(other).state_dict()["param_groups"]


@pytest.mark.parametrize("saved_at", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", [DiLoCo, LocalSGD])
def test_its_state_dict_alone_resumes_exactly(kind: type[DiLoCo | LocalSGD], saved_at: int) -> None:
    """At a boundary and in the middle of a round, in a fresh model, optimizer and swarm."""
    settings = RunSettings(sync_every=2, codec="fp32", method=kind.method)

    def start() -> tuple[nn.Module, DiLoCo | LocalSGD]:
        model = net()
        inner = adamw(model)
        return model, kind(model.parameters(), inner, swarm=SoloSwarm(settings), model=model)

    model, optimizer = start()
    train(model, optimizer, range(saved_at))
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    train(model, optimizer, range(saved_at, 12))
    other, again = start()
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    train(other, again, range(saved_at, 12))
    assert again.attachment.round == optimizer.attachment.round == 6
    assert again.attachment.stats["steps"] == 12
    assert same(model, other)
    optimizer.attachment.detach()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    again.load_state_dict(optimizer.state_dict())  # the attachment stays as it is
    assert again.attachment.round == 6


def test_hooks_closures_and_zero_grad_work() -> None:
    model = net()
    optimizer = diloco(model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda opt, state: seen.append("state"))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("load"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post", "state", "load"]
    assert "lr: 0.01" in repr(optimizer)
    train(model, optimizer, range(1))
    assert optimizer.attachment.round == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradscaler_skips_are_no_steps() -> None:
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = DiLoCo(model.parameters(), inner, swarm=SoloSwarm(SETTINGS), model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(
            model(torch.ones(2, 5)).square().mean() * (float("inf") if step == 1 else 1.0)
        ).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (optimizer.attachment.round, optimizer.attachment.stats["steps"]) == (1, 2)


def test_local_sgd_is_plain_averaging() -> None:
    model = net()
    settings = RunSettings(method="local_sgd", sync_every=2)
    optimizer = LocalSGD(model.parameters(), adamw(model), swarm=SoloSwarm(settings), model=model)
    plain = net()
    plain_optimizer = adamw(plain)
    train(model, optimizer, range(4))
    train(plain, plain_optimizer, range(4))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-6, atol=1e-7
        )  # averaging one member changes roundings only
    assert optimizer.attachment.round == 2


def test_refusals() -> None:
    model = net()
    with pytest.raises(ConfigError, match="'diloco', LocalSGD is 'local_sgd'") as error:
        LocalSGD(model.parameters(), adamw(model), swarm=SoloSwarm(SETTINGS), model=model)
    assert error.value.key == "$.train.method"
    with pytest.raises(ConfigError, match="2 parameters") as error:
        DiLoCo(model[0].parameters(), adamw(model), swarm=SoloSwarm(SETTINGS), model=model)
    assert error.value.key == "params"
    optimizer = diloco(model)
    with pytest.raises(ConfigError, match="after the start"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(optimizer.param_groups) == 1


def test_what_is_frozen_belongs_to_the_run_where_it_is_included() -> None:
    model = net()
    model[0].requires_grad_(False)
    inner = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    optimizer = DiLoCo(
        model[2].parameters(), inner, swarm=SoloSwarm(SETTINGS), model=model, include="0.*"
    )
    assert [spec.name for spec in optimizer.attachment._flat.layout.tensors] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    other = net()
    with pytest.raises(ConfigError, match="no such parameter"):
        DiLoCo(
            other.parameters(), adamw(other), swarm=SoloSwarm(SETTINGS), model=other, include="9"
        )

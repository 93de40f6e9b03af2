"""GradientAveraging: one large batch, whoever brings which part of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import GradientAveraging, SoloSwarm, attach
from atoll.optim.model.flat import FlatVector

SIZES = (3, 8, 5)  # samples a step, by member
ROUNDS = 12
SETTINGS = RunSettings(
    method="gradient_averaging", sync_every=1, rounds=ROUNDS, codec="fp32", deadline_s=60.0
)
OUTER: dict[str, tuple[OuterSettings, Any]] = {
    "sgd": (OuterSettings("sgd", 0.1, 0.0), lambda params: torch.optim.SGD(params, lr=0.1)),
    "nesterov": (
        OuterSettings("nesterov", 0.05, 0.9),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adamw": (
        OuterSettings("adamw", 0.01, 0.9, 0.99, 1e-8, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    ),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(member: int, round_: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * member + round_)
    x = torch.randn(SIZES[member], 4, generator=generator)
    return x, torch.stack((x[:, 0] * x[:, 1], x.sum(1)), 1)


def script(member: LocalMember) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """A member's training; its batch is that of the round it is in, so that it is known what each
    round was made of.
    """
    model, seen = net(), list[tuple[int, ...]]()
    member.open(
        FlatVector(model, member.settings).layout, FlatVector(model, member.settings).write_to
    ).release()
    while len(member.members()) < len(SIZES):
        member.sleep(0.1)
    optimizer = GradientAveraging(
        model.parameters(),
        swarm=member,
        model=model,
        clock=member.clock,
        on_round=lambda outcome: seen.append(
            tuple(sorted(int(share.peer[1:]) for share in outcome.contributors))
        ),
    )
    while not optimizer.attachment.done:
        x, y = data(member.index, optimizer.attachment.round)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.attachment.samples(len(x))
        optimizer.step()
        member.sleep(0.2)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), seen


def large_batch(kind: str, groups: list[tuple[int, ...]]) -> torch.Tensor:
    """One process, torch's own optimizer, one batch a round of the same samples."""
    model = net()
    optimizer = OUTER[kind][1](model.parameters())
    for round_, group in enumerate(groups):
        x, y = (
            torch.cat(column)
            for column in zip(*(data(member, round_) for member in group), strict=True)
        )
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("kind", OUTER)
def test_it_equals_one_large_batch(kind: str) -> None:
    settings = msgspec.structs.replace(SETTINGS, outer=OUTER[kind][0])
    results = LocalSwarm(3, settings=settings).run(script)
    groups = max((seen for _, seen in results), key=len)
    assert len(groups) == ROUNDS
    assert any(len(group) == 3 for group in groups)
    expected = large_batch(kind, groups)
    for values, _ in results:
        assert torch.equal(values, results[0][0])
        assert torch.allclose(values, expected, rtol=1e-5, atol=1e-6)


def test_it_equals_one_large_batch_whatever_the_membership() -> None:
    """A member is killed for good: rounds without it are batches without its samples."""
    settings = msgspec.structs.replace(SETTINGS, outer=OUTER["nesterov"][0])
    results = LocalSwarm(3, settings=settings).crash_at(1, 2.5).run(script)
    assert results[1] is None
    values, groups = results[0]
    assert {len(group) for group in groups} >= {2, 3}
    assert torch.allclose(values, large_batch("nesterov", groups), rtol=1e-5, atol=1e-6)


def test_rounds_end_when_the_swarm_has_its_batch() -> None:
    settings = msgspec.structs.replace(
        SETTINGS, sync_every=None, target_samples=64, outer=OUTER["sgd"][0], rounds=6
    )
    sizes: list[int] = []

    def counted(member: LocalMember) -> None:
        model = net()
        optimizer = GradientAveraging(
            model.parameters(),
            swarm=member,
            model=model,
            clock=member.clock,
            on_round=lambda outcome: (
                sizes.append(sum(share.samples for share in outcome.contributors))
                if member.index == 0
                else None
            ),
        )
        while not optimizer.attachment.done:
            x, y = data(member.index, 0)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.attachment.samples(len(x))
            optimizer.step()
            member.sleep(0.2)

    LocalSwarm(3, settings=settings).run(counted)
    assert len(sizes) >= 4
    assert all(45 <= size <= 90 for size in sizes[2:])


def test_another_method_and_another_optimizer_are_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match="the run's method is 'diloco'"):
        GradientAveraging(model.parameters(), swarm=SoloSwarm(), model=model)
    with pytest.raises(ConfigError, match="one optimizer, in the nodes"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SoloSwarm(SETTINGS))


def test_a_gradient_that_is_not_finite_takes_its_samples_along() -> None:
    """Gradients of 1 and steps of lr 1: what is dropped must not make the next step a smaller one."""
    model = nn.Linear(2, 1, bias=False)
    outer = OuterSettings("sgd", 1.0, 0.0)
    swarm = SoloSwarm(
        RunSettings(method="gradient_averaging", sync_every=2, codec="fp32", outer=outer)
    )
    optimizer = GradientAveraging(model.parameters(), swarm=swarm, model=model)
    start = model.weight[0, 1].item()
    for gradient in (1.0, float("nan"), 1.0, 1.0):
        model.weight.grad = torch.tensor([[gradient, 1.0]])
        optimizer.attachment.samples(4)
        optimizer.step()
    assert model.weight[0, 1].item() == pytest.approx(start - 1.0)
    stats = optimizer.attachment.stats
    assert (
        stats["round"],
        stats["samples_counted"],
        stats["samples_dropped"],
        stats["samples_unsent"],
    ) == (1, 8, 8, 0)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            lambda model: model[1].parameters(),
            "2 parameters are in one of params and the model only",
        ),
        (
            lambda model: [
                {"params": model[0].parameters(), "lr": 0.1},
                {"params": model[1].parameters()},
            ],
            "groups with lr of their own",
        ),
    ],
)
def test_what_the_runs_optimizer_would_not_do_is_refused(params: Any, words: str) -> None:
    """Parameters that were left out would be trained all the same, and rates of groups be the
    manifest's.
    """
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with pytest.raises(ConfigError, match=words) as told:
        GradientAveraging(params(model), swarm=SoloSwarm(SETTINGS), model=model)
    assert told.value.hint

"""What is frozen and unfrozen after the model was attached, and what belongs to the run though it
is frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from exporting_kit import KeptSwarm
from safetensors.torch import load_file
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm, attach
from atoll.optim.model.flat import FlatVector
from atoll.optim.script.checks import included_names

H = 16
SETTINGS = RunSettings(sync_every=H, rounds=14, codec="fp32")
Act = Callable[[nn.Module, int], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def play(
    act: Callable[[LocalMember], Act], settings: RunSettings = SETTINGS, frozen: bool = False
) -> list[dict[str, Any]]:
    """Two members, each of which does something to its model before each step."""

    def script(swarm: Any) -> dict[str, Any]:
        model, does = net(), act(swarm)
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        include = ["0.*"] if frozen else None
        sync = attach(model, optimizer, swarm, batch_size=4, include=include)
        draw, step = torch.Generator().manual_seed(swarm.index), 0
        while not sync.done:
            step += 1
            does(model, step)
            optimizer.zero_grad()
            (model(torch.randn(4, 5, generator=draw)) - 1).square().mean().backward()
            optimizer.step()
        found: dict[str, Any] = {}
        for each in swarm.reports:
            found |= {name: v for name, v in each.items() if name.startswith("parts_")}
        return {"reports": found, "state": {k: v.clone() for k, v in model.state_dict().items()}}

    return LocalSwarm(2, settings=settings, latency_s=0.01).run(script, step_s=0.1)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of, but for the end of the run."""
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [line for line in lines if "finished" not in line]


def freezes(swarm: LocalMember) -> Act:
    """The first member freezes its first layer in the third round."""

    def act(model: nn.Module, step: int) -> None:
        if swarm.index == 0 and step == 3 * H:
            model[0].requires_grad_(False)  # type: ignore[index]

    return act


def test_what_one_member_freezes_and_others_train_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = play(freezes)
    (line,) = warned(caplog)
    assert line.startswith(
        "frozen here (requires_grad is False) and trained by other members: 0.weight, 0.bias, 63 % "
    )
    assert first["reports"] == {"parts_frozen": pytest.approx(36 / 57)}
    assert second["reports"] == {}


def everybody(swarm: LocalMember) -> Act:
    """All freeze in the same round, as a schedule says it."""
    return lambda model, step: model[0].requires_grad_(step < 3 * H)  # type: ignore[index, func-returns-value]


def alternating(every: int) -> Callable[[LocalMember], Act]:
    """One part or the other trains, in turns that last so many steps."""

    def act(swarm: LocalMember) -> Act:
        def turn(model: nn.Module, step: int) -> None:
            first = step // every % 2 == swarm.index
            model[0].requires_grad_(first)  # type: ignore[index]
            model[2].requires_grad_(not first)  # type: ignore[index]

        return turn

    return act


def twice(swarm: LocalMember) -> Act:
    """Frozen for a few steps, now and then."""
    return lambda model, step: model[0].requires_grad_(step % 50 > 20)  # type: ignore[index, func-returns-value]


@pytest.mark.parametrize(
    ("act", "momentum"),
    [
        (everybody, 0.0),
        (everybody, 0.6),
        (alternating(1), 0.0),
        (alternating(H), 0.0),
        (alternating(3 * H), 0.6),
        (twice, 0.0),
    ],
)
def test_freezing_in_turns_or_everywhere_is_no_fault(
    act: Callable[[LocalMember], Act], momentum: float, caplog: pytest.LogCaptureFixture
) -> None:
    outer = OuterSettings("nesterov", 0.9, momentum) if momentum else SETTINGS.outer
    found = play(act, msgspec.structs.replace(SETTINGS, outer=outer))
    assert warned(caplog) == []
    assert [each["reports"] for each in found] == [{}, {}]


def test_what_is_trained_again_is_no_longer_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atoll")

    def act(swarm: LocalMember) -> Act:
        def thaw(model: nn.Module, step: int) -> None:
            if swarm.index == 0:
                model[0].requires_grad_(not 3 * H <= step < 11 * H)  # type: ignore[index]

        return thaw

    assert play(act)[0]["reports"] == {"parts_frozen": 0.0}
    assert "what was frozen here is trained again" in caplog.text


def unfreezes(swarm: LocalMember) -> Act:
    """The first layer trains from the fourth round on."""
    return lambda model, step: model[0].requires_grad_(step >= 3 * H)  # type: ignore[index, func-returns-value]


def test_an_included_part_rests_and_is_trained_by_all_once_it_is_unfrozen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = net().state_dict()
    first, second = play(unfreezes, frozen=True)
    assert warned(caplog) == []
    assert [each["reports"] for each in (first, second)] == [{}, {}]
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in begun)
    assert not torch.equal(first["state"]["0.weight"], begun["0.weight"])


def test_what_is_trained_outside_of_the_run_is_named_with_what_takes_it_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    swarm = SoloSwarm(msgspec.structs.replace(SETTINGS, sync_every=1, rounds=40))
    sync = attach(model, optimizer, swarm)
    for step in range(20):
        model[0].requires_grad_(5 <= step < 8)
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        if step == 10:
            assert swarm.reported["parts_outside"] == 2
    (line,) = warned(caplog)
    assert "attached, or not there: 0.weight, 0.bias." in line
    assert "attach(..., include=['0.*'])" in line
    assert swarm.reported["parts_outside"] == 0
    assert sync.round == 20


class Adapted(nn.Module):
    """A frozen trunk under a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def test_include_takes_patterns_modules_and_parameters() -> None:
    model = Adapted()
    all_of_it = {"backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias"}
    assert included_names(model, "backbone.*") == all_of_it
    assert included_names(model, model.backbone) == all_of_it
    assert included_names(model, model.backbone.parameters()) == all_of_it
    assert included_names(model, [model.backbone[0].bias, "*.1.bias"]) == {
        "backbone.0.bias",
        "backbone.1.bias",
    }
    assert included_names(model, None) == frozenset()
    for wrong in ("trunk.*", [nn.Linear(1, 1)], [nn.Parameter(torch.ones(1))], 3):
        with pytest.raises(ConfigError, match="the model has no such parameter") as error:
            included_names(model, wrong)
        assert error.value.key == "include"
    plain, whole = FlatVector(model), FlatVector(model, included=all_of_it)
    assert [spec.name for spec in plain.layout.tensors][:2] == ["head.weight", "head.bias"]
    assert {spec.name for spec in whole.layout.tensors} >= all_of_it
    assert (whole.layout.base, len(plain.layout.base)) == (b"", 32)


def test_an_export_has_an_included_part_as_trained_and_own_and_averaged_buffers(
    atoll_home: Path, tmp_path: Path
) -> None:
    model: Any = Adapted()
    model.register_buffer("centre", torch.zeros(4))
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    model.register_buffer("queue", torch.zeros(2))
    settings = RunSettings(sync_every=2, rounds=4, buffers={"centre": "mean", "calls": "mean"})
    swarm = KeptSwarm(atoll_home, "parts", settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, swarm, batch_size=4, include=[model.backbone])
    while not sync.done:
        if sync.round == 2:
            model.backbone.requires_grad_(True)
        model.centre += 0.25
        model.calls += 1
        model.queue += 1
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    swarm.checkpoint(sync._flat.layout)
    done = swarm.export(tmp_path / "out", dtype="bfloat16")
    assert "queue" in done.notes[0]
    assert "centre" not in done.notes[0]
    exact = swarm.export(tmp_path / "exact")
    assert exact.missing == ()
    weights = load_file(tmp_path / "exact" / "model.safetensors")
    with sync.evaluate_anchor():
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert (int(weights["calls"]), weights["calls"].dtype) == (8, torch.int64)
    assert (float(weights["centre"][0]), float(weights["queue"][0])) == (2.0, 8.0)
    assert not torch.equal(weights["backbone.0.weight"], weights["backbone.0.weight"].round())
    narrow = load_file(tmp_path / "out" / "model.safetensors")
    assert (narrow["calls"].dtype, narrow["centre"].dtype) == (torch.int64, torch.bfloat16)

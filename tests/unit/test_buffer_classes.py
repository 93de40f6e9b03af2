"""Which class a buffer has by the manifest and by what it is; how two members' are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.node.cli.simulating_fleet import _settings
from atoll.node.manifest import parse_manifest
from atoll.optim import SoloSwarm, attach
from atoll.optim.model.flat import FlatVector, buffers_of
from atoll.optim.model.vector import FlatTensor
from atoll.optim.script.buffer_watch import _agree, _sketch, due


class Several(nn.Module):
    """Buffers of many kinds, beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.quiet = nn.BatchNorm1d(2, track_running_stats=False)
        self.register_buffer("bank", torch.zeros(4, 2))
        self.register_buffer("bank_ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("step", torch.tensor(3, dtype=torch.int32))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("nothing", None)
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64), persistent=False)


class FrozenBatchNorm2d(nn.Module):
    """As torchvision has it: constants under the names of statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))


def test_each_buffer_has_a_class_before_the_model_has_seen_a_batch() -> None:
    def classes(model: nn.Module, **patterns: str) -> dict[str, str | None]:
        return {each.name: each.kind for each in buffers_of(model, patterns)}  # type: ignore[arg-type]

    usual = {
        "norm.running_mean": "mean",
        "norm.running_var": "mean",
        "norm.num_batches_tracked": "own",
        "bank": "own",
        "bank_ptr": "own",
        "step": None,
        "ready": None,
        "scale": None,
    }
    assert classes(Several()) == {k: usual[k] for k in classes(Several())}
    assert classes(Several()).keys() == usual.keys()
    declared = {"*": "own", "bank*": "same", "*_ptr": "mean", "*.running_mean": "own"}
    found = classes(Several(), **declared)
    assert (found["bank"], found["bank_ptr"], found["step"]) == ("same", "same", "own")
    assert (found["norm.running_mean"], found["norm.running_var"]) == ("own", "own")
    compiled = torch.compile(Several(), backend="eager")
    assert classes(compiled) == classes(Several())  # type: ignore[arg-type]
    assert set(classes(FrozenBatchNorm2d()).values()) == {None}
    roles = {spec.name: spec.role for spec in FlatVector(Several()).layout.tensors}
    assert (roles["norm.running_mean"], roles["norm.running_var"]) == ("mean", "variance")


def test_counts_and_flags_are_rounded_where_they_are_written() -> None:
    settings = RunSettings(codec="fp32", buffers={"step": "mean", "ready": "mean"})
    model = Several()
    flat = FlatVector(model, settings)
    values = torch.zeros(flat.numel)
    flat.write_to(values)
    place = {spec.name: spec.offset for spec in flat.layout.tensors}
    assert values[place["step"]] == 3
    for given, step, ready in ((2.75, 3, True), (0.4, 0, False), (1e9, 10**9, True)):
        values[place["step"]] = given
        values[place["ready"]] = min(given, 1.0)
        flat.read_from(FlatTensor(values))
        assert (int(model.step), bool(model.ready)) == (step, ready)  # type: ignore[arg-type]
    assert flat.not_finite() == ""


def test_a_pattern_that_no_buffer_has_is_refused_and_one_without_values() -> None:
    def told(model: nn.Module, **buffers: str) -> ConfigError:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError) as caught:
            attach(model, optimizer, SoloSwarm(RunSettings(buffers=buffers)))  # type: ignore[arg-type]
        return caught.value

    error = told(Several(), codebok="mean")
    assert (error.key, "bank, bank_ptr" in error.why) == ("$.model.buffers", True)
    assert told(nn.Linear(1, 1), bank="own").why == "It has no buffers."
    infinite = nn.BatchNorm1d(2)
    infinite.register_buffer("least", torch.tensor(torch.inf))
    assert "least holds NaN or infinity" in told(infinite, least="mean").message
    turned = nn.BatchNorm1d(2)
    turned.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    assert "phase has dtype torch.complex64" in told(turned, phase="mean").message


def test_two_tables_of_constants_agree_but_for_rounding() -> None:
    angles = torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(0, 32) / 32))
    table = angles.sin()
    near = _sketch(table + 1e-7 * torch.randn(table.shape))
    for other in (near, _sketch(table.to(torch.bfloat16)), _sketch(table.double())):
        assert _agree(_sketch(table), other, exact=False)
    shifted = torch.outer(torch.arange(64.0), 5e5 ** -(torch.arange(0, 32) / 32)).sin()
    for other in (table[:-1], table * 1.05, shifted, -table, table.T):
        assert not _agree(_sketch(table), _sketch(other), exact=False)
    ids = torch.arange(9)
    assert _agree(_sketch(ids), _sketch(ids.clone()), exact=True)
    for given in (ids + 1, ids.view(3, 3), ids.int()):
        assert not _agree(_sketch(ids), _sketch(given), exact=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_whatever_a_member_says_of_its_own_only_differs(value: float) -> None:
    mine = _sketch(torch.linspace(1, 2, 7))
    assert not _agree(mine, [value] * len(mine), exact=False)
    assert not _agree(_sketch(torch.arange(3)), [value] * len(mine), exact=True)
    assert _agree(_sketch(torch.zeros(0)), _sketch(torch.zeros(0)), exact=False)


def test_members_compare_in_rounds_that_all_of_them_know() -> None:
    assert [round_ for round_ in range(300) if due(round_)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        192,
        256,
    ]


def test_a_simulation_plays_a_model_without_the_runs_buffers() -> None:
    text = "schema = 1\nname = 'x'\nmodel = { entry = 'local:x', buffers = { 'book' = 'mean' } }"
    played = _settings(parse_manifest(text), {"rounds": 3, "seconds": None})
    assert (played.rounds, played.buffers) == (3, {})


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_a_model_that_is_converted_has_learnt_nothing(
    convert: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = nn.BatchNorm1d(2)
    model.register_buffer("angles", torch.linspace(0, 1, 7))
    swarm = SoloSwarm(RunSettings(sync_every=1, rounds=9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, swarm, batch_size=1)
    for step in range(9):
        if step == 1:
            convert(model)
        if step == 5:
            model.angles *= 2
        inputs = torch.randn(4, 2, dtype=model.weight.dtype)
        model(inputs).square().sum().backward()
        optimizer.step()
        assert ("buffer_learnt/angles" in swarm.reported) == (step >= 7)
    assert (sync.round, caplog.text.count("learnt here")) == (9, 1)


def test_ranges_by_channel_that_were_empty_are_learnt(caplog: pytest.LogCaptureFixture) -> None:
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

    observer = FakeQuantize(
        MovingAveragePerChannelMinMaxObserver, quant_min=0, quant_max=127, ch_axis=1
    )
    model = nn.Sequential(nn.Linear(2, 2), observer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, SoloSwarm(RunSettings(sync_every=9)), batch_size=1)
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    assert "1.activation_post_process.min_val" in caplog.text

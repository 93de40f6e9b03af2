"""What a script logs and reads: numbers only, and nothing that it logs ends it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.metrics import Warned, number_of
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings, sample_count
from atoll.node.run.duty import OF_DUTY
from atoll.node.run.events import read_event
from atoll.node.run.verdicts import BUFFERS, NOT_COUNTED, PARTS, STILL, Verdicts
from atoll.optim import Attachment, SoloSwarm, attach
from atoll.optim.script.lookout import OWN, OWN_BEGINNINGS

H = 2


class Raises:
    """A value of a library's own whose conversion fails in its own way."""

    def __float__(self) -> float:
        raise KeyError("device lost")


NONE_OF_THEM: list[tuple[object, str]] = [
    (None, "NoneType"),
    ("0.5", "str"),
    (b"1", "bytes"),
    (1 + 2j, "complex"),
    (10**400, "int"),
    ([1.0], "list"),
    ({"a": 1}, "dict"),
    (np.complex64(1), "complex64"),
    (np.array([1j]), "ndarray"),
    (np.zeros(3), "ndarray"),
    (np.array("x"), "ndarray"),
    (torch.zeros(2), "Tensor"),
    (torch.tensor(1j), "Tensor"),
    (torch.empty((), device="meta"), "Tensor"),
    (torch.zeros(1).to_sparse(), "Tensor"),
    (Raises(), "Raises"),
    (object(), "object"),
]
NUMBERS: list[tuple[object, float]] = [
    (True, 1.0),
    (10**30, 1e30),
    (0.25, 0.25),
    (np.float16(0.5), 0.5),
    (np.array([[2.0]]), 2.0),
    (np.int64(3), 3.0),
    (torch.tensor([[0.5]], requires_grad=True), 0.5),
    (torch.tensor(7), 7.0),
    (torch.tensor(True), 1.0),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (Fraction(1, 4), 0.25),
    (Decimal("0.75"), 0.75),
]


def run(rounds: int = 3) -> RunSettings:
    return RunSettings(
        sync_every=H, rounds=rounds, codec="fp32", outer=OuterSettings(kind="sgd", lr=1.0)
    )


def begun(swarm: SoloSwarm) -> tuple[Attachment, Callable[[], None]]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, swarm, batch_size=4)

    def step() -> None:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return sync, step


@pytest.mark.parametrize(("value", "number"), NUMBERS, ids=lambda each: type(each).__name__)
def test_what_is_a_number_is_taken_as_one(value: object, number: float) -> None:
    assert number_of(value) == number


@pytest.mark.parametrize(("value", "kind"), NONE_OF_THEM, ids=lambda each: type(each).__name__)
@pytest.mark.filterwarnings("error")
def test_what_is_no_number_is_named_once_and_ends_nothing(
    value: object, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    swarm = SoloSwarm(run())
    sync, step = begun(swarm)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        for _ in range(2 * H):
            sync.log(strange=value, loss=1.0)
            swarm.report({"odd": value, "fine": 2.0})  # type: ignore[dict-item]
            step()
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" leaves ")[0] for line in said if "'strange'" in line] == [
        "attachment.log()"
    ]
    assert [line.split(" leaves ")[0] for line in said if "'odd'" in line] == ["swarm.report()"]
    assert all(f"of type {kind}," in line for line in said)
    assert sync.describe()["metrics"] == {"loss": 1.0}
    assert swarm.reported["fine"] == 2.0
    assert {"odd", "strange"} & swarm.reported.keys() == set()


@pytest.mark.parametrize("metrics", [None, 3.0, [("loss", 1.0)], {1: 2.0}, {"\ud800": 1.0}])
def test_a_report_that_is_no_mapping_of_names_is_left_out(
    metrics: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warned = Warned("swarm.report()")
    with caplog.at_level(logging.WARNING, logger="atoll"):
        assert warned.taken(metrics) == warned.taken(metrics) == {}
    assert len(caplog.records) == 1


def test_a_loss_that_is_nan_is_reported_and_is_no_number_of_a_tracker() -> None:
    swarm = SoloSwarm(run())
    sync, step = begun(swarm)
    for _ in range(H):
        sync.log(loss=float("nan"), grad=torch.tensor(float("inf")), lr=0.1)
        step()
    assert math.isnan(swarm.reported["loss"])  # a verdict goes by it
    assert "metrics/loss" not in sync.stats
    assert sync.stats["metrics/lr"] == 0.1
    assert sync.describe()["metrics"] == {"loss": "nan", "grad": "inf", "lr": 0.1}


def test_stats_are_finite_numbers_at_every_moment_and_the_rest_is_described() -> None:
    sync, step = begun(SoloSwarm(run()))
    seen = [sync.stats]
    while not sync.done:
        sync.log(loss=torch.tensor(0.5), big=10**30)
        step()
        seen.append(sync.stats)
        json.dumps(sync.describe(), allow_nan=False)
    for stats in seen:
        assert {type(value) for value in stats.values()} <= {int, float}
        json.dumps(stats, allow_nan=False)
    assert (seen[-1]["alone"], seen[-1]["last_counted"], seen[-1]["contributors"]) == (1, 1, 1)
    assert seen[-1]["metrics/loss"] == 0.5
    assert sync.describe()["last_status"] == "committed"
    assert sync.describe()["last_contributors"] == ["solo"]


def test_samples_beyond_any_round_are_refused_in_words() -> None:
    swarm = SoloSwarm(run())
    sync, step = begun(swarm)
    for count in (2**70, 2**48, 2**20_000):
        with pytest.raises(ConfigError, match=r"samples") as told:
            sync.samples(count)
        assert told.value.key == "samples"
    sync.samples(2**48 - 1)
    with pytest.raises(ConfigError, match="samples"):
        sync.samples(1)
    step()
    assert sync.stats["steps"] == 1
    assert sample_count(np.int64(7)) == 7
    with pytest.raises(ConfigError, match="samples"):
        attach(nn.Linear(2, 1), None, SoloSwarm(run()), batch_size=2**70)


class Stubborn(torch.Tensor):
    """Of a library: it looks like any tensor and refuses to be written."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], cls):
            raise RuntimeError("packed weights are read-only\nframes of the library")
        return super().__torch_function__(func, types, args, kwargs or {})


def strange_model(kind: str) -> nn.Module:
    model = nn.Module()
    model.plain = nn.Linear(2, 2)
    if kind == "lazy":
        model.late = nn.LazyLinear(3)
    elif kind == "lazy buffer":
        model.late = nn.LazyBatchNorm1d(affine=False)
    elif kind == "expanded":
        model.late = nn.Parameter(torch.randn(1, 4).expand(3, 4))
    elif kind == "sparse":
        model.late = nn.Parameter(torch.eye(3).to_sparse())
    elif kind == "frozen sparse":
        model.late = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    else:
        model.late = nn.Parameter(torch.randn(3).as_subclass(Stubborn))
    return model


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("lazy", "late.weight", "lazy"),
        ("lazy buffer", "late.running_mean", "lazy"),
        ("expanded", "late", "expanded"),
        ("sparse", "late", "sparse"),
        ("frozen sparse", "the frozen parameter late", "cannot be read"),
        ("subclass", "late", "packed weights are read-only"),
    ],
)
def test_a_tensor_that_attach_cannot_use_is_named_with_the_way_out(
    kind: str, name: str, said: str
) -> None:
    model = strange_model(kind)
    with pytest.raises(ConfigError, match=said) as told:
        attach(model, None, SoloSwarm(run()))
    assert told.value.message.startswith(name)
    assert told.value.hint


def test_a_lazy_model_is_attached_after_one_call_as_the_hint_says() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1))
    with pytest.raises(ConfigError) as told:
        attach(model, None, SoloSwarm(run()))
    assert "Call the model once" in told.value.hint
    model(torch.zeros(2, 3))
    assert attach(model, None, SoloSwarm(run())).round == 0


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        # Lightning-AI/torchmetrics#187, modelscope/ms-swift#9551: counts beyond 2^24 in float32
        ([torch.tensor(16_777_217)] * 2, 16_777_217.0),
        ([torch.tensor(90_170_815), torch.tensor(90_170_813)], 90_170_814.0),
        ([torch.tensor(0.1, dtype=torch.float64)] * 2, 0.1),
        # wandb/wandb#3464, mlflow/mlflow#5462
        ([torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(2.5)], 1.5),
        ([np.bool_(True), np.bool_(False)], 0.5),
    ],
)
def test_a_mean_of_what_is_logged_is_exact(values: list[Any], mean: float) -> None:
    sync, step = begun(SoloSwarm(run()))
    for value in values:
        sync.log(tokens=value)
        step()
    assert sync.stats["metrics/tokens"] == mean


@pytest.mark.parametrize(
    ("name", "code"),
    [
        # mlfoundations/open_clip#613, pytorch/torchtitan#844: the step among the metrics
        ("step", None),
        ("samples", None),
        ("dropped", "V04"),
        ("moved", "V16"),
        ("samples_short", "V14"),
        ("still_rate", "V15"),
        ("parts_outside", "V19"),
        ("buffer_learnt/x", "V18"),
        ("frozen_changed/x", "V18"),
        ("encoding_error", None),
        ("held_out", None),
    ],
)
def test_a_number_of_the_runs_own_is_not_taken_from_a_script(
    name: str, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a script that logs it raises a verdict, or hides one."""
    swarm, verdicts = SoloSwarm(run(16)), Verdicts()
    sync, step = begun(swarm)
    for at in range(16 * H):
        sync.log(**{name: 1.0 + at, "loss": 1.0})
        step()
        verdicts.take(
            read_event({"at": at, "event": "script.report", "metrics": dict(swarm.reported)})
        )
    assert not verdicts.standing
    if code is not None:  # which such a number would have raised
        for at in range(16 * H):
            metrics = {**swarm.reported, name: 1.0 + at}
            verdicts.take(
                read_event({"at": 99.0 + at, "event": "script.report", "metrics": metrics})
            )
        assert code in {each for each, _ in verdicts.standing}
    (line,) = [r.getMessage() for r in caplog.records if "leaves" in r.getMessage()]
    assert f"log() leaves {name!r} out" in line
    assert swarm.reported["step"] == 16 * H
    assert f"metrics/{name}" not in sync.stats


def test_all_numbers_that_verdicts_go_by_are_names_of_the_runs_own() -> None:
    """But for the loss, which is the script's to log."""
    names = {*NOT_COUNTED, *STILL, *PARTS, *BUFFERS, *OF_DUTY}
    assert {
        each for each in names if each not in OWN and not each.startswith(OWN_BEGINNINGS)
    } == set()

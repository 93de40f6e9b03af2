"""Where a run ends, for learning-rate schedules; what the trainers of others are told of it, and
what they count.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm, attach, steps_left

H, ROUNDS = 3, 4


def run(**more: Any) -> RunSettings:
    given = {"sync_every": H, "rounds": ROUNDS, "codec": "fp32", **more}
    return RunSettings(outer=OuterSettings(kind="sgd", lr=1.0), **given)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "steps_left" in record.getMessage() and record.name == "atoll"
    ]


def test_a_plain_schedule_reaches_its_end_with_the_runs_last_round() -> None:
    swarm = SoloSwarm(run())
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = steps_left(swarm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    sync = attach(model, optimizer, swarm, batch_size=1)
    left = list[int]()
    while not sync.done:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
        left.append(steps_left(swarm))
    assert total == H * ROUNDS == sync.stats["steps"]
    assert schedule.get_last_lr() == [0.0]
    assert left[H - 1 :: H] == [9, 6, 3, 0]


def test_who_joins_late_has_the_rest() -> None:
    first = SoloSwarm(run())
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, first, batch_size=1)
    for _ in range(2 * H):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    sync.detach()
    assert steps_left(first) == 2 * H


def test_rounds_of_one_step_are_counted_as_such() -> None:
    assert steps_left(SoloSwarm(run(local_after=3))) == 3 + H
    assert steps_left(SoloSwarm(run(local_after=10))) == ROUNDS


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"rounds": None}, "rounds"),
        ({"sync_every": None, "round_s": 10.0}, "time or samples"),
        ({"sync_every": None, "target_samples": 64}, "time or samples"),
        ({"share": 0.9}, "planned again"),
    ],
)
def test_a_run_whose_steps_nobody_knows_says_so(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as told:
        steps_left(SoloSwarm(run(**more)))
    assert "sync.position" in told.value.hint


def plain_loop(
    make: Any, caplog: pytest.LogCaptureFixture, *, every: int = 1, **more: Any
) -> list[str]:
    """What is said of a schedule that ``make(optimizer)`` makes, stepped after ``every`` steps."""
    swarm = SoloSwarm(run(**more))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, swarm, batch_size=1)
    schedule = make(optimizer)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        for step in range(1, 1 + 2 * H * (more.get("rounds") or ROUNDS)):
            if sync.done:
                break
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0:
                schedule.step()
    found = [r.getMessage() for r in caplog.records if "schedule" in r.getMessage()]
    caplog.clear()
    return found


def linear(steps: int) -> Any:
    """As transformers' get_linear_schedule_with_warmup makes it."""

    def left(step: int, *, num_training_steps: int) -> float:
        return max(0.0, 1 - step / num_training_steps)

    return lambda optimizer: schedulers.LambdaLR(
        optimizer, functools.partial(left, num_training_steps=steps)
    )


def after_warmup(steps: int) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        parts = [
            schedulers.LinearLR(optimizer, 0.1, 1.0, 3),
            schedulers.CosineAnnealingLR(optimizer, steps - 3),
        ]
        return schedulers.SequentialLR(optimizer, parts, [3])

    return make


ENDING: dict[str, Any] = {
    "cosine": lambda steps: lambda optimizer: schedulers.CosineAnnealingLR(optimizer, steps),
    "one_cycle": lambda steps: (
        lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=steps)
    ),
    "polynomial": lambda steps: lambda optimizer: schedulers.PolynomialLR(optimizer, steps),
    "decay": lambda steps: lambda optimizer: schedulers.LinearLR(optimizer, 1.0, 0.0, steps),
    "transformers": linear,
    "after_warmup": after_warmup,
}


@pytest.mark.parametrize("kind", ENDING)
def test_a_plain_loops_schedule_that_does_not_end_with_the_run_is_named(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The number of steps is often that of all epochs, or of one machine alone."""
    make = ENDING[kind]
    assert plain_loop(make(H * ROUNDS), caplog) == []
    (said,) = plain_loop(make(400), caplog)
    assert "400) will be at 3 % of its way when the run ends" in said
    assert "make it of steps_left(swarm) steps" in said
    if kind != "one_cycle":  # torch says it, with an error
        (said,) = plain_loop(make(20), caplog, rounds=14)
        assert "20) ends at 49 % of the run's steps" in said
        assert "make it of steps_left(swarm) steps" in said


def test_a_schedule_of_epochs_is_judged_once_epochs_were_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Eight rounds of three steps are six epochs of four, of which one was seen."""
    more: dict[str, Any] = {"every": 4, "rounds": 8}
    assert plain_loop(ENDING["cosine"](6), caplog, **more) == []
    (said,) = plain_loop(ENDING["cosine"](100), caplog, **more)
    assert "100) will be at" in said
    assert "about 7 of its steps end with the run" in said


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.CosineAnnealingLR(o, 4),  # up and down many times
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 400),
        lambda o: schedulers.LinearLR(o, 0.1, 1.0, 400),  # a warm-up
        lambda o: schedulers.LinearLR(o, 1.0, 0.1, 5),  # stays at a tenth
        lambda o: schedulers.StepLR(o, 400),
        lambda o: schedulers.ExponentialLR(o, 0.99),
        lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: schedulers.ReduceLROnPlateau(o),
    ],
)
def test_schedules_without_an_end_are_let_be(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    def stepped(optimizer: torch.optim.Optimizer) -> Any:
        schedule = make(optimizer)
        if isinstance(schedule, schedulers.ReduceLROnPlateau):
            schedule.step = functools.partial(schedule.step, 1.0)  # type: ignore[method-assign]
        return schedule

    assert plain_loop(stepped, caplog, rounds=12) == []


def test_a_schedule_of_the_runs_steps_at_a_slower_member_is_told_to_follow_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others end rounds after fewer steps of its own: `steps_left` is not the cure."""
    swarm = SoloSwarm(run(rounds=10))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = linear(steps_left(swarm))(optimizer)
    sync = attach(model, optimizer, swarm, batch_size=1)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        while not sync.done:
            for _ in range(H - 1):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                schedule.step()
            sync.sync()
    (said,) = [r.getMessage() for r in caplog.records if "schedule" in r.getMessage()]
    assert "since others are faster: let it follow attachment.position" in said
    assert "steps_left" not in said


def test_of_a_run_without_an_end_no_schedule_is_judged(caplog: pytest.LogCaptureFixture) -> None:
    assert plain_loop(ENDING["cosine"](400), caplog, rounds=None) == []


def by_hand(
    rate: Callable[[int], float],
    caplog: pytest.LogCaptureFixture,
    *,
    rounds: int = 8,
    follows: bool = False,
    groups: int = 1,
    skips: Collection[int] = (),
) -> list[str]:
    """What is said of a loop that sets this rate of each step, as nanoGPT's does and timm's
    schedulers do. ``skips``: steps whose rate is set and which are not made.
    """
    swarm = SoloSwarm(run(rounds=rounds))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD([{"params": each.parameters()} for each in model][:groups], lr=1.0)
    sync = attach(model, optimizer, swarm, batch_size=1) if groups == 2 else None
    if sync is None:
        for each in model[1].parameters():
            each.requires_grad_(False)
        sync = attach(model, optimizer, swarm, batch_size=1)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        for step in range(100 * H * rounds):
            if sync.done:
                break
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = (1 + number) * rate(sync.position if follows else step)
            if step in skips:
                continue
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [r.getMessage() for r in caplog.records if "learning rate falls" in r.getMessage()]
    caplog.clear()
    return found


def half_cosine(steps: int, least: float = 0.0, warm: int = 0, each: int = 1) -> Any:
    def rate(step: int) -> float:
        if step < warm:
            return 1e-3 * (step + 1) / warm
        over = min(1.0, (step - warm) // each * each / (steps - warm))
        return least + (1e-3 - least) * 0.5 * (1 + math.cos(math.pi * over))

    return rate


def timms(steps: int, each: int = 1, *, warm: int, prefix: bool) -> Any:
    """timm's CosineLRScheduler of so many epochs of ``each`` steps, where ``warm`` are a warm-up:
    with ``prefix`` before the cosine, else instead of its beginning.
    """

    def rate(step: int) -> float:
        epoch = step // each
        if epoch < warm:
            return 1e-6 + epoch * (1e-3 - 1e-6) / warm
        epoch -= warm if prefix else 0
        if epoch >= steps:
            return 1e-5
        return 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * epoch / steps))

    return rate


def line(steps: int, least: float = 0.0) -> Any:
    return lambda step: max(least, 1e-3 * (1 - step / steps))


FALLING: dict[str, tuple[Any, str]] = {
    # karpathy/nanoGPT: get_lr, with lr_decay_iters left at its default
    "nanogpt": (half_cosine(600, 1e-4, warm=3), "half cosine, of which 13% will be over then"),
    # huggingface/pytorch-image-models: t_initial in epochs, or in updates
    "timm_epochs": (half_cosine(400, 1e-5, each=4), "of which 27% will be over then"),
    "timm_updates": (half_cosine(400), "of which 27% will be over then"),
    "line": (line(1000), "in a straight line, and will still be 88 % of its highest"),
}


@pytest.mark.parametrize("kind", FALLING)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_rate_that_a_script_sets_is_judged_by_what_it_does(
    kind: str, groups: int, caplog: pytest.LogCaptureFixture
) -> None:
    rate, words = FALLING[kind]
    rounds = 28 if kind == "nanogpt" else 37 if kind.startswith("timm") else 40
    (said,) = by_hand(rate, caplog, rounds=rounds, groups=groups)
    assert words in said
    assert "steps_left(swarm) steps of atoll.optim" in said


@pytest.mark.parametrize(
    "rate",
    [
        half_cosine(H * 20),
        half_cosine(H * 20, 1e-4, warm=5),
        half_cosine(H * 18, 1e-4),
        line(H * 20),
        line(H * 24, 1e-4),
        lambda step: 1e-3,
        lambda step: 1e-3 * min(1.0, (step + 1) / 400),  # a warm-up
        lambda step: 1e-3 * 0.99**step,
        lambda step: 1e-3 / (1 + step) ** 0.5,
        lambda step: 1e-3 * 0.1 ** (step // 17),
        lambda step: 1e-3 * (1 - step / 400) ** 2,
        lambda step: half_cosine(17)(step % 17),  # restarts
        lambda step: 1e-4 + 1e-3 * abs((step + 15) % 30 - 15) / 15,  # a triangle, up and down
        lambda step: 1e-3 * 0.999999**step,
        lambda step: 0.0 if step else 1e-3,
    ],
)
def test_rates_that_end_with_the_run_or_nowhere_are_let_be(
    rate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert by_hand(rate, caplog, rounds=20) == []


@pytest.mark.parametrize("each", [1, 12])  # step_update(n), and step(epoch)
@pytest.mark.parametrize(("warm", "prefix"), [(0, False), (1, False), (2, False), (2, True)])
def test_timms_schedule_of_the_runs_epochs_is_let_be_and_a_longer_one_named(
    each: int, warm: int, prefix: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rounds, epochs = 40, H * 40 // each
    within = epochs - (warm if prefix else 0)
    assert by_hand(timms(within, each, warm=warm, prefix=prefix), caplog, rounds=rounds) == []
    for longer in (2, 10):
        rate = timms(longer * epochs, each, warm=warm, prefix=prefix)
        (said,) = by_hand(rate, caplog, rounds=rounds)
        assert "on a half cosine" in said


def test_a_rate_that_follows_the_run_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    """Where it ends then depends on who comes."""
    assert by_hand(half_cosine(600), caplog, rounds=20, follows=True) == []
    assert len(by_hand(half_cosine(600), caplog, rounds=20)) == 1


def test_steps_that_are_skipped_hide_a_falling_rate_for_some_steps_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (said,) = by_hand(half_cosine(600), caplog, rounds=20, skips=(9, 10, 13))
    assert "half cosine" in said


class Deep(nn.Module):
    """For Trainer: a regression that runs out of memory beyond ``most`` samples."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(2, 1), most
        self.trained = 0  # samples that a backward was made for

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(x) > self.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        self.trained += len(x)
        return {"loss": (self.linear(x) - labels).square().mean()}


def trained(
    folder: Path, swarm: SoloSwarm, model: Deep, **arguments: Any
) -> tuple[Any, list[float]]:
    """The attachment of a `Trainer.train()`, and the learning rate at each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from atoll.optim import AtollCallback

    rates = list[float]()

    class Rates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["lr_scheduler"].get_last_lr()[0])

    settings = {
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1.0,
        "logging_strategy": "no",
        **arguments,
    }
    data = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(4096)]
    callback = AtollCallback(swarm)
    Trainer(
        model,
        TrainingArguments(str(folder), **settings),
        train_dataset=data,
        callbacks=[callback, Rates()],
    ).train()
    return callback.attachment, rates


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate
def test_trainers_schedule_ends_with_the_run_or_is_told_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="atoll"):
        swarm = SoloSwarm(run())
        sync, rates = trained(tmp_path, swarm, Deep(), max_steps=steps_left(swarm))
        assert (sync.done, len(rates), rates[-1]) == (True, H * ROUNDS, 0.0)
        assert warnings(caplog) == []

        sync, rates = trained(tmp_path, SoloSwarm(run()), Deep(), max_steps=400)
        assert (sync.done, rates[-1]) == (True, pytest.approx(0.97))
        (said,) = warnings(caplog)
        assert "made for 400 steps, and the run ends after 12, at 3 % of its way" in said
        assert "TrainingArguments(max_steps=steps_left(swarm))" in said

        caplog.clear()
        constant = {"max_steps": 400, "lr_scheduler_type": "constant"}
        trained(tmp_path, SoloSwarm(run()), Deep(), **constant)
        assert warnings(caplog) == []
        sync, _ = trained(tmp_path, SoloSwarm(run()), Deep(), max_steps=5)
        (said,) = warnings(caplog)
        assert "to end after 5 steps here, and the run has 12 more" in said
        assert not sync.done


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_counts_the_batches_that_fit_into_memory(tmp_path: Path, accumulated: int) -> None:
    model = Deep(most=8)
    sync, rates = trained(
        tmp_path,
        SoloSwarm(run()),
        model,
        max_steps=H * ROUNDS,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=accumulated,
        auto_find_batch_size=True,
    )
    assert len(rates) == H * ROUNDS
    assert sync.stats["samples_counted"] == model.trained
    assert 0 < model.trained <= 8 * accumulated * H * ROUNDS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("max_steps", "end", "told"),
    [
        (H * ROUNDS, H * ROUNDS, ""),
        (60, 60, "lightning.Trainer(max_steps=steps_left(swarm))"),
        # the trainer ends with the run, and the script's own schedule does not
        (H * ROUNDS, 60, "(LinearLR, total_iters 60) will be at 18 % of its way"),
    ],
)
def test_lightnings_schedule_is_compared_with_the_run(
    max_steps: int, end: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from atoll.optim import AtollLightningCallback

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.linear(batch).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, end)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callback = AtollLightningCallback(SoloSwarm(run()))
    trainer = Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with caplog.at_level(logging.WARNING, logger="atoll"):
        trainer.fit(Net(), DataLoader(torch.ones(4096, 2), batch_size=4))
    assert callback.attachment is not None
    assert callback.attachment.done
    assert len(warnings(caplog)) == bool(told)
    assert not told or told in warnings(caplog)[0]


def test_members_of_a_run_have_the_same_number_of_steps_left() -> None:
    def script(swarm: LocalMember) -> tuple[int, int]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = steps_left(swarm)
        sync = attach(model, optimizer, swarm, batch_size=1, clock=swarm.clock)
        while not sync.done:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            swarm.sleep(0.1)
        return before, steps_left(swarm)

    found = LocalSwarm(2, settings=run(), latency_s=0.01).run(script)
    assert found == [(H * ROUNDS, 0), (H * ROUNDS, 0)]

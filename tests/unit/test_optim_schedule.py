"""Counting steps, ending rounds, bounding waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.optim.rounds.schedule import FLOOR_S, Counted, Schedule, Since, StepCounter
from atoll.optim.rounds.wait_budget import CEILING_S, UNMEASURED_DEADLINE_S, WaitBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_skipped_steps_and_their_samples_do_not_count() -> None:
    counter = StepCounter()
    counter.count(8)
    counter.count(8, torch.tensor([1.0]))
    counter.count(4, torch.tensor([0.0]))
    counter.count(4, torch.tensor(2.0))
    assert counter.settle() == Counted(steps=2, samples=12, skipped=2)
    counter.clear()
    assert counter.settle() == Counted(0, 0, 0)


def test_flags_on_a_device_are_read_only_when_settled() -> None:
    counter = StepCounter()
    counter._unread[torch.device("cpu")] = torch.tensor([2.0, 16.0], dtype=torch.float64)
    counter._steps, counter._samples = 5, 40
    assert counter.fired == 5
    assert counter.settle() == Counted(3, 24, 2)
    assert counter.settle() == Counted(3, 24, 2)


@pytest.mark.gpu
def test_flags_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    counter = StepCounter()
    for flag in (0.0, 1.0, 0.0, 1.0, 1.0):
        counter.count(8, torch.tensor([flag], device="cuda"))
    assert counter.fired == 5
    assert counter.settle() == Counted(2, 16, 3)


def test_rounds_by_steps_wait_for_real_ones() -> None:
    schedule, counter = Schedule(RunSettings(sync_every=2), Clock()), StepCounter()
    counter.count(1)
    assert not schedule.due(counter)
    counter.count(1, torch.tensor(1.0))
    assert not schedule.due(counter)
    counter.count(1)
    assert schedule.due(counter)


def test_rounds_by_time_need_one_real_step() -> None:
    clock = Clock()
    schedule, counter = Schedule(RunSettings(sync_every=None, round_s=10.0), clock), StepCounter()
    clock.now += 11
    assert not schedule.due(counter)
    counter.count(1)
    assert schedule.due(counter)
    schedule.restart()
    assert not schedule.due(counter)
    clock.now += 9.9
    assert not schedule.due(counter)
    schedule.restart(elapsed_s=10.0)
    assert schedule.due(counter)
    assert schedule.elapsed_s == pytest.approx(10.0)


def test_waits_are_bounded_by_the_manifest_or_by_what_was_measured() -> None:
    assert WaitBudget(3.5).seconds == 3.5
    budget = WaitBudget(None)
    assert budget.seconds == UNMEASURED_DEADLINE_S
    budget.measured(0.1)
    assert budget.seconds == FLOOR_S
    budget.measured(5.0)
    assert budget.seconds == 20.0
    budget.measured(1e6)
    assert budget.seconds == CEILING_S
    for _ in range(8):
        budget.measured(2.0)
    assert budget.seconds == 8.0


def test_a_run_whose_rounds_never_end_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Schedule(RunSettings(sync_every=None), Clock())
    assert error.value.key == "$.train.sync_every"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"sync_every": 0}, "$.train.sync_every"),
        ({"sync_every": -3}, "$.train.sync_every"),
        ({"sync_every": None, "target_samples": 0}, "$.train.target_samples"),
        ({"sync_every": None, "round_s": 0.0}, "$.train.round_s"),
        ({"round_s": float("nan")}, "$.train.round_s"),
        ({"rounds": 0}, "$.train.rounds"),
        ({"codec": "int7"}, "$.exchange.codec"),
        ({"codecs": {"*.bias": "fp31"}}, "$.exchange.codec"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_their_constructor(
    settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        RunSettings(**settings)
    assert error.value.key == key


def test_rounds_by_samples_of_all_members_follow_ones_own_share() -> None:
    schedule, counter = (
        Schedule(RunSettings(sync_every=None, target_samples=100), Clock()),
        StepCounter(),
    )
    schedule.members = 4
    counter.count(24)
    assert not schedule.due(counter)
    counter.count(1)
    assert schedule.due(counter)
    schedule.share = 0.6  # it had that of the last round
    assert not schedule.due(counter)
    counter.count(35)
    assert schedule.due(counter)


def test_post_local_rounds_are_of_one_step_at_first() -> None:
    schedule, counter = Schedule(RunSettings(sync_every=3, local_after=2), Clock()), StepCounter()
    assert not schedule.due(counter, 0)
    counter.count(1)
    assert [schedule.due(counter, round_) for round_ in (0, 1, 2)] == [True, True, False]


def test_several_watch_one_counter() -> None:
    counter = StepCounter()
    counter.count(5)
    one, two = Since(counter), Since(counter)
    counter.count(2)
    one.clear()
    counter.count(2, torch.tensor(1.0))
    counter.count(3)
    assert (one.settle(), two.settle()) == (Counted(1, 3, 1), Counted(2, 5, 1))
    two.restore(Counted(7, 70, 0))
    counter.count(1)
    assert (two.settle(), two.fired, counter.settle().steps) == (Counted(8, 71, 0), 8, 4)

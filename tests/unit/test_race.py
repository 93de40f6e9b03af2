"""The race to a loss (scripts/bench/bench_race.py), without a race: what is trained, when a step
ends, when a loss is reached, which races are void, and what is remembered.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from house import ROOT

from atoll.node.manifest import parse_manifest

sys.path.append(str(ROOT / "scripts" / "bench"))

import _race_task
from _race import (
    ARMS,
    LINKS,
    Records,
    manifest,
    plain_settings,
    reached,
    ring_over_step,
    table,
    targets,
    void,
)
from _race_task import BATCH, CONTEXT, Model, Pace, Task, curve
from _race_tune import TRIALS, alike, averaged, best, rounds_of, timed

LR = 2e-3


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out losses are of eight windows."""
    monkeypatch.setattr(_race_task, "LOOKED_AT", 8)


def test_batches_follow_from_seed_worker_and_step() -> None:
    first, again = Task(1, 0, LR), Task(1, 3, LR)
    assert first.batch(2, 7).shape == (BATCH, CONTEXT + 1)
    assert torch.equal(first.batch(2, 7), again.batch(2, 7))
    others = [first.batch(2, 8), first.batch(3, 7), Task(2, 0, LR).batch(2, 7)]
    assert not any(torch.equal(first.batch(2, 7), other) for other in others)
    same = zip(first.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in same)


def test_a_mean_after_each_step_is_not_the_mean_gradient_but_all_have_it() -> None:
    """One step of AdamW on one worker's batch by hand; and "ddp" with one worker is "alone"."""
    assert curve("ddp", 1, LR, 2, 2, 1, 1) == curve("alone", 1, LR, 2, 2, 1, 1)
    assert curve("local", 1, LR, 2, 1, 1, 1) == curve("alone", 1, LR, 2, 1, 1, 1)
    (step, mean), *rest = curve("local", 1, LR, 1, 1, 2, 1)
    assert (step, rest) == (1, [])
    tasks = [Task(1, worker, LR) for worker in range(2)]
    for task in tasks:
        task.backward(task.model, 0)
        task.optimizer.step()
    with torch.no_grad():
        one, other = (task.model.parameters() for task in tasks)
        for mine, theirs in zip(one, other, strict=True):
            mine.copy_((mine + theirs) / 2)
    assert tasks[0].evaluate() == pytest.approx(mean, rel=1e-5)


def test_a_step_lasts_as_long_as_it_is_told_and_waits_in_forward_and_in_backward() -> None:
    pace = Pace(0.3)
    task = Task(1, 0, LR, pace)
    began = time.monotonic()
    task.backward(task.model, 0)
    assert time.monotonic() - began >= 0.3
    pace.begin()
    logits = task.model(task.batch(0, 0)[:, :-1])
    assert time.monotonic() - pace._began >= 0.1  # a third
    logits.sum().backward()
    assert time.monotonic() - pace._began >= 0.3
    free = Model(1)
    free.load_state_dict(task.model.state_dict())
    tokens = task.batch(0, 0)[:, :-1]
    assert torch.equal(free(tokens), task.model(tokens))  # waiting changes nothing


def test_weights_are_evaluated_after_the_race(tmp_path: Path) -> None:
    task = Task(1, 0, LR)
    before = task.evaluate()
    task.save(tmp_path, 20)
    with torch.no_grad():
        task.model.head.weight.zero_()
    task.save(tmp_path, 40)
    assert task.losses(tmp_path) == {
        20: before,
        40: pytest.approx(torch.tensor(256.0).log().item()),
    }
    assert not list(tmp_path.iterdir())


def test_a_loss_is_reached_only_if_it_is_kept() -> None:
    points = [(1.0, 20, 3.4), (2.0, 40, 3.0), (3.0, 60, 6.4), (4.0, 80, 2.9), (5.0, 100, 2.919)]
    assert reached(points, 3.5) == 4.0
    assert reached(points, 2.9) == 4.0  # 2.919 is within what losses vary
    assert reached(points, 2.5) is None
    assert reached([*points, (6.0, 120, 2.95)], 2.9) is None
    alone = [(300, 3.0), (600, 2.8), (900, 2.7)]
    assert targets(alone, [300, 900]) == {300: 3.0, 900: 2.7}
    slow = [(9.0, 20, 3.0), (10.0, 40, 2.6)]
    by_arm = {"fast": [points, points, slow], "slow": [slow, slow, points]}
    three = [{300: 3.0, 900: 2.7}] * 3
    assert table(by_arm, three) == {
        "fast": {300: 4.0, 900: None},
        "slow": {300: 9.0, 900: 10.0},
    }


def test_a_race_is_void_if_it_was_late_or_the_network_was_short_of_processor_time() -> None:
    well: dict[str, Any] = {"late": 0.01, "rates": [100.0, 97.0, 95.0], "on_target": True}
    assert void(well) == []
    assert void({"curve": []}) == []  # computed
    assert void({**well, "late": 0.011}) == ["steps were 1.1% late"]
    assert void({**well, "rates": [100.0, 94.0, 100.0]}) == ["plain TCP kept 94% of its rate"]
    assert void({**well, "on_target": False}) == ["pings were off target"]


def test_the_caption_is_ring_time_over_step_time() -> None:
    assert ring_over_step(LINKS["100"], 1_000_000, 4, 0.5) == pytest.approx(6e6 / 12.5e6 / 0.5)
    assert ring_over_step(LINKS["20-100"], 1_000_000, 4, 0.5) == pytest.approx(6e6 / 2.5e6 / 0.5)


def test_the_plain_mean_is_what_its_manifest_says() -> None:
    run = parse_manifest(manifest(plain_settings(400, 20), 1_086_048, 4))
    settings = run.settings()
    assert (settings.sync_every, settings.rounds, settings.growth) == (20, 20, 0)
    assert (settings.outer.kind, settings.outer.lr, settings.codec) == ("sgd", 1.0, "int8")
    assert run.train.start_with == 4
    asked = manifest({"train": {"sync_every": 20, "rounds": 20}}, 1_086_048, 4)
    assert parse_manifest(asked).settings().growth == 20  # as planned: with short rounds


def test_everybody_is_tuned_by_equally_many_trials() -> None:
    assert set(TRIALS) == set(ARMS)
    assert {len(trials) for trials in TRIALS.values()} == {4}
    assert all(len({tuple(each.items()) for each in trials}) == 4 for trials in TRIALS.values())


def test_a_trial_is_the_arithmetic_of_the_race_in_one_process() -> None:
    """The plain mean of two members is "local"; growing rounds are as long as a run's settings say,
    and momentum that waits is not there.
    """
    plain = averaged(1, LR, 4, 2, alike(2, 1.0, 0.0))
    assert [(step, rounds) for step, rounds, _ in plain] == [(2, 1), (4, 2)]
    local = curve("local", 1, LR, 4, 2, 2, 1)
    assert [loss for _, _, loss in plain] == pytest.approx([loss for _, loss in local], rel=1e-5)
    asked = manifest({"train": {"sync_every": 20, "rounds": 20}}, 1_086_048, 4)
    rounds = rounds_of(parse_manifest(asked).settings())
    assert [rounds(done) for done in (0, 39)] == [(1, 1.0, 0.0), (1, 1.0, 0.0)]
    assert rounds(200) == (20, 0.9, 0.6)


def test_of_trials_the_one_is_taken_that_is_at_the_losses_soonest() -> None:
    slow, fast, short = ([[20, 1, 3.0], [40, 2, loss]] for loss in (2.9, 2.9, 2.95))
    trials = [({"lr": 1}, timed(slow, 0.5, 1.0)), ({"lr": 2}, timed(fast, 0.5, 0.5))]
    assert timed(slow, 0.5, 1.0) == [(11.0, 20, 3.0), (22.0, 40, 2.9)]
    assert best([*trials, ({"lr": 3}, timed(short, 0.5, 0.0))], {300: 3.0, 600: 2.9}) == {"lr": 2}


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    records = Records(tmp_path / "race.jsonl")
    assert records.find("race", "ddp", 0) is None
    records.keep({"seconds": 1.5}, "race", "ddp", 0)
    records.keep({"seconds": 2.5}, "race", "ddp", 0)  # the first was void
    again = Records(tmp_path / "race.jsonl").find("race", "ddp", 0)
    assert again == {"key": "race ddp 0", "seconds": 2.5}
    assert Records(None).find("race", "ddp", 0) is None

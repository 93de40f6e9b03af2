"""A verdict on averaging that makes the model worse, in runs of the product's own code in virtual
time: two members, whose reports a node judges.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from seeds import daily
from torch import Tensor, nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest.gpt import GptConfig
from atoll.node.recipes.data import batch, unique_paragraphs
from atoll.node.recipes.gpt import GPT
from atoll.node.run.events import read_event
from atoll.node.run.verdicts import VerdictChange, Verdicts
from atoll.optim import attach, outer_preset

Task = tuple[nn.Module, torch.optim.Optimizer, Callable[[torch.Generator], Tensor]]
CONFIG = GptConfig(width=32, layers=1, heads=2, context=16)


def line() -> Task:
    """A linear regression, of whose distance to the optimum 100 steps take half."""
    model = nn.Linear(8, 1, bias=False)

    def loss(stream: torch.Generator) -> Tensor:
        x = torch.randn(256, 8, generator=stream)
        y = x.sum(1, keepdim=True) + 0.1 * torch.randn(256, 1, generator=stream)
        return (model(x) - y).square().mean()

    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.0035), loss


@cache
def text() -> Tensor:
    topics = importlib.import_module("pydoc_data.topics").topics.values()
    written = "".join(unique_paragraphs(list(topics)))
    return torch.frombuffer(bytearray(written.encode()), dtype=torch.uint8)


def language() -> Task:
    """A byte-level GPT."""
    model = GPT(CONFIG)

    def loss(stream: torch.Generator) -> Tensor:
        return model.loss(*batch(text(), CONFIG.context, 8, stream))

    return model, torch.optim.AdamW(model.parameters(), lr=8e-3), loss


def reports(
    task: Callable[[], Task], outer: OuterSettings, steps: int, rounds: int, seed: int
) -> list[list[dict[str, Any]]]:
    """What each of two members reported, of a run that starts cold."""

    def script(member: Any) -> list[dict[str, Any]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, optimizer, loss_of = task()
        sync = attach(model, optimizer, member, batch_size=8)
        stream = torch.Generator().manual_seed(1000 * seed + member.index)
        while not sync.done:
            loss = loss_of(stream)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sync.log(loss=loss)
        return member.reports

    settings = RunSettings(sync_every=steps, rounds=rounds, outer=outer)
    return LocalSwarm(2, settings=settings, seed=seed).run(script, step_s=0.1)


def judged(told: list[dict[str, Any]]) -> list[tuple[int, VerdictChange]]:
    """Changes of verdicts, with the number of reports until then."""
    verdicts = Verdicts()
    verdicts.take(
        read_event(
            {
                "at": 1.0,
                "event": "script.attached",
                "averaging": "outer nesterov lr 0.9 momentum 0.9",
            }
        )
    )
    return [
        (number, change)
        for number, metrics in enumerate(told, 1)
        for change in verdicts.take(
            read_event({"at": 10.0 * number, "event": "script.report", "metrics": metrics})
        )
    ]


@pytest.mark.parametrize("seed", daily(1, range(3)))
def test_momentum_from_a_cold_start_is_named_within_five_rounds(seed: int) -> None:
    """0.9 / 0.9 at H = 100 carries the second anchor past the optimum: its loss is several times
    that of the first.
    """
    for told in reports(line, OuterSettings("nesterov", 0.9, 0.9), 100, 6, seed):
        number, change = judged(told)[0]
        assert change.raised
        assert change.verdict.code == "V10"
        assert number <= 5
        assert change.verdict.said.endswith("(outer nesterov lr 0.9 momentum 0.9)")


@pytest.mark.parametrize(("task", "steps"), [(line, 100), (language, 10), (language, 30)])
@pytest.mark.parametrize("preset", ["plain-mean", "cold"])
@pytest.mark.parametrize("seed", daily(1, range(3)))
def test_a_run_that_is_well_is_never_accused(
    task: Callable[[], Task], steps: int, seed: int, preset: str
) -> None:
    rounds = 8 if task is line else 240 // steps
    for told in reports(task, outer_preset(preset), steps, rounds, seed):
        assert sum("loss_after" in metrics for metrics in told) >= rounds - 2
        assert judged(told) == []


def held_out(preset: str, seed: int) -> float:
    """The loss of the last anchor of two members, 20 rounds of 20 steps from cold."""
    train, held = text()[:-20_000], text()[-20_000:]

    def script(member: Any) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
        decay = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 400)
        )
        sync = attach(model, optimizer, member, batch_size=8)
        stream = torch.Generator().manual_seed(1000 * seed + member.index)
        for _ in range(400):
            optimizer.zero_grad()
            model.loss(*batch(train, CONFIG.context, 8, stream)).backward()
            optimizer.step()
            decay.step()
        assert sync.round == 20
        with torch.no_grad(), sync.evaluate_anchor():
            windows = batch(held, CONFIG.context, 512, torch.Generator().manual_seed(1))
            return float(model.loss(*windows))

    settings = RunSettings(sync_every=20, rounds=20, outer=outer_preset(preset))
    first, second = LocalSwarm(2, settings=settings, seed=seed).run(script, step_s=0.1)
    assert first == second
    return first


@pytest.mark.parametrize("seed", daily(0, range(2)))
def test_momentum_that_warms_up_is_better_than_none_on_the_same_samples(seed: int) -> None:
    """By 2 % (three seeds): in a loop of the product's own optimizer and int8 as in plain torch."""
    assert held_out("cold", seed) < 0.99 * held_out("plain-mean", seed)

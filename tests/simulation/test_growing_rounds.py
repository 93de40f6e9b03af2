"""Rounds that begin short and grow: as long as the number of rounds before says, also for who comes
late or again. Sessions, logs and state transfer are the real ones, in virtual time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.growth import growing
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim import attach, steps_left

H, GROWTH, ROUNDS = 6, 2, 10
SHORT = growing(H, GROWTH)
SETTINGS = RunSettings(
    sync_every=H,
    growth=GROWTH,
    rounds=ROUNDS,
    codec="fp32",
    outer=OuterSettings("nesterov", 0.9, 0.6, warmup=2),
)


def script(swarm: Any) -> dict[str, Any]:
    """Steps that were made from each anchor, and those that were said to be left."""
    torch.manual_seed(7)
    model = nn.Linear(6, 2)
    torch.manual_seed(100 + swarm.index)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attachment = attach(model, optimizer, swarm, clock=swarm.clock)
    steps, left = dict[int, int](), dict[int, int]()
    while not attachment.done:
        round_ = attachment.round
        left.setdefault(round_, steps_left(swarm))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(8, 6)), torch.ones(8, 2)).backward()
        attachment.samples(8)
        steps[round_] = steps.get(round_, 0) + 1
        optimizer.step()
    view = swarm.anchor()
    anchor = torch.empty(view.numel)
    view.copy_into(anchor)
    return {"steps": steps, "left": left, "anchor": anchor}


def lengths(first: int = 0) -> dict[int, int]:
    return {done: (*SHORT, *[H] * (ROUNDS - len(SHORT)))[done] for done in range(first, ROUNDS)}


def test_each_round_has_the_steps_of_its_place_in_the_log() -> None:
    assert SHORT == (1, 1, 1, 1, 2, 3, 3)
    found = LocalSwarm(3, settings=SETTINGS, latency_s=0.02).run(script, step_s=1.0)
    for each in found:
        assert each["steps"] == lengths()
        assert each["left"] == {done: sum(lengths(done).values()) for done in range(ROUNDS)}
        assert torch.equal(each["anchor"], found[0]["anchor"])
    assert sum(lengths().values()) == 5 * H  # as many steps as five rounds of full length


@pytest.mark.parametrize(("at", "first"), [(1.8, 1), (4.5, 4)])
def test_who_joins_late_makes_rounds_as_long_as_the_others(at: float, first: int) -> None:
    swarm = LocalSwarm(4, settings=SETTINGS, latency_s=0.02).join_at(3, at)
    *others, late = swarm.run(script, step_s=1.0)
    for each in others:
        assert each["steps"] == lengths()
    assert late["steps"] == lengths(first)
    assert late["left"][first] == sum(lengths(first).values())
    assert torch.equal(late["anchor"], others[0]["anchor"])  # the warm-up's count, too


def test_who_is_killed_goes_on_with_rounds_as_long_as_the_others() -> None:
    """Killed in round 4, of two steps; back in round 5, of three, with its disk."""
    swarm = LocalSwarm(3, settings=SETTINGS, latency_s=0.02).crash_at(2, 5.2, back_after_s=3.0)
    *others, back = swarm.run(script, step_s=1.0)
    for each in others:
        assert each["steps"] == lengths()
    first = min(back["steps"])
    assert 4 <= first < len(SHORT)
    assert {done: n for done, n in back["steps"].items() if done > 6} == lengths(7)
    assert torch.equal(back["anchor"], others[0]["anchor"])

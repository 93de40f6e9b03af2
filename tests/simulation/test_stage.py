"""Blocking scripts in virtual time: one runs at a time, waiting passes the baton, and nothing
depends on the threads' luck.
"""

from __future__ import annotations

import random

import pytest
import torch

from atoll.collectives.errors import SwarmClosedError
from atoll.collectives.simulation import World
from atoll.node.simulation.stage import Stage


def play(seed: int) -> tuple[list[tuple[float, str, float]], World]:
    world = World(seed)
    stage, log = Stage(world), list[tuple[float, str, float]]()

    def script(name: str) -> None:
        for _ in range(3):
            log.append((world.now, name, float(torch.rand(1)) + random.random()))
            actor[name].sleep(random.choice([0.25, 0.5]))

    actor = {
        name: stage.enter(name, lambda n=name: script(n), seed=i) for i, name in enumerate("abc")
    }
    stage.run(limit_s=100)
    return log, world


def test_the_same_seed_gives_the_same_play() -> None:
    one, two = play(1), play(1)
    assert one[0] == two[0]
    assert [name for _, name, _ in one[0][:3]] == ["a", "b", "c"]
    assert one[1].now == two[1].now > 0.75


def test_every_actor_has_random_state_of_its_own_and_the_caller_keeps_its() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    log, _ = play(1)
    assert torch.equal(torch.rand(1), expected)
    mine = [value for _, name, value in log if name == "b"]
    torch.manual_seed(1)
    rng = random.Random(1)
    alone = []
    for _ in range(3):
        alone.append(float(torch.rand(1)) + rng.random())
        rng.choice([0.25, 0.5])
    assert mine == alone


def test_waiting_ends_when_poked_or_when_the_time_has_passed() -> None:
    world = World(0)
    stage, box, seen = Stage(world), list[str](), list[tuple[str, bool, float]]()

    def giver() -> None:
        give.sleep(2.0)
        box.append("gift")
        take.poke()
        give.sleep(1.0)

    def taker() -> None:
        seen.append(("early", take.wait(lambda: bool(box), timeout_s=0.5), world.now))
        seen.append(("there", take.wait(lambda: bool(box)), world.now))

    give, take = stage.enter("give", giver, 0), stage.enter("take", taker, 1)
    stage.run(limit_s=100)
    assert seen == [("early", False, 0.5), ("there", True, 2.0)]
    assert world.now == 3.0


def test_the_error_of_a_script_ends_the_play_and_the_others_clean_up() -> None:
    world = World(0)
    stage, cleaned = Stage(world), list[str]()

    def waits() -> None:
        try:
            a.sleep(1000.0)
        finally:
            cleaned.append("a")

    def fails() -> None:
        b.sleep(1.0)
        raise ValueError("no")

    a, b = stage.enter("a", waits, 0), stage.enter("b", fails, 1)
    with pytest.raises(ValueError, match="no"):
        stage.run(limit_s=5000)
    assert cleaned == ["a"]


def test_a_play_that_stands_still_or_takes_too_long_says_who_waits() -> None:
    world = World(0)
    stage = Stage(world)
    actor = stage.enter("lonely", lambda: actor.wait(lambda: False), 0)
    with pytest.raises(SwarmClosedError, match="lonely"):
        stage.run(limit_s=10)
    world = World(0)
    stage = Stage(world)
    slow = stage.enter("slow", lambda: slow.sleep(50), 0)
    world.at(20, lambda: None)
    with pytest.raises(SwarmClosedError, match="slow"):
        stage.run(limit_s=10)

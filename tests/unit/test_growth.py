"""Rounds that begin short: their steps by place in the log, what follows from that elsewhere, and
with what they cannot go.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.growth import RoundLengths, growing
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.collectives.telemetry import subscribe
from atoll.node.manifest import decode_manifest, parse_manifest
from atoll.node.manifest.form import as_toml
from atoll.node.manifest.tables import InnerTable
from atoll.node.recipes.loop import schedule_position
from atoll.optim import OuterStep, SoloSwarm, steps_left
from atoll.optim.outer.governor import Governed
from atoll.optim.outer.step import warmed
from atoll.optim.rounds.schedule import Schedule, StepCounter


@given(every=st.integers(1, 200), growth=st.integers(1, 40))
def test_short_rounds_grow_to_the_full_length_and_make_up_whole_rounds(
    every: int, growth: int
) -> None:
    found, now = growing(every, growth), 0
    for steps in found:
        assert steps == min(max(1, now // growth), every - now % every)
        now += steps
    assert now == growth * every
    assert found[0] == 1
    assert max(found) <= every
    # one of each block is cut short at its end
    assert len(found) <= growth * (3 + math.log2(every))


@given(
    every=st.integers(1, 60),
    growth=st.integers(0, 12),
    local_after=st.integers(0, 12),
    rounds=st.integers(0, 90),
)
def test_positions_add_up(every: int, growth: int, local_after: int, rounds: int) -> None:
    lengths = RoundLengths(every, growth, 0 if growth else local_after)
    steps = [lengths.short(done) or every for done in range(rounds)]
    assert [lengths.before(done) for done in range(rounds + 1)] == [
        sum(steps[:done]) for done in range(rounds + 1)
    ]
    if rounds and not local_after:
        assert lengths.before(lengths.rounds_for(rounds)) == rounds * every


def test_a_round_is_due_after_as_many_steps_as_its_place_says() -> None:
    schedule, counter = Schedule(RunSettings(sync_every=6, growth=2), lambda: 0.0), StepCounter()
    due = list[int]()
    for done in range(9):
        counter.clear()
        while not schedule.due(counter, done):
            counter.count(1)
        due.append(counter.settle().steps)
    assert due == [1, 1, 1, 1, 2, 3, 3, 6, 6]


def test_learning_rates_go_by_the_steps_of_the_rounds() -> None:
    settings = RunSettings(sync_every=6, growth=2, rounds=10)
    assert steps_left(SoloSwarm(settings)) == 5 * 6
    at: Any = SimpleNamespace(round=6)
    assert schedule_position(at, settings, InnerTable(steps=100), 77, 2) == 9 + 2
    later = RunSettings(sync_every=6, local_after=4)
    assert schedule_position(at, later, InnerTable(steps=100), 77, 2) == 4 + 2 * 6 + 2


def test_momentum_waits_until_rounds_have_their_full_length() -> None:
    """Counted in the outer state, which a newcomer and a restarted node have."""
    outer = OuterSettings("nesterov", 0.5, 0.5, warmup=1)
    found = RunSettings(sync_every=6, growth=2, outer=outer).effective_outer
    assert found.hold == 7
    assert [warmed(found, steps) for steps in (0, 6, 7, 8)] == [
        (1.0, 0.0), (1.0, 0.0), (0.75, 0.25), (0.5, 0.5)
    ]  # fmt: skip
    step, anchor, state = OuterStep(found), torch.zeros(3), torch.zeros(4)
    assert step.state_numel(3) == 4
    moves = list[float]()
    for index in range(10):
        if index == 5:
            step, state = OuterStep(found), state.clone()
        after = torch.empty(3)
        step.apply(anchor, torch.ones(3), state, after)
        moves.append(float((anchor - after)[0]))
        anchor = after
        assert state[-1] == min(index + 1, 8)
    assert moves[:7] == [1.0] * 7
    assert moves[7] == 0.75 * (1 + 0.25 * 1.25)
    # without a warm-up: at once; rules that never are the plain mean begin with the first round
    assert RunSettings(sync_every=6, growth=2).effective_outer.hold == 0
    assert RunSettings(sync_every=6, outer=outer).effective_outer == outer


def test_momentum_begins_in_short_rounds_where_a_run_says_after_how_many() -> None:
    outer = OuterSettings("nesterov", 0.5, 0.5, warmup=1, hold=2)
    found = RunSettings(sync_every=6, growth=2, outer=outer).effective_outer
    assert (found.hold, found.short) == (2, 7)
    step, anchor, state = OuterStep(found), torch.zeros(3), torch.zeros(4)
    moves = list[float]()
    for index in range(9):
        after = torch.empty(3)
        step.apply(anchor, torch.ones(3), state, after)
        moves.append(float((anchor - after)[0]))
        anchor = after
        assert state[-1] == min(index + 1, 7)  # until rounds have their full length
    assert moves[:2] == [1.0, 1.0]
    assert moves[2] == 0.75 * (1 + 0.25 * (1 + 0.25))
    assert moves[3] == 0.5 * (1 + 0.5 * (1 + 0.5 * 1.25))


def test_a_governor_does_not_take_longer_rounds_for_a_jump() -> None:
    outer = OuterSettings("nesterov", 0.9, 0.6, governor=True)
    jumps = list[Governed]()
    for growth, hold, told in ((0, 0, True), (10, 0, False), (10, 3, False)):
        jumps.clear()
        outer = msgspec.structs.replace(outer, hold=hold)
        settings = RunSettings(sync_every=20, growth=growth, outer=outer)
        step, anchor = OuterStep(settings.effective_outer), torch.zeros(8)
        state, out = torch.zeros(step.state_numel(8)), torch.empty(8)
        off = subscribe(lambda event: jumps.append(event) if isinstance(event, Governed) else None)
        for steps in growing(20, 10):
            step.apply(anchor, torch.full((8,), float(steps)), state, out)
        off()
        assert bool(jumps) == told


def manifest(train: str, more: str = "") -> str:
    return f'schema = 1\nname = "grow"\n[train]\n{train}\n[model]\nentry = "local:x"\n{more}'


def test_a_run_that_chooses_nothing_has_as_many_steps_with_short_rounds() -> None:
    found = parse_manifest(manifest("sync_every = 20\nrounds = 25"))
    assert (found.train.growth, found.train.rounds) == (20, 104)
    assert found.settings().lengths.before(104) == 500
    assert decode_manifest(found.encode()) == found == parse_manifest(as_toml(found))
    short = parse_manifest(manifest("sync_every = 20\nrounds = 12"))
    assert short.settings().lengths.before(short.train.rounds or 0) == 240
    assert parse_manifest(manifest("sync_every = 20")).train.growth == 20
    # who says how rounds begin, or the outer values, is taken at her word
    none = parse_manifest(manifest("sync_every = 20\nrounds = 25\ngrowth = 0"))
    assert (none.train.growth, none.train.rounds) == (0, 25)
    assert none.settings().outer == OuterSettings("nesterov", 0.9, 0.6, warmup=20)
    own = "[train.outer]\nlr = 0.9\nmomentum = 0.6\nwarmup = 20"
    kept = parse_manifest(manifest("sync_every = 20\nrounds = 25", own))
    assert kept == none
    assert b"growth" not in kept.encode()  # as earlier releases wrote it


@pytest.mark.parametrize(
    ("train", "more", "says"),
    [
        ("round_s = 60.0", "", "rounds do not end by steps"),
        ('overlap = "late"', "", '"late"'),
        ("local_after = 3", "", "local_after"),
        ("share = 0.9", "", "share"),
        ("outliers = 3.0", "", "outliers"),
        ("", "[exchange]\nfragments = 2", "fragments is 2"),
        ("", "[exchange.arrivals]\nquorum = 2", "turns of their own"),
        ('method = "gradient_averaging"', '[train.outer]\noptimizer = "adamw"\nlr = 0.1\nmomentum = 0.9',
         "one step of the outer optimizer"),
    ],
)  # fmt: skip
def test_growth_is_refused_where_rounds_are_not_as_long_as_the_log_says(
    train: str, more: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_manifest(manifest(f"growth = 3\n{train}", more))
    assert (caught.value.key, caught.value.code) == ("$.train.growth", "E414")
    for out_of_bounds in (-1, 1001):
        with pytest.raises(ConfigError) as caught:
            parse_manifest(manifest(f"growth = {out_of_bounds}"))
        assert caught.value.key == "$.train.growth"

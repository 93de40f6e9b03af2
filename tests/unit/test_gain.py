"""How much sooner a run is with one machine, and than that machine alone."""

from __future__ import annotations

import pytest

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.run.gain import NEWEST, Gain, gain_of, gain_words, training_share
from atoll.node.watching.views import cost_of
from atoll.optim.planning import Choice, price

ALL = {"me": 10, "p1": 20, "p2": 10}


def test_of_a_quarter_of_the_samples() -> None:
    gain = gain_of([ALL], "me", 0.9, cost=1.2)
    assert gain == Gain(pytest.approx(4 / 3), pytest.approx(4 * 0.9 / 1.2))
    assert gain_of([ALL], "me", None, cost=1.2) == Gain(pytest.approx(4 / 3), None)


def test_rounds_without_it_count_for_the_run_and_others_entries_for_nobody() -> None:
    rounds = [ALL, {}, {"p1": 20, "p2": 20}]
    assert gain_of(rounds, "me", 1.0, cost=1.0) == Gain(pytest.approx(8 / 7), pytest.approx(8.0))
    assert gain_of([{"p1": 20}], "me", 1.0, cost=1.0) is None
    assert gain_of([], "me", 1.0, cost=1.0) is None
    old = [{"me": 1000}] * 5 + [ALL] * NEWEST
    assert gain_of(old, "me", 1.0, cost=1.0) == gain_of([ALL], "me", 1.0, cost=1.0)


def test_who_is_alone_in_it_only_waits() -> None:
    assert gain_of([{"me": 10}], "me", 0.9, cost=1.0) == Gain(None, 0.9)
    assert gain_words({"without": None, "alone": None}) == ""


def test_it_costs_what_the_planner_says() -> None:
    settings = RunSettings(sync_every=20, codec="int8_dither", outer=OuterSettings("sgd", 1.0))
    assert cost_of(settings, 1_000_000, 4) == price(1_000_000, Choice(20), 4).samples > 1.2
    assert cost_of(settings, 1_000_000, 1) == 1.0
    assert cost_of(settings, None, 4) == 1.0
    assert cost_of(RunSettings(method="gradient_averaging"), 1_000_000, 4) == 1.0


def test_a_training_share_is_what_waits_leave_of_the_newest_rounds() -> None:
    assert training_share([], "none") is None
    assert training_share([(1.0, 10.0), (3.0, 30.0)], "none") == 0.9
    assert training_share([(-1.0, 10.0), (99.0, 30.0)], "none") == 0.25  # no longer than its round
    assert training_share([(1.0, 10.0)], "late") is None  # nobody waits

"""How much a run and its members train on in a second, by what was committed of it."""

from __future__ import annotations

import pytest

from atoll.node.cli.templates import FINETUNE
from atoll.node.manifest import parse_manifest
from atoll.node.run.rate import CAUGHT_UP_S, NEWEST, TrainingRate, rate_of

Rounds = list[tuple[float, dict[str, int]]]


def every(period_s: float, count: int, contributors: dict[str, int], start: float = 0.0) -> Rounds:
    return [(start + period_s * number, contributors) for number in range(count)]


def test_the_newest_rounds_are_counted_by_the_time_between_them() -> None:
    rounds = every(10.0, 50, {"a": 30, "b": 10})
    rounds[-NEWEST - 2] = (rounds[-NEWEST - 2][0], {"a": 10**9})
    assert rate_of(rounds, ["a", "b"], "tokens") == TrainingRate(
        "tokens", 4.0, {"a": 3.0, "b": 1.0}
    )
    assert rate_of(rounds, ["b", "c"], "tokens") == TrainingRate("tokens", 4.0, {"b": 1.0})
    assert rate_of(rounds[:1], ["a"], "tokens") is None
    assert rate_of([], ["a"], "tokens") is None


def test_a_member_that_came_late_is_counted_from_when_it_came() -> None:
    rounds = every(10.0, 11, {"a": 20})
    rounds[9:] = [(at, {"a": 20, "b": 40}) for at, _ in rounds[9:]]
    found = rate_of(rounds, ["a", "b"], "samples")
    assert found is not None
    assert (found.all, found.members) == (2.8, {"a": 2.0, "b": 4.0})
    rounds[-1] = (rounds[-1][0], {"a": 20})  # it missed one: that time counts, too
    found = rate_of(rounds, ["a", "b"], "samples")
    assert found is not None
    assert found.members == {"a": 2.0, "b": 2.0}


def test_rounds_that_a_node_catches_up_with_are_not_taken_for_fast_ones() -> None:
    """It was away for 60 rounds: they are counted over the time that they took."""
    before, burst = every(10.0, 30, {"a": 40}), CAUGHT_UP_S / 10
    away = every(burst, 60, {"a": 40}, start=890.0)
    found = rate_of([*before, *away], ["a"], "samples")
    assert found is not None
    assert found.all == pytest.approx(60 * 40 / (away[-1][0] - before[-1][0]), abs=1e-3)
    newcomer = [*away, *every(10.0, 3, {"a": 40}, start=away[-1][0] + 10.0)]
    found = rate_of(newcomer, ["a"], "samples")
    assert found is not None
    assert found.all == pytest.approx(4.0)
    assert rate_of(away, ["a"], "samples") is None


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (FINETUNE, "tokens"),
        (FINETUNE.replace('source = "local"', f'source = "shared"\nsha256 = "{"0" * 64}"'), "documents"),
        ('schema = 1\nname = "x"\n[model]\nentry = "local:x"\n', "samples"),
    ],
)  # fmt: skip
def test_what_members_count_by(text: str, unit: str) -> None:
    assert parse_manifest(text).unit == unit

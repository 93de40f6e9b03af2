"""Plans made again: arithmetic by hand, bounds, what a member measures, and what one liar among
five can do.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.group import Reading
from atoll.collectives.swarm import RunSettings
from atoll.node.manifest import parse_manifest
from atoll.optim.outer.reported import median_lag
from atoll.optim.planning.planner import LEAST_STEPS
from atoll.optim.rounds.again import Lag, RoundSteps, again

BASE = RunSettings(sync_every=50, share=0.9)


def settings(**changes: object) -> RunSettings:
    return msgspec.structs.replace(BASE, **changes)


def test_waiting_the_round_is_the_shortest_that_keeps_the_share() -> None:
    assert again(BASE, 1000, 4.0) == RoundSteps(36, None)  # 36 steps of training, 4 of waiting
    assert again(BASE, 1000, 4.1) == RoundSteps(37, None)
    assert again(BASE, 1000, 0.1) == RoundSteps(LEAST_STEPS, None)
    assert again(BASE, 1000, 1e6) == RoundSteps(100, None)  # a small model
    assert again(BASE, 1 << 30, 1e6) == RoundSteps(500, None)
    assert again(settings(max_steps=2000), 1000, 1e6) == RoundSteps(2000, None)
    assert again(settings(sync_every=5, max_steps=5), 1000, 0.1) == RoundSteps(5, None)


def test_with_overlap_a_result_is_due_when_it_is_there() -> None:
    late = settings(overlap="late", sync_every=20)
    assert again(late, 1000, 8.0) == RoundSteps(20, None)  # it fits into a round
    assert again(late, 1000, 24.0) == RoundSteps(30, None)  # a quarter to spare
    delayed = settings(overlap="late", sync_every=20, delay=2)
    assert again(delayed, 1000, 8.0) == RoundSteps(20, 10)
    assert again(delayed, 1000, 24.0) == RoundSteps(31, 30)
    assert again(delayed, 1000, 1e9) == RoundSteps(100, 99)


def test_without_measurements_or_without_being_asked_the_plan_is_the_manifests() -> None:
    assert again(BASE, 1000, 0.0) == RoundSteps(50, None)
    assert again(RunSettings(sync_every=50), 1000, 7.0) == RoundSteps(50, None)
    assert again(RunSettings(sync_every=50, overlap="late", delay=3), 1000, 7.0) == RoundSteps(
        50, 3
    )


@given(
    st.floats(0, 1e30),
    st.floats(0.01, 0.99),
    st.integers(1, 500),
    st.integers(2, 500),
    st.sampled_from(["none", "late", "eager"]),
    st.integers(0, 499) | st.none(),
)
def test_whatever_is_said_a_plan_is_one_that_the_manifest_allows(
    lag: float, share: float, first: int, more: int, overlap: str, delay: int | None
) -> None:
    run = settings(
        share=share,
        sync_every=first,
        max_steps=first + more,
        overlap=overlap,
        delay=delay if overlap != "none" else None,
    )
    found = again(run, 1000, lag)
    assert 1 <= found.steps <= first + more
    if found.delay is not None and lag > 0:
        assert 0 < found.delay < found.steps


def test_a_member_measures_medians_and_one_liar_of_five_moves_nothing() -> None:
    lag = Lag()
    assert lag.steps is None
    lag.trained(10, 5.0)
    assert lag.steps is None
    for seconds in (2.0, 2.0, 60.0):
        lag.decided(seconds)
    lag.trained(10, 5.0)
    lag.trained(1, 30.0)
    assert lag.steps == 4.0
    honest = [Reading(lag=value) for value in (3.0, 4.0, 4.5, 5.0)]
    assert median_lag([*honest, Reading(lag=1e30)]) == 4.5
    assert median_lag([*honest, Reading(lag=0.0)]) == 4.0
    assert median_lag([*honest, Reading(1.0)]) == 4.25
    assert median_lag([Reading(), Reading(norm=1.0)]) == 0.0


HEAD = 'schema = 1\nname = "p"\n[model]\nentry = "local:p"\n'


def test_the_built_in_recipe_then_goes_by_samples() -> None:
    text = 'schema = 1\nname = "p"\n[train]\nsync_every = 20\nshare = 0.95\n'
    with pytest.raises(ConfigError, match="goes by steps"):
        parse_manifest(text)
    assert parse_manifest(text + "[train.inner]\nsamples = 9000\n").train.share == 0.95


def test_the_manifest_says_it() -> None:
    found = parse_manifest(
        HEAD + "[train]\nsync_every = 20\nshare = 0.95\nmax_steps = 80\n"
    ).settings()
    assert (found.share, found.max_steps) == (0.95, 80)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ("[train]\nround_s = 10\nshare = 0.9", "$.train.share"),
        ("[train]\nsync_every = 20\nmax_steps = 80", "$.train.max_steps"),
        ("[train]\nsync_every = 20\nshare = 0.9\nmax_steps = 10", "$.train.max_steps"),
        ("[train]\nsync_every = 20\nshare = 1.0", "$.train.share"),
        (
            '[train]\nsync_every = 20\nshare = 0.9\nmethod = "gradient_averaging"\nouter = { optimizer = "sgd", lr = 0.1 }',
            "$.train.share",
        ),
        ("[train]\nsync_every = 20\nshare = 0.9\n[exchange]\nfragments = 2", "$.train.share"),
    ],
)
def test_what_cannot_be_planned_again_is_refused(tables: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_manifest(HEAD + tables + "\n")
    assert refused.value.key == key

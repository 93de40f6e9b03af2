"""The round under members that lie, explored: every reachable state of small systems, random paths
of larger ones.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from lying_model import INVALID, VALUES, Rules, State, Wrong, explore, normal, wander
from seeds import seeds

FOUR = Rules(honest=3, liars=1, ballots=3)


def decided(rules: Rules, state: State) -> set[int]:
    slots = range(rules.ballots * VALUES)
    return {
        slot % VALUES
        for slot in slots
        if sum(node[4] >> slot & 1 for node in state) >= rules.needed
    }


@pytest.mark.slow
def test_every_state_of_four_members_one_of_whom_lies() -> None:
    found = explore(FOUR)
    assert len(found) == 19_872
    assert {value for state in found for value in decided(FOUR, state)} == {0, 1}, (
        "either may be decided, never both"
    )


def test_every_state_of_four_members_in_two_ballots() -> None:
    assert len(explore(replace(FOUR, ballots=2))) == 929


def test_every_state_of_five_members_in_two_ballots() -> None:
    assert len(explore(Rules(honest=4, liars=1, ballots=2))) == 2_018


def test_states_that_are_left_out_are_like_one_that_is_not() -> None:
    rules = Rules(honest=3, liars=1, ballots=2)
    everything = explore(rules, reduced=False)
    assert len(everything) == 35_588
    assert {normal(rules, state) for state in everything} == explore(rules)


@pytest.mark.parametrize(
    "broken",
    [
        {"echoes": False},
        {"justified": False},
        {"claims_proven": False},
        {"validated": False},
        {"promise_binds": False},
        {"highest": False},
        {"decides_by_echoes": True},
        {"volatile": ("promised",)},
        {"volatile": ("echoed",)},
        {"volatile": ("accepted",)},
        {"quorum": 2},
        {"liars": 2, "honest": 2, "quorum": 3},
    ],
    ids=str,
)
def test_what_is_broken_is_found(broken: dict[str, object]) -> None:
    with pytest.raises(Wrong):
        explore(replace(FOUR, **broken), most=30_000)


def test_a_majority_is_no_quorum_of_five() -> None:
    with pytest.raises(Wrong, match="two certificates"):
        explore(Rules(honest=4, liars=1, ballots=2, quorum=3))


@pytest.mark.parametrize("seed", seeds(3, 200))
def test_random_paths_of_up_to_seven_members(seed: int) -> None:
    rng = Random(seed)
    for honest, liars in ((4, 1), (5, 1), (5, 2)):
        rules = Rules(honest, liars, ballots=5)
        ends = [wander(rules, rng) for _ in range(40)]
        assert all(INVALID not in decided(rules, state) for state in ends)

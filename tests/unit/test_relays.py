"""Over which members the news of a round goes in a large configuration: whoever is silent, all
others are reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.relays import RelayGrid

COUNTS = st.integers(1, 300)


def grid_of(count: int) -> RelayGrid:
    """Members p0, p1, …, in this order."""
    return RelayGrid([PeerId(f"p{index}") for index in range(count)])


@given(COUNTS, st.randoms(use_true_random=False))
def test_a_decision_reaches_all_whose_relay_is_not_thought_to_live_and_does_not(
    count: int, rng: object
) -> None:
    grid = grid_of(count)
    convener = grid.order[0]
    silent = {peer for peer in grid.order[1:] if rng.random() < 0.3}  # type: ignore[attr-defined]
    told = grid.relays(convener, silent.__contains__)
    row = grid.row(convener)
    reached = {convener, *row}
    for relay in told:
        if relay not in silent:
            reached |= {relay, *(grid.row(relay) if relay not in row else ())}
    dead_rows = [
        peer for peer in grid.order if {peer, *grid.row(peer)} <= silent
    ]  # then none of them waits for anything
    assert reached >= set(grid.order) - silent - set(dead_rows)
    assert len(told) == len(set(told)) <= 2 * (isqrt(count - 1) + 1)
    assert convener not in told


@pytest.mark.parametrize("counts", [range(1, 100), range(100, 201), [993, 1000, 1025]])
def test_one_contribution_closes_the_round_for_all_whoever_gives_it(counts: Iterable[int]) -> None:
    for count in counts:
        grid = grid_of(count)
        everybody, columns = set(grid.order), {peer: set(grid.column(peer)) for peer in grid.order}
        for first in grid.order:
            heard = {first, *grid.row(first)}
            assert heard.union(*(columns[peer] for peer in heard)) == everybody, (count, first)


@given(COUNTS, st.data())
def test_each_dead_member_of_a_row_leaves_as_many_untold_as_it_would_have_told(
    count: int, data: st.DataObject
) -> None:
    grid = grid_of(count)
    first = data.draw(st.sampled_from(grid.order))
    dead = data.draw(st.sets(st.sampled_from(grid.order), max_size=count // 3)) - {first}
    row = {first, *grid.row(first)}
    closed = (row - dead).union(*(grid.column(peer) for peer in row - dead))
    untold = set(grid.order) - dead - closed
    assert len(untold) <= len(row & dead) * (isqrt(count - 1) + 1)


@given(COUNTS)
def test_no_member_has_more_to_tell_than_two_roots_of_their_number(count: int) -> None:
    grid = grid_of(count)
    for peer in grid.order:
        told = [*grid.row(peer), *grid.column(peer)]
        assert peer not in told
        assert len(told) == len(set(told)) <= 2 * (isqrt(count - 1) + 1)

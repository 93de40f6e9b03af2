"""Owners of parts that held up reductions: how long they own none."""

from __future__ import annotations

from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.byzantine.blame import MOST, REMEMBERED, ROUNDS, Blame, Strikes

A, B, C = (PeerId(name) for name in "abc")


def over(blame: Strikes, peer: PeerId, since: int) -> int:
    """The first round from ``since`` on in which the peer may own parts."""
    return next(
        round_ for round_ in range(since, since + 10_000) if peer not in blame.shunned(round_, 9)
    )


def test_each_strike_costs_twice_as_many_rounds_up_to_a_bound() -> None:
    blame, at, costs = Strikes(ROUNDS), 0, list[int]()
    for _ in range(8):
        blame.strike(A, at)
        end = over(blame, A, at)
        costs.append(end - at)
        at = end
    assert costs == [16, 32, 64, 128, 256, 512, 512, 512]
    assert costs[-1] == ROUNDS << (MOST - 1)


def test_a_round_counts_once() -> None:
    blame = Strikes(ROUNDS)
    blame.strike(A, 5)
    blame.strike(A, 5)
    assert over(blame, A, 5) == 5 + ROUNDS


def test_strikes_are_forgotten_one_by_one() -> None:
    blame = Strikes(ROUNDS)
    blame.strike(A, 0)
    blame.strike(A, 16)  # two: until 48
    blame.strike(A, 48 + 32)  # one forgotten: again two
    assert over(blame, A, 80) == 80 + 32
    blame.strike(A, 112 + 32 + 16)  # both forgotten
    assert over(blame, A, 160) == 160 + 16


def test_no_more_are_shunned_than_may_lie_and_the_worst_first() -> None:
    blame = Strikes(ROUNDS)
    for peer, rounds in ((A, (1,)), (B, (1, 2)), (C, (3,))):
        for round_ in rounds:
            blame.strike(peer, round_)
    assert blame.shunned(4, 1) == {B}
    assert blame.shunned(4, 2) == {B, C}
    assert blame.shunned(4, 3) == {A, B, C}
    assert blame.shunned(4, 0) == set()


def test_peers_whose_time_is_over_do_not_fill_memory() -> None:
    blame = Strikes(ROUNDS)
    for number in range(10 * REMEMBERED):
        blame.strike(PeerId(f"p{number}"), 100 * number)
    assert len(blame._of) <= REMEMBERED + 1


def test_a_tree_that_fell_is_planned_no_more_for_a_while() -> None:
    blame = Blame()
    assert not blame.no_tree(7)
    blame.fell(7)
    assert blame.no_tree(7)
    assert blame.no_tree(7 + ROUNDS - 1)
    assert not blame.no_tree(7 + ROUNDS)
    assert blame.owners.shunned(7, 9) == blame.givers.shunned(7, 9) == set()

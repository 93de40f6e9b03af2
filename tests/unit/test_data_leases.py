"""Leases of samples: one order for all, disjoint streams, and what an entry of the log makes of
them.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.group import Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outcomes import Tally
from atoll.optim.data.leases import MARGIN, Leases
from atoll.optim.data.order import Order
from atoll.optim.data.spans import Cursor, Span, united, without

A, B, C = (Member(PeerId(name), 0) for name in "abc")


def flat(spans: list[Span]) -> list[int]:
    return [position for span in spans for position in range(*span)]


def positions(leases: Leases, member: Member, count: int) -> list[int]:
    return flat(leases.stream(member).take(count))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_every_epoch_is_a_shuffle_of_all_samples(size: int) -> None:
    order = Order(size, "run")
    epochs = [order(np.arange(epoch * size, (epoch + 1) * size)).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size >= 64:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert Order(size, "other")(np.arange(size)).tolist() != epochs[0]
        assert (
            sum(abs(a - b) == 1 for a, b in pairwise(epochs[0])) < size / 8
        )  # neighbours are torn apart


def test_the_order_is_this_one_on_every_machine() -> None:
    assert Order(1000, "run")(np.array([0, 1, 999, 1000, 10**15])).tolist() == [
        437,
        20,
        971,
        776,
        556,
    ]


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_spans_are_sets(one: set[int], other: set[int]) -> None:
    spans, taken = (united((at, at + 1) for at in each) for each in (one, other))
    assert flat(spans) == sorted(one)
    assert all(left[1] < right[0] for left, right in pairwise(spans))
    assert flat(without(spans, taken)) == sorted(one - other)
    cursor = Cursor(iter(spans))
    assert flat(cursor.take(3)) + flat(cursor.take(100)) == sorted(one)


def play(
    rng: Random, *, clean: bool, entries: int = 60
) -> tuple[Leases, dict[Member, list[int]], list[int], list[set[int]]]:
    """A run as its members see it: each trains the front of its stream, and hears of entries that
    count some of it, late.
    """
    leases, done = Leases(8), list[int]()
    members, speed = (A,), {A: 5, B: 11, C: 2}
    begun: dict[Member, list[int]] = {A: []}
    leases.decided(Tally(0, 0, (), members))
    overlaps = list[set[int]]()
    for entry in range(1, entries):
        shares = dict[Member, int]()
        for member in members:
            count = rng.randint(1, speed[member]) if entry > 3 else 1
            ahead = (
                rng.randint(0, count) if entry > 3 else 0
            )  # trained since, before anybody hears of the entry
            work = positions(leases, member, len(begun[member]) + count + ahead)
            assert work[: len(begun[member])] == begun[member]
            begun[member] = work
            if clean or rng.random() < 0.9:
                shares[member] = len(work) - ahead
        streams = [set(work) for work in begun.values()]
        overlaps += [one & other for at, one in enumerate(streams) for other in streams[at + 1 :]]
        for member, samples in shares.items():
            done += begun[member][:samples]
            begun[member] = begun[member][samples:]
        if not clean and rng.random() < 0.2:
            members = tuple(sorted(rng.sample([A, B, C], rng.randint(1, 3))))
        elif clean and entry == 2:
            members = (A, B, C)
        leases.decided(Tally(entry, entry, tuple(shares.items()), members))
        begun = {member: begun.get(member, []) for member in members}
        for member in members:  # who lost its place has dropped its work
            if positions(leases, member, len(begun[member])) != begun[member]:
                assert not clean
                begun[member] = []
    return leases, begun, done, overlaps


@pytest.mark.parametrize("seed", range(50))
def test_a_clean_run_reads_every_sample_once_and_nobody_another_s(seed: int) -> None:
    leases, _, done, overlaps = play(Random(seed), clean=True)
    assert len(done) == len(set(done))
    assert not any(overlaps)
    rest = [positions(leases, member, 400) for member in (A, B, C)]
    assert set(done) | set().union(*map(set, rest)) >= set(
        range(max(done))
    )  # what is not done will be
    assert not set(done) & set().union(*map(set, rest))
    behind = set(range(max(done))) - set(done)
    assert (
        len(behind) <= 3 * 3 * MARGIN * 3 * 11 + 3 * 8
    )  # and soon: blocks and what is kept are a few contributions long


@pytest.mark.parametrize("seed", range(50))
def test_with_members_that_come_and_go_nothing_counts_twice_and_nothing_is_lost(seed: int) -> None:
    leases, _, done, overlaps = play(Random(seed), clean=False)
    assert len(done) == len(set(done))
    assert not any(overlaps)
    rest = [positions(leases, member, 2000) for member in leases.members]
    assert sum(map(len, rest)) == len(set().union(*map(set, rest)))
    assert not set(done) & set().union(*map(set, rest))
    assert set(done) | set().union(*map(set, rest)) >= set(range(max(done)))


def test_a_member_that_never_contributes_keeps_nothing_for_long() -> None:
    leases = Leases(64)
    for entry in range(80):
        leases.decided(Tally(entry, entry, ((A, 10),) if entry else (), (A, B)))
    assert leases._kept[B] == []
    assert positions(leases, A, 40)[0] < 800


def test_the_samples_of_who_is_lost_are_read_by_the_others() -> None:
    leases = Leases(8)
    leases.decided(Tally(0, 0, (), (A, B)))
    leases.decided(Tally(1, 1, ((A, 4), (B, 4)), (A, B)))
    lost = positions(leases, B, MARGIN * 4)
    leases.decided(Tally(2, 2, ((A, 4),), (A,)))
    assert set(lost) <= set(positions(leases, A, 64))


def test_a_member_that_counts_something_else_costs_the_others_a_moment() -> None:
    leases = Leases(8)
    leases.decided(Tally(0, 0, (), (A, B)))
    leases.decided(Tally(1, 1, ((A, 1 << 48), (B, 4)), (A, B)))
    assert not set(positions(leases, A, 100)) & set(positions(leases, B, 100))


def test_whatever_members_claim_there_is_a_next_sample() -> None:
    """A liar's claims bring positions beyond 64 bits, in some 10,000 entries."""
    liar = Member(PeerId("liar"), 0)
    leases, order = Leases(16), Order(1000, "run")
    for entry in range(1, 8):
        leases.decided(Tally(entry, entry, ((A, 8), (liar, 1 << 48)), (A, liar)))
    leases._frontier = 1 << 63  # as the rest of them do
    leases.decided(Tally(8, 8, ((A, 8), (liar, 1 << 48)), (A, liar)))
    for member in (A, liar):
        spans = leases.stream(member).take(1 << 54)
        assert sum(stop - start for start, stop in spans) == 1 << 54
        assert spans[-1][1] > 1 << 63
        last = spans[-1][1]
        drawn = order.positions([(last - 4096, last)])
        assert len(np.unique(drawn)) == 4096
        assert ((order(drawn) >= 0) & (order(drawn) < 1000)).all()
    assert order.positions([(3, 6), (1000, 1001)]).tolist() == [3, 4, 5, 1000]

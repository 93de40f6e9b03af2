"""Asking for a manifest: a few members at a time, others in place of those who refuse, growing
periods, everybody in the end.
"""

from __future__ import annotations

import random

from atoll.collectives.identifiers import PeerId
from atoll.node.service.asking import AT_ONCE, FIRST_S, LONGEST_S, Asking

MANY = [PeerId(f"p{number:03}") for number in range(100)]


def test_a_large_run_is_asked_by_threes_at_growing_distances() -> None:
    asking, now, asked, periods = Asking(random.Random(1)), 0.0, list[PeerId](), list[float]()
    while now < 20.0:
        chosen = asking.whom(now, MANY)
        assert len(chosen) == AT_ONCE
        assert asking.whom(now, MANY) == []
        asked += chosen
        periods.append(asking.again_at - now)
        now = asking.again_at
    assert len(set(asked)) == len(asked) <= 36  # all of them every 0.25 s would be 8000
    assert 0.75 * FIRST_S <= periods[0] <= 1.25 * FIRST_S
    assert 0.75 * LONGEST_S <= periods[-1] <= 1.25 * LONGEST_S


def test_whoever_becomes_known_is_asked_at_once_and_not_twice_in_a_period() -> None:
    asking = Asking(random.Random(2))
    for number in range(8):  # nobody is known: the periods stay short
        assert asking.whom(number / 2, []) == []
        assert asking.again_at - number / 2 <= 1.25 * FIRST_S
    assert asking.whom(3.55, MANY[:1]) == MANY[:1]
    assert asking.whom(3.56, MANY[:2]) == MANY[1:2]
    assert asking.whom(asking.again_at - 0.01, MANY[:2]) == []
    assert set(asking.whom(asking.again_at, MANY[:2])) == set(MANY[:2])


def test_one_that_refuses_makes_room_for_another() -> None:
    asking = Asking(random.Random(3))
    first = asking.whom(0.0, MANY)
    for peer in first[:2]:
        asking.refused(peer)
    second = asking.whom(0.01, MANY)
    assert len(second) == 2
    assert not set(first) & set(second)
    everybody = Asking(random.Random(4))
    asked = list[PeerId]()
    while chosen := everybody.whom(0.0, MANY):
        asked += chosen
        for peer in chosen:
            everybody.refused(peer)
    assert sorted(asked) == MANY

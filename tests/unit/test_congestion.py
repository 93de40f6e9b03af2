"""When a lane's connection goes over to bbr, from recorded counters."""

from __future__ import annotations

import pytest

from atoll.collectives.engine.congestion import DEEP_S, Path
from atoll.collectives.engine.meter import LaneCounters


def play(*readings: tuple[int, int], rtt_s: float = 0.06) -> list[bool]:
    """What a path says after each reading: (segments, of them again) since the one before."""
    path, found, sent, lost = Path(), list[bool](), 0, 0
    for segments, again in readings:
        sent, lost = sent + segments, lost + again
        found.append(path.read(LaneCounters(0, 0, 0.0, 0.0, rtt_s, 0.05, sent, lost)))
    return found


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        (((500, 5), (500, 5), (500, 5)), [False, True, False]),  # random loss: said once
        (((500, 100), (500, 0), (500, 5)), [False, False, False]),  # a queue that was full once
        (
            ((500, 2), (500, 0), (500, 2), (500, 1)),
            [False, False, False, True],
        ),  # a few, but all the time
        (((500, 2), *[(500, 0)] * 3) * 4, [False] * 16),  # a queue that runs over now and then
        (((50_000, 15),) * 9, [False] * 9),  # the same on a fast link
        (((100, 5),) * 9, [False] * 7 + [True, False]),  # little by little: judged by the stretch
    ],
)
def test_losses_that_last(readings: tuple[tuple[int, int], ...], found: list[bool]) -> None:
    assert play(*readings) == found


def test_where_cubic_sends_next_to_nothing_nobody_waits_for_a_whole_stretch() -> None:
    """As at 20 % of loss: some fifteen segments a second."""
    path, found = Path(), list[bool]()
    for number in range(1, 21):  # a reading each 0.15 s, the connection is busy all the time
        counters = LaneCounters(0, 0, 0.15 * number, 0.0, 0.06, 0.05, 2 * number, number // 3)
        found.append(path.read(counters))
    assert found == [False] * 17 + [True] + [False] * 2
    idle = Path()
    assert not any(  # the same losses among many: one stretch is not over
        idle.read(LaneCounters(0, 0, 0.15 * number, 0.0, 0.06, 0.05, 19 * number, number // 3))
        for number in range(1, 21)
    )


@pytest.mark.parametrize(
    ("lost", "rtt_s", "least_rtt_s", "every"),
    [
        (5, 0.06, 0.05, 9),  # a quarter: bbr begins anew after each 1.25 s, 25 round trips
        (5, 0.035, 0.03, 7),  # after each second at least
        (5, 0.21, 0.2, 34),  # on a far link, after five
        (2, 0.06, 0.05, 0),  # a tenth: it can bear that
        (5, 0.15, 0.05, 0),  # there is a queue: the link is full
    ],
)
def test_where_more_is_lost_than_bbr_can_bear_it_begins_anew(
    lost: int, rtt_s: float, least_rtt_s: float, every: int
) -> None:
    path, found, number = Path(), list[int](), 0
    path.spoilt = True
    for number in range(1, 72):  # a reading each 0.15 s, busy all the time
        counters = LaneCounters(
            0, 0, 0.15 * number, 0.0, rtt_s, least_rtt_s, 20 * number, lost * number
        )
        if path.read(counters):
            found.append(number)
    assert found == (list(range(1 + every, 72, every)) if every else [])


def test_a_lane_that_rests_does_not_begin_anew() -> None:
    path = Path()
    path.spoilt = True
    assert not any(  # some heartbeats, of which a third is lost
        path.read(LaneCounters(0, 0, 0.01 * number, 0.0, 0.06, 0.05, 3 * number, number))
        for number in range(1, 100)
    )


def test_a_deep_queue() -> None:
    assert play((10, 0), rtt_s=0.05 + DEEP_S) == [False]
    assert play((10, 0), rtt_s=0.051 + DEEP_S) == [True]


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        (
            ((473, 86), (726, 5), (455, 211), (500, 0)),
            [False] * 4,
        ),  # recorded on a link with a queue of 100 ms: it ran over twice in a row
        (((427, 29), (442, 9), (500, 0)), [False] * 3),  # the same
        (((500, 5),) * 5, [False, False, False, True, False]),  # a queue of others, and random loss
        (((500, 1),) * 7, [False] * 5 + [True, False]),
    ],
)
def test_losses_with_a_queue_on_the_way_count_half(
    readings: tuple[tuple[int, int], ...], found: list[bool]
) -> None:
    assert play(*readings, rtt_s=0.151) == found


def test_a_queue_that_has_run_over_is_gone_when_its_losses_are_counted() -> None:
    path = Path()
    assert [
        path.read(LaneCounters(0, 0, 0.0, 0.0, rtt, 0.05, sent, lost))
        for rtt, sent, lost in ((0.15, 100, 0), (0.05, 600, 90), (0.05, 1100, 120))
    ] == [False] * 3

"""How many lanes a peer gets where there is no bbr: recorded counters in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.collectives.engine.meter import LaneCounters
from atoll.collectives.engine.width import FIRST, JUDGED_S, MOST, RETRY_S, SETTLING_S, Width, first

WINDOW_S = 0.15
SEGMENT = 1448
Rate = Callable[[int], float]
"""Bytes a second of so many lanes together."""


class Play:
    """A path, and the lanes that the rule wants on it, all of them there a window later."""

    def __init__(self, width: Width) -> None:
        self.width, self.now = width, 0.0
        self.changes: list[tuple[float, int]] = []
        self._counters: dict[int, list[float]] = {}

    def go(
        self, seconds: float, rate: Rate, lost: float, *, busy: float = 1.0, held_up: float = 0.0
    ) -> list[int]:
        """So long on a path that loses this share; what was wanted from each change on."""
        known = len(self.changes)
        for _ in range(round(seconds / WINDOW_S)):
            self.now += WINDOW_S
            count = self.width.wanted
            self._counters = {
                number: self._counters.get(number, [0.0] * 5) for number in range(count)
            }
            for counters in self._counters.values():
                nbytes = rate(count) / count * WINDOW_S
                for place, more in enumerate(
                    (
                        nbytes,
                        busy * WINDOW_S,
                        held_up * WINDOW_S,
                        nbytes / SEGMENT,
                        lost * nbytes / SEGMENT,
                    )
                ):
                    counters[place] += more
            readings = {
                number: LaneCounters(
                    int(acked), 0, busy_s, held_up_s, 0.05, 0.05, int(segments), int(again)
                )
                for number, (acked, busy_s, held_up_s, segments, again) in self._counters.items()
            }
            if self.width.read(self.now, readings):
                self.changes.append((self.now, self.width.wanted))
        return [wanted for _, wanted in self.changes[known:]]


def linear(count: int) -> float:
    """Each lane carries as much, as where losses keep connections down."""
    return 1e6 * count


def full(count: int) -> float:
    """One lane fills the link."""
    return 12e6


def test_one_lane_with_bbr_and_two_without() -> None:
    assert first(bbr=True) == 1
    assert first(bbr=False) == Width().wanted == FIRST == 2


def test_it_doubles_to_eight_while_more_lanes_carry_more() -> None:
    play = Play(Width())
    assert play.go(60, linear, 0.01) == [4, 8]
    (one, _), (two, _) = play.changes
    assert one == pytest.approx(JUDGED_S, abs=2 * WINDOW_S)
    assert two - one == pytest.approx(JUDGED_S + SETTLING_S, abs=3 * WINDOW_S)
    assert play.go(3600, linear, 0.01) == []
    assert play.width.wanted == MOST


@pytest.mark.parametrize(("most", "wanted"), [(1, 1), (2, 2), (3, 3), (8, 8)])
def test_no_more_than_are_allowed(most: int, wanted: int) -> None:
    play = Play(Width(most))
    play.go(60, linear, 0.01)
    assert play.width.wanted == wanted


@pytest.mark.parametrize(
    ("lost", "busy", "held_up"),
    [(0.0004, 1.0, 0.0), (0.01, 0.5, 0.0), (0.01, 1.0, 0.3)],
    ids=["hardly a loss", "little to send", "the receiver is slow"],
)
def test_two_stay_where_more_would_not_help(lost: float, busy: float, held_up: float) -> None:
    assert Play(Width()).go(120, linear, lost, busy=busy, held_up=held_up) == []


def test_what_little_goes_over_lanes_says_nothing() -> None:
    assert Play(Width()).go(120, lambda count: 1000.0, 0.01) == []


def test_useless_lanes_are_given_up_and_not_tried_again_for_long() -> None:
    play = Play(Width())
    assert play.go(30, full, 0.002) == [4, 2]
    assert play.go(RETRY_S - 40, full, 0.002) == []
    assert play.go(60, full, 0.002) == [4, 2]


@pytest.mark.parametrize(
    ("lost", "found"), [(0.003, []), (0.0011, []), (0.005, [4, 2]), (0.0009, [4, 2])]
)
def test_another_path_is_tried_at_once(lost: float, found: list[int]) -> None:
    play = Play(Width())
    assert play.go(30, full, 0.002) == [4, 2]
    assert play.go(30, full, lost)[:2] == found


def test_a_pause_of_the_process_and_lanes_that_are_still_missing_are_not_judged() -> None:
    width = Width()
    readings = [
        {0: LaneCounters(n * 10**7, 0, float(n), 0.0, 0.05, 0.05, n * 7000, n * 70)}
        for n in range(60)
    ]
    assert not any(
        width.read(2.0 * n, found) for n, found in enumerate(readings)
    )  # windows of two seconds
    assert not any(
        width.read(200 + 0.5 * n, found) for n, found in enumerate(readings)
    )  # one lane, where two are wanted

"""DyLU's number of steps as the log tells it, and grace windows: values and bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.arrivals import ArrivalSettings, DynamicSteps, GraceWindow
from atoll.collectives.group import Certified, Contributor, Entry, Member, Reading
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.arrivals.dynamic_steps import OwnSteps, dynamic_steps
from atoll.collectives.modes.arrivals.gathering import LONGEST_WINDOW_S, is_ripe, window_s
from atoll.collectives.round import Log

NAMES = [PeerId(name) for name in "abcde"]
SECONDS = st.floats(1e-6, 1e6)
SAID = st.none() | st.floats(allow_nan=False, allow_infinity=False)


def test_steps_are_as_published() -> None:
    speeds = dict(zip(NAMES, (1.0, 1.0, 1 / 2, 1 / 4, 1 / 20), strict=True))
    step_s = {peer: 1 / speed for peer, speed in speeds.items()}
    published = {
        peer: max(1, math.floor(50 * v / max(speeds.values()))) for peer, v in speeds.items()
    }
    assert {peer: dynamic_steps(DynamicSteps(50), step_s, peer) for peer in NAMES} == published
    assert [*published.values()] == [50, 50, 25, 12, 2]
    assert dynamic_steps(DynamicSteps(50, 5), step_s, NAMES[4]) == 5
    assert dynamic_steps(DynamicSteps(50), step_s, PeerId("new")) == 50


@given(step_s=st.dictionaries(st.sampled_from(NAMES), SECONDS), most=st.integers(1, 10_000))
def test_steps_are_within_their_bounds_and_no_slower_member_makes_more(
    step_s: dict[PeerId, float], most: int
) -> None:
    settings = DynamicSteps(most, (most + 1) // 3 or 1)
    steps = {peer: dynamic_steps(settings, step_s, peer) for peer in NAMES}
    assert all(settings.least <= each <= most for each in steps.values())
    for one in step_s:
        for other in step_s:
            assert step_s[one] > step_s[other] or steps[one] >= steps[other]


class Written:
    """A log that is written entry by entry."""

    def __init__(self) -> None:
        self.kept = list[Certified]()
        self.log = Log(lambda first, stop: self.kept[first:stop])

    def append(self, said: dict[PeerId, float | None], members: list[PeerId]) -> None:
        contributors = tuple(
            Contributor(Member(peer, 0), bytes(16), 1, Reading(lag=lag))
            for peer, lag in said.items()
        )
        config = tuple(Member(peer, 0) for peer in members)
        entry = Entry(
            "main",
            self.log.length,
            bytes(32),
            bytes(32),
            contributors,
            (),
            (),
            4,
            4,
            "fp32",
            "mean",
            config,
        )
        self.kept.append(Certified(entry, ()))
        self.log.append(self.kept[-1])


WORDS = st.dictionaries(st.sampled_from(NAMES), SAID)


@given(st.lists(st.tuples(WORDS, st.sets(st.sampled_from(NAMES), min_size=1)), max_size=8))
def test_all_that_have_the_entries_agree_whenever_they_read_them_and_whatever_is_said(
    entries: list[tuple[dict[PeerId, float | None], set[PeerId]]],
) -> None:
    written, settings = Written(), DynamicSteps(40, 4)
    early = OwnSteps(settings, written.log)
    for said, members in entries:
        written.append(said, sorted(members))
        early.follow()
    late = OwnSteps(settings, written.log)
    late.follow()
    assert [early.steps(peer) for peer in NAMES] == [late.steps(peer) for peer in NAMES]
    assert all(4 <= late.steps(peer) <= 40 for peer in NAMES)


def test_who_left_no_longer_sets_the_pace() -> None:
    a, b = NAMES[:2]
    written = Written()
    written.append({a: 1.0, b: 2.0}, [a, b])
    own = OwnSteps(DynamicSteps(40), written.log)
    own.follow()
    assert (own.steps(a), own.steps(b)) == (40, 20)
    written.append({b: 2.0}, [b])
    own.follow()
    assert own.steps(b) == 40


@given(st.lists(SAID, max_size=6))
def test_a_window_of_a_step_is_bounded_whatever_is_said(said: list[float | None]) -> None:
    assert 0 <= window_s(GraceWindow(None), said) <= LONGEST_WINDOW_S
    assert window_s(GraceWindow(3.0), said) == 3.0


def test_a_window_of_a_step_is_the_fastest_ones() -> None:
    assert window_s(GraceWindow(None), [0.4, None, 0.1]) == 0.1
    assert window_s(GraceWindow(None), [None]) == 0.0


@pytest.mark.parametrize(("there", "awaited", "ripe"), [(1, 3, False), (2, 2, True), (1, 0, True)])
def test_a_quorum_is_enough_and_so_is_everybody(there: int, awaited: int, ripe: bool) -> None:
    arrivals = ArrivalSettings(2, window=GraceWindow())
    assert is_ripe(arrivals, 5.0, born=0.0, first_at=1.0, there=there, awaited=awaited) == ripe


@given(
    said=st.lists(SECONDS, min_size=1, max_size=4),
    lies=st.lists(SECONDS, max_size=4),
    most=st.integers(1, 1000),
)
def test_fewer_than_half_shorten_nobodys_turn_to_less_than_half(
    said: list[float], lies: list[float], most: int
) -> None:
    """Of what it is by honest words, and no turn of the honest fastest's speed at all but by half of
    ``most``; one of two cannot either."""
    lies = lies[: max(len(said) - 1, 1 if len(said) == 1 else 0)]
    honest = {PeerId(f"h{place}"): seconds for place, seconds in enumerate(said)}
    liars = {PeerId(f"l{place}"): seconds for place, seconds in enumerate(lies)}
    settings = DynamicSteps(most)
    for peer in honest:
        before = min(most, most * min(said) / honest[peer])
        assert dynamic_steps(settings, honest | liars, peer) >= math.floor(before / 2 - 1e-6)

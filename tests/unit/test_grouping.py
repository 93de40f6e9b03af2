"""FedCompass' groups as the log tells them: who makes how many steps, when a group makes a round,
and what a false word comes to. By hand.
"""

from __future__ import annotations

import random

import pytest

from atoll.collectives.arrivals import Groups
from atoll.collectives.group import Certified, Contributor, Entry, Member, Reading
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.arrivals.grouping import Grouping
from atoll.collectives.round import Log

A, B, C = (Member(PeerId(name), 0) for name in "abc")
NAMES = {PeerId(name) for name in "abc"}
GROUPS = Groups(10, 50, 10, slack=1.5)


class Story:
    """A log, and a member that reads it at its own clock."""

    def __init__(self, *members: Member) -> None:
        self.log = Log(lambda first, stop: self.kept[first:stop])
        self.kept: list[Certified] = []
        self.members, self.now = members, 100.0
        self.append(0.0)
        self.grouping = Grouping(GROUPS, self.log)
        self.grouping.follow(self.now)

    def append(self, elapsed_s: float | None, **pace: float | None) -> None:
        contributors = tuple(
            Contributor(Member(PeerId(peer), 0), bytes(16), 1, Reading(lag=lag))
            for peer, lag in pace.items()
        )
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
            "sum",
            self.members,
            elapsed_s=elapsed_s,
        )
        self.kept.append(Certified(entry, ()))
        self.log.append(self.kept[-1])

    def decided(self, elapsed_s: float, **pace: float | None) -> None:
        """So many seconds later an entry is there, of these contributors, each with its seconds a
        step.
        """
        self.append(elapsed_s, **pace)
        self.now += elapsed_s
        self.grouping.follow(self.now)

    def steps(self) -> tuple[int, ...]:
        return tuple(self.grouping.steps(member.peer) for member in (A, B, C))

    def due(self, there: str, awaited: str, after_s: float = 0.0) -> str:
        """Whose contributions would make a round so much later."""
        return "".join(
            sorted(
                self.grouping.ready(
                    {PeerId(name) for name in there},
                    {PeerId(name) for name in awaited},
                    self.now + after_s,
                )
            )
        )


def grouped() -> Story:
    """Of three members a was counted after 1 s and b after 2; c is in its first turn. a comes at 1
    + 50 and b with it, after 24 steps of 2 s.
    """
    story = Story(A, B, C)
    story.decided(1.0, a=1.0)
    story.decided(1.0, b=2.0)
    return story


def test_a_first_turn_is_measured_and_a_slower_member_joins_the_group_that_is_on_its_way() -> None:
    story = Story(A, B, C)
    assert story.steps() == (10, 10, 10)
    assert story.grouping.steps(PeerId("a stranger")) == 10
    story.decided(1.0, a=1.0)
    assert story.steps() == (50, 10, 10)
    story.decided(1.0, b=2.0)
    assert story.steps() == (50, 24, 10)  # 51 - 2 s of 2 s each
    story.decided(3.0, c=4.0)
    assert story.steps() == (50, 24, 11)  # 51 - 5 s
    assert story.due("ab", "c") == ""
    assert story.due("abc", "") == "abc"
    story.decided(46.0, a=1.0, b=2.0, c=4.0)
    assert story.steps() == (50, 25, 12)


def test_a_group_is_waited_for_up_to_its_latest_arrival_and_who_comes_then_is_late() -> None:
    story = grouped()
    assert story.due("a", "b", 73.0) == ""  # until 1 + 1.5 * 50 = 76
    assert story.due("a", "b", 74.1) == "a"
    assert story.due("a", "") == "a"  # b is dead
    assert story.due("", "ab", 1000.0) == ""
    assert story.due("b", "a", 1000.0) == "b"  # nobody came in time: the first that comes
    story.decided(74.5, a=1.0)
    assert story.steps() == (50, 0, 10)  # b's was made without it
    assert story.due("b", "ac") == ""  # it is in the next round, whosever that is
    assert story.due("ab", "c") == "ab"
    assert story.due("bc", "a") == "bc"  # c's first turn
    assert story.due("b", "", 0.0) == "b"  # nobody else will come
    story.decided(50.0, a=1.0, b=3.0)
    assert story.grouping.version == 4
    assert story.steps() == (50, 17, 10)  # b's speed is now 0.1 * 2 + 0.9 * 3 s: 50 / 2.9


def test_who_goes_is_not_waited_for_and_who_comes_is_measured() -> None:
    story = grouped()
    story.members = (A, C)
    story.decided(5.0)
    assert story.due("a", "bc") == "a"
    story.members = (A, B, C)
    story.decided(5.0)
    assert story.steps() == (50, 10, 10)
    assert story.due("b", "ac") == "b"


def test_a_member_that_was_started_again_knows_the_same() -> None:
    story = grouped()
    story.decided(49.0, a=1.0, b=2.0)
    again = Grouping(GROUPS, story.log)
    again.follow(7.0)
    assert [again.steps(peer) for peer in sorted(NAMES)] == list(story.steps())
    assert again.ready({A.peer}, {B.peer}, 7.0 + 74.0) == set()
    assert again.ready({A.peer}, {B.peer}, 7.0 + 76.0) == {A.peer}


@pytest.mark.parametrize("lie", [0.0, 1e-300, 1e30, None])
def test_a_false_speed_costs_its_member_only(lie: float | None) -> None:
    """The honest two have the same groups, and the same or more frequent rounds: nobody gets less
    than the least or more than the most.
    """
    story = grouped()
    story.decided(1.0, c=lie)
    a, b, c = story.steps()
    assert (a, b) == (50, 24)
    assert 10 <= c <= 50
    story.decided(48.0, a=1.0, b=2.0)
    assert all(10 <= steps <= 50 for steps in story.steps()[:2])
    assert story.due("ab", "" if lie is None else "c") == "ab"  # in their group is nobody who lies
    if lie == 1e30:
        assert story.steps() == (50, 25, 10)


@pytest.mark.parametrize("seed", range(5))
def test_false_times_of_entries_make_members_late_and_lose_nothing(seed: int) -> None:
    """Whatever proposers say of the time, some contribution that is there makes a round as soon as
    nobody else is to come.
    """
    rng, story = random.Random(seed), Story(A, B, C)
    for _ in range(200):
        there = {member.peer for member in (A, B, C) if rng.random() < 0.6}
        found = story.grouping.ready(
            there, NAMES - there if rng.random() < 0.5 else set(), story.now
        )
        assert found <= there
        assert story.grouping.ready(there, set(), story.now) or not there
        story.decided(
            rng.choice([0.0, 1e-6, 7.0, 1e9]),
            **{str(peer): rng.choice([None, 0.0, 0.1, 3.0, 1e30]) for peer in found},
        )
        assert all(steps == 0 or 10 <= steps <= 50 for steps in story.steps())


def test_an_entry_takes_the_time_no_further_than_to_the_end_of_another_groups_wait() -> None:
    story = grouped()
    story.decided(1e9, c=4.0)  # a lie: at most to 76, when a and b have been waited for
    assert story.due("a", "b") == ""
    assert story.due("a", "b", 0.1) == "a"

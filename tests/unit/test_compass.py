"""FedCompass' groups, on machines of known speeds."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from atoll.collectives.errors import ConfigError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.arrivals.compass import Compass, Decision

SPEEDS = {
    PeerId(name): speed for name, speed in zip("abcde", (1.0, 1.5, 2.0, 4.0, 5.0), strict=True)
}
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def orders(decisions: list[Decision[str]]) -> dict[PeerId, int]:
    return {peer: steps for decision in decisions for peer, steps in decision.orders}


def merged(decisions: list[Decision[str]]) -> list[list[tuple[str, int]]]:
    return [
        [(part.work, part.staleness) for part in decision.parts]
        for decision in decisions
        if decision.parts
    ]


class Swarm:
    """Members that work at their speed, times a factor drawn anew for each turn, and bring their
    own name and turn.
    """

    def __init__(self, seed: int = 0, spread: float = 0.0) -> None:
        self.compass: Compass[str] = Compass()
        self.rng, self.spread = random.Random(seed), spread
        self.due: list[tuple[float, PeerId, str]] = []
        self.sent: list[str] = []
        self.counted: Counter[str] = Counter()
        self.merges: list[
            tuple[float, list[tuple[PeerId, float]]]
        ] = []  # when, and who had come when
        self.came: dict[PeerId, float] = {}
        self.arrival: dict[str, float] = {}
        self.waited = self.worked = self.now = 0.0
        for peer in SPEEDS:
            self.do(self.compass.join(peer, 0.0))

    def do(self, decisions: list[Decision[str]]) -> None:
        for decision in decisions:
            assert all(part.staleness >= 0 for part in decision.parts)
            self.counted.update(part.work for part in decision.parts)
            if decision.parts:
                self.merges.append(
                    (self.now, [(part.peer, self.arrival[part.work]) for part in decision.parts])
                )
            for peer, steps in decision.orders:
                assert 20 <= steps <= 100
                self.waited += self.now - self.came.pop(peer, self.now)
                seconds = steps * SPEEDS[peer] * (1 + self.spread * self.rng.random())
                self.worked += seconds
                work = f"{peer}{len(self.sent)}"
                self.sent.append(work)
                heapq.heappush(self.due, (self.now + seconds, peer, work))

    def until(self, end: float) -> None:
        while self.due[0][0] <= end:
            timer = self.compass.due
            if timer is not None and timer < self.due[0][0]:
                self.now = timer + 1e-9
                self.do(self.compass.tick(self.now))
                continue
            self.now, peer, work = heapq.heappop(self.due)
            self.came[peer] = self.arrival[work] = self.now
            self.do(self.compass.arrived(peer, work, self.now))


def test_a_group_arrives_together_and_nobody_waits_long() -> None:
    swarm = Swarm()
    swarm.until(1000)
    swarm.waited = swarm.worked = 0.0
    swarm.merges.clear()
    swarm.until(10_000)
    assert swarm.waited / (swarm.waited + swarm.worked) < 0.1
    assert max(len(parts) for _, parts in swarm.merges) == 5
    for _, parts in swarm.merges:
        times = [time for _, time in parts]
        assert max(times) - min(times) <= max(SPEEDS.values())


@pytest.mark.parametrize("seed", range(5))
def test_every_contribution_counts_once_whatever_the_delays(seed: int) -> None:
    """With turns up to four times as long as planned many are late, some twice between two merges."""
    swarm = Swarm(seed, spread=3.0)
    swarm.until(30_000)
    late = len(swarm.sent) - sum(swarm.counted.values())
    assert set(swarm.counted.values()) == {1}
    assert late <= 2 * len(SPEEDS)  # under way, or waiting for the next merge


def test_the_first_return_is_merged_alone_and_opens_a_group_that_others_join() -> None:
    compass: Compass[str] = Compass()
    for peer in (A, B):
        assert orders(compass.join(peer, 0.0)) == {peer: 100}
    first = compass.arrived(A, "a1", 100.0)
    assert (merged(first), orders(first)) == ([[("a1", 0)]], {A: 100})
    second = compass.arrived(B, "b1", 150.0)  # 1.5 s a step: a's group is back at 200 s
    assert (merged(second), orders(second)) == ([[("b1", 1)]], {B: 33})
    assert compass.due == 250.0
    assert compass.arrived(B, "b2", 199.5) == []
    third = compass.arrived(A, "a2", 200.0)
    assert merged(third) == [[("b2", 0), ("a2", 1)]]
    assert orders(third) == {A: 100, B: 66}


def test_a_slow_one_gets_a_group_of_its_own_that_meets_the_fast_one_later() -> None:
    compass: Compass[str] = Compass()
    for peer in (A, C):
        compass.join(peer, 0.0)
    compass.arrived(A, "a1", 100.0)  # back at 200, at 250 at the latest
    assert orders(compass.arrived(C, "c1", 190.0)) == {C: (350 - 190) * 100 // 190}


def test_who_is_late_counts_in_the_next_merge_and_gets_the_anchor_at_once() -> None:
    compass: Compass[str] = Compass()
    for peer in (A, B):
        compass.join(peer, 0.0)
    compass.arrived(A, "a1", 100.0)
    compass.arrived(B, "b1", 150.0)
    assert compass.arrived(A, "a2", 200.0) == []
    assert compass.tick(250.0) == []  # at this moment B would be in time
    over = compass.tick(250.1)
    assert (merged(over), orders(over)) == ([[("a2", 1)]], {A: 100})
    late = compass.arrived(B, "b2", 260.0)
    assert (merged(late), list(orders(late))) == ([], [B])
    assert merged(compass.arrived(A, "a3", 350.0)) == []  # b has joined its group
    assert merged(compass.arrived(B, "b3", compass.due or 0.0)) == [
        [("a3", 0), ("b3", 0), ("b2", 1)]
    ]


def test_two_late_contributions_of_one_member_both_count() -> None:
    compass: Compass[str] = Compass(most=20)
    for peer in (A, B):
        compass.join(peer, 0.0)
    compass.arrived(A, "a1", 20.0)
    compass.arrived(B, "b1", 20.0)
    assert merged(compass.tick(51.0)) == []
    for time, work in ((60.0, "b2"), (600.0, "b3")):
        found = compass.arrived(B, work, time)
        assert (merged(found), list(orders(found))) == ([], [B])
    found = compass.arrived(B, "b4", 610.0)
    assert [[work for work, _ in parts] for parts in merged(found)] == [["b4", "b2", "b3"]]


def test_a_group_does_not_wait_for_who_is_gone() -> None:
    compass: Compass[str] = Compass()
    for peer in (A, B):
        compass.join(peer, 0.0)
    compass.arrived(A, "a1", 100.0)
    compass.arrived(B, "b1", 150.0)
    compass.arrived(A, "a2", 200.0)
    left = compass.gone(B, 201.0)
    assert (merged(left), orders(left)) == ([[("a2", 1)]], {A: 100})
    assert compass.gone(A, 202.0) == []
    assert compass.due is None
    with pytest.raises(ConfigError):
        compass.arrived(B, "b2", 203.0)


def test_a_first_turn_may_be_short() -> None:
    compass: Compass[str] = Compass(first=5)
    assert orders(compass.join(A, 0.0)) == {A: 5}
    assert orders(compass.arrived(A, "a1", 5.0)) == {A: 100}


def test_values_that_make_no_schedule_are_refused() -> None:
    for wrong in (
        {"least": 0},
        {"least": 30, "most": 20},
        {"slack": 0.9},
        {"keep": 0.0},
        {"first": 101},
    ):
        with pytest.raises(ConfigError):
            Compass(**wrong)  # type: ignore[arg-type]

"""Members that a busy machine keeps silent for some seconds are members still when they are back,
so that they make a majority with those who lived meanwhile.
"""

from __future__ import annotations

from typing import Any

import pytest

from atoll.collectives import api
from atoll.collectives.layout import make_layout
from atoll.collectives.round import Timing
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.session.durations import EVICT_S, durations

LAYOUT = make_layout([("w", (16,))])
END_S = 100.0
AWAY_S = 60.0  # of who is killed: a slow machine starts it that slowly


def gap(
    swarm: LocalSwarm, after_s: float, members: int, end_s: float = END_S
) -> tuple[float, set[int]]:
    """The longest time without a round after ``after_s``, and how many members there were then."""
    at, sizes = dict[int, float](), set[int]()

    def script(member: Any) -> None:
        member.open(LAYOUT, lambda into: into.zero_())
        while member.index and member.clock() < 8.0 and len(member.members()) < members:
            member.sleep(0.1)
        while member.clock() < end_s:
            member.sleep(0.3)
            pending = member.contribute(samples=1, write=lambda into: into.zero_())
            outcome = pending.wait(END_S)
            at[outcome.round] = min(at.get(outcome.round, END_S), member.clock())
            if member.clock() > after_s:
                sizes.add(len(member.members()))

    swarm.run(script, limit_s=END_S + 200.0)
    times = sorted(when for when in at.values() if when > after_s)
    return max(b - a for a, b in zip([after_s, *times], times, strict=False)), sizes


def founder_is_gone(timing: Timing) -> LocalSwarm:
    """Five are left, two are busy for six seconds, and in the end of that two others are killed."""
    settings = RunSettings(codec="fp32", sync_every=1)
    swarm = LocalSwarm(6, settings=settings, latency_s=0.02, seed=1, timing=timing)
    swarm.crash_at(0, 12.0)
    for who in (4, 5):
        swarm.freeze_at(who, 30.0, 6.0)
    for who in (1, 2):
        swarm.crash_at(who, 35.0, back_after_s=AWAY_S)
    return swarm


def founder_is_killed(timing: Timing) -> LocalSwarm:
    """All but the founder are busy for four seconds, in the end of which that is killed."""
    settings = RunSettings(codec="fp32", sync_every=1)
    swarm = LocalSwarm(5, settings=settings, latency_s=0.02, seed=1, timing=timing)
    for who in (1, 2, 3, 4):
        swarm.freeze_at(who, 30.0, 4.0)
    return swarm.crash_at(0, 33.0, back_after_s=AWAY_S)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "members"), [(founder_is_gone, 6), (founder_is_killed, 5)])
def test_members_that_were_busy_are_a_majority_again_when_they_are_back(
    what: Any, members: int
) -> None:
    before, _ = gap(what(Timing()), 25.0, members)
    assert before > AWAY_S - 10.0
    mended, _ = gap(what(durations(RunSettings(codec="fp32", sync_every=1))), 25.0, members)
    assert mended < 10.0


@pytest.mark.slow
def test_who_stays_away_is_evicted_and_one_more_may_die() -> None:
    """Of five that decide without the organiser, one after another, each `EVICT_S` after the one
    before, until three are left of which one dies."""
    settings = RunSettings(codec="fp32", sync_every=1)
    swarm = LocalSwarm(6, settings=settings, latency_s=0.02, seed=1, timing=durations(settings))
    for who in range(4):
        swarm.crash_at(who, 20.0 + (EVICT_S + 3.0) * who)
    longest, sizes = gap(swarm, 15.0, 6)
    assert longest < 10.0
    assert sizes == {6, 5, 4, 3}


@pytest.mark.parametrize("seed", range(2))
def test_where_nobody_offers_anything_the_dead_are_evicted_all_the_same(seed: int) -> None:
    """In a run of operations alone nothing else would ask for an entry: four of six die one after
    another, and the two that are left of the last three still decide."""
    settings = RunSettings(codec="fp32", sync_every=1)
    swarm = LocalSwarm(6, settings=settings, latency_s=0.02, seed=seed, timing=durations(settings))
    sizes = list[tuple[float, int]]()

    def script(member: Any) -> Any:
        api.enter(member)
        while member.clock() < 90.0:
            member.sleep(1.0)
            if member.index == 5:
                sizes.append((member.clock(), len(member.members())))
        if member.index < 4:
            return None
        return api.barrier(member, op_id="last", deadline_s=60.0).wait()

    for who in range(4):
        swarm.crash_at(who, 20.0 + (EVICT_S + 6.0) * who)
    outcomes = swarm.run(script, limit_s=300.0)[4:]
    assert [outcome.status for outcome in outcomes] == ["committed", "committed"]
    assert {len(outcome.contributors) for outcome in outcomes} == {2}
    assert {size for at, size in sizes if at > 15.0} == {6, 5, 4, 3}
    for who in range(3):  # nobody is waited for longer than `EVICT_S` and what it takes to see it
        died = 20.0 + (EVICT_S + 6.0) * who
        assert {size for at, size in sizes if died + 15.5 < at < died + 16.0 + EVICT_S} == {5 - who}

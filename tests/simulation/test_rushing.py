"""A member that offers nothing as soon as each round opens, by what any script may call, does not
end the turns of the others after one step.
"""

from __future__ import annotations

from typing import Any

import pytest
from seeds import daily

from atoll.collectives.layout import make_layout
from atoll.collectives.round import Timing
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm

STEP_S = 0.05
STEPS = 100  # of a turn
SPAN_S = 60.0
LAYOUT = make_layout([("w", (4096,))])
SETTINGS = RunSettings(codec="fp32", sync_every=STEPS)


def play(
    least_turn: float, *, rushers: int = 0, members: int = 4, slow: int = 0
) -> tuple[list[list[int]], int]:
    """The steps of each contribution of each honest member, and the rounds that were decided, in a
    minute. A step takes ``STEP_S``, of the first ``slow`` members twenty times as long; during a
    wait nobody trains.
    """
    turns = [list[int]() for _ in range(members)]
    rounds = [0] * members
    swarm = LocalSwarm(
        members, settings=SETTINGS, latency_s=0.01, seed=5, timing=Timing(least_turn=least_turn)
    )

    def script(member: Any) -> None:
        member.open(LAYOUT, lambda into: into.zero_())
        while len(member.members()) < members:
            member.sleep(0.1)
        member.sleep(max(0.0, 5.0 - member.clock()))
        rushes = member.index >= members - rushers
        while member.clock() < 5.0 + SPAN_S:
            base, steps = member.anchor().round, 0
            while not rushes and steps < STEPS and not (steps and member.closing > base):
                member.sleep(STEP_S * (20 if member.index < slow else 1))
                steps += 1
            pending = member.contribute(samples=steps or STEPS, write=lambda into: into.zero_())
            rounds[member.index] = pending.wait(30.0).round
            if not rushes:
                turns[member.index].append(steps)

    swarm.run(script, limit_s=200.0)
    return turns[: members - rushers], max(rounds)


def worked(turns: list[list[int]]) -> float:
    """The least share of the minute that an honest member trained."""
    return min(sum(steps) * STEP_S / SPAN_S for steps in turns)


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_rusher_costs_a_tenth_of_the_others_time_at_most() -> None:
    alone, _ = play(9.0)
    kept, rounds = play(9.0, rushers=1)
    rushed, many = play(0.0, rushers=1)
    assert worked(alone) > 0.95
    assert worked(kept) > 0.9 * worked(alone)
    assert worked(rushed) < 0.5
    assert many > 5 * rounds


@pytest.mark.parametrize(("members", "slow"), daily(2, [(2, 0), (2, 1), (3, 0), (5, 1)]))
def test_who_does_not_rush_is_not_held_up(members: int, slow: int) -> None:
    """Rounds end as before, and when they did."""
    assert play(9.0, members=members, slow=slow) == play(0.0, members=members, slow=slow)


def test_who_is_fast_among_two_that_are_slow_is_hardly_held_up() -> None:
    """The two hear later that they are to hurry, by at most nine of their own steps."""
    kept, rounds = play(9.0, members=3, slow=2)
    before, _ = play(0.0, members=3, slow=2)
    assert sum(kept[2]) > 0.9 * sum(before[2])
    assert rounds >= 10

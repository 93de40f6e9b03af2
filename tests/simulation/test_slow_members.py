"""A member whose steps are much longer than the others': nobody waits for it, it ends no round, and
what it has done is in a later one. Played by nodes' code in virtual time.
"""

from __future__ import annotations

import pytest

from atoll.collectives.swarm import RunSettings
from atoll.node.simulation.churn import Mishap
from atoll.node.simulation.fleet import parse_fleet
from atoll.node.simulation.fleet_run import FleetRun, PlayedRun
from atoll.optim.planning.waiting import costs_more
from atoll.optim.rounds.slow import SlowMember

ROUNDS = 40
FAST = "3 x 250ms@100Mbit"


def played(
    fleet: str, *mishaps: Mishap, rounds: int = ROUNDS, delay: int | None = None
) -> PlayedRun:
    settings = RunSettings(
        sync_every=20, rounds=rounds, overlap="late" if delay else "none", delay=delay
    )
    machines = parse_fleet(fleet, step_s=None, flops=None)
    return FleetRun(settings, machines, 200_000, mishaps=mishaps).play()


def fast_share(run: PlayedRun) -> float:
    return sum(machine.share for machine in run.machines[:3]) / 3


@pytest.mark.slow
@pytest.mark.parametrize("delay", [None, 4])
def test_one_that_is_twenty_times_slower_costs_the_others_nothing(
    delay: int | None,
) -> None:
    """Before, the three trained 0.88 of the time in place of 0.98, in rounds of 17.7 steps."""
    without, with_it = played(FAST, delay=delay), played(FAST + ", 5s@100Mbit", delay=delay)
    assert with_it.rounds == without.rounds == ROUNDS
    assert fast_share(with_it) >= 0.97 * fast_share(without)  # 40 rounds, of which one waits
    for machine, alone in zip(with_it.machines[:3], without.machines, strict=True):
        assert machine.rounds == ROUNDS
        assert machine.samples == pytest.approx(alone.samples, rel=0.01)  # no round was cut short
    slow = with_it.machines[3]
    assert slow.rounds >= ROUNDS // 2  # what it does counts
    assert slow.samples >= 8 * (slow.steps - 1)  # the last step may come after the last round


def test_it_contributes_to_every_other_round_where_a_step_takes_longer_than_a_round() -> None:
    run = played(FAST + ", 7s@100Mbit", rounds=12)
    assert run.machines[3].rounds in (4, 5, 6)
    assert {machine.rounds for machine in run.machines[:3]} == {12}


def test_members_that_are_a_little_slower_are_waited_for() -> None:
    """At 1.5 times the fastest one's step a member brings more than its waits cost."""
    run = played("2 x 250ms@100Mbit, 375ms@100Mbit", rounds=8)
    assert [machine.rounds for machine in run.machines] == [8, 8, 8]


def test_where_the_fast_ones_are_gone_it_goes_on_alone() -> None:
    """The founder is the slow one; what it holds back for others to end the round is announced."""
    run = played("5s@100Mbit, 250ms@100Mbit", Mishap(30.0, "kill", 1), rounds=12)
    assert run.ended == "finished"
    assert run.rounds == 12
    assert [count for _, count in run.counted[-2:]] == [1, 1]


# ── the rule


def test_a_member_stands_aside_where_waiting_costs_more_than_it_brings() -> None:
    assert not costs_more(1 / 20, 4 * 20)  # alike
    assert not costs_more(3 / 20, 4 * 20)  # three times slower, of five: 6.7 steps for 6
    assert costs_more(4 / 20, 4 * 20)
    slow = SlowMember()
    slow.adopted(0.0, 0, 0)
    slow.trained(1, 8, 5.0)
    slow.adopted(5.0, 1, 640)
    assert slow.stands_aside(steps=20, fired=1, ended=0, members=5)
    assert slow.too_late_for_another(0.0)
    alike = SlowMember()
    alike.adopted(0.0, 0, 0)
    alike.trained(20, 160, 5.0)
    alike.adopted(5.1, 1, 64_000)  # of four hundred members
    assert not alike.stands_aside(steps=20, fired=1, ended=0, members=400)


def test_what_was_waited_before_a_run_began_makes_no_member_slow() -> None:
    member = SlowMember()
    member.adopted(0.0, 0, 0)
    member.trained(20, 160, 40.0)  # of which 35 s were spent on waiting
    member.adopted(41.0, 1, 800)
    member.trained(8, 64, 2.0)
    member.adopted(44.0, 2, 1120)
    assert not member.stands_aside(steps=20, fired=8, ended=1, members=5)


def test_before_a_round_was_measured_its_first_steps_tell() -> None:
    new = SlowMember()
    assert not new.stands_aside(steps=20, fired=1, ended=0, members=5)  # nobody has ended one
    assert new.stands_aside(steps=20, fired=1, ended=1, members=5)
    assert not new.stands_aside(steps=20, fired=8, ended=1, members=5)
    assert not new.stands_aside(steps=1, fired=1, ended=1, members=5)

"""A member whose steps are much longer than the others', or its link much thinner: nobody waits for
it, it ends no round, and what it has done is in a later one. Played by nodes' code in virtual time.
"""

from __future__ import annotations

import pytest

from atoll.collectives.swarm import RunSettings
from atoll.node.simulation.churn import Mishap
from atoll.node.simulation.fleet import parse_fleet
from atoll.node.simulation.fleet_run import FleetRun, PlayedRun
from atoll.optim.rounds.slow import SlowMember, costs_more

ROUNDS = 40
FAST = "3 x 250ms@100Mbit"


def played(
    fleet: str,
    *mishaps: Mishap,
    rounds: int = ROUNDS,
    seed: int = 0,
    **more: int,
) -> PlayedRun:
    settings = RunSettings(**{"sync_every": 20, "rounds": rounds, **more})  # type: ignore[arg-type]
    machines = parse_fleet(fleet, step_s=None, flops=None)
    return FleetRun(settings, machines, 200_000, mishaps=mishaps, seed=seed).play()


def fast_share(run: PlayedRun, count: int = 3) -> float:
    return sum(machine.share for machine in run.machines[:count]) / count


@pytest.mark.slow
def test_one_that_is_twenty_times_slower_costs_the_others_nothing() -> None:
    """Before, the three trained 0.88 of the time in place of 0.98, in rounds of 17.7 steps."""
    without, with_it = played(FAST), played(FAST + ", 5s@100Mbit")
    assert with_it.rounds == without.rounds == ROUNDS
    assert fast_share(with_it) >= 0.97 * fast_share(without)  # 40 rounds, of which three wait
    for machine, alone in zip(with_it.machines[:3], without.machines, strict=True):
        assert machine.rounds == ROUNDS
        assert machine.samples == pytest.approx(alone.samples, rel=0.02)  # two rounds are cut short
    slow = with_it.machines[3]
    assert slow.rounds >= ROUNDS // 2  # what it does counts
    assert slow.samples >= 8 * (slow.steps - 1)  # the last step may come after the last round


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fifth", ["5s@100Mbit", "250ms@5Mbit", "5s@5Mbit"])
def test_a_fifth_that_is_twenty_times_slower_leaves_four_their_training(
    fifth: str, seed: int
) -> None:
    """In compute, in its link, in both. All were waited for before: 0.90, 0.94, 0.86."""
    without = played("4 x 250ms@100Mbit", rounds=100, seed=seed)
    with_it = played(f"4 x 250ms@100Mbit, {fifth}", rounds=100, seed=seed)
    assert with_it.rounds == without.rounds == 100
    assert fast_share(with_it, 4) >= 0.98 * fast_share(without, 4)
    assert with_it.seconds <= 1.02 * without.seconds
    fast = sum(machine.samples for machine in with_it.machines[:4])
    assert fast >= 0.98 * without.samples  # their rounds are not cut short, either
    assert with_it.machines[4].rounds >= 5  # it counts


@pytest.mark.slow
def test_who_has_a_thin_link_is_in_every_nth_round() -> None:
    """An upload of 0.3 s, in rounds of 5 s, is waited for now and then; the three others' votes
    decide, and rounds that this member would convene are convened by others.
    """
    run = played(FAST + ", 250ms@5Mbit", rounds=10)
    assert [machine.rounds for machine in run.machines] == [10, 10, 10, 2]
    # of the rounds between, it brings three at most: what it did before weighs nothing
    assert run.machines[3].samples <= 3 * 160 * run.machines[3].rounds
    begun_s, counted = run.begun_s or 0.0, run.counted
    lengths = [
        at - before for (before, _), (at, _) in zip([(begun_s, 0), *counted], counted, strict=False)
    ]
    without = [length for length, (_, count) in zip(lengths, counted, strict=True) if count == 3]
    assert max(without) < 5.3  # 5 s of steps, 0.15 s for the others, 0.08 s for another convener


def test_it_contributes_to_every_other_round_where_a_step_takes_longer_than_a_round() -> None:
    run = played(FAST + ", 7s@100Mbit", rounds=12)
    assert run.machines[3].rounds in (4, 5, 6)
    assert {machine.rounds for machine in run.machines[:3]} == {12}


@pytest.mark.slow
@pytest.mark.rota(7)
def test_in_short_rounds_it_costs_the_others_its_first_step() -> None:
    """A step of 5 s lasts as long as a dozen rounds of one step, each of which waited a second for
    it: 43.5 s in place of 31.2. What others do meanwhile is in the log, and nothing else is known
    so early.
    """
    without = played(FAST, rounds=24, sync_every=10, growth=4)
    with_it = played(FAST + ", 5s@100Mbit", rounds=24, sync_every=10, growth=4)
    assert [machine.rounds for machine in with_it.machines[:3]] == [24] * 3
    assert with_it.seconds - without.seconds <= 5.0
    assert with_it.machines[3].rounds >= 4  # it counts


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
    slow = measured((0.0, 0), (5.0, 640), (10.0, 1280), steps=((1, 8, 5.0), (1, 8, 5.0)))
    assert slow.stands_aside(20)
    assert slow.too_late_for_another(0.0)
    crowd = measured((0.0, 0), (5.1, 64_000), (10.2, 128_000), steps=((20, 160, 5.0),) * 2)
    assert not crowd.stands_aside(20)  # alike, of four hundred members


def measured(*anchors: tuple[float, int], steps: tuple[tuple[int, int, float], ...]) -> SlowMember:
    """Anchors of rounds 0, 1, 2, … at (seconds, samples), with steps (how many, on how many
    samples, seconds) in between.
    """
    member = SlowMember()
    for round_, (at, samples) in enumerate(anchors):
        member.adopted(at, round_, samples)
    for each in steps:
        member.trained(*each)
    return member


def test_what_was_waited_before_a_run_began_makes_no_member_slow() -> None:
    waited = (20, 160, 40.0)  # of which 35 s were spent on waiting
    member = measured((0.0, 0), (41.0, 800), (44.0, 1120), steps=(waited, (8, 64, 2.0)))
    assert not member.stands_aside(20)


def test_one_measurement_makes_no_member_slow() -> None:
    """Its first step may have compiled the model; one that began late heard of a round's end in
    its first step.
    """
    first = (1, 8, 60.0)
    assert not measured((0.0, 0), (5.0, 640), (10.0, 1280), steps=(first,)).stands_aside(20)
    assert not measured((0.0, 0), (5.0, 640), steps=(first, first)).stands_aside(20)
    warm = measured((0.0, 0), (5.0, 640), (10.0, 1280), steps=(first, (17, 136, 4.3)))
    assert not warm.stands_aside(20)


def test_long_steps_on_as_many_samples_make_no_member_slow() -> None:
    """Three times as long, on three times the samples (found in Trainer, where one of two members
    accumulated more gradients): half of all that is in a round.
    """
    anchors = (0.0, 0), (6.0, 96), (12.0, 192)
    assert not measured(*anchors, steps=((1, 48, 6.0), (1, 48, 6.0))).stands_aside(3)
    assert measured(*anchors, steps=((1, 8, 6.0), (1, 8, 6.0))).stands_aside(3)

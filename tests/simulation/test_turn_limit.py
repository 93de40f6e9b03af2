"""Until when a round of the drawn sites waits: for all of them in the first round; then for eight
times the slowest turn of the round before, two minutes at least; and always, where a masked sum
would be of too few.
"""

from __future__ import annotations

import pytest
import torch
from msgspec import structs
from torch import nn

from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round.turns import LEAST_S, SLOWEST, TurnClock
from atoll.collectives.round_settings import WorkSettings
from atoll.collectives.swarm import RunSettings, SecureSettings, SiteSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

ROUNDS = 4
STEPS = 2
HANGS = 400.0


def played(
    *, hangs_in: int, step_s: float = 1.0, secure: bool = False
) -> tuple[list[float], list[int]]:
    """When each round was there at the first of three sites, and how many sites were in it. The
    third hangs for `HANGS` seconds in the round ``hangs_in``."""
    settings = RunSettings(
        sync_every=None,
        rounds=ROUNDS,
        outer=OuterSettings(kind="sgd", lr=1.0),
        site=SiteSettings(work=WorkSettings(steps=STEPS, weights="equal")),
    )
    if secure:
        masks = SecureSettings()
        settings = structs.replace(settings, codec="bits", reducer="copy", secure=masks)
    times, counts = list[float](), list[int]()

    def script(member: LocalMember) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def note(outcome: Outcome) -> None:
            if member.index == 0:
                times.append(member.clock())
                counts.append(len(outcome.contributors))

        attachment = attach(model, optimizer, member, clock=member.clock, on_round=note)
        hung = False
        while not attachment.done:
            if member.index == 2 and attachment.round == hangs_in - 1 and not hung:
                hung = True
                member.sleep(HANGS)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    LocalSwarm(3, settings=settings).run(script, step_s=step_s, limit_s=20_000)
    return times, counts


@pytest.mark.slow
def test_the_first_round_waits_for_everybody() -> None:
    times, counts = played(hangs_in=1)
    assert counts[0] == 3
    assert times[0] >= HANGS


@pytest.mark.slow
def test_who_is_not_done_in_time_is_left_out_and_comes_back() -> None:
    times, counts = played(hangs_in=3)
    assert counts[:3] == [3, 3, 2]
    assert LEAST_S <= times[2] - times[1] < LEAST_S + 10


@pytest.mark.slow
def test_the_limit_follows_the_slowest_turn_of_the_round_before() -> None:
    times, counts = played(hangs_in=3, step_s=20.0)
    assert counts[:3] == [3, 3, 2]
    turn = times[1] - times[0]
    assert SLOWEST * STEPS * 20 <= times[2] - times[1] <= SLOWEST * turn + 10


@pytest.mark.slow
def test_a_masked_sum_of_too_few_waits_on() -> None:
    times, _ = played(hangs_in=3, secure=True)
    assert times[2] - times[1] >= HANGS
    assert len(times) == ROUNDS


def test_the_clock_by_itself() -> None:
    clock = TurnClock(0.0)
    assert not clock.over(1e9)  # nobody knows how long work takes
    clock.done(5.0)
    clock.next(6.0)
    assert clock.ends_at == 6.0 + LEAST_S
    clock.done(106.0)
    clock.next(110.0)
    assert clock.ends_at == 110.0 + SLOWEST * 100.0
    assert not clock.over(909.0)
    assert clock.over(910.0)

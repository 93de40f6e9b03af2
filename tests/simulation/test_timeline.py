"""Where the time of a reduction goes: told by every member, and the slowest is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.collectives import api
from atoll.collectives.identifiers import PeerId
from atoll.collectives.swarm import RunSettings
from atoll.collectives.telemetry import PHASES, Event, ReductionTimed, subscribe
from atoll.node.local import LocalSwarm

P = [PeerId(f"p{index}") for index in range(3)]


def timed(script: Any, **options: Any) -> list[ReductionTimed]:
    """What three members tell while they play ``script``."""
    heard = list[Event]()
    unsubscribe = subscribe(heard.append)
    try:
        LocalSwarm(3, settings=RunSettings(codec="fp32", sync_every=1), **options).run(script)
    finally:
        unsubscribe()
    return [event for event in heard if isinstance(event, ReductionTimed)]


def entered(member: Any) -> None:
    """Open, and wait until all three are members and know it."""
    api.enter(member)
    while len(member.members()) < 3:
        member.sleep(0.1)
    member.sleep(1.0)


def ordered(timing: ReductionTimed) -> None:
    """What must hold of each, whatever happened."""
    assert 0 <= timing.planned_s <= timing.reduced_s <= timing.decided_s <= timing.elapsed_s
    assert tuple(timing.phases) == PHASES
    assert min(timing.phases["ready"].values()) == 0
    others = {peer for peer in P if peer != timing.peer}
    assert set(timing.phases["part"]) <= others
    assert set(timing.phases["result"]) <= others
    for phase in ("part", "result"):
        assert all(
            timing.planned_s <= at <= timing.reduced_s for at in timing.phases[phase].values()
        )


def test_a_late_caller_is_named_by_all() -> None:
    def script(member: Any) -> None:
        entered(member)
        member.sleep(2.5 if member.index == 1 else 0.0)
        assert (
            member.all_reduce(torch.ones(200_000), op_id="late", everyone=True).wait().status
            == "committed"
        )
        member.sleep(1.0)

    found = timed(script)
    assert sorted(timing.peer for timing in found) == P
    for timing in found:
        ordered(timing)
        assert (timing.op_id, timing.reducer, timing.codec, timing.numel) == (
            "late",
            "mean",
            "fp32",
            200_000,
        )
        assert (timing.contributors, timing.ballot, timing.revision, timing.asked_again) == (
            tuple(P),
            0,
            0,
            0,
        )
        assert timing.slowest is not None
        assert timing.slowest[:2] == (P[1], "ready")
        assert timing.slowest[2] == pytest.approx(2.5, abs=0.2)
        assert timing.planned_s == pytest.approx(2.5, abs=0.2)


def test_training_rounds_are_told_too_and_parts_come_before_results() -> None:
    def script(member: Any) -> None:
        entered(member)
        for _ in range(3):
            assert (
                member.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(60).status
                == "committed"
            )
        member.sleep(1.0)

    found = timed(script, bandwidth_bytes_per_s=1e6)
    rounds = [timing for timing in found if timing.op_id == ""]
    assert len({timing.round for timing in rounds}) >= 3
    for timing in rounds:
        ordered(timing)
        assert timing.log == "main/local"


def test_a_slow_link_shows_in_the_bytes_phases() -> None:
    def script(member: Any) -> None:
        entered(member)
        if member.index == 0:
            for peer in (P[0], P[2]):
                member._place.network.link(P[1], peer).bandwidth_bytes_per_s = 4e5
        member.sleep(0.5)
        assert (
            member.all_reduce(torch.ones(600_000), op_id="slow", everyone=True).wait().status
            == "committed"
        )
        member.sleep(1.0)

    found = timed(script, bandwidth_bytes_per_s=1e7)
    assert len(found) == 3
    for timing in found:
        ordered(timing)
        assert timing.slowest is not None
        assert timing.slowest[1] in ("part", "result")
    assert {timing.slowest[0] for timing in found if timing.peer != P[1] and timing.slowest} == {
        P[1]
    }


def test_a_killed_member_shows_as_a_revision_or_another_ballot() -> None:
    swarm = LocalSwarm(3, settings=RunSettings(codec="fp32"), bandwidth_bytes_per_s=2e6).crash_at(
        2, 10.3
    )
    heard = list[Event]()

    def script(member: Any) -> None:
        entered(member)
        member.sleep(10.0 - member.clock())
        outcome = member.all_reduce(torch.ones(500_000), op_id="killed").wait()
        assert [share.peer for share in outcome.contributors] == P[:2]

    unsubscribe = subscribe(heard.append)
    try:
        swarm.run(script)
    finally:
        unsubscribe()
    found = [event for event in heard if isinstance(event, ReductionTimed)]
    assert [timing.peer for timing in sorted(found, key=lambda timing: timing.peer)] == P[:2]
    for timing in found:
        ordered(timing)
        assert timing.ballot + timing.revision > 0
        assert timing.contributors == tuple(P[:2])
        assert timing.elapsed_s > 1.0  # it was waited for

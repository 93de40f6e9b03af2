"""A member to which nothing happens looks seldom for what needs repair, and as often as ever once
something does; nobody stays behind.
"""

from __future__ import annotations

from typing import Any

import torch

from atoll.collectives import api
from atoll.collectives.round import Timing
from atoll.node.local import LocalSwarm
from atoll.node.session.session import RESTING_PULLS, Session
from atoll.node.simulation.local_member import LocalMember

PULL_S = Timing().pull_s


def session_of(member: LocalMember) -> Session:
    run = member._node().run
    assert isinstance(run, Session)
    return run


def test_a_member_rests_until_an_operation_or_a_round_is_under_way() -> None:
    def body(member: Any) -> list[float]:
        api.enter(member)
        member.sleep(5.0 - member.clock())
        found = [session_of(member).look_s]
        if member.index:
            member.sleep(2.0)
        handle = api.barrier(member, op_id="b", deadline_s=20.0)
        member.sleep(0.5)
        found.append(session_of(member).look_s)
        assert handle.wait().status == "committed"
        member.sleep(10.0 - member.clock())
        found.append(session_of(member).look_s)
        if member.index:
            member.sleep(0.5)
        pending = member.contribute(samples=1, write=lambda out: out.fill_(1.0))
        member.sleep(0.25)
        found.append(session_of(member).look_s)
        assert pending.wait(20.0).counted
        member.sleep(15.0 - member.clock())
        return [*found, session_of(member).look_s]

    first, second = LocalSwarm(2).run(body)
    rest = RESTING_PULLS * PULL_S
    assert first == [rest, PULL_S, rest, PULL_S, rest]
    assert second[0] == second[2] == second[4] == rest


def test_everybody_hears_of_the_last_member_though_nothing_else_happens() -> None:
    """The entry that let it in may be decided while another newcomer still catches up, and nobody
    says it again.
    """

    def body(member: Any) -> int:
        api.enter(member)
        member.sleep(4.0 - member.clock())
        return len(member.members())

    for latency_s in (0.005, 0.02, 0.03, 0.05):
        assert LocalSwarm(5, latency_s=latency_s).run(body) == [5] * 5


def test_results_are_as_before_after_a_long_rest() -> None:
    def body(member: Any) -> tuple[str, float]:
        api.enter(member)
        member.sleep(60.0 - member.clock())
        began, values = member.clock(), torch.full((100,), float(member.index))
        outcome = api.all_reduce(member, values, op_id="x", codec="fp32").wait()
        assert values.tolist() == [1.0] * 100
        return outcome.status, member.clock() - began

    for status, elapsed in LocalSwarm(3, latency_s=0.005).run(body):
        assert status == "committed"
        assert elapsed < 0.5

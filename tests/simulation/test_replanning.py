"""Rounds that are planned again: from one anchor all members make the same plan, whoever comes,
goes or lags; it is the one that the log says.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec
import pytest
from seeds import seeds
from torch import nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import Attachment, attach
from atoll.optim.model.flat import FlatVector
from atoll.optim.rounds.again import again

ROUNDS = 8
BASE = RunSettings(
    sync_every=4,
    share=0.75,
    max_steps=40,
    rounds=ROUNDS,
    codec="fp32",
    outer=OuterSettings("nesterov", 0.7, 0.5),
)


def begin(member: LocalMember, peers: int) -> Attachment:
    """Attach a small model once so many are there."""
    model = nn.Linear(4, 1)
    member.open(FlatVector(model).layout, lambda initial: None).release()
    while len(member.members()) < peers:
        member.sleep(0.1)
    return attach(model, None, member, clock=member.clock)


def train(member: LocalMember) -> dict[str, Any]:
    """Steps of unequal length, and after each what is planned from which anchor."""
    attachment = begin(member, 3)
    plans, said = dict[int, tuple[int, float]](), dict[int, list[float]]()
    while not attachment.done:
        member.sleep(0.25 + 0.05 * member.index)
        attachment.samples(1)
        attachment.step()
        round_, plan = (
            attachment.begun[0],
            (attachment.stats["sync_every"], attachment._strands[0].replica.base.lag),
        )
        assert plans.setdefault(round_, plan) == plan  # it stays until the next anchor
    for certified in member._session(0).machine.journal.entries:  # type: ignore[union-attr]
        entry = certified.entry
        if entry.contributors:
            said[len(said) + 1] = [
                each.reading.lag for each in entry.contributors if each.reading.lag is not None
            ]
    return {"plans": plans, "said": said}


@pytest.mark.parametrize("overlap", ["none", "late"])
@pytest.mark.parametrize("seed", seeds(2, 8))
def test_all_have_one_plan_a_round_under_churn(seed: int, overlap: str) -> None:
    far = 4 if overlap == "late" else 1
    settings = msgspec.structs.replace(
        BASE, overlap=overlap, delay=2 if overlap == "late" and seed % 2 else None
    )
    swarm = LocalSwarm(4, settings=settings, latency_s=far * (0.05 + 0.05 * (seed % 3)), seed=seed)
    swarm.join_at(3, 3.0 + seed % 6).crash_at(
        1 + seed % 2, 5.0 + 1.5 * (seed % 7), back_after_s=1.0
    )
    results = swarm.run(train)
    said = max((result["said"] for result in results), key=len)
    plans: dict[int, set[tuple[int, float]]] = {}
    for result in results:
        assert all(said[round_] == values for round_, values in result["said"].items())
        for round_, plan in result["plans"].items():
            plans.setdefault(round_, set()).add(plan)
    for round_, found in plans.items():
        lag = median(said[round_] or [0.0]) if round_ else 0.0
        assert found == {(again(settings, 5, lag).steps, lag)}
    assert len({steps for found in plans.values() for steps, _ in found}) > 1


def waited(settings: RunSettings, latency_s: float) -> list[tuple[int, float]]:
    """Steps planned, and the share of the time that was training, round by round, of two equal
    members.
    """

    def script(member: LocalMember) -> list[tuple[int, float]]:
        attachment = begin(member, 2)
        rows, waiting, began, planned = (
            list[tuple[int, float]](),
            0.0,
            member.clock(),
            attachment.stats["sync_every"],
        )
        while not attachment.done:
            before = attachment.stats["rounds"]
            member.sleep(0.25)
            attachment.samples(1)
            attachment.step()
            if attachment.stats["rounds"] > before:
                spent = attachment.stats["waiting_s"] - waiting
                rows.append((planned, 1 - spent / (member.clock() - began)))
                waiting, began, planned = (
                    attachment.stats["waiting_s"],
                    member.clock(),
                    attachment.stats["sync_every"],
                )
        return rows

    return LocalSwarm(2, settings=settings, latency_s=latency_s).run(script)[0]


def test_rounds_become_as_long_as_the_share_needs_and_as_short_as_it_allows() -> None:
    far = waited(BASE, 0.4)
    assert far[0][0] == 4
    assert far[0][1] < 0.5
    assert all(10 < steps < 40 and abs(share - 0.75) < 0.06 for steps, share in far[4:])
    near = waited(msgspec.structs.replace(BASE, sync_every=40), 0.01)
    assert near[0][0] == 40
    assert [steps for steps, _ in near[2:]] == [10] * len(near[2:])

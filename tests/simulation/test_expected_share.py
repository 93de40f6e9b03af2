"""What an eager member expects of a round is its part of it, also in the first one and when others
came since: values, in virtual time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.optim.rounds.schedule import expected_share

H, LR, PEERS = 8, 0.25, 3
OUTER = OuterSettings("nesterov", 0.5, 0.5)


class Slopes(nn.Module):
    """Whose gradient is the same everywhere, so that each inner step moves it by LR."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))


def step(model: Slopes, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.w.sum().backward()
    optimizer.step()


def values(member: LocalMember) -> dict[str, Any]:
    """Attach at once, and train over two boundaries; live values after the first one."""
    model = Slopes()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    attachment = attach(model, optimizer, member, clock=member.clock)
    knew = len(member.members())
    for _ in range(H):
        step(model, optimizer)
    after = model.w.detach().clone()
    share = len(member.members())
    for _ in range(2 * H):
        step(model, optimizer)
    attachment.detach()
    return {"knew": knew, "know": share, "after": after}


def test_members_that_attach_before_they_know_one_another() -> None:
    settings = RunSettings(sync_every=H, rounds=3, overlap="eager", outer=OUTER, codec="fp32")
    results = LocalSwarm(PEERS, settings=settings, latency_s=0.02).run(values, step_s=0.25)
    assert [result["knew"] for result in results] == [1, PEERS, PEERS]
    assert {result["know"] for result in results} == {PEERS}
    # The founder is at its boundary first; the others follow at their next step, their last but
    # one, and have made one more since.
    for result, before, since in zip(results, (H, H - 1, H - 1), (0, 1, 1), strict=True):
        expected = -OUTER.lr * (1 + OUTER.momentum) * before * LR / PEERS - since * LR
        torch.testing.assert_close(result["after"], torch.full((4,), expected))


@pytest.mark.parametrize(
    ("share", "among", "members", "expected"),
    [
        (0.0, 0, 1, 1.0),  # alone
        (0.0, 0, 3, 1 / 3),  # nothing decided yet
        (0.2, 4, 4, 0.2),  # as in the last round
        (0.2, 0, 4, 0.2),  # resumed
        (1.0, 1, 3, 1 / 3),  # two came since
        (0.5, 2, 1, 1.0),  # the other left
        (0.9, 3, 1, 1.0),  # never more than all
        (0.25, 5, 5, 0.25),  # one of five contributes nothing
        (0.0, 0, 0, 1.0),  # nobody is known, not even this one
    ],
)
def test_the_share_by_hand(share: float, among: int, members: int, expected: float) -> None:
    assert expected_share(share, among, members) == pytest.approx(expected)

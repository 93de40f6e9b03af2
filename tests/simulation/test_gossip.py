"""Gossip over the public average: peers that only ever meet in pairs come together, and a peer that
is lost costs its pairs only.
"""

from __future__ import annotations

from typing import Any

import torch

from atoll.collectives.api import enter
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim.lab.gossip import NoLoCo, TwoLevel, over_group, over_swarm


def test_noloco_comes_together_and_goes_on_without_a_lost_peer() -> None:
    ended = set[int]()

    def script(member: Any) -> list[torch.Tensor]:
        enter(member)
        while len(member.members()) < 4:
            member.sleep(0.1)
        peer = NoLoCo(torch.full((3,), float(member.index)))
        exchange, seen = over_swarm(member, "noloco", deadline_s=20.0), [peer.slow.clone()]
        for step in range(14):
            if (member.index, step) == (3, 8):
                break  # its script is gone, and calls no more
            peer.step(peer.slow.clone(), exchange)
            seen.append(peer.slow.clone())
        ended.add(member.index)
        while len(ended) < 4:
            member.sleep(0.5)
        return seen

    seen = LocalSwarm(4, settings=RunSettings(codec="fp32")).run(script, limit_s=600.0)
    assert [len(peer) for peer in seen] == [15, 15, 15, 9]
    together = torch.stack([torch.stack(peer[:9]) for peer in seen])  # [peers, steps, 3]
    assert torch.allclose(together.mean(0), torch.tensor(1.5))  # what pulls in pairs is kept
    apart = together.std(0)[:, 0]
    assert apart[8] < 0.3 * apart[0]
    rest = torch.stack([peer[-1] for peer in seen[:3]]).std(0)[0]
    assert rest < apart[8]


def test_groups_agree_and_merge_to_one_model_though_a_member_is_lost() -> None:
    """Two groups of two, lines of a grid, whose members want four different points. All have the
    same common weights, bit for bit, and end near the mean of the four."""
    ended = set[int]()

    def script(member: Any) -> list[torch.Tensor]:
        enter(member)
        while len(member.members()) < 4:
            member.sleep(0.1)
        outer = TwoLevel(torch.zeros(3), lr=0.7, momentum=0.3, every=3, alpha=0.5)
        within = over_group(member, "within", "2x2.1", deadline_s=20.0)
        across, found = over_group(member, "across", deadline_s=20.0), list[torch.Tensor]()
        for step in range(18):
            if (member.index, step) == (3, 12):
                break  # its script is gone
            live = outer.slow + 0.3 * (float(member.index) - outer.slow)
            outer.step(live, within, across)
            found.append(torch.stack([outer.slow, outer.common]))
        ended.add(member.index)
        while len(ended) < 4:
            member.sleep(0.5)
        return found

    seen = LocalSwarm(4, settings=RunSettings(codec="fp32")).run(script, limit_s=600.0)
    assert [len(found) for found in seen] == [18, 18, 18, 12]
    partners = {i: {j for j in range(4) if torch.equal(seen[i][0], seen[j][0])} for i in range(4)}
    assert all(len(partners[i]) == 2 for i in range(4))
    for step in range(18):
        for i in range(4 if step < 12 else 3):
            for j in range(4 if step < 12 else 3):
                assert torch.equal(seen[i][step][1], seen[j][step][1])
                if j in partners[i]:
                    assert torch.equal(seen[i][step][0], seen[j][step][0])
    assert abs(float(seen[0][11][1][0]) - 1.5) < 0.4

"""Gossip over the public average: peers that only ever meet in pairs come together, and a peer that
is lost costs its pairs only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seeds import RARE

from atoll.collectives.api import enter
from atoll.collectives.script_swarm import MAX_TAG
from atoll.collectives.series import number_of, series_tag
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim.lab.gossip import NoLoCo, TwoLevel, over_group, over_swarm
from atoll.optim.lab.gossip.exchange import LATE
from atoll.optim.solo import SoloSwarm


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


SLOW = [
    pytest.param(slower, f"gossip {number}", marks=RARE)
    for slower in (1, 2, 3, 4, 6, 8, 12, 16)
    for number in range(6)
]


@pytest.mark.parametrize(
    ("slower", "name"), [(1, "gossip"), (2, "gossip"), (4, "gossip"), (16, "gossip"), *SLOW]
)
def test_a_slow_peers_work_counts_at_its_pace(slower: int, name: str) -> None:
    """One of four peers is slower. Each step adds 1 to the element of who made it, and exchanges
    are with whoever waits: over all peers the elements sum to what each did.
    """
    ended, steps = set[int](), [0] * 4

    def script(member: Any) -> tuple[torch.Tensor, set[str]]:
        enter(member)
        while len(member.members()) < 4:
            member.sleep(0.1)
        member.sleep(1.0)
        exchange, how = over_swarm(member, name, deadline_s=20.0), set[str]()
        value, end = torch.zeros(4), member.clock() + 64.0
        while member.clock() < end:
            member.sleep(2.0 * (slower if member.index == 3 else 1))
            value[member.index] += 1.0
            steps[member.index] += 1
            told = exchange(value)
            assert told is not None
            how.add(told.how)
        ended.add(member.index)
        while len(ended) < 4:
            member.sleep(0.5)
        return value, how

    ends = LocalSwarm(4, latency_s=0.02).run(script, limit_s=600.0)
    assert min(steps[:3]) >= 10
    assert steps[3] >= 32 // slower - 16
    summed = sum((value for value, _ in ends), torch.zeros(4))
    for index, did in enumerate(steps):
        assert float(summed[index]) == pytest.approx(did, rel=1e-5)
    assert all("mean" in how and "mixed" not in how for _, how in ends)
    assert min(float(value.min()) for value, _ in ends) > 0  # everybody has some of everybody's


class Untold:
    """A swarm of a member that does not hear how far the others are."""

    def __init__(self, member: Any) -> None:
        self.peer, self.operate, self.members = member.peer, member.operate, member.members


def test_a_peer_that_is_late_again_and_again_mixes_the_fourth() -> None:
    """So that who is always late does not stay alone: the others' value comes to it."""
    seen = dict[int, tuple[list[tuple[str, int]], float]]()

    def script(member: Any) -> None:
        enter(member)
        while len(member.members()) < 2:
            member.sleep(0.1)
        value, told = torch.full((3,), float(member.index)), list[tuple[str, int]]()
        if member.index == 0:
            exchange = over_swarm(member, "late", deadline_s=20.0)
            turns = 6
        else:
            while not gone:
                member.sleep(0.5)
            exchange, turns = over_swarm(Untold(member), "late", deadline_s=20.0), 1  # pyright: ignore[reportArgumentType]
        for _ in range(turns):
            found = exchange(value)
            assert found is not None
            told.append((found.how, found.number))
        gone.add(member.index)
        seen[member.index] = told, float(value[0])
        while len(seen) < 2:
            member.sleep(0.5)

    gone = set[int]()
    LocalSwarm(2, latency_s=0.02).run(script, limit_s=600.0)
    assert seen[0] == ([("own", number) for number in range(6)], 0.0)
    assert seen[1] == ([("mixed", LATE)], 0.5)


def test_a_newcomer_and_a_script_that_began_again_find_the_others_number() -> None:
    seen = dict[int, list[tuple[int, str]]]()

    def script(member: Any) -> None:
        enter(member)
        exchange, told = over_swarm(member, "gossip", deadline_s=20.0), list[tuple[int, str]]()
        while member.clock() < 60.0:
            member.sleep(2.0)
            if len(told) == 3 and member.index == 1:  # as a script that does not remember
                exchange = over_swarm(member, "gossip", deadline_s=20.0)
            found = exchange(torch.full((3,), float(member.index)))
            assert found is not None
            told.append((found.number, found.how))
        seen[member.index] = told
        while len(seen) < 3:
            member.sleep(0.5)

    LocalSwarm(3, latency_s=0.02).join_at(2, 20.0).run(script, limit_s=600.0)
    for told in seen.values():
        numbers = [number for number, _ in told]
        assert numbers == sorted(set(numbers))
    assert seen[2][0][0] > 4
    assert "mean" in [how for _, how in seen[2][:3]]


def test_numbers_of_a_series_come_from_tags_alone() -> None:
    tag = series_tag("float32[3]", "gossip", 17)
    assert (number_of(tag, "gossip"), number_of(tag, "other")) == (17, None)
    for other in ("float32[3]", "", "#.1", tag + "0" * 12, "float32[3]#00000000.1"):
        assert number_of(other, "gossip") is None
    longest = series_tag("x" * 200, "gossip", 10**12 - 1)
    assert (len(longest) <= MAX_TAG, number_of(longest, "gossip")) == (True, 10**12 - 1)
    swarm = SoloSwarm()
    exchanges = [over_swarm(swarm, "alone"), over_swarm(swarm, "alone")]
    told = [exchange(torch.ones(2)) for exchange in exchanges]
    assert [(one.number, one.how) for one in told if one] == [(0, "own"), (1, "own")]

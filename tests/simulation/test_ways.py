"""Rounds and all-reduces on rings, two levels and three: faults at every phase, bits against a reference,
and what crosses between two sites.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from exchange_kit import decoded, ref_tree_result
from faults import PHASES, TARGETS, Kind, Simulated, fault
from kits.rounds.swarm import Options, SimSwarm
from seeds import daily

from atoll.collectives import api
from atoll.collectives import messages as m
from atoll.collectives.codecs.codec import Chunking
from atoll.collectives.exchange import header as record_header
from atoll.collectives.group import Plan, TopologyKind
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm

TREES: tuple[TopologyKind, ...] = ("ring", "two-level", "checked", "three-level")
NUMEL = 2_400_000
RATE = 12.5e6  # bytes per second of an uplink: 100 Mbit/s
BEGIN_S = 3.0


@pytest.mark.parametrize("kind", daily(2, ("kill", "slow", "stop", "blackhole", "reset")))
@pytest.mark.parametrize("plan", TREES)
def test_whoever_fails_in_a_tree_the_round_is_decided(plan: TopologyKind, kind: Kind) -> None:
    """The victim is an owner, and everybody hands something on to others: the oracle recomputes
    every entry, sum by sum.
    """
    struck, trees = 0, 0
    for turn, phase in enumerate(PHASES):
        swarm = SimSwarm(turn, Options(peers=(5, 6), faults=(), rounds=12, plan=plan))
        faults = Simulated(swarm, [fault(kind).of(TARGETS[turn]).during(phase)])
        verdict = swarm.run()
        assert verdict.problem == "", (phase, faults.struck)
        struck += len(faults.struck)
        trees += sum(
            certified.entry.topology.kind == plan
            for certified in swarm.checker.entries
            if len(certified.entry.contributors) > 2
        )
    assert struck >= 2
    assert (
        trees >= 6
    )  # of 36 entries: where a tree was held up with nobody to blame, later ones are butterflies


class Sum:
    """One all-reduce among 8 peers at two sites of 4, each with one uplink: its plans, what crossed
    between the sites, its results.
    """

    def __init__(
        self,
        plan: TopologyKind,
        *,
        codec: str = "int8",
        wan_bytes_per_s: float = RATE,
        kill_head: bool = False,
    ) -> None:
        sites = ["lab-1", "lab-2"] * 4
        labels = [f"{site}/{index // 4}" for index, site in enumerate(sites)]  # two on a host
        self.swarm = LocalSwarm(
            8,
            settings=RunSettings(codec=codec, plan=plan, sync_every=1),
            latency_s=0.0005,
            sites=labels,
        )
        self.site = dict(zip(self.swarm.names, sites, strict=True))
        for site in set(sites):
            pairs = [
                (one, other)
                for one in self.swarm.names
                for other in self.swarm.names
                if self.site[one] == site != self.site[other]
            ]
            uplink = self.swarm.network.share(pairs)
            uplink.latency_s, uplink.bandwidth_bytes_per_s = 0.02, wan_bytes_per_s
        self.crossed: Counter[tuple[str, str]] = Counter()
        self.plans: list[Plan] = []
        self.swarm.network.tap = self._tap
        self._kill_head = kill_head
        found = [result for result in self.swarm.run(self._script) if result is not None]
        self.results = [tensor for tensor, _, _ in found]
        self.contributors = [names for _, names, _ in found]
        self.elapsed_s = max(elapsed for _, _, elapsed in found)

    def _tap(self, sender: Any, receiver: Any, channel: str, payload: Any) -> bool:
        if channel == "record" and self.swarm.now > BEGIN_S:
            kind = record_header.parse(payload[0], sender).kind
            if self.site[sender] != self.site[receiver]:
                self.crossed[self.site[sender], self.site[receiver]] += len(payload[1])
            if kind == record_header.PARTIAL and self._kill_head:
                self._kill_head = False
                self.swarm.world.after(0.0, self.swarm.peers[self.swarm.names.index(sender)].crash)
        elif channel == "control" and payload[:1] == b"R":
            body = m.decode(payload[1:], sender).body
            if (
                isinstance(body, m.PlanMessage)
                and body.plan.log.startswith("op/")
                and body.plan not in self.plans
            ):
                self.plans.append(body.plan)
        return False

    def _script(self, member: Any) -> tuple[torch.Tensor, list[str], float]:
        api.enter(member)
        member.sleep(BEGIN_S - member.clock())
        assert len(member.members()) == 8
        tensor = self.given(member.peer)
        outcome = member.all_reduce(
            tensor, op_id="x", weight=1 + member.index, codec=member.settings.codec
        ).wait()
        assert outcome.status == "committed", outcome
        elapsed = member.clock() - BEGIN_S
        member.sleep(3.0)
        return tensor, [share.peer for share in outcome.contributors], elapsed

    def given(self, peer: str) -> torch.Tensor:
        """What a peer gives."""
        return torch.randn(NUMEL, generator=torch.Generator().manual_seed(int(peer[1:])))

    def check(self) -> Plan:
        """All hold the bits of the last plan's trees, computed in numpy; returns that plan."""
        plan = self.plans[-1]
        assert self.contributors == [[c.member.peer for c in plan.contributors]] * len(self.results)
        want = decoded(
            plan,
            ref_tree_result(plan, {c.cid: self.given(c.member.peer) for c in plan.contributors}),
        )
        assert all(torch.equal(tensor, torch.from_numpy(want)) for tensor in self.results)
        return plan


def test_two_levels_send_a_site_s_sum_once() -> None:
    """Of an encoded vector V: 4 V on each uplink in the butterfly, V with two levels; and it takes
    as much less time.
    """
    star, tree = Sum("butterfly"), Sum("two-level")
    assert star.check().topology.groups == ()
    groups = tree.check().topology.groups
    assert sorted(groups) == [0] * 4 + [1] * 4
    size = sum(tree.crossed.values()) / 2
    assert size == Chunking("int8", NUMEL, tree.plans[-1].chunk_elements).nbytes
    assert set(tree.crossed) == {("lab-1", "lab-2"), ("lab-2", "lab-1")}
    assert set(tree.crossed.values()) == {size}
    assert set(star.crossed.values()) == {4 * size}
    assert star.elapsed_s > 4 * size / RATE
    assert tree.elapsed_s < 2 * size / RATE
    checked = Sum("checked")
    chunks = checked.check().chunks / 2  # of the other site's owners
    accounts = 2 * chunks * (1 + 4) * 32
    assert sum(checked.crossed.values()) == 2 * (size + accounts)
    assert accounts < 0.011 * size
    assert checked.elapsed_s < 2 * size / RATE


def test_three_levels_send_a_site_s_sum_once_too() -> None:
    """Two hosts of two at each site: across the uplink goes what goes with two levels."""
    three = Sum("three-level")
    plan = three.check()
    size, found = Chunking("int8", NUMEL, plan.chunk_elements).nbytes, plan.topology
    assert sorted(zip(found.groups, found.hosts, strict=True)) == sorted(
        (site, host) for host, site in {*zip(found.hosts, found.groups, strict=True)} for _ in "ab"
    )
    assert len({*found.hosts}) == 4
    assert three.crossed == {("lab-1", "lab-2"): size, ("lab-2", "lab-1"): size}
    assert three.elapsed_s < 2 * size / RATE


@pytest.mark.parametrize("plan", TREES)
def test_a_head_that_dies_is_replaced(plan: TopologyKind) -> None:
    """It dies when its first partial sum is on its way: the rest make a new tree, and the result is
    exactly theirs.
    """
    found = Sum(plan, codec="fp32", kill_head=True)
    last = found.check()
    assert len(found.results) == 7
    assert last.topology.kind == plan
    assert len(last.contributors) == 7
    assert last.revision >= 1

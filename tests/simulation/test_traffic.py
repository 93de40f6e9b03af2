"""How many bytes a reduction costs: on slow links exactly those of its plan; and a lane that breaks
costs little time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from atoll.collectives import api
from atoll.collectives.exchange import header as record_header
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm

NUMEL = 2_000_000
RATE = 4e6  # bytes per second of a link: a third of 100 Mbit/s
BEGIN_S = 3.0


def reduce_once(swarm: LocalSwarm) -> tuple[dict[int, int], float]:
    """One all-reduce of all: payload bytes on their way by kind of record, and how long it took."""
    sent = Counter[int]()

    def tap(sender: Any, receiver: Any, channel: str, payload: Any) -> bool:
        if channel == "record" and swarm.now > BEGIN_S:
            sent[record_header.parse(payload[0], sender).kind] += len(payload[1])
        return False

    swarm.network.tap = tap

    def script(member: Any) -> float:
        api.enter(member)
        member.sleep(BEGIN_S - member.clock())
        assert len(member.members()) == len(swarm.names)
        assert (
            member.all_reduce(torch.ones(NUMEL), op_id="x", everyone=True).wait().status
            == "committed"
        )
        elapsed = member.clock() - BEGIN_S
        member.sleep(2.0)
        return elapsed

    elapsed_s = max(swarm.run(script))
    return dict(sent), elapsed_s


def slow_swarm(count: int, latency_s: float, slow: float = 1.0) -> LocalSwarm:
    """All links at RATE, those of p1 at ``slow`` times that."""
    swarm = LocalSwarm(
        count,
        settings=RunSettings(codec="fp32", sync_every=1),
        latency_s=latency_s,
        bandwidth_bytes_per_s=RATE,
    )
    for other in (swarm.names[0], *swarm.names[2:]):
        for pair in ((swarm.names[1], other), (other, swarm.names[1])):
            swarm.network.link(*pair).bandwidth_bytes_per_s = slow * RATE
    return swarm


@pytest.mark.parametrize(
    ("count", "latency_s", "slow"), [(4, 0.02, 1.0), (4, 0.1, 1.0), (4, 0.05, 0.25), (6, 0.05, 0.5)]
)
def test_slow_links_carry_what_the_plan_needs_and_no_more(
    count: int, latency_s: float, slow: float
) -> None:
    sent, _ = reduce_once(slow_swarm(count, latency_s, slow))
    needed = (count - 1) * 4 * NUMEL
    assert sent == {record_header.PART: needed, record_header.RESULT: needed}


def test_a_lane_that_breaks_is_asked_again_as_soon_as_it_is_back() -> None:
    calm = reduce_once(slow_swarm(4, 0.02))
    swarm = slow_swarm(4, 0.02)
    p0, p1 = swarm.names[:2]

    def broken() -> None:
        swarm.network.cut(p0, p1)
        swarm.network.cut(p1, p0)
        link(False)

    def back() -> None:
        swarm.network.mend()
        link(True)

    def link(up: bool) -> None:
        for index, other in ((0, p1), (1, p0)):
            process = swarm.peers[index].process
            assert process is not None
            process.link(other, up)

    swarm.world.at(BEGIN_S + 0.6, broken)
    swarm.world.at(BEGIN_S + 0.7, back)
    torn = reduce_once(swarm)
    assert calm[1] < torn[1] < calm[1] + 0.3
    lost = {kind: torn[0][kind] - calm[0][kind] for kind in calm[0]}
    assert 0 < sum(lost.values()) <= 8 * (1 << 20)

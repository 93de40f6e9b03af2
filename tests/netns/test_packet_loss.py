"""Real peers on links that lose a fifth of all packets, acknowledgements too: rounds go on, and
nobody is taken for dead.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from netns.lab import Lab
from swarm_kit import Peers

pytestmark = [pytest.mark.netns, pytest.mark.slow]

NUMEL = 200_000
LOSS = 0.2
ROUNDS = 6
LEAST_WHOLE = 4  # a straggler of a busy machine may miss one
PATIENCE_S = 120.0  # a bound for hangs


def test_rounds_go_on_where_a_fifth_of_the_packets_is_lost(tmp_path: Path) -> None:
    with (
        Lab(3, mbit=50, rtt_ms=40) as lab,
        Peers(tmp_path, 3, NUMEL, hosts=lab.hosts, ready_s=PATIENCE_S) as swarm,
    ):
        swarm.settle()
        for host in lab.hosts:
            host.prepare("lose", share=LOSS)()
        whole, digests = 0, list[set[str]]()
        for number in range(ROUNDS):
            swarm.contribute(1000 * number, wait_s=PATIENCE_S)
            found = [peer.expect("outcome", PATIENCE_S + 10) for peer in swarm.all]
            assert {outcome["status"] for outcome in found} == {"committed"}
            by_round = {outcome["round"] for outcome in found}
            if len(by_round) == 1:
                digests.append({outcome["digest"] for outcome in found})
            whole += all(len(outcome["contributors"]) == 3 for outcome in found)
        assert whole >= LEAST_WHOLE
        assert digests
        assert all(len(same) == 1 for same in digests)

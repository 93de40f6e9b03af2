"""Four real peers on hosts of their own; the network of one is struck in the middle of a round.
Survivors commit an honest mean.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults import Kind, Phase, Target, fault
from netns.lab import Lab
from real_faults import Armed, Ledger
from swarm_kit import Peers

pytestmark = pytest.mark.netns

NUMEL = 1_000_000
TRIES = 3
# a reduced part is at the others half of that later: so long lasts the shortest phase, however fast
# the machine
RTT_MS = 200
WARM = 3  # rounds after which all have measured their links, and own parts alike


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """Four peers far from each other: no phase of a round is over before a fault can strike."""
    with (
        Lab(4, mbit=200, rtt_ms=RTT_MS) as lab,
        Peers(tmp_path_factory.mktemp("netns"), 4, NUMEL, hosts=lab.hosts) as peers,
    ):
        yield peers


@pytest.fixture(scope="module")
def ledger(swarm: Peers) -> Ledger:
    """Everybody takes part, and their anchor is known."""
    found = Ledger(swarm)
    for warm in range(WARM):
        found.common_round(warm)
    return found


@pytest.mark.parametrize(
    ("kind", "target", "phase"),
    [
        ("blackhole", "owner", "reduce"),
        ("reset", "convener", "gather"),
        ("corrupt", "owner", "reduce"),
        ("slow", "member", "reduce"),
    ],
)
def test_the_network_of_one_peer_fails(
    swarm: Peers, ledger: Ledger, kind: Kind, target: Target, phase: Phase
) -> None:
    for attempt in range(TRIES):
        seed = 10_000 * attempt + 100
        with Armed(swarm, fault(kind).of(target).during(phase), slow_mbit=2.0) as armed:
            swarm.contribute(seed)
            outcomes = armed.outcomes()
            assert armed.blow is not None
            told = outcomes.pop(armed.blow.victim, None)
            found = ledger.take(seed, list(outcomes.values()))
            assert found.committed, outcomes
            assert found.honest, (found, outcomes)
            armed.heal() if told else armed.revive()
        ledger.common_round(seed + 10)
        if armed.hit:
            return
    raise AssertionError(f"{TRIES} times the phase was over before the fault struck")

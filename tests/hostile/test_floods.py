"""Real nodes, one of which floods another with well-formed messages, a type at a time: no round is lost or late, and no memory or disk.

`scripts/bench_hostile.py` does the same for a minute each, with every type.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile.kit import Cost, Swarm, hostile_swarm

pytestmark = [pytest.mark.slow, pytest.mark.flaky(reruns=1)]

SECONDS = 2.0
MEMORY = 64 << 20
DISK = 32 << 20  # far less than what is declared; journals and checkpoints grow a little meanwhile
SLOWER = 1.25
ADMITTED = [
    "get",
    "get_chunks",
    "ask_state",
    "fetch",
    "offer",
    "catch",
    "trial",
    "sample",
    "missing",
    "need",
    "records",
    "replays",
    "churn",
    "blobs",
]
MEMBERS = [
    *("get", "offer", "ready", "prepare", "op_plan", "op_prepare", "op_accept", "calls", "rates"),
    "turn",  # breaks a rule: from here on the member is shut out
]
AND_THEN = "and then"
DONE = [
    *(("observer", kind) for kind in [*ADMITTED, AND_THEN]),
    *(("member", kind) for kind in [*MEMBERS, AND_THEN]),
]


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Swarm, Cost, tuple[int, int]]]:
    """The swarm, its rounds without misbehaviour, and what the victim took then."""
    member = request.param == "member"
    with hostile_swarm(tmp_path_factory.mktemp("hostile"), member=member) as swarm:
        quiet = swarm.quiet(4 * SECONDS)
        yield swarm, quiet, swarm.took()


@pytest.mark.parametrize(("scene", "kind"), DONE, indirect=["scene"])
def test_a_flood_costs_no_round_and_neither_memory_nor_disk(
    scene: tuple[Swarm, Cost, tuple[int, int]], kind: str
) -> None:
    swarm, quiet, (memory, room) = scene
    if kind == AND_THEN:
        assert swarm.back(memory + MEMORY // 2, room + DISK) <= 30.0
        assert set(swarm.refused()) >= ({"operations"} if swarm.member else {"get", "ask_state"})
        return
    cost = swarm.suffer(kind, SECONDS)
    assert cost.sent > 0
    assert cost.rounds
    assert cost.lost == 0, cost
    assert cost.round_s <= SLOWER * quiet.round_s, (cost, quiet)
    assert cost.rss <= MEMORY, cost
    assert cost.disk <= DISK, cost

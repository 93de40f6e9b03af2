"""Real nodes, one of which floods another with well-formed messages, several types at once: no
round is lost or held up, and no memory or disk.

`scripts/bench/bench_hostile.py` does the same for a minute each, with every type by itself, and says
how much longer a round takes: that is a figure of a machine at rest, and none of a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.kit import Cost, Swarm, hostile_swarm
from seeds import RARE

from atoll.node.session.budgets import SHUT_OUT

pytestmark = [*RARE, pytest.mark.flaky(reruns=1)]

SECONDS = 1.5
MEMORY = 64 << 20
DISK = 32 << 20  # far less than what is declared; journals and checkpoints grow a little meanwhile
HELD_UP_S = 5.0
"""What a round may take longer, seconds: a busy machine costs a flooded round a part of a second,
and a node that serves the flood before its rounds costs it minutes.
"""
ADMITTED = [
    "slow+get+get_chunks+get_unknown+ask_state+fetch",
    "offer+trial+sample+missing+need+manifest",
    "churn+blobs+half_blobs",
    "replays+records+other_runs+other_lives",  # breaks rules: whoever sends these is shut out
]
NOT_READING = {"slow": 8.0, "churn": 6.0}
"""Seconds of what a member does that is known after a while only: until then a round that it
convenes may go without a contribution.
"""
MEMBERS = [
    *NOT_READING,
    "get+get_chunks+missing+need+offer",
    "ready+rates+other_lives",
    "op_plan+op_prepare+op_call+op_accept+calls",
    "in_and_out",
    "turn+records",
]
AND_THEN = "and then"
REFUSED = {"observer": {"ask_state", SHUT_OUT}, "member": {"operation", SHUT_OUT}}

Scene = tuple[Swarm, Cost, tuple[int, int], list[str]]
"""The swarm, its rounds without misbehaviour, what the victim took then, and the floods since."""


def staged(folder: Path, *, member: bool) -> Iterator[Scene]:
    with hostile_swarm(folder, member=member) as swarm:
        quiet = swarm.quiet(3 * SECONDS)
        yield swarm, quiet, swarm.took(), []


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield from staged(tmp_path_factory.mktemp("observer"), member=False)


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield from staged(tmp_path_factory.mktemp("member"), member=True)


@pytest.mark.parametrize("kind", [*ADMITTED, AND_THEN])
def test_a_flood_by_who_is_admitted_costs_no_round_and_neither_memory_nor_disk(
    observed: Scene, kind: str
) -> None:
    bear(observed, kind)


@pytest.mark.parametrize("kind", [*MEMBERS, AND_THEN])
def test_a_flood_by_a_member_costs_no_round_and_neither_memory_nor_disk(
    within: Scene, kind: str
) -> None:
    bear(within, kind)


def bear(scene: Scene, kind: str) -> None:
    """One flood; or, at the end of all, what is left of them."""
    swarm, quiet, (memory, room), played = scene
    if kind == AND_THEN:
        assert swarm.back(memory + MEMORY // 2, room + DISK) <= 30.0
        if set(played) == set(MEMBERS if swarm.member else ADMITTED):  # of a day's share some are
            assert swarm.refused().keys() >= REFUSED["member" if swarm.member else "observer"]
        return
    played.append(kind)
    slowly = swarm.member and kind in NOT_READING
    cost = swarm.suffer(kind, NOT_READING[kind] if slowly else SECONDS)
    if not cost.rounds:  # on a busy machine a short flood may lie between two rounds
        cost = swarm.suffer(kind, 4 * SECONDS)
    assert cost.sent > 0
    assert cost.rounds
    assert cost.lost <= slowly, cost
    assert cost.round_s <= quiet.round_s + HELD_UP_S, (cost, quiet)
    assert cost.rss <= MEMORY, cost
    assert cost.disk <= DISK, cost

"""Which lanes are kept: all of a small configuration, those in use of a large one, and the ones
used last; and who talks with whom in a plan.
"""

from __future__ import annotations

import itertools

import pytest

from atoll.collectives.group import Contributor, Member, Part, Plan, Topology
from atoll.collectives.identifiers import PeerId
from atoll.collectives.reduce import MEAN
from atoll.collectives.trees import trees_of
from atoll.node.service.lanes import LaneKeeper, neighbours


def peer(number: int) -> PeerId:
    return PeerId(f"p{number:02}")


class Table:
    """A keeper, and the lanes as a node would have them."""

    def __init__(self, kept: int) -> None:
        self.open: list[PeerId] = []
        self.keeper = LaneKeeper(self.open.append, self.open.remove, kept=kept, hold_s=10.0)


def test_a_small_configuration_has_all_its_lanes_at_once_and_for_good() -> None:
    table = Table(3)
    table.keeper.members(0.0, "run", frozenset(map(peer, range(3))))
    assert sorted(table.open) == [peer(0), peer(1), peer(2)]
    assert all(table.keeper.lost(1000.0, peer(number)) for number in range(3))
    table.keeper.tend(2000.0)
    assert len(table.open) == 3


def test_in_a_large_one_lanes_come_with_use_and_the_idle_go_but_the_last() -> None:
    table = Table(2)
    table.keeper.members(0.0, "run", frozenset(map(peer, range(9))))
    assert table.open == []
    table.keeper.begin(1.0, ("log", 1), [peer(0), peer(1), peer(2), peer(3)])
    table.keeper.tend(100.0)
    assert len(table.open) == 4  # as long as it is under way
    assert table.keeper.lost(100.0, peer(0))
    table.keeper.end(100.0, ("log", 1))
    table.keeper.once(101.0, peer(1))
    table.keeper.soon(101.0, [peer(5)])
    table.keeper.soon(101.0, list(map(peer, range(3))))  # too many to be opened unasked
    table.keeper.tend(105.0)
    assert len(table.open) == 5  # none is idle yet
    table.keeper.tend(200.0)
    assert sorted(table.open) == [peer(1), peer(5)]


def test_an_idle_lane_that_is_lost_is_not_made_again_and_one_that_came_counts() -> None:
    table = Table(1)
    table.keeper.once(0.0, peer(0))
    table.open.append(peer(1))
    table.keeper.came(0.0, peer(1))  # the other side wanted it
    assert not table.keeper.lost(1.0, peer(1))
    assert table.open == [peer(0)]
    assert table.keeper.lost(9.0, peer(0))
    assert not table.keeper.lost(10.0, peer(0))
    assert table.open == []
    table.keeper.once(20.0, peer(0))
    assert table.open == [peer(0)]


def test_a_run_that_ends_or_grows_lets_its_members_become_idle() -> None:
    table = Table(1)
    table.keeper.members(0.0, "a", frozenset([peer(0)]))
    table.keeper.members(1.0, "b", frozenset([peer(1)]))
    table.keeper.members(2.0, "b", frozenset([peer(1), peer(2)]))
    table.keeper.tend(100.0)
    assert sorted(table.open) == [peer(0), peer(1)]  # one is a member's, one is the last used
    table.keeper.once(101.0, peer(3))
    table.keeper.left("a")
    table.keeper.tend(200.0)
    assert table.open == [peer(3)]


@pytest.mark.parametrize("kind", ["butterfly", "ring", "two-level", "checked", "three-level"])
def test_neighbours_are_all_with_whom_a_tree_exchanges_records(kind: str) -> None:
    everybody = [peer(number) for number in range(7)]
    giving, owners = everybody[:5], [peer(1), peer(3), peer(6)]
    who = tuple(
        Contributor(Member(name, 0), bytes([index]) * 16, 1) for index, name in enumerate(giving)
    )
    parts = tuple(Part(owner, index, index + 1) for index, owner in enumerate(owners))
    sites = () if kind == "butterfly" else (0, 1, 0, 1, 1)
    hosts = (0, 1, 2, 3, 1) if kind == "three-level" else ()
    plan = Plan(
        "main/x",
        1,
        0,
        0,
        bytes(32),
        who,
        parts,
        12,
        4,
        "fp32",
        topology=Topology(kind, sites, hosts),
    )  # type: ignore[arg-type]
    found = {me: neighbours(plan, everybody, me) for me in everybody}
    assert all((a in found[b]) == (b in found[a]) for a, b in itertools.combinations(everybody, 2))
    for tree, me in itertools.product(trees_of(plan, MEAN), everybody):
        total = tree.sum(me)
        needed = {
            term.peer for term in (*(total.terms if total is not None else ()), *tree.wants(me))
        } | {to for _, to in tree.sends(me)}
        needed |= {*tree.below(me, everybody)} | (
            {tree.above(me)} if me != tree.owner else set[PeerId]()
        )
        assert needed - {me} <= found[me]
    assert kind == "butterfly" or any(len(found[me]) < 6 for me in giving)

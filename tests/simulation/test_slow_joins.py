"""How long a newcomer fetches the state: over a slow link of its own, and from a member that
trickles.
"""

from __future__ import annotations

import pytest
import session_table
from seeds import RARE
from session_table import Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.layout import make_layout
from atoll.node.session.actions import ROUND_PREFIX

MIB = 1 << 20
CHUNKS = 16  # of the state: anchor and outer state
LAYOUT = make_layout([("w", (CHUNKS // 2 * MIB // 4,))])

pytestmark = [*RARE]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_table, "LAYOUT", LAYOUT)


def run_of(members: int) -> Table:
    """A run after five rounds; its last peer has not begun."""
    table = Table(members + 1)
    table.place.chunk_elements = MIB // 4
    table.found()
    inside = table.peers[:members]
    for peer in inside[1:]:
        peer.start().attach()
    table.until(
        lambda: all(peer.inside and len(peer.session.config_peers()) == members for peer in inside)
    )
    for number in range(5):
        for peer in inside:
            peer.contribute(f"{peer.name}/{number}")
        table.until(lambda number=number: all(len(peer.rounds()) > number for peer in inside))
    return table


def join_s(table: Table) -> float:
    """How long it takes the last peer to have the model."""
    late, began = table.peers[-1], table.world.now
    late.start().attach()
    table.until(lambda: late.session.replica is not None)
    took = table.world.now - began
    table.end()
    return took


def slow_link(table: Table, rate: float) -> None:
    """What all send to the last peer shares one link."""
    *members, late = table.peers
    shared = table.network.share([(peer.name, late.name) for peer in members])
    shared.bandwidth_bytes_per_s = rate


def trickles(table: Table, liars: list[Peer], every_s: float, fast_s: float = 0.0) -> None:
    """These send the newcomer a record now and then, once ``fast_s`` is over, and are the first
    who offer a state.
    """
    late, world, began = table.peers[-1].name, table.world, table.world.now
    names, sent = {liar.name for liar in liars}, dict[str, float]()

    def tap(sender: str, receiver: str, channel: str, payload: object) -> bool:
        if receiver != late:
            return False
        if channel == "record" and sender in names and world.now - began > fast_s:
            if world.now - sent.get(sender, -1e9) < every_s:
                return True
            sent[sender] = world.now
        if channel == "control" and sender not in names and world.now - began < 2.0:
            assert isinstance(payload, bytes)
            return payload.startswith(ROUND_PREFIX) and isinstance(
                m.decode(payload[len(ROUND_PREFIX) :], table.peers[-1].name).body, m.Offer
            )
        return False

    table.network.tap = tap


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.usefixtures("tables")
def test_over_a_slow_link_of_ones_own_the_state_comes_about_once(members: int) -> None:
    """Two or more sources once made it take twice to four times as long."""
    table = run_of(members)
    slow_link(table, MIB / 2)
    assert join_s(table) <= 1.1 * CHUNKS * 2 + 1


@pytest.mark.parametrize(
    ("rate_s", "most_s"), [(0.3, 30), (1.0, 30), (5.0, 6), (29.0, 6), (1e6, 6)]
)
@pytest.mark.usefixtures("tables")
def test_a_member_that_trickles_keeps_nobody_out(rate_s: float, most_s: float) -> None:
    table = run_of(3)
    trickles(table, [table.peers[1]], rate_s)
    assert join_s(table) <= most_s


@pytest.mark.usefixtures("tables")
def test_of_two_members_that_send_nothing_the_one_that_is_tried_costs_ten_seconds() -> None:
    """One offers its state first, and the other once a state is looked for beside it: then nothing
    comes of either.
    """
    table = run_of(4)
    late, began = table.peers[-1].name, table.world.now
    silent = {table.peers[1].name: 0.0, table.peers[2].name: 4.0}

    def tap(sender: str, receiver: str, channel: str, payload: object) -> bool:
        if receiver != late:
            return False
        if channel == "record":
            return sender in silent
        assert isinstance(payload, bytes)
        return (
            world.now - began < silent.get(sender, 4.5)
            and payload.startswith(ROUND_PREFIX)
            and isinstance(m.decode(payload[len(ROUND_PREFIX) :], late).body, m.Offer)
        )

    world, table.network.tap = table.world, tap
    assert join_s(table) <= 16.0


@pytest.mark.usefixtures("tables")
def test_two_members_that_trickle_keep_nobody_out() -> None:
    table = run_of(4)
    trickles(table, table.peers[1:3], 2.0)
    assert join_s(table) <= 30.0


@pytest.mark.usefixtures("tables")
def test_over_a_slow_link_a_member_that_trickles_costs_a_window() -> None:
    """What the link carries of it and is of no use is as much as it was asked for: how many records
    of 2 s each that is, hangs on when it sends the next one.
    """
    table = run_of(3)
    slow_link(table, MIB)
    trickles(table, [table.peers[1]], 5.0)
    assert join_s(table) <= 2 * CHUNKS + 14.0

"""The DHT in virtual time: lookups among liars and the dead, values that outlive those who kept
them, replays that nobody believes.
"""

from __future__ import annotations

import pytest
from dht_kit import Node, Swarm
from seeds import daily

from atoll.collectives.identifiers import PeerId
from atoll.node.net.dht import records
from atoll.node.net.dht.engine import REPLICAS
from atoll.node.net.dht.routing import K, closest, position
from atoll.node.net.dht.store import REPUBLISH_S

OPERATIONS = 40


def pairs(swarm: Swarm) -> list[tuple[Node, Node, str]]:
    rng = swarm.world.stream("pairs")
    return [(*rng.sample(swarm.living, 2), f"key {number}") for number in range(OPERATIONS)]


def replaced_values_found(swarm: Swarm) -> int:
    """Each value is replaced by a newer one before it is looked for; how often the newer one is
    found.
    """
    right = 0
    for writer, reader, name in pairs(swarm):
        for payload in (b"old", b"new"):
            swarm.put(writer, name, payload)
            swarm.world.run(until=swarm.world.now + 1.0)
        right += swarm.get(reader, writer.peer, name) == b"new"
    return right


def providers_found(swarm: Swarm) -> int:
    right = 0
    for writer, reader, name in pairs(swarm):
        swarm.carry_out(writer, writer.engine.provide(name.encode(), (), swarm.world.now))
        swarm.world.run(until=swarm.world.now + 1.0)
        found = swarm.carry_out(
            reader, reader.engine.find_providers(name.encode(), 20, True, swarm.world.now)
        )
        right += found == [(writer.peer, ())]
    return right


@pytest.mark.parametrize("seed", daily(1, range(3)))
def test_thirty_percent_hostile_nodes_among_two_hundred_spoil_no_twentieth(seed: int) -> None:
    swarm = Swarm(200, seed=seed, hostile=0.3)
    assert replaced_values_found(swarm) >= 0.95 * OPERATIONS
    assert providers_found(swarm) >= 0.95 * OPERATIONS


def test_a_tenth_that_died_spoils_nothing() -> None:
    swarm = Swarm(200, seed=7, dead=0.1)
    assert replaced_values_found(swarm) == OPERATIONS
    assert providers_found(swarm) == OPERATIONS


def test_an_honest_swarm_finds_the_nearest_with_few_requests() -> None:
    swarm = Swarm(200, seed=8)
    before = swarm.requests
    for writer, reader, name in pairs(swarm):
        key = records.owner_key(writer.peer, name)
        assert swarm.put(writer, name, b"value") > REPLICAS // 2
        swarm.world.run(until=swarm.world.now + 1.0)
        holders = {
            peer
            for peer, node in swarm.nodes.items()
            if node.engine.server.values.get(key, swarm.unix_s) and peer != writer.peer
        }
        assert len(holders) == REPLICAS
        assert (
            len(holders & set(swarm.nearest(key, REPLICAS))) >= REPLICAS - 2
        )  # whoever asks does not count among the nearest
        assert swarm.get(reader, writer.peer, name) == b"value"
    assert (swarm.requests - before) / OPERATIONS < 30


def test_what_nobody_stored_is_not_found() -> None:
    swarm = Swarm(50, seed=9, hostile=0.3)
    reader, owner = swarm.living[:2]
    assert swarm.get(reader, owner.peer, "nothing") is None


def test_one_who_is_alone_waits_for_nobody() -> None:
    swarm = Swarm(1)
    (node,) = swarm.living
    assert swarm.put(node, "name", b"value") == 0
    assert swarm.get(node, node.peer, "name") == b"value"
    assert swarm.carry_out(node, node.engine.find_providers(b"key", 20, True, 0.0)) == []


@pytest.mark.parametrize("frozen", range(3))
def test_a_frozen_node_costs_one_hedge(frozen: int) -> None:
    swarm = Swarm(16, seed=10, known=15)
    writer, reader = swarm.living[:2]
    key = records.owner_key(writer.peer, "name")
    silent = closest([node.peer for node in swarm.living[2:]], position(key), 3)[frozen]
    swarm.nodes[silent].way = "silent"
    for operate in (
        lambda: swarm.put(writer, "name", b"value"),
        lambda: swarm.get(reader, writer.peer, "name"),
    ):
        hedge_s = max(writer.engine.hedge_s, reader.engine.hedge_s)
        started = swarm.world.now
        assert operate() in (REPLICAS // 2 + 1, b"value")
        assert swarm.world.now - started < hedge_s + 3 * 0.08  # three exchanges at most


def test_few_and_slow_peers_are_waited_for() -> None:
    swarm = Swarm(3, seed=17, slow_s=0.3)
    writer, reader = swarm.living[:2]
    assert swarm.put(writer, "name", b"value") >= 1
    assert swarm.get(reader, writer.peer, "name") == b"value"
    swarm.living[2].way = "silent"
    started = swarm.world.now
    assert swarm.get(reader, writer.peer, "nothing") is None
    assert swarm.world.now - started < 3.0


def test_a_value_outlives_its_owner_and_all_who_kept_it_first() -> None:
    swarm = Swarm(60, seed=11)
    writer, reader = swarm.living[:2]
    key = records.owner_key(writer.peer, "name")
    swarm.put(writer, "name", b"value", life_s=4 * REPUBLISH_S)
    swarm.world.run(until=swarm.world.now + 1.0)
    first = [node for node in swarm.honest if node.engine.server.values.get(key, swarm.unix_s)]
    for leaving in (first[::2], first[1::2]):
        for node in leaving:
            if node is not reader:
                swarm.end(node)
        swarm.world.run(until=swarm.world.now + REPUBLISH_S + 1.0)
        for node in swarm.honest:
            for its_key, data in node.engine.server.values.due(swarm.unix_s) if node.up else ():
                swarm.carry_out(node, node.engine.store_value(its_key, data))
        swarm.world.run(until=swarm.world.now + 1.0)
    assert swarm.get(reader, writer.peer, "name") == b"value"
    swarm.world.run(until=swarm.world.now + 3 * REPUBLISH_S)
    assert swarm.get(reader, writer.peer, "name") is None  # it has expired, everywhere


def test_who_has_read_the_newer_value_believes_no_replay() -> None:
    swarm = Swarm(20, seed=12)
    writer, reader = swarm.living[:2]
    key = records.owner_key(writer.peer, "name")
    old = records.sign(writer.identity, "name", b"old", 1, int(swarm.unix_s) + 3600)[1]
    assert swarm.put(writer, "name", b"new") > 0
    assert swarm.get(reader, writer.peer, "name") == b"new"
    for node in swarm.nodes.values():  # all of them have lost it, and take the old one
        node.engine.server.values.__init__(0)
        assert node.engine.server.values.put(key, old, swarm.unix_s)
    assert swarm.get(reader, writer.peer, "name") is None
    assert (
        swarm.get(swarm.living[2], writer.peer, "name") == b"old"
    )  # who has never heard of another cannot know


def test_peers_that_fail_leave_the_table_and_are_asked_again_when_nobody_else_is_left() -> None:
    swarm = Swarm(2, seed=13, known=1)
    one, other = swarm.living
    other.way = "silent"
    for _ in range(3):
        assert swarm.get(one, other.peer, "name") is None
        swarm.world.run(until=swarm.world.now + 3.0)
    assert other.peer not in one.engine.table
    other.way = ""
    swarm.put(other, "name", b"value")
    assert swarm.get(one, other.peer, "name") == b"value"
    assert other.peer in one.engine.table


def test_two_halves_become_one_when_two_of_them_meet() -> None:
    swarm = Swarm(40, seed=14, known=0)
    left, right = swarm.honest[:20], swarm.honest[20:]
    for half in (left, right):
        for node in half[1:]:
            swarm.link(node.peer, half[0].peer)
    assert swarm.put(left[0], "name", b"value") > 0
    swarm.world.run(until=swarm.world.now + 1.0)
    assert swarm.get(right[0], left[0].peer, "name") is None
    swarm.link(left[5].peer, right[5].peer)
    for _ in range(3):
        for node in swarm.honest:
            swarm.carry_out(node, node.engine.refresh())
    assert swarm.get(right[0], left[0].peer, "name") == b"value"


def test_one_network_cannot_fill_the_table() -> None:
    swarm = Swarm(1, seed=15)
    table = swarm.living[0].engine.table
    crowd = [PeerId(peer) for peer in Swarm(400, seed=16, known=0).nodes]
    for peer in crowd[:300]:
        table.add(peer, "192.0.0.0/16")
    assert len(table) < 300
    full = len(table)
    guests = crowd[300:]
    assert all(table.add(peer, f"10.{number}.0.0/16") for number, peer in enumerate(guests[:K]))
    assert all(peer in table for peer in guests[:K])
    assert not all(table.add(peer, "192.0.0.0/16") for peer in guests[K:])
    assert len(table) <= full + K

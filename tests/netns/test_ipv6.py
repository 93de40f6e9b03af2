"""IPv6: houses without translation but with a firewall, in front of them public nodes of both
families.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from netns.lab import Lab
from netns.nat import Router
from netns.reach_kit import Node

pytestmark = [pytest.mark.netns, pytest.mark.slow]  # slow: the longer limit
BOTH = ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"]


class Street:
    """Two public nodes that listen on both, and two houses; ``add`` a peer that knows the public
    ones' IPv6 addresses.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.lab = stack.enter_context(Lab(4, internet=True))
        self.homes = [Router(host, "symmetric", behind=2) for host in self.lab.hosts[2:]]
        self.known: list[str] = []
        self.public = [self.add(host, listen=BOTH) for host in self.lab.hosts[:2]]
        self.known = [
            f"/ip6/{node.place.prefix6}::2/tcp/4001/p2p/{node.peer}" for node in self.public
        ]

    def add(self, place: Any, **start: Any) -> Node:
        known = self.known or [node.address for node in getattr(self, "public", [])]
        return self._stack.enter_context(
            Node(
                place, **{"bootstrap": known, "run": "run", "listen": ["/ip6/::/tcp/4001"], **start}
            )
        )


@pytest.fixture(scope="module")
def street() -> Iterator[Street]:
    with ExitStack() as stack:
        yield Street(stack)


def meet(one: Node, other: Node, *paths: str) -> None:
    """They talk, and come to such a path."""
    for node, met in ((one, other), (other, one)):
        node.until("member", lambda member, peer=met.peer: member[0] == peer and bool(member[1]))
    one.tell(send=other.peer)
    other.until("got", lambda got: got == [one.peer, "hello"])
    for node, met in ((one, other), (other, one)):
        node.until("path", lambda path, peer=met.peer: path[0] == peer and path[1] in paths)


def test_a_public_node_tells_both_of_its_addresses(street: Street) -> None:
    node = street.public[0]
    status = node.status_when(lambda found: len(found["addresses"]) == 2)
    hosts = [f"/ip4/{node.place.address}", f"/ip6/{node.place.prefix6}::2"]
    assert status["addresses"] == [f"{host}/tcp/4001/p2p/{node.peer}" for host in hosts]
    assert status["reach"]["nat"] == "none"


def test_behind_a_closed_firewall_relays_are_told_and_connections_punched(street: Street) -> None:
    """Of two houses, and of one: there nothing is in the way."""
    inside = [home.hosts[0] for home in street.homes]
    one, other = (street.add(place) for place in inside)
    for node in (one, other):
        status = node.status_when(
            lambda found: (
                found["reach"]["reach"] == "private" and len(found["reach"]["relays"]) == 2
            )
        )
        assert status["addresses"]
        assert all(
            "/p2p-circuit" in address and address.startswith("/ip6/")
            for address in status["addresses"]
        )
        assert status["reach"]["nat"] == "none"
    meet(one, other, "punched")
    next_door = street.add(street.homes[0].hosts[1])
    next_door.status_when(lambda found: len(found["reach"]["relays"]) == 2)
    meet(one, next_door, "punched", "direct")


def test_an_address_that_the_firewall_lets_in_is_told_once_it_was_reached(street: Street) -> None:
    home = street.homes[1]
    home.open6(4002)
    node = street.add(home.hosts[1], listen=["/ip4/0.0.0.0/tcp/4002", "/ip6/::/tcp/4002"])
    own = f"/ip6/{home.hosts[1].address6}/tcp/4002"
    status = node.status_when(
        lambda found: found["reach"]["candidates"].get(own, {}).get("verdict") == "reachable"
    )
    assert status["addresses"][0] == f"{own}/p2p/{node.peer}"
    for public in street.public:
        public.until("member", lambda member: member[0] == node.peer and own in member[1])
    caller = street.add(street.lab.hosts[0], listen=["/ip6/::/tcp/4003"])
    meet(caller, node, "direct")
    caller.tell(lane=node.peer)
    node.tell(lane=caller.peer)
    caller.until("lane", lambda lane: lane == [node.peer, "direct"])


def test_who_has_both_in_a_house_is_told_of_by_its_relays(street: Street) -> None:
    """Its IPv6 address is one of the internet's and does not answer; what its router does to IPv4
    is seen all the same.
    """
    node = street.add(
        street.homes[0].hosts[1],
        listen=["/ip4/0.0.0.0/tcp/4004", "/ip6/::/tcp/4004"],
        bootstrap=[p.address for p in street.public],
    )
    status = node.status_when(
        lambda found: found["reach"]["observers"] == 2 and len(found["reach"]["relays"]) == 2
    )
    assert status["reach"]["nat"] == "address-dependent"
    assert all("/p2p-circuit" in address for address in status["addresses"])
    assert f"/ip6/{street.homes[0].hosts[1].address6}/tcp/4004" in status["reach"]["interfaces"]

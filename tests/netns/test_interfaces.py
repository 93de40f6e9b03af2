"""Machines that reach one another by another interface than that of the default route."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from netns.lab import Host, Lab, configure, run
from netns.reach_kit import Node

pytestmark = pytest.mark.netns


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def cable(one: Host, other: Host, network: str) -> None:
    """A cable between two hosts, whose ends are .1 and .2 of a network of 16 bits."""
    run(
        ["ip", "-batch", "-"],
        f"link add name eth1 netns {one.namespace} type veth "
        f"peer name eth1 netns {other.namespace}\n",
    )
    for host, number in ((one, 1), (other, 2)):
        address = f"addr add {network}.7.{number}/16 dev eth1"
        configure(host.namespace, [address, "link set eth1 up"])


def test_two_at_the_ends_of_a_cable_meet_by_addresses_that_nobody_assigned(
    stack: ExitStack,
) -> None:
    lab = stack.enter_context(Lab(2))
    for host in lab.hosts:
        configure(host.namespace, ["link del eth0"])
    cable(*lab.hosts, "169.254")
    nodes = [stack.enter_context(Node(host, run="run", lan=True)) for host in lab.hosts]
    for node, met in zip(nodes, reversed(nodes), strict=True):
        node.until("member", lambda member, peer=met.peer: member[0] == peer)
        node.status_when(lambda found, peer=met.peer: found["paths"] == {peer: "lan"})
    nodes[0].tell(send=nodes[1].peer)
    nodes[1].until("got", lambda got: got == [nodes[0].peer, "hello"])


def test_two_with_a_network_of_their_own_go_on_without_that_of_the_default_route(
    stack: ExitStack,
) -> None:
    """Nothing but an invite's address by the first network is known at the start."""
    lab = stack.enter_context(Lab(2))
    cable(*lab.hosts, "10.99")
    one = stack.enter_context(Node(lab.hosts[0], run="run"))
    known = one.until("up")
    first = next(address for address in known if lab.hosts[0].address in address)
    other = stack.enter_context(Node(lab.hosts[1], run="run", bootstrap=[first]))
    for node, met in ((one, other), (other, one)):
        node.until("member", lambda member, peer=met.peer: member[0] == peer)
        node.status_when(lambda found, peer=met.peer: peer in found["paths"])
    assert any("/10.99.7.1/" in address for address in known)
    configure(lab.hub, [f"link set {host.hub_device} down" for host in lab.hosts])
    one.tell(send=other.peer)
    other.until("got", lambda got: got == [one.peer, "hello"])

"""Machines that reach one another by another interface than that of the default route."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from netns.lab import Host, Lab, configure, run
from netns.nat import Inner, Router
from netns.reach_kit import Node
from swarm_kit import Peers

Place = Host | Inner

pytestmark = pytest.mark.netns


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def times(count: int, wanted: object) -> Callable[[object], bool]:
    """Whether something was said so many times, asked of all that was said in its order."""
    seen = 0

    def holds(found: object) -> bool:
        nonlocal seen
        seen += found == wanted
        return seen >= count

    return holds


BOTH = ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"]


def cable(one: Place, other: Place, network: str = "") -> None:
    """A cable between two hosts, whose ends are .1 and .2 of a network of 16 bits; have no address
    but those that systems give themselves, where it is none.
    """
    run(
        ["ip", "-batch", "-"],
        f"link add name eth1 netns {one.namespace} type veth "
        f"peer name eth1 netns {other.namespace}\n",
    )
    for host, number in ((one, 1), (other, 2)):
        address = [f"addr add {network}.7.{number}/16 dev eth1"] if network else []
        configure(host.namespace, [*address, "link set eth1 up"])


def test_two_at_the_ends_of_a_cable_meet_by_addresses_that_nobody_assigned(
    stack: ExitStack,
) -> None:
    lab = stack.enter_context(Lab(2))
    for host in lab.hosts:
        configure(host.namespace, ["link del eth0"])
    cable(lab.hosts[0], lab.hosts[1], "169.254")
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
    cable(lab.hosts[0], lab.hosts[1], "10.99")
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


def test_two_at_the_ends_of_a_cable_meet_by_what_ipv6_gives_each_link(stack: ExitStack) -> None:
    """Nobody has assigned anything, and each has another link that leads nowhere."""
    lab = stack.enter_context(Lab(2))
    for host in lab.hosts:
        configure(host.namespace, ["link del eth0", "link add aside type veth peer name far"])
        configure(host.namespace, ["link set aside up", "link set far up"])
    cable(lab.hosts[0], lab.hosts[1])
    nodes = [
        stack.enter_context(Node(host, run="run", lan=True, listen=BOTH)) for host in lab.hosts
    ]
    for node, met in zip(nodes, reversed(nodes), strict=True):
        node.until("member", lambda member, peer=met.peer: member[0] == peer)
        node.status_when(lambda found, peer=met.peer: found["paths"] == {peer: "lan"})
    nodes[0].tell(send=nodes[1].peer, lane=nodes[1].peer)
    nodes[1].until("got", lambda got: got == [nodes[0].peer, "hello"])
    nodes[0].until("lane", lambda lane: lane == [nodes[1].peer, "lan"])


def test_a_cable_that_is_plugged_in_later_is_a_way_too(stack: ExitStack) -> None:
    lab = stack.enter_context(Lab(2))
    for host in lab.hosts:
        configure(host.namespace, ["link del eth0"])
    nodes = [
        stack.enter_context(Node(host, run="run", lan=True, listen=BOTH)) for host in lab.hosts
    ]
    for node in nodes:
        node.until("up")
    cable(lab.hosts[0], lab.hosts[1])
    for node, met in zip(nodes, reversed(nodes), strict=True):
        node.until("member", lambda member, peer=met.peer: member[0] == peer)
    nodes[0].tell(send=nodes[1].peer)
    nodes[1].until("got", lambda got: got == [nodes[0].peer, "hello"])


def test_in_a_house_with_ipv6_alone_all_meet(stack: ExitStack) -> None:
    """Three on one wire with no IPv4: one has an assigned address, too."""
    lab = stack.enter_context(Lab(3))
    for host in lab.hosts:
        configure(host.namespace, ["link del eth0"])
    switch(lab, lab.hosts)
    configure(lab.hosts[0].namespace, ["addr add fd00:7::1/64 dev eth1 nodad"])
    nodes = [
        stack.enter_context(Node(host, run="run", lan=True, listen=BOTH)) for host in lab.hosts
    ]
    for node in nodes:
        for met in nodes:
            if met is not node:
                node.until("member", lambda member, peer=met.peer: member[0] == peer)
                node.tell(send=met.peer, lane=met.peer)
                met.until("got", lambda got, peer=node.peer: got == [peer, "hello"])
                node.until("lane", lambda lane, peer=met.peer: lane == [peer, "lan"])


def switch(lab: Lab, hosts: list[Host]) -> None:
    """One wire, eth1 of each host, and nothing assigned."""
    configure(lab.hub, ["link add wire type bridge", "link set wire up"])
    for index, host in enumerate(hosts):
        run(
            ["ip", "-batch", "-"],
            f"link add name w{index} netns {lab.hub} type veth "
            f"peer name eth1 netns {host.namespace}\n",
        )
        configure(lab.hub, [f"link set w{index} master wire", f"link set w{index} up"])
        configure(host.namespace, ["link set eth1 up"])


def test_lanes_go_by_a_network_in_common_and_runs_on_when_the_hub_dies(stack: ExitStack) -> None:
    """A third member is all that both can dial by their default routes; it ends."""
    lab = stack.enter_context(Lab(3))
    cable(lab.hosts[0], lab.hosts[1], "10.99")
    for host, other in ((lab.hosts[0], lab.hosts[1]), (lab.hosts[1], lab.hosts[0])):
        configure(host.namespace, [f"route add blackhole {other.address}"])
    hub = stack.enter_context(Node(lab.hosts[2], run="run"))
    nodes = [
        stack.enter_context(Node(host, run="run", bootstrap=[hub.address]))
        for host in lab.hosts[:2]
    ]
    for node, met in zip(nodes, reversed(nodes), strict=True):
        node.until("member", lambda member, peer=met.peer: member[0] == peer)
        node.tell(send=met.peer, lane=met.peer)
        met.until("got", lambda got, peer=node.peer: got == [peer, "hello"])
        node.until("lane", lambda lane, peer=met.peer: lane == [peer, "lan"])
    configure(lab.hub, [f"link set {host.hub_device} down" for host in lab.hosts])
    hub.close()
    for node, met in zip(nodes, reversed(nodes), strict=True):
        node.tell(send=met.peer)
        met.until("got", times(2, [node.peer, "hello"]))


def test_rounds_go_on_when_the_machine_dies_by_which_two_members_met(
    stack: ExitStack, tmp_path: Path
) -> None:
    """It has founded the run, and is all that both reach by their default routes."""
    lab = stack.enter_context(Lab(3))
    hub, one, other = lab.hosts
    cable(one, other, "10.99")
    for host, far in ((one, other), (other, one)):
        configure(host.namespace, [f"route add blackhole {far.address}"])
    peers = stack.enter_context(Peers(tmp_path, 3, 100_000, hosts=lab.hosts, everywhere=True))
    peers.settle()
    configure(lab.hub, [f"link set {hub.hub_device} down"])
    peers.all[0].signal("both", signal.SIGKILL)
    left = peers.all[1:]
    for attempt in range(10):  # until both know that it is gone
        peers.contribute(1000 * attempt, wait_s=60.0, who=left)
        outcomes = [peer.expect("outcome") for peer in left]
        if all(set(found["contributors"]) == {peer.peer for peer in left} for found in outcomes):
            return
    raise AssertionError(outcomes)


def test_beside_two_houses_an_overlay_carries_lanes(stack: ExitStack) -> None:
    """Both routers are symmetric, so that nothing but a relay joins them; the overlay does."""
    lab = stack.enter_context(Lab(4, internet=True))
    public = [stack.enter_context(Node(host, run="run", open=True)) for host in lab.hosts[:2]]
    inner = [Router(host, "symmetric", behind=1).hosts[0] for host in lab.hosts[2:]]
    cable(inner[0], inner[1], "100.80")
    known = [node.address for node in public]
    nodes = [stack.enter_context(Node(place, run="run", bootstrap=known)) for place in inner]
    for node, met in zip(nodes, reversed(nodes), strict=True):
        node.until("member", lambda member, peer=met.peer: member[0] == peer)
        node.tell(send=met.peer)
        met.until("got", lambda got, peer=node.peer: got == [peer, "hello"])
        node.tell(lane=met.peer)
        node.until("lane", lambda lane, peer=met.peer: lane[0] == peer and lane[1] != "relay")
        node.until("told", bool)
        told = [event["told"] for event in node.events if "told" in event]
        assert not any("/100.80." in address for each in told for address in each), told

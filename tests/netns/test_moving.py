"""A node whose machine sleeps, gets another address, or another way to the internet, in mid-run is
found and heard again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from netns.lab import Lab, configure, run
from netns.nat import Router
from netns.reach_kit import Node

from atoll.node.net.transport.addresses import host_and_port

pytestmark = [pytest.mark.netns, pytest.mark.slow]  # slow: the longer limit
SILENT_S = 1.0


class Scene:
    """Two public nodes, and one in a house with two routers; it uses the first one."""

    def __init__(self, stack: ExitStack) -> None:
        self.lab = stack.enter_context(Lab(4, internet=True))
        self.homes = [Router(host, "port-restricted") for host in self.lab.hosts[2:]]
        self.place = self.homes[0].hosts[0]
        name, other = self.place.namespace, self.homes[1]
        run(
            [
                "ip",
                "link",
                "add",
                "name",
                "second",
                "netns",
                other.host.namespace,
                "type",
                "veth",
                "peer",
                "name",
                "eth1",
                "netns",
                name,
            ]
        )
        configure(other.host.namespace, ["link set second master lan up"])
        configure(name, [f"addr add {other.lan}.77/24 dev eth1", "link set eth1 up"])
        self.public = [
            stack.enter_context(Node(host, run="run", silent_s=SILENT_S))
            for host in self.lab.hosts[:2]
        ]
        known = [node.address for node in self.public]
        self.node = stack.enter_context(
            Node(self.place, run="run", bootstrap=known, silent_s=SILENT_S)
        )
        self.settled()

    def settled(self) -> dict[str, object]:
        """The node's status once it is where it wants to be."""
        return self.node.status_when(
            lambda found: len(found["reach"]["relays"]) == 2 and found["reach"]["observers"] == 2
        )

    def talk(self) -> None:
        """A message each way arrives that was sent after now."""
        say(self.public[0], self.node)
        say(self.node, self.public[0])


def say(one: Node, other: Node) -> None:
    """Until one more has arrived."""
    before = sum("got" in event for event in other.events)

    def more(_: object) -> bool:
        one.tell(send=other.peer)
        return sum("got" in event for event in other.events) > before

    other.status_when(more)


def seen(status: dict[str, Any]) -> set[str]:
    """At which hosts others see the node."""
    return {host_and_port(address)[0] for address in status["reach"]["candidates"]}


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def test_another_address_in_the_same_house(scene: Scene) -> None:
    scene.talk()
    lan, name = scene.homes[0].lan, scene.place.namespace
    configure(
        name,
        [
            f"addr del {lan}.2/24 dev eth0",
            f"addr add {lan}.99/24 dev eth0",
            f"route replace default via {lan}.1",
        ],
    )
    scene.node.status_when(
        lambda found: any(
            address.startswith(f"/ip4/{lan}.99/") for address in found["reach"]["interfaces"]
        )
    )
    assert len(scene.settled()["addresses"]) == 2
    scene.talk()


def test_another_way_to_the_internet(scene: Scene) -> None:
    """No interface changes; its router sees it leave through the other one."""
    scene.talk()
    first, second = (home.address for home in scene.homes)
    scene.node.status_when(lambda found: seen(found) == {first})
    configure(scene.place.namespace, [f"route replace default via {scene.homes[1].lan}.1 dev eth1"])
    scene.node.status_when(lambda found: seen(found) == {second})
    scene.settled()
    scene.talk()


def test_a_machine_that_slept(scene: Scene) -> None:
    """With nothing to say to anybody, until the others have given it up."""
    pid = scene.node.process.pid
    os.kill(pid, signal.SIGSTOP)
    scene.lab.hosts[2].prepare("blackhole")()
    try:
        for public in scene.public:
            public.status_when(lambda found: scene.node.peer not in found["connected"])
    finally:
        scene.lab.hosts[2].heal()
        os.kill(pid, signal.SIGCONT)
    scene.node.status_when(lambda found: len(found["connected"]) == 2)
    scene.settled()
    scene.talk()

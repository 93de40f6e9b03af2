"""A node whose machine gets another address in mid-run is found and heard again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from netns.lab import Lab, configure
from netns.nat import Router
from netns.reach_kit import Node

pytestmark = [pytest.mark.netns, pytest.mark.slow]  # slow: the longer limit


class Scene:
    """Two public nodes, and one in a house."""

    def __init__(self, stack: ExitStack) -> None:
        self.lab = stack.enter_context(Lab(3, internet=True))
        self.homes = [Router(host, "port-restricted") for host in self.lab.hosts[2:]]
        self.public = [stack.enter_context(Node(host, run="run")) for host in self.lab.hosts[:2]]
        known = [node.address for node in self.public]
        self.place = self.homes[0].hosts[0]
        self.node = stack.enter_context(Node(self.place, run="run", bootstrap=known))
        self.node.status_when(lambda found: len(found["reach"]["relays"]) == 2)

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


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def test_another_address_in_the_same_house(scene: Scene) -> None:
    scene.talk()
    lan, name = scene.homes[0].lan, scene.place.namespace
    configure(name, [f"addr del {lan}.2/24 dev eth0", f"addr add {lan}.77/24 dev eth0", f"route replace default via {lan}.1"])
    scene.node.status_when(lambda found: found["reach"]["interfaces"][0].startswith(f"/ip4/{lan}.77/"))
    status = scene.node.status_when(lambda found: len(found["reach"]["relays"]) == 2 and found["reach"]["observers"] == 2)
    assert len(status["addresses"]) == 2
    scene.talk()

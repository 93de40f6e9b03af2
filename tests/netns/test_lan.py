"""Peers in one house find each other by multicast DNS, without anybody's address; those of another
house do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from netns.lab import Lab, run
from netns.nat import Inner, Router
from netns.reach_kit import Node

pytestmark = pytest.mark.netns
_COUNT = "table inet sent {\nchain c { type filter hook output priority 0;\nudp dport 5353 counter\n}\n}\n"


@pytest.fixture
def houses() -> Iterator[tuple[ExitStack, list[Inner], list[Inner]]]:
    """Two hosts each in two houses."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(2, internet=True))
        one, other = (Router(host, "port-restricted", behind=2) for host in lab.hosts)
        yield stack, one.hosts, other.hosts


def sent(place: Inner) -> int:
    """Datagrams of multicast DNS that have left this host since `_COUNT`."""
    text = run(place.command(["nft", "list", "table", "inet", "sent"]))
    return int(text.split("counter packets ")[1].split()[0])


def test_two_in_a_house_meet_and_train_without_a_bootstrap(
    houses: tuple[ExitStack, list[Inner], list[Inner]],
) -> None:
    stack, (a, b), (c, _) = houses
    one = stack.enter_context(Node(a, run="run", lan=True))
    stranger = stack.enter_context(Node(c, run="run", lan=True))
    assert stranger.peer
    other = stack.enter_context(Node(b, run="run", lan=True))
    for node, met in ((one, other), (other, one)):
        node.until("member", lambda member, peer=met.peer: member[0] == peer)
        node.status_when(
            lambda found, peer=met.peer: (
                (found["paths"], list(found["lan"]["found"])) == ({peer: "lan"}, [peer])
            )
        )
    one.tell(send=other.peer)
    other.until("got", lambda got: got == [one.peer, "hello"])
    assert stranger.status_when(lambda found: True)["connected"] == []


def test_who_turns_it_off_or_is_alone_on_his_machine_sends_nothing(
    houses: tuple[ExitStack, list[Inner], list[Inner]],
) -> None:
    """The third, which does take part, is the clock: it has asked and said who it is."""
    stack, (a, b), (c, _) = houses
    for place in (a, b, c):
        run(place.command(["nft", "-f", "-"]), _COUNT)
    stack.enter_context(Node(a, run="run", lan=False)).until("up")
    stack.enter_context(Node(b, run="run", lan=True, listen=["/ip4/127.0.0.1/tcp/4001"])).until(
        "up"
    )
    there = stack.enter_context(Node(c, run="run", lan=True))
    there.status_when(lambda _: sent(c) >= 3)
    assert (sent(a), sent(b)) == (0, 0)

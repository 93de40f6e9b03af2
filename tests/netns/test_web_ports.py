"""Firewalls that let nothing out but TCP to port 443, and nothing in: two members of a run talk and
move bulk bytes through one relay there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from netns.lab import Host, Lab
from netns.reach_kit import Node

pytestmark = [pytest.mark.netns, pytest.mark.slow]
ONLY_443 = """
table inet web {
    chain out { type filter hook output priority 0; policy drop; oif lo accept; ct state established,related accept; tcp dport 443 accept; }
    chain in { type filter hook input priority 0; policy drop; iif lo accept; ct state established,related accept; }
}
"""


def shut(host: Host) -> Host:
    """Nothing but web ports from here on."""
    subprocess.run(host.command(["nft", "-f", "-"]), input=ONLY_443, text=True, check=True)
    return host


@pytest.fixture
def three() -> Iterator[tuple[Node, Node, Node]]:
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(3, internet=True))
        relay = stack.enter_context(Node(lab.hosts[0], open=True, listen=["/ip4/0.0.0.0/tcp/443"]))
        inside = [
            stack.enter_context(Node(shut(host), run="run", bootstrap=[relay.address]))
            for host in lab.hosts[1:]
        ]
        yield relay, inside[0], inside[1]


def test_members_talk_and_have_a_lane_by_a_relay_on_port_443(
    three: tuple[Node, Node, Node],
) -> None:
    relay, one, other = three
    for node, met in ((one, other), (other, one)):
        node.until(
            "member",
            lambda member, peer=met.peer: member[0] == peer and "/p2p-circuit" in str(member[1]),
        )
        assert set(
            node.status_when(lambda found: bool(found["reach"]["relays"]))["reach"]["relays"]
        ) == {relay.peer}
    one.tell(send=other.peer)
    assert other.until("got", lambda got: got[0] == one.peer)[1] == "hello"
    one.tell(lane=other.peer)
    for node, met in ((one, other), (other, one)):
        assert (
            node.until("lane", lambda lane, peer=met.peer: lane[0] == peer)[1] == "stream"
        )  # no second port: the relay's lanes are at 444
        paths = {
            path
            for peer, path in (event["path"] for event in node.events if "path" in event)
            if peer == met.peer
        }
        assert paths == {"relay"}

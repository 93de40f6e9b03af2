"""Peers behind NATs, in front of them public ones: who can be dialled is told so, who cannot is
reached through relays, and directly a moment later.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from netns.lab import Lab, run
from netns.meet_kit import Meetings
from netns.nat import Kind, Router
from netns.reach_kit import Node

pytestmark = [pytest.mark.netns, pytest.mark.slow]  # slow: the longer limit
RUN = "run"
TRAP = 4999

Add = Callable[..., Node]
"""Like `Town.add`."""


class Town:
    """Three public nodes (the first is the others' bootstrap), and what tests add."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.lab = stack.enter_context(Lab(9, internet=True))
        self.kinds = ["port-restricted", "port-shifting", "symmetric", "symmetric", "full-cone"]
        self.homes = [
            Router(host, kind) for host, kind in zip(self.lab.hosts[3:8], self.kinds, strict=True)
        ]  # type: ignore[arg-type]
        self.generous = Router(self.lab.hosts[8], "upnp", behind=2)
        self.public = [self.add(self.lab.hosts[0], bootstrap=[])]
        self.public += [self.add(host) for host in self.lab.hosts[1:3]]

    def add(self, place: Any, **start: Any) -> Node:
        """One more peer; it knows the first two public ones."""
        known = [node.address for node in getattr(self, "public", [])[:2]]
        return self.stack.enter_context(Node(place, **{"bootstrap": known, "run": RUN, **start}))


@pytest.fixture(scope="module")
def town() -> Iterator[Town]:
    with ExitStack() as stack:
        yield Town(stack)


@pytest.fixture(scope="module")
def hidden(town: Town) -> list[Node]:
    """One peer behind each router, in the order of `Town.kinds`. They ask nobody for a sign of
    life: what they notice, they were told.
    """
    return [town.add(home.hosts[0], silent_s=600) for home in town.homes]


@pytest.fixture
def guest(town: Town) -> Iterator[Add]:
    """Adds a peer to the town that ends with the test: whoever tries again finds its port free."""
    with ExitStack() as stack:
        yield lambda place, **start: stack.enter_context(town.add(place, **start))


@contextmanager
def apart(lab: Lab, one: str, other: str) -> Generator[None]:
    """Nothing passes between these hosts of the internet."""
    rules = "\n".join(
        f"ip saddr {source} ip daddr {target} drop"
        for source, target in ((one, other), (other, one))
    )
    nft = ["ip", "netns", "exec", lab.hub, "nft", "-f", "-"]
    run(
        nft,
        f"table inet apart {{ chain c {{ type filter hook forward priority 0;\n{rules}\n}}\n}}\n",
    )
    try:
        yield
    finally:
        run(nft, "delete table inet apart\n")


def circuits(addresses: list[str]) -> set[str]:
    """The ids of the relays among somebody's addresses."""
    return {
        address.split("/p2p/")[1].removesuffix("/p2p-circuit")
        for address in addresses
        if "/p2p-circuit" in address
    }


def verdicts(status: dict[str, Any]) -> set[str]:
    return {found["verdict"] for found in status["reach"]["candidates"].values()}


def judged(reach: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status["reach"]["reach"] == reach


def test_public_nodes_are_told_so(town: Town, hidden: list[Node]) -> None:
    for node, host in zip(town.public, town.lab.hosts, strict=False):
        status = node.status_when(judged("public"))
        assert status["reach"]["nat"] == "none"
        assert status["addresses"] == [f"/ip4/{host.address}/tcp/4001/p2p/{node.peer}"]


@pytest.mark.parametrize(
    ("index", "nat"),
    [(0, "endpoint-independent"), (1, "endpoint-independent"), (2, "address-dependent")],
)
def test_who_is_behind_a_router_has_relays_and_no_address_of_its_own(
    town: Town, hidden: list[Node], index: int, nat: str
) -> None:
    status = hidden[index].status_when(
        lambda found: (
            judged("private")(found)
            and len(found["reach"]["relays"]) == 2
            and found["reach"]["nat"] != "unknown"
        )
    )
    assert status["reach"]["nat"] == nat
    assert circuits(status["addresses"]) == set(status["reach"]["relays"])
    assert (
        len(status["addresses"]) == 2
    )  # nothing but circuits: neither the house's address nor one that was not reached
    assert "reachable" not in verdicts(status)
    seen = {address.split("/")[2] for address in status["reach"]["candidates"]}
    assert seen <= {town.lab.hosts[3 + index].address}


def test_an_open_router_lets_us_be_dialled(town: Town, hidden: list[Node]) -> None:
    status = hidden[4].status_when(
        lambda found: judged("public")(found) and not found["reach"]["relays"]
    )
    assert status["addresses"] == [
        f"/ip4/{town.lab.hosts[7].address}/tcp/4001/p2p/{hidden[4].peer}"
    ]
    assert status["reach"]["nat"] == "endpoint-independent"


@pytest.mark.parametrize(("index", "means", "port"), [(0, "nat-pmp", 4001), (1, "upnp", 4002)])
def test_a_router_that_is_asked_opens_a_port(
    town: Town, hidden: list[Node], guest: Add, index: int, means: str, port: int
) -> None:
    node = guest(
        town.generous.hosts[index], listen=[f"/ip4/0.0.0.0/tcp/{port}"], only_upnp=means == "upnp"
    )
    status = node.status_when(
        lambda found: judged("public")(found) and not found["reach"]["relays"]
    )
    address = f"/ip4/{town.lab.hosts[8].address}/tcp/{port}"
    assert status["reach"]["mappings"] == {means: address}
    assert status["addresses"] == [f"{address}/p2p/{node.peer}"]
    at = node.status_when(lambda found: bool(found["lanes_outside"]))["lanes_outside"]
    assert [where.split("/")[2] for where in at] == [town.lab.hosts[8].address]
    caller = hidden[3]  # whom nobody else can give a lane but by a relay
    caller.until("member", lambda member: member[0] == node.peer and member[1] == [address])
    caller.tell(send=node.peer)
    node.until("got", lambda got: got[0] == caller.peer)
    caller.tell(lane=node.peer)
    caller.until(
        "lane", lambda lane: lane == [node.peer, "direct"]
    )  # on a busy machine one over a relay may come before


def test_a_device_that_only_says_it_is_a_router_stands_in_nobodys_way(
    town: Town, hidden: list[Node], guest: Add
) -> None:
    assert hidden
    other, host = town.generous.hosts
    decoy = str(Path(__file__).with_name("decoy.py"))
    assert town.lab.start(other.command([sys.executable, decoy, other.address])) == "ready"
    node = guest(host, listen=["/ip4/0.0.0.0/tcp/4003"], only_upnp=True)
    status = node.status_when(lambda found: bool(found["reach"]["mappings"]))
    address = f"/ip4/{town.lab.hosts[8].address}/tcp/4003"
    assert status["reach"]["mappings"] == {"upnp": address}


@pytest.mark.parametrize(("a", "b"), [(0, 1), (2, 4), (4, 3)])
def test_two_hidden_peers_meet_directly(hidden: list[Node], a: int, b: int) -> None:
    """Through a relay first; then without: at the same moment (0, 1), or since one of them can be
    dialled, by the one who speaks first (2, 4) or by the one who was called (4, 3). Both ends say
    so."""
    for node in (hidden[a], hidden[b]):
        node.until("told")
    hidden[a].status_when(lambda found: bool(found["addresses"]))
    hidden[b].until(
        "member", lambda member: member[0] == hidden[a].peer and "192.168" not in member[1][0]
    )
    hidden[a].until(
        "member", lambda member: member[0] == hidden[b].peer and "192.168" not in member[1][0]
    )
    hidden[a].tell(send=hidden[b].peer)
    hidden[b].until("got", lambda got: got == [hidden[a].peer, "hello"])
    for node, other in ((hidden[a], hidden[b]), (hidden[b], hidden[a])):
        node.until(
            "path",
            lambda path, peer=other.peer: path[0] == peer and path[1] in ("direct", "punched"),
        )
        node.status_when(
            lambda found, peer=other.peer: found["paths"].get(peer) in ("direct", "punched")
        )


@pytest.mark.parametrize(
    ("a", "b", "crossing"), [("rst", "rst", False), ("port-restricted", "no-udp", True)]
)
def test_pairs_meet_at_a_distance(a: Kind, b: Kind, crossing: bool) -> None:
    """Each time two that never met; a RST-ing router punishes who dials out of step, so one in ten
    may stay on its relay for now. Two that call each other at the same moment punch once."""
    with Meetings(a, b, 10, rtt_ms=80) as meetings:
        found = meetings.meet(20.0, crossing=crossing)
    assert sum(meeting.path in ("punched", "direct") for meeting in found) >= (
        9 if a == "rst" else 10
    ), found


def test_two_symmetric_routers_leave_the_relay(hidden: list[Node]) -> None:
    """It stays relayed, and works."""
    one, other = hidden[2], hidden[3]
    other.status_when(lambda found: len(found["reach"]["relays"]) == 2)
    one.until("member", lambda member: member[0] == other.peer and bool(circuits(member[1])))
    one.tell(send=other.peer)
    other.until("got", lambda got: got == [one.peer, "hello"])
    other.until("path", lambda path: path == [one.peer, "relay"])
    assert other.status_when(lambda found: True)["paths"][one.peer] == "relay"


def test_a_direct_path_comes_back_though_a_relayed_one_was_there_before_it_broke(
    town: Town, hidden: list[Node]
) -> None:
    """The public end loses the connection, calls through a relay, and the one that it calls has
    heard of nothing yet.
    """
    public, node = town.public[0], hidden[0]
    node.status_when(
        lambda found: (
            len(found["reach"]["relays"]) == 2 and found["paths"].get(public.peer) == "direct"
        )
    )
    with apart(town.lab, town.lab.hosts[0].address, town.homes[0].address):
        run(town.lab.hosts[0].command(["ss", "-K", "-t", "-n", "-H", "dst", town.homes[0].address]))
        public.tell(send=node.peer)
        public.status_when(lambda found: found["paths"].get(node.peer) == "relay")
    node.tell(send=public.peer)  # and is told that there is no such connection
    for one, other in ((node, public), (public, node)):
        one.status_when(lambda found, peer=other.peer: found["paths"].get(peer) == "direct")


def test_strangers_are_not_relayed(town: Town, hidden: list[Node], guest: Add) -> None:
    """A peer of no run that the relay knows reaches nobody through it, and gets no place."""
    status = hidden[0].status_when(lambda found: len(found["reach"]["relays"]) == 2)
    stranger = guest(town.lab.hosts[1], listen=["/ip4/0.0.0.0/tcp/4009"], run="")
    stranger.tell(add=[hidden[0].peer, status["addresses"]])
    stranger.tell(connect=hidden[0].peer)
    _, error = stranger.until("connected", lambda found: found[0] == hidden[0].peer)
    assert "relays only for peers of runs it knows" in error


def test_addresses_of_other_houses_are_not_dialled(
    town: Town, hidden: list[Node], guest: Add
) -> None:
    """Whoever makes others believe that a peer is at a private address, or at their own machine,
    makes them send nothing.
    """
    victim = guest(town.lab.hosts[2], listen=["/ip4/0.0.0.0/tcp/4010"], run="other")
    name = "12D3KooWQnwEGNqcM2nAcPtRR9rAX8Hrg4k9kJLCHoTR5chJfz6d"
    victim.tell(
        add=[
            name,
            [
                "/ip4/192.168.4.2/tcp/4001",
                "/ip4/127.0.0.1/tcp/4010",
                "/ip4/10.0.0.1/tcp/22",
                "/ip4/169.254.169.254/tcp/80",
            ],
        ]
    )
    victim.tell(connect=name)
    assert (
        victim.until("connected", lambda found: found[0] == name)[1]
        == f"no address of {name} is known"
    )


def test_a_relay_dies_and_another_takes_its_place(town: Town, hidden: list[Node]) -> None:
    """Last: it takes a public node from the town."""
    node = hidden[1]
    relays = set(
        node.status_when(lambda found: len(found["reach"]["relays"]) == 2)["reach"]["relays"]
    )
    dead = next(public for public in town.public if public.peer in relays)
    dead.close()
    status = node.status_when(lambda found: len(set(found["reach"]["relays"]) - {dead.peer}) == 2)
    assert dead.peer not in circuits(status["addresses"])
    caller = hidden[3]
    caller.until(
        "member",
        lambda member: (
            member[0] == node.peer
            and bool(circuits(member[1]))
            and dead.peer not in circuits(member[1])
        ),
    )
    caller.tell(send=node.peer)
    node.until("got", lambda got: got == [caller.peer, "hello"])


def test_a_peer_of_the_internet_cannot_make_us_dial_our_own_house(town: Town, guest: Add) -> None:
    home = town.homes[0]
    traps = [
        home.hosts[0].inside(lambda: socket.create_server(("127.0.0.1", TRAP))),
        home.host.inside(lambda: socket.create_server((f"{home.lan}.1", TRAP))),
    ]
    try:
        lies = [f"/ip4/{trap.getsockname()[0]}/tcp/{TRAP}" for trap in traps]
        liar = guest(town.lab.hosts[2], listen=["/ip4/0.0.0.0/tcp/4012"], lies=lies)
        victim = guest(home.hosts[0], listen=["/ip4/0.0.0.0/tcp/4011"])
        victim.status_when(lambda status: status["reach"]["observers"] > 0)
        for _ in range(20):  # more than a wire needs
            victim.tell(send=liar.peer)
        liar.until("got")
        victim.tell(lane=liar.peer)
        victim.until("lane", lambda lane: lane == [liar.peer, "direct"])
        victim.status_when(lambda status: liar.peer in status["wires"])
        for trap in traps:
            trap.setblocking(False)
            with pytest.raises(BlockingIOError):
                trap.accept()
    finally:
        for trap in traps:
            trap.close()


def test_a_node_that_is_reached_through_relays_only_shows_no_member_where_it_is(
    town: Town, hidden: list[Node], guest: Add
) -> None:
    """Whatever a member gets of it, and whatever it dials: circuits, and nobody but bootstrap
    nodes.
    """
    place = town.generous.hosts[0]  # behind a router that would open a port, if it were asked
    shy = guest(place, listen=["/ip4/127.0.0.1/tcp/4150"], relay_only=True, lan=True)
    member, outside = hidden[0], town.lab.hosts[8].address
    status = shy.status_when(
        lambda found: (
            0 < len(found["addresses"]) == len(found["reach"]["relays"])
            and circuits(found["addresses"]) == set(found["reach"]["relays"])
        )
    )
    assert (status["reach"]["mappings"], status["reach"]["candidates"], status["lan"]["on"]) == (
        {},
        {},
        False,
    )
    told = member.until(
        "member", lambda found: found[0] == shy.peer and circuits(found[1]) != set()
    )[1]
    assert [address for address in told if "/p2p-circuit" not in address] == []
    member.tell(send=shy.peer)
    shy.until("got", lambda got: got == [member.peer, "hello"])
    shy.tell(send=member.peer)
    member.until("got", lambda got: got == [shy.peer, "hello"])
    member.tell(lane=shy.peer)
    shy.tell(lane=member.peer)
    assert member.until("lane", lambda lane: lane[0] == shy.peer)[1] in ("relay", "stream")
    third = town.public[2]  # public, and no bootstrap of it
    third.tell(send=shy.peer)
    shy.until("got", lambda got: got == [third.peer, "hello"])
    shy.tell(send=third.peer)
    third.until("got", lambda got: got == [shy.peer, "hello"])
    for node in (member, third):
        assert (
            node.status_when(lambda found: shy.peer in found["paths"])["paths"][shy.peer] == "relay"
        )
        said = [
            event for event in node.events if "log" not in event and "status" not in event
        ]  # others of that house are in its status
        assert [
            event
            for event in said
            if any(name in str(event) for name in (place.address, outside))
            and shy.peer in str(event)
        ] == []

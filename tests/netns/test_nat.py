"""Routers of the laboratory behave as their kind says: what they do to ports, and whom they let in."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest
from netns.igd import GROUP, PMP, SERVICE, SSDP
from netns.lab import PATIENCE_S, Lab
from netns.nat import KINDS, SHIFT, Inner, Kind, Router
from netns.probe import Server, answers_udp, knock, simultaneous_open, tcp_mappings, udp_mappings

pytestmark = pytest.mark.netns
Build = Callable[..., Lab]
PORT = 20_001
SAME = {"full-cone", "port-restricted", "no-udp", "rst", "upnp"}


@contextmanager
def servers(lab: Lab) -> Iterator[list[Server]]:
    """Two ports of the first host and one of the second."""
    made = [Server(lab.hosts[0], 7001), Server(lab.hosts[0], 7002), Server(lab.hosts[1], 7001)]
    try:
        yield made
    finally:
        for server in made:
            server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_maps_and_filters_as_its_kind_says(build: Build, kind: Kind) -> None:
    lab = build(3, internet=True)
    router = Router(lab.hosts[2], kind)
    inner = router.hosts[0]
    with servers(lab) as (first, other_port, other_host):
        everywhere = [first, other_port, other_host]
        if kind == "no-udp":
            assert udp_mappings(inner, PORT, everywhere, 0.3) == [None] * 3
        else:
            check(kind, router, udp_mappings(inner, PORT, everywhere))
            assert answers_udp(inner, PORT + 1, first, first)
            assert answers_udp(inner, PORT + 2, first, other_port) == (kind == "full-cone")
            assert answers_udp(inner, PORT + 3, first, other_host) == (kind == "full-cone")
        with tcp_mappings(inner, PORT, everywhere) as mappings:
            check(kind, router, list(mappings))
            want = {"full-cone": "refused", "rst": "refused"}.get(
                kind, "silent"
            )  # by the host, and by the router
            assert knock(lab.hosts[1], mappings[0]) == want
            if kind == "full-cone":
                with inner.inside(
                    lambda: socket.create_server((inner.address, PORT), reuse_port=True)
                ):
                    assert knock(lab.hosts[1], mappings[0]) == "open"


def check(kind: Kind, router: Router, mappings: list[tuple[str, int] | None]) -> None:
    """Ports outside, against the kind."""
    assert {mapping and mapping[0] for mapping in mappings} == {router.address}
    ports = [mapping[1] for mapping in mappings if mapping]
    if kind == "symmetric":
        assert len({*ports, PORT}) > 2, ports  # at random, so that two may be alike
    else:
        assert ports == [PORT if kind in SAME else PORT ^ SHIFT] * 3


@pytest.mark.parametrize(
    ("kind", "delay", "meets"),
    [("port-restricted", 0, True), ("port-shifting", 0, True), ("rst", 80, True)],
)
def test_two_hosts_meet_by_a_simultaneous_open(
    build: Build, kind: Kind, delay: float, meets: bool
) -> None:
    lab = build(2, internet=True, rtt_ms=delay)
    homes = [Router(host, kind) for host in lab.hosts]
    port = PORT ^ SHIFT if kind == "port-shifting" else PORT
    one, other = [(home.address, port) for home in homes]
    assert simultaneous_open(homes[0].hosts[0], PORT, homes[1].hosts[0], PORT, one, other) == meets


def test_symmetric_routers_do_not_let_hosts_meet(build: Build) -> None:
    lab = build(2, internet=True)
    homes = [Router(host, "symmetric") for host in lab.hosts]
    one, other = [(home.address, PORT) for home in homes]
    assert not simultaneous_open(homes[0].hosts[0], PORT, homes[1].hosts[0], PORT, one, other, 1.5)


def test_two_hosts_behind_one_router_see_each_other_unless_isolated(build: Build) -> None:
    lab = build(4, internet=True)
    together, apart = (
        Router(lab.hosts[2], "port-restricted", 2),
        Router(lab.hosts[3], "port-restricted", 2, isolated=True),
    )
    assert knock(together.hosts[0], (together.hosts[1].address, 9)) == "refused"
    assert knock(apart.hosts[0], (apart.hosts[1].address, 9)) == "silent"
    with servers(lab) as (server, *_):
        for inner in (*together.hosts, *apart.hosts):
            assert udp_mappings(inner, PORT + inner.index, [server]) == [
                (inner.router.address, PORT + inner.index)
            ]


def test_two_hosts_of_one_port_get_two(build: Build) -> None:
    lab = build(3, internet=True)
    router = Router(lab.hosts[2], "port-restricted", 2)
    with servers(lab) as (server, *_), tcp_mappings(router.hosts[0], PORT, [server]) as one:
        with tcp_mappings(router.hosts[1], PORT, [server]) as other:
            assert one == [(router.address, PORT)]
            assert other[0][1] != PORT


def test_a_house_has_ipv6_and_a_firewall(build: Build) -> None:
    lab = build(2, internet=True, rtt_ms=10)
    inner, outside = Router(lab.hosts[1], "symmetric").hosts[0], lab.hosts[0]
    there = f"{outside.prefix6}::2"
    with outside.inside(lambda: socket.create_server((there, 0), family=socket.AF_INET6)) as server:
        port = server.getsockname()[1]
        with inner.inside(
            lambda: socket.create_connection((there, port), timeout=PATIENCE_S)
        ) as dialled:
            accepted, seen = server.accept()
            with accepted:
                assert seen[0] == inner.address6
                assert seen[1] == dialled.getsockname()[1]

    def dial() -> None:
        socket.create_connection((inner.address6, 9), timeout=0.5)

    with pytest.raises(TimeoutError):
        outside.inside(dial)


def soap(inner: Inner, where: str, action: str, **values: str) -> str:
    """A UPnP action's answer."""
    inside_it = "".join(f"<New{name}>{value}</New{name}>" for name, value in values.items())
    body = f'<s:Envelope><s:Body><u:{action} xmlns:u="{SERVICE}">{inside_it}</u:{action}></s:Body></s:Envelope>'
    request = Request(where, body.encode(), {"SOAPAction": f'"{SERVICE}#{action}"'})

    def post() -> str:
        with urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    return inner.inside(post)


def search(inner: Inner) -> str:
    """Where the router describes itself, found by a multicast."""
    with inner.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendto(
            f'M-SEARCH * HTTP/1.1\r\nHOST: {GROUP}:{SSDP}\r\nMAN: "ssdp:discover"\r\nMX: 1\r\nST: {SERVICE}\r\n\r\n'.encode(),
            (GROUP, SSDP),
        )
        found = re.search(r"LOCATION: (\S+)", sock.recv(2048).decode())
    assert found is not None
    return found[1]


def test_a_router_with_upnp_opens_a_port_and_closes_it(build: Build) -> None:
    lab = build(2, internet=True)
    router = Router(lab.hosts[1], "upnp")
    inner, outside = router.hosts[0], lab.hosts[0]
    location = search(inner)

    def describe() -> str:
        with urlopen(location, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    assert SERVICE in inner.inside(describe)
    control = location.replace("/rootDesc.xml", "/control")
    assert router.address in soap(inner, control, "GetExternalIPAddress")
    with inner.inside(lambda: socket.create_server((inner.address, 4001))):
        mine = {"RemoteHost": "", "ExternalPort": "5001", "Protocol": "TCP"}
        assert knock(outside, (router.address, 5001)) == "silent"
        soap(
            inner,
            control,
            "AddPortMapping",
            **mine,
            InternalPort="4001",
            InternalClient=inner.address,
            LeaseDuration="0",
        )
        assert knock(outside, (router.address, 5001)) == "open"
        soap(inner, control, "DeletePortMapping", **mine)
        assert knock(outside, (router.address, 5001)) == "silent"


def test_a_lease_ends_and_nat_pmp_works(build: Build) -> None:
    lab = build(2, internet=True)
    router = Router(lab.hosts[1], "upnp")
    inner, outside = router.hosts[0], lab.hosts[0]
    with (
        inner.inside(lambda: socket.create_server((inner.address, 4001))),
        inner.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock,
    ):
        sock.settimeout(PATIENCE_S)
        sock.sendto(b"\0\0", (f"{router.lan}.1", PMP))
        assert sock.recv(64)[8:] == socket.inet_aton(router.address)
        sock.sendto(struct.pack(">BBHHHI", 0, 2, 0, 4001, 5002, 1), (f"{router.lan}.1", PMP))
        assert struct.unpack(">HHI", sock.recv(64)[8:]) == (4001, 5002, 1)
        assert knock(outside, (router.address, 5002)) == "open"
        until = time.monotonic() + PATIENCE_S
        while knock(outside, (router.address, 5002)) != "silent":
            assert time.monotonic() < until

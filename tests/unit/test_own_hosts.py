"""Which of a machine's numeric hosts others are told of, and in which order."""

from __future__ import annotations

import pytest

from atoll.node.net.transport import addresses, lane_sockets
from atoll.node.net.transport.addresses import MAX_HOSTS, ordered_hosts, own_hosts, places


def test_default_routes_first_then_cables_and_overlays_but_no_bridge() -> None:
    adapters = [
        ("lo", ["127.0.0.1", "::1"]),
        ("eth1", ["169.254.3.4", "fe80::1"]),
        ("docker0", ["172.17.0.1"]),
        ("eth0", ["192.168.1.5", "2001:db8::5", "2001:db8::6", "fe80::2"]),
        ("veth12ab", ["10.1.1.1"]),
        ("wg0", ["10.8.0.2", "fd01::2", "fd01::3"]),
    ]
    assert ordered_hosts(["192.168.1.5", "2001:db8::5"], adapters) == [
        "192.168.1.5",
        "2001:db8::5",
        "10.8.0.2",
        "169.254.3.4",
        "fd01::2",
        "fe80::1",  # where nobody has assigned an IPv4 address
    ]


def test_without_a_default_route_a_cable_is_a_way() -> None:
    assert ordered_hosts([], [("eth1", ["169.254.3.4", "fe80::1"])]) == ["169.254.3.4", "fe80::1"]


def test_where_there_is_no_ipv4_the_address_of_the_link_is_told_too() -> None:
    adapters = [("eth0", ["2001:db8::5", "fe80::2"]), ("eth1", ["fe80::1"])]
    assert ordered_hosts(["2001:db8::5"], adapters) == ["2001:db8::5", "fe80::2", "fe80::1"]


def test_an_address_of_a_link_is_dialled_by_each_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [addresses.LinkHost(4, "fe80::a"), addresses.LinkHost(7, "fe80::b")]
    monkeypatch.setattr(addresses, "links", lambda: ours)
    assert places("fe80::1", 4001) == [("fe80::1", 4001, 0, 4), ("fe80::1", 4001, 0, 7)]
    assert places("fd00::1", 4001) == [("fd00::1", 4001)]
    assert places("10.0.0.1", 4001) == [("10.0.0.1", 4001)]


def test_there_are_at_most_so_many() -> None:
    adapters = [(f"eth{index}", [f"10.0.{index}.1"]) for index in range(20)]
    assert len(ordered_hosts(["192.168.1.5"], adapters)) == MAX_HOSTS


def test_this_machine_has_loopback_last() -> None:
    assert own_hosts()[-1] == "127.0.0.1"


def test_addresses_of_links_are_told_on_private_networks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = ["/ip4/10.0.0.1/tcp/7", "/ip6/fe80::1/tcp/7", "/ip4/127.0.0.1/tcp/7"]
    monkeypatch.setattr(lane_sockets, "listening_at", lambda _: bound)
    listener = lane_sockets.LaneListener(["0.0.0.0"], 0)
    listener.look_again()
    for far in ("", "1.2.3.4", "2a00::1"):
        assert listener.addresses(far) == [bound[0], bound[2]]
    for far in ("10.0.0.2", "fe80::2", "169.254.1.1"):
        assert listener.addresses(far) == bound

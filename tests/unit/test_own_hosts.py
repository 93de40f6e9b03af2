"""Which of a machine's numeric hosts others are told of, and in which order."""

from __future__ import annotations

from atoll.node.net.transport.addresses import MAX_HOSTS, ordered_hosts, own_hosts


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
    ]


def test_without_a_default_route_a_cable_is_a_way() -> None:
    assert ordered_hosts([], [("eth1", ["169.254.3.4", "fe80::1"])]) == ["169.254.3.4"]


def test_there_are_at_most_so_many() -> None:
    adapters = [(f"eth{index}", [f"10.0.{index}.1"]) for index in range(20)]
    assert len(ordered_hosts(["192.168.1.5"], adapters)) == MAX_HOSTS


def test_this_machine_has_loopback_last() -> None:
    assert own_hosts()[-1] == "127.0.0.1"

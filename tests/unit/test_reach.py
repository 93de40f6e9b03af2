"""The address manager, a relay's ledger, the rules of dialling back, and the small messages: state
machines without I/O.
"""

from __future__ import annotations

import random
import re
from functools import partial

import pytest
import trio

from atoll.collectives.identifiers import PeerId
from atoll.node.net.announcements import Registry, announce
from atoll.node.net.reach import natpmp, portmap, upnp
from atoll.node.net.reach.autonat import may_try
from atoll.node.net.reach.circuit import peer_field, peer_in, reservation_fields, reservation_in
from atoll.node.net.reach.ledger import RelayLedger, RelayLimits
from atoll.node.net.reach.manager import FRESH_S, AddressManager
from atoll.node.net.reach.protobuf import MAX_FIELDS, decode, encode, number, octets
from atoll.node.net.reach.routes import assigned, on_link
from atoll.node.net.transport.addresses import (
    circuit,
    host_of,
    is_address,
    is_direct,
    is_internet,
    split_circuit,
    split_peer,
    usable,
    without_peer,
)
from atoll.node.net.transport.packed import pack, unpack
from atoll.security.identity import Identity

A, B, C = (Identity(bytes([number]) * 32).peer for number in range(3))
HOUSE, LOOP = "/ip4/192.168.1.20/tcp/4150", "/ip4/127.0.0.1/tcp/4150"
WAN, SHIFTED = "/ip4/11.0.0.7/tcp/4150", "/ip4/11.0.0.7/tcp/50123"
S1, S2, S3 = "11.1.0.1", "11.2.0.1", "11.3.0.1"
CIRCUIT = circuit(A, "/ip4/11.1.0.1/tcp/4001")


# ---- addresses
def test_a_circuit_is_an_address_and_leads_to_its_relay() -> None:
    assert split_circuit(CIRCUIT) == (A, "/ip4/11.1.0.1/tcp/4001")
    assert is_address(CIRCUIT)
    assert not is_direct(CIRCUIT)
    assert host_of(CIRCUIT) == "11.1.0.1"
    assert without_peer(f"{CIRCUIT}/p2p/{B}") == CIRCUIT
    assert without_peer(f"{WAN}/p2p/{B}") == WAN
    assert without_peer(WAN) == WAN
    assert split_peer(f"{CIRCUIT}/p2p/{B}") == (B, CIRCUIT)
    assert usable([CIRCUIT, WAN, CIRCUIT]) == (CIRCUIT, WAN)


@pytest.mark.parametrize(
    "bad",
    [
        f"{CIRCUIT}/p2p/{A}/p2p-circuit",
        "/p2p-circuit",
        f"/p2p/{A}/p2p-circuit",
        "/ip4/11.1.0.1/tcp/1/p2p/x/p2p-circuit",
    ],
)
def test_what_is_no_circuit(bad: str) -> None:
    assert split_circuit(bad) is None
    assert not is_address(bad)


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("11.0.0.1", True),
        ("10.0.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
    ],
)
def test_whose_the_internet_is(host: str, answer: bool) -> None:
    assert is_internet(f"/ip4/{host}/tcp/1") is answer


def test_ipv6() -> None:
    assert is_internet("/ip6/2a0b::1/tcp/1")
    assert not is_internet("/ip6/fe80::1/tcp/1")
    assert not is_internet("/ip6/fd00::1/tcp/1")
    assert not is_internet("/dns4/example.org/tcp/1")


# ---- the address manager
def behind_nat(*observations: tuple[str, str]) -> AddressManager:
    manager = AddressManager()
    assert manager.interfaces([HOUSE, LOOP])
    for by, address in observations:
        manager.observed(by, address, 0.0)
    return manager


def test_without_an_internet_private_addresses_are_told() -> None:
    manager = behind_nat()
    assert manager.advertised(0.0) == (HOUSE, LOOP)
    assert (manager.reach(0.0), manager.nat(0.0)) == ("local", "unknown")
    assert not manager.online


def test_a_public_interface_is_told_at_once_until_it_is_refuted() -> None:
    manager = AddressManager()
    manager.interfaces([WAN, LOOP])
    assert manager.advertised(0.0) == (WAN,)
    assert manager.reach(0.0) == "unknown"
    manager.report(WAN, S1, True, 0.0)
    assert (manager.reach(0.0), manager.nat(0.0)) == ("public", "none")
    manager.report(WAN, S2, False, 1.0)
    manager.report(WAN, S3, False, 1.0)
    assert manager.reach(1.0) == "private"
    manager.circuits([CIRCUIT])
    assert manager.advertised(1.0) == (CIRCUIT,)


def test_what_is_observed_is_told_only_when_it_was_reached() -> None:
    manager = behind_nat((S1, WAN))
    assert manager.advertised(0.0) == (HOUSE, LOOP)  # better than a goodbye
    manager.circuits([CIRCUIT])
    assert manager.advertised(0.0) == (CIRCUIT,)
    manager.report(WAN, S1, True, 1.0)
    assert manager.advertised(1.0) == (WAN, CIRCUIT)
    manager.circuits([])
    assert manager.advertised(1.0) == (WAN,)
    assert manager.reach(1.0) == "public"


SIX = "/ip6/2a0b:1::7/tcp/4150"


def test_an_ipv6_address_in_a_house_is_told_once_it_was_reached() -> None:
    manager = AddressManager()
    manager.interfaces([HOUSE, SIX, LOOP])
    manager.observed(S1, WAN, 0.0)
    manager.observed(S2, SHIFTED, 0.0)
    manager.circuits([CIRCUIT])
    assert (manager.plain(ipv6=False), manager.plain(ipv6=True)) == (False, True)
    assert manager.nat(0.0) == "address-dependent"
    assert manager.candidates(0.0) == [SIX]
    assert (manager.advertised(0.0), manager.reach(0.0)) == ((CIRCUIT,), "private")
    manager.report(SIX, S1, True, 0.0)
    assert (manager.advertised(0.0), manager.reach(0.0)) == (
        (SIX, CIRCUIT),
        "private",
    )  # whoever has IPv4 only needs a relay


def test_where_no_house_is_in_between_an_ipv6_address_is_told_at_once() -> None:
    for own, expected in (([WAN, SIX, LOOP], (WAN, SIX)), ([SIX], (SIX,))):
        manager = AddressManager()
        manager.interfaces(own)
        assert (manager.advertised(0.0), manager.nat(0.0)) == (expected, "none")
        manager.report(SIX, S1, False, 0.0)
        manager.circuits([CIRCUIT])
        assert manager.advertised(0.0) == (
            *(address for address in expected if address != SIX),
            CIRCUIT,
        )


def test_the_majority_of_servers_decides_and_verdicts_age() -> None:
    manager = behind_nat((S1, WAN), (S2, WAN))
    manager.report(WAN, S1, True, 0.0)
    manager.report(WAN, S2, False, 0.0)
    assert manager.verdict(WAN, 0.0) == "unreachable"
    manager.report(WAN, S3, True, 0.0)
    assert manager.verdict(WAN, 0.0) == "reachable"
    assert manager.verdict(WAN, FRESH_S + 1) == "unknown"
    assert manager.candidates(FRESH_S + 1) == []


def test_kinds_of_nat() -> None:
    assert behind_nat((S1, WAN)).nat(0.0) == "unknown"
    assert behind_nat((S1, SHIFTED), (S2, SHIFTED)).nat(0.0) == "endpoint-independent"
    symmetric = behind_nat((S1, WAN), (S2, SHIFTED))
    assert symmetric.nat(0.0) == "address-dependent"
    assert symmetric.candidates(0.0) == []
    assert symmetric.reach(0.0) == "private"
    assert set(symmetric.seen_at(0.0)) == {WAN, SHIFTED}


def test_one_liar_among_observers_makes_no_other_nat() -> None:
    """Else it would take a forwarded port from us, and make us ask relays for places."""
    behind = behind_nat((S1, WAN), (S2, WAN), (S3, SHIFTED))
    assert behind.nat(0.0) == "endpoint-independent"
    assert behind.candidates(0.0)[0] == WAN
    behind.report(WAN, S1, True, 0.0)
    assert behind.reach(0.0) == "public"
    public = AddressManager()
    public.interfaces([WAN])
    public.observed(S1, WAN, 0.0)
    public.observed(S2, "/ip4/11.0.0.8/tcp/9", 0.0)
    assert public.nat(0.0) == "none"


def test_what_nobody_says_any_more_is_forgotten() -> None:
    manager = behind_nat((S1, WAN), (S2, WAN))
    for port in range(1, 51):
        manager.report(f"/ip4/11.0.0.7/tcp/{port}", S1, False, port * FRESH_S)
    assert len(manager._reports) <= 2


def test_observers_cannot_name_private_addresses_or_relays() -> None:
    manager = behind_nat((S1, "/ip4/10.0.0.1/tcp/22"), (S2, "/ip4/127.0.0.1/tcp/22"), (S3, CIRCUIT))
    assert manager.seen_at(0.0) == []
    assert not manager.online


def test_a_mapping_is_a_candidate_and_goes() -> None:
    manager = behind_nat((S1, WAN), (S2, SHIFTED))
    manager.mapped("upnp", "/ip4/11.0.0.7/tcp/4150")
    assert manager.candidates(0.0) == [WAN]
    manager.mapped("nat-pmp", "/ip4/192.168.0.1/tcp/4150")
    assert manager.candidates(0.0) == [WAN]
    manager.mapped("upnp", None)
    assert manager.candidates(0.0) == []


def test_what_was_tried_before_it_was_mapped_is_tried_again() -> None:
    manager = behind_nat((S1, WAN), (S2, WAN))
    manager.report(WAN, S1, False, 0.0)
    manager.mapped("nat-pmp", WAN)
    assert manager.verdict(WAN, 0.0) == "unknown"
    manager.report(WAN, S1, True, 1.0)
    manager.mapped("nat-pmp", WAN)  # a renewal
    assert manager.verdict(WAN, 1.0) == "reachable"
    manager.mapped("nat-pmp", None)
    assert manager.verdict(WAN, 1.0) == "unknown"


def test_another_network_voids_what_others_said() -> None:
    manager = behind_nat((S1, WAN))
    manager.report(WAN, S1, True, 0.0)
    assert not manager.interfaces([HOUSE, LOOP])
    assert manager.interfaces(["/ip4/172.20.10.2/tcp/4150", LOOP])
    assert (manager.reach(1.0), manager.candidates(1.0)) == ("local", [])
    assert manager.advertised(1.0) == ("/ip4/172.20.10.2/tcp/4150", LOOP)


def test_so_does_another_way_to_the_internet() -> None:
    manager = AddressManager()
    assert manager.interfaces([HOUSE, LOOP], "192.168.1.20")
    manager.observed(S1, WAN, 0.0)
    assert not manager.interfaces([HOUSE, LOOP], "192.168.1.20")
    assert manager.seen_at(1.0) == [WAN]
    assert manager.interfaces([HOUSE, LOOP], "172.20.10.2")
    assert manager.way == "172.20.10.2"
    assert manager.seen_at(1.0) == []


def test_what_the_user_announces_needs_no_proof() -> None:
    manager = AddressManager(["/ip4/11.9.9.9/tcp/4150"])
    manager.interfaces([HOUSE])
    assert manager.advertised(0.0) == ("/ip4/11.9.9.9/tcp/4150",)
    assert manager.reach(0.0) == "public"


# ---- a relay's promises
def test_reservations_are_bounded_by_host_and_in_all_and_end() -> None:
    ledger = RelayLedger(RelayLimits(reservations=3, reservations_per_host=2, reservation_s=10.0))
    peers = [PeerId(f"p{index}") for index in range(5)]
    assert [ledger.reserve(peer, S1, 0.0) for peer in peers[:3]] == [True, True, False]
    assert [ledger.reserve(peer, S2, 0.0) for peer in peers[3:]] == [True, False]
    assert ledger.reserve(peers[0], S1, 9.0)  # a renewal
    assert ledger.reserved() == [peers[0], peers[1], peers[3]]
    assert (ledger.holds(peers[0], 15.0), ledger.holds(peers[1], 15.0)) == (True, False)
    assert ledger.refused["reservations"] == 2
    ledger.drop(peers[0])
    assert not ledger.holds(peers[0], 15.0)


def test_circuits_are_bounded_by_peer_and_in_all() -> None:
    ledger = RelayLedger(RelayLimits(circuits=3, circuits_per_peer=2))
    assert [ledger.begin(A, B), ledger.begin(A, C), ledger.begin(A, B)] == [True, True, False]
    ledger.end(A, C)
    assert ledger.begin(A, B)
    assert ledger.open == 2
    assert not ledger.begin(C, B)  # B has two


def test_runs_that_a_relay_knows() -> None:
    registry = Registry()
    one, two = Identity.generate(), Identity.generate()
    for identity, run in ((one, "a"), (one, "b"), (two, "b")):
        assert registry.accept(announce(identity, run, [WAN], 1000.0), A, 0.0, 1000.0)  # type: ignore[arg-type]
    assert registry.runs_of(one.peer, 0.0) == {"a", "b"}
    assert registry.runs_of(two.peer, 0.0) == {"b"}
    assert registry.runs_of(A, 0.0) == set()
    assert registry.runs_of(one.peer, 1e6) == set()


# ---- dialling back
def test_a_server_dials_nothing_but_the_askers_own_host() -> None:
    asked = [
        WAN,
        "/ip4/11.0.0.8/tcp/4150",
        HOUSE,
        LOOP,
        CIRCUIT,
        "",
        "/dns4/example.org/tcp/80",
        SHIFTED,
        WAN,
    ]
    assert may_try(asked, "11.0.0.7") == [WAN, SHIFTED]
    assert may_try(asked, "192.168.1.20") == []
    assert may_try(asked, "") == []
    assert len(may_try([f"/ip4/11.0.0.7/tcp/{port}" for port in range(1, 99)], "11.0.0.7")) == 4


# ---- messages
def test_messages_come_back_as_they_were() -> None:
    assert decode(encode({1: 300, 2: b"xy", 3: [b"a", b""]})) == {
        1: [300],
        2: [b"xy"],
        3: [b"a", b""],
    }
    assert number(decode(b""), 1, 7) == 7
    assert octets(decode(b""), 1) == b""
    assert peer_in({2: [peer_field(B)]}, A) == B
    granted = reservation_in({3: [reservation_fields(1234, [f"{WAN}/p2p/{A}", CIRCUIT])]}, A)
    assert (granted.expires_s, granted.addresses) == (1234, (WAN, CIRCUIT))
    assert unpack([*pack([CIRCUIT]), b"\xff\xff", 7, bytes(300), *pack([WAN, WAN])]) == (
        CIRCUIT,
        WAN,
    )
    assert pack(["/dns4/my_box/tcp/1", WAN]) == pack(
        [WAN]
    )  # an address of ours, though libp2p cannot say it


def test_the_librarys_messages_are_the_same() -> None:
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage

    message = HopMessage()
    message.ParseFromString(encode({1: 1, 2: peer_field(B), 5: 100}))
    assert (message.type, message.status) == (HopMessage.CONNECT, 100)
    assert peer_in(decode(message.SerializeToString()), A) == B


@pytest.mark.parametrize(
    "bad",
    [
        b"\x08",
        b"\x0a\x05ab",
        b"\x0b\x01",
        b"\x08" + b"\xff" * 11,
        encode({1: [1] * (MAX_FIELDS + 1)}),
    ],
)
def test_broken_messages_are_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match=r"field|number|kind"):
        decode(bad)


def test_whose_address_it_is() -> None:
    assert assigned("127.0.0.1")
    assert not assigned("192.0.2.1")


def test_on_link_networks() -> None:
    table = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "eth0\t0000000A\t0101A8C0\t0003\t0\t0\t0\t000000FF\t0\t0\t0\n"
    )
    assert on_link("192.168.1.77", table)
    assert not on_link("192.168.2.77", table)
    assert not on_link("10.0.0.1", table)
    assert not on_link("not a number", table)


# ---- asking the router
def test_nat_pmp() -> None:
    assert natpmp.ask_address() == b"\x00\x00"
    assert natpmp.ask_port(4150, 4150, 3600) == bytes.fromhex("000200001036103600000e10")
    assert natpmp.ask_port(4150, 4150, 0)[6:] == bytes(6)
    assert natpmp.address_in(bytes.fromhex("00800000000000ff0b000007")) == "11.0.0.7"
    granted = bytes.fromhex("00820000000000ff1036c35000000e10")
    assert natpmp.mapping_in(granted, 4150) == (50000, 3600)
    for bad in (
        b"",
        granted[:-1],
        granted.replace(b"\x10\x36", b"\x10\x37"),
        b"\x00\x82\x00\x02" + granted[4:],
        b"\x01" + granted[1:],
    ):
        with pytest.raises(ValueError, match=r"bytes|port|refuses|version"):
            natpmp.mapping_in(bad, 4150)


LOCATION = "http://192.168.1.1:5000/desc.xml"
SERVICE = (
    f"<service><serviceType>{upnp.SERVICES[0]}</serviceType><controlURL>/ctl</controlURL></service>"
    "<service><serviceType>other</serviceType><controlURL>/x</controlURL></service>"
)


def test_upnp() -> None:
    assert (
        upnp.location_in(
            f"HTTP/1.1 200 OK\r\nST: x\r\nLOCATION: {LOCATION}\r\n\r\n".encode(), "192.168.1.1"
        )
        == LOCATION
    )
    assert upnp.control_in(SERVICE, LOCATION) == (upnp.SERVICES[0], "http://192.168.1.1:5000/ctl")
    request = upnp.call(
        upnp.SERVICES[0],
        "http://192.168.1.1:5000/ctl",
        "AddPortMapping",
        upnp.add_port(1, 2, "192.168.1.20", 60),
    )
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"<NewInternalClient>192.168.1.20</NewInternalClient>" in body
    answer = "<NewExternalIPAddress>11.0.0.7</NewExternalIPAddress>"
    assert (
        upnp.external_in(upnp.body_of(b"HTTP/1.1 200 OK\r\n\r\n" + answer.encode())) == "11.0.0.7"
    )


def test_a_router_sends_us_nowhere_else() -> None:
    """Whoever answers the search, or writes the description, cannot make us ask another host."""
    with pytest.raises(ValueError, match="another host"):
        upnp.location_in(b"LOCATION: http://127.0.0.1:22/\r\n", "192.168.1.1")
    with pytest.raises(ValueError, match="no connection"):
        upnp.control_in(SERVICE.replace("/ctl", "http://127.0.0.1:22/"), LOCATION)
    with pytest.raises(ValueError, match="refuses: Denied"):
        upnp.body_of(b"HTTP/1.1 500 no\r\n\r\n<errorDescription>Denied</errorDescription>")


def test_what_routers_of_today_say() -> None:
    """A service of the second version, told from others of the same path by its query (D-Link)."""
    text = f"<service><serviceType>{upnp.SERVICES[2]}</serviceType><controlURL> /soap.cgi?service=WANIPConn1 </controlURL></service>"
    service, control = upnp.control_in(text, LOCATION)
    assert (service, control) == (
        upnp.SERVICES[2],
        "http://192.168.1.1:5000/soap.cgi?service=WANIPConn1",
    )
    assert upnp.call(service, control, "X", {}).startswith(
        b"POST /soap.cgi?service=WANIPConn1 HTTP/1.1\r\n"
    )
    assert upnp.get(f"{LOCATION}?a=1").startswith(b"GET /desc.xml?a=1 HTTP/1.1\r\n")


@pytest.mark.parametrize("filler", [" ", "<NewExternalIPAddress>", "<service>", "<service> ", "x"])
def test_a_routers_text_is_read_in_no_time(filler: str) -> None:
    """By patterns, 64 KB of spaces took hours, and anybody in the house may play the router."""
    text = "<NewExternalIPAddress>" + filler * (upnp.MAX_ANSWER_BYTES // len(filler))
    assert upnp.external_in(text) == ""
    with pytest.raises(ValueError, match="no connection"):
        upnp.control_in(text, LOCATION)


@pytest.mark.parametrize("taken", [{4150}, {4150, "timed"}, set[object]()])
def test_where_another_node_of_the_house_has_our_port_another_is_asked_for(
    taken: set[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asked for again when the mapping is renewed. ``timed``: a router that knows mappings
    without an end only.
    """
    asked: list[tuple[int, int]] = []

    async def router(stream: trio.SocketStream) -> None:
        request = await stream.receive_some(8192)
        if b"AddPortMapping" in request:
            outside, life_s = (
                int(re.search(rb"<New%s>(\d+)<" % name, request)[1])
                for name in (b"ExternalPort", b"LeaseDuration")
            )  # type: ignore[index]
            asked.append((outside, life_s))
            refused = outside in taken or ("timed" in taken and life_s > 0)
        else:
            refused = False
        text = SERVICE + "<NewExternalIPAddress>11.0.0.7</NewExternalIPAddress>"
        await stream.send_all(
            f"HTTP/1.1 {'500 no' if refused else '200 OK'}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        await stream.aclose()

    async def other(stream: trio.SocketStream) -> None:
        await stream.receive_some(8192)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n<root/>")
        await stream.aclose()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, router, 0, host="127.0.0.1"))
            (device,) = await nursery.start(partial(trio.serve_tcp, other, 0, host="127.0.0.1"))
            port, radio = (each.socket.getsockname()[1] for each in (listener, device))

            async def found(own: str) -> list[str]:
                # the first that answers the search only says that it is a router
                return [f"http://127.0.0.1:{at}/desc.xml" for at in (radio, port)]

            monkeypatch.setattr(portmap, "_discover", found)
            monkeypatch.setattr(portmap.PortMapper, "_by_natpmp", refuses)
            mapper = portmap.PortMapper(
                random.Random(1), mine=lambda: [HOUSE], on_change=lambda means, address: None
            )
            first, again = await mapper._map(), await mapper._map()
            assert first == again
            assert first is not None
            assert first.address == (f"/ip4/11.0.0.7/tcp/{asked[-1][0]}" if taken else WAN)
            assert (
                portmap.OUTSIDE[0] <= asked[-1][0] <= portmap.OUTSIDE[1]
                if taken
                else asked == [(4150, 3600)] * 2
            )
            nursery.cancel_scope.cancel()

    async def refuses(self: portmap.PortMapper, inside: tuple[str, int]) -> None:
        return None

    trio.run(main)


def test_the_default_gateway() -> None:
    table = "head\neth0\t0001A8C0\t00000000\t1\t0\t0\t0\t00FFFFFF\t0\t0\t0\neth0\t00000000\t0101A8C0\t3\t0\t0\t0\t00000000\t0\t0\t0\n"
    assert natpmp.gateway(table) == "192.168.1.1"
    assert natpmp.gateway("head\n") == ""

"""LAN discovery without a network: what is said, what is believed, how often; and what hostile
datagrams can do (nothing).
"""

from __future__ import annotations

import itertools
import random
import struct

import dns.message
import dns.rdatatype
import dns.rrset
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.identifiers import PeerId
from atoll.node.net.lan import mdns, neighbours
from atoll.node.net.lan.discovery import LanDiscovery
from atoll.node.net.lan.neighbours import Neighbours
from atoll.security.identity import Identity

ME, OTHER = (Identity.generate().peer for _ in range(2))
HOST = "192.168.7.9"
ADDRESS = f"/ip4/{HOST}/tcp/4150"


def named(peer: PeerId, *addresses: str) -> bytes:
    return mdns.answer("x" * 32, [f"{address}/p2p/{peer}" for address in addresses])


def listening(now: float = 0.0) -> Neighbours:
    node = Neighbours(ME, random.Random(1))
    node.here(["/ip4/192.168.7.2/tcp/4150"], now)
    return node


def test_another_program_reads_what_we_say() -> None:
    """An independent reader of DNS finds the question and the records that libp2p's specification
    asks for.
    """
    asked = dns.message.from_wire(mdns.question())
    assert [str(question) for question in asked.question] == ["_p2p._udp.local. IN PTR"]
    said = dns.message.from_wire(named(OTHER, ADDRESS))
    pointer, texts = said.answer[0], said.additional[0]
    assert (str(pointer.name), pointer.rdtype) == ("_p2p._udp.local.", dns.rdatatype.PTR)
    assert str(pointer[0]) == str(texts.name) == "x" * 32 + "._p2p._udp.local."
    assert [text.decode() for text in texts[0].strings] == [
        f"dnsaddr={ADDRESS}/p2p/{OTHER}",
        "atoll=1",
    ]


def test_what_others_write_is_read() -> None:
    """With compressed names, other records beside ours, in whatever section."""
    other = dns.message.make_response(dns.message.from_wire(mdns.question()))
    for section, line in (
        ("answer", ("_p2p._udp.local.", "PTR", "q._p2p._udp.local.")),
        ("additional", ("q.local.", "A", HOST)),
    ):
        getattr(other, section).append(dns.rrset.from_text(line[0], 120, "IN", *line[1:]))
    text = f'"dnsaddr={ADDRESS}/p2p/{OTHER}" "atoll=1"'
    other.additional.append(dns.rrset.from_text("Q._P2P._udp.local.", 120, "IN", "TXT", text))
    assert mdns.read(other.to_wire()) == mdns.Heard(
        False, ((f"dnsaddr={ADDRESS}/p2p/{OTHER}", "atoll=1"),)
    )
    assert mdns.read(mdns.question()) == mdns.Heard(True, ())
    assert mdns.read(dns.message.make_query("_ipp._tcp.local.", "PTR").to_wire()) == mdns.Heard(
        False, ()
    )


def test_two_find_each_other() -> None:
    one, other, now = listening(), Neighbours(OTHER, random.Random(2)), 0.0
    other.here([ADDRESS], now)
    heard = {ME: set[tuple[PeerId, str]](), OTHER: set[tuple[PeerId, str]]()}
    while now < 0.5:
        now += 0.01
        for sender, host, receiver, me in (
            (one, "192.168.7.2", other, OTHER),
            (other, HOST, one, ME),
        ):
            for datagram in sender.due(now):
                heard[me] |= set(receiver.heard(datagram, host, now))
    assert heard == {ME: {(OTHER, ADDRESS)}, OTHER: {(ME, "/ip4/192.168.7.2/tcp/4150")}}


def test_questions_grow_rare_and_answers_keep_their_distance() -> None:
    node, asked, answered, now = listening(), list[float](), list[float](), 0.0
    while now < 3600:
        now = min(node.due_at, now + 0.5)
        for datagram in node.due(now):
            (asked if mdns.read(datagram).asks else answered).append(now)
        if now < 10:
            node.heard(mdns.question(), HOST, now)  # somebody asks without end
    assert len(asked) <= 13
    assert asked[-1] - asked[-2] >= neighbours.LONGEST_S
    assert len(answered) <= 11
    assert all(b - a >= neighbours.PAUSE_S for a, b in itertools.pairwise(answered))


def test_only_the_senders_own_address_counts() -> None:
    """Else whoever is on the network could make everybody dial whomever he likes."""
    node = listening()
    victim = [
        "/ip4/11.0.0.9/tcp/80",
        "/ip4/192.168.7.1/tcp/22",
        "/ip4/127.0.0.1/tcp/22",
        "/dns4/example.org/tcp/80",
        "/ip4/0.0.0.0/tcp/1",
    ]
    assert node.heard(named(OTHER, *victim), HOST, 0.0) == []
    assert node.heard(named(OTHER, f"{ADDRESS}/p2p/{OTHER}/p2p-circuit"), HOST, 0.0) == []
    assert node.heard(named(ME, ADDRESS), HOST, 0.0) == []
    assert node.heard(named(OTHER, *victim, ADDRESS), HOST, 0.0) == [(OTHER, ADDRESS)]


def test_peers_of_other_programs_are_left_alone() -> None:
    assert (
        listening().heard(named(OTHER, ADDRESS).replace(b"\x07atoll=1", b"\x07other=1"), HOST, 0.0)
        == []
    )


def test_a_neighbour_is_told_again_only_after_a_while() -> None:
    node, datagram = listening(), named(OTHER, ADDRESS)
    told = [now for now in range(100) if node.heard(datagram, HOST, float(now))]
    assert told == [0, 30, 60, 90]
    moved = "/ip4/192.168.7.9/tcp/5000"
    assert node.heard(named(OTHER, moved), HOST, 91.0) == [(OTHER, moved)]


def test_inventing_peers_is_of_no_use() -> None:
    node = listening()
    told = sum(
        len(node.heard(named(Identity.generate().peer, ADDRESS), HOST, number / 100))
        for number in range(40)
    )
    assert told == neighbours.MAX_OF_HOST
    for host in range(20, 60):
        for _ in range(4):
            told += len(
                node.heard(
                    named(Identity.generate().peer, f"/ip4/192.168.7.{host}/tcp/1"),
                    f"192.168.7.{host}",
                    1.0,
                )
            )
    assert told == len(node.status(1.0)) == neighbours.MAX_PEERS


def test_a_flood_is_read_in_part() -> None:
    node = listening()
    read = 0
    while not node.spent(5.0):
        node.heard(b"flood", HOST, 5.0)
        read += 1
    assert read == neighbours.MAX_A_SECOND
    assert not node.spent(6.0)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    node = listening()
    assert node.heard(data, HOST, 0.0) == []
    assert len(node.due(1.0)) <= 2


@given(st.data())
def test_damaged_answers_tell_nothing_that_was_not_sent(data: st.DataObject) -> None:
    """Bytes changed anywhere: at most the same peer at another port of the sender's own."""
    said = bytearray(named(OTHER, ADDRESS))
    for _ in range(data.draw(st.integers(1, 6))):
        said[data.draw(st.integers(0, len(said) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(said)))
    for datagram in (bytes(said), bytes(said[:cut])):
        for _, address in listening().heard(datagram, HOST, 0.0):
            assert address.startswith(f"/ip4/{HOST}/tcp/")


@pytest.mark.parametrize(
    "name",
    [
        b"\xc0\x0c",  # to itself
        b"\xc0\x0e\xc0\x0c",  # to one another
        b"\xc0\xff",  # forward, to nowhere
        b"\x01a\xc0\x0c",  # round and round, longer each time
        b"\x40" + b"a" * 64,  # a label of a kind that does not exist
        b"\x3f"
        + b"a" * 63
        + b"\x3f"
        + b"a" * 63
        + b"\x3f"
        + b"a" * 63
        + b"\x3f"
        + b"a" * 63
        + b"\0",  # 256 bytes
        b"\x05a",
    ],
)
def test_names_without_an_end_are_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match=r"name|early"):
        mdns.read(struct.pack(">HHHHHH", 0, 0, 1, 0, 0, 0) + name + struct.pack(">HH", 12, 1))


@pytest.mark.parametrize(
    "counts", [(17, 0, 0, 0), (0, 65, 0, 0), (0, 30, 30, 30), (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF)]
)
def test_more_than_anybody_needs_is_refused(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="questions"):
        mdns.read(struct.pack(">HHHHHH", 0, 0x8400, *counts))
    with pytest.raises(ValueError, match="bytes"):
        mdns.read(bytes(mdns.MAX_BYTES + 1))


@pytest.mark.parametrize(
    "mine", [[], ["/ip4/127.0.0.1/tcp/4150"], ["/ip6/fd00::1/tcp/4150", "/ip4/127.0.0.1/tcp/4150"]]
)
def test_who_has_no_address_in_a_house_opens_no_socket(
    mine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("atoll.node.net.lan.discovery._socket", opened.append)
    lan = LanDiscovery(ME, random.Random(1), mine=lambda: mine, found=lambda peer, address: None)

    async def look() -> None:
        with trio.move_on_after(0.05):
            await lan.run()

    trio.run(look)
    assert opened == []

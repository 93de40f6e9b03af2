"""The parts of the network without I/O: addresses, framing, announcements, DHT records, stores,
routing, peer book, faults.
"""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.composing.announced import read_invite
from atoll.node.net import announcements
from atoll.node.net.announcements import (
    LIFE_S,
    MAX_PER_RUN,
    REMEMBER_S,
    AnnouncedRun,
    Announcement,
    Registry,
    announce,
)
from atoll.node.net.dht import records, store, wire
from atoll.node.net.dht.routing import RoutingTable, closest, position
from atoll.node.net.transport import addresses, door, faults, peerbook
from atoll.node.net.transport.backoff import Backoff
from atoll.node.net.transport.framing import MAX_FRAME_BYTES, FrameReader, frame
from atoll.node.net.transport.peerbook import PeerBook
from atoll.node.run import capability
from atoll.node.run.invite import Invite, make_invite
from atoll.security.identity import Identity

A, B, C = Identity(b"a" * 32), Identity(b"b" * 32), Identity(b"c" * 32)
RUN = RunId("run")
HERE = "/ip4/127.0.0.1/tcp/4001"


def reader_of(data: bytes, piece: int) -> FrameReader:
    pieces = [data[i : i + piece] for i in range(0, len(data), piece)]

    async def receive(max_bytes: int) -> bytes:
        return pieces.pop(0) if pieces else b""

    return FrameReader(receive, A.peer)


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 64))
def test_frames_survive_any_cut(payloads: list[bytes], piece: int) -> None:
    async def main() -> list[bytes]:
        reader, found = reader_of(b"".join(map(frame, payloads)), piece), list[bytes]()
        while (payload := await reader.next()) is not None:
            found.append(payload)
        return found

    assert trio.run(main) == payloads


def test_oversized_frames_are_refused_before_they_are_read() -> None:
    async def main() -> None:
        await reader_of((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), 4).next()

    with pytest.raises(RemoteProtocolError, match="1048577"):
        trio.run(main)
    with pytest.raises(LocalProtocolError):
        frame(bytes(MAX_FRAME_BYTES + 1))


def test_a_cut_frame_is_the_end() -> None:
    async def main() -> bytes | None:
        return await reader_of(frame(b"hello")[:-1], 3).next()

    assert trio.run(main) is None


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (HERE, True),
        ("/ip6/::1/tcp/1", True),
        ("/dns4/boot.example.org/tcp/443", True),
        ("/ip4/0.0.0.0/tcp/4001", False),
        ("/ip4/127.0.0.1/tcp/0", False),
        ("/ip4/127.0.0.1/tcp/65536", False),
        ("/ip4/127.0.0.1/udp/4001", False),
        ("/ip4/127.0.0.1/tcp/4001/ws", False),
        ("/ip4/1270.0.0.1/tcp/4001", False),
        ("/dns4/-bad-/tcp/1", False),
        ("/dns4/" + "a" * 300 + "/tcp/1", False),
        ("/dns4/a..b/tcp/1", False),
        ("/dns4/" + "a" * 64 + "/tcp/1", False),
        (
            "/dns4/" + "a" * 63 + "!/tcp/1",
            False,
        ),  # a pattern that tried all ways to cut it took for ever
        ("/dns4/127.1/tcp/1", False),  # systems take these for numeric addresses
        ("/dns4/example.2130706433/tcp/1", False),
        ("/ip6/fe80::1%eth0/tcp/1", False),
        ("/ip6/::ffff:127.0.0.1/tcp/1", False),
        ("", False),
    ],
)
def test_addresses(text: str, good: bool) -> None:
    assert addresses.is_address(text) is good


@given(st.text(max_size=60))
def test_no_text_breaks_the_address_check(text: str) -> None:
    addresses.is_address(text)
    addresses.is_address(f"/ip4/127.0.0.1/tcp/{text}")


def test_bootstrap_addresses_name_their_peer() -> None:
    assert addresses.split_peer(addresses.join_peer(A.peer, HERE)) == (A.peer, HERE)
    for wrong in (HERE, f"{HERE}/p2p/nobody", f"/p2p/{A.peer}"):
        with pytest.raises(ConfigError):
            addresses.split_peer(wrong)


def test_announcements_the_newest_wins_and_goodbye_removes() -> None:
    registry = Registry()
    first, second, goodbye = (
        announce(A, RUN, [HERE], 1000.0),
        announce(A, RUN, ["/ip4/10.0.0.1/tcp/1"], 1001.0),
        announce(A, RUN, [], 1002.0),
    )
    assert registry.accept(second, B.peer, 0.0, 1000.0)
    assert not registry.accept(first, B.peer, 0.0, 1000.0)
    assert not registry.accept(second, B.peer, 0.0, 1000.0)
    assert [news.addresses for news in registry.members(RUN, 1.0)] == [("/ip4/10.0.0.1/tcp/1",)]
    assert registry.missing(RUN, [first], 1.0) == [second]
    assert registry.missing(RUN, [second], 1.0) == []
    assert registry.accept(goodbye, B.peer, 2.0, 1002.0)
    assert registry.members(RUN, 2.0) == []
    assert registry.missing(RUN, [second], 2.0) == [goodbye]


def test_announcements_expire_by_the_clock_of_the_holder() -> None:
    registry = Registry()
    assert registry.accept(announce(A, RUN, [HERE], 5000.0), B.peer, 0.0, 5090.0)
    assert len(registry.members(RUN, LIFE_S - 1)) == 1
    assert registry.members(RUN, LIFE_S + 1) == []


def test_an_announcement_that_is_replayed_after_a_newer_one_has_expired_is_not_taken() -> None:
    """Until it is too old for anybody."""
    registry = Registry()
    older, goodbye = announce(A, RUN, [HERE], 1000.0), announce(A, RUN, [], 1001.0)
    assert registry.accept(goodbye, B.peer, 0.0, 1001.0)
    for now in (1.0, LIFE_S + 1.0, LIFE_S + REMEMBER_S - 1.0, LIFE_S + REMEMBER_S + 1.0):
        registry.members(RUN, now)
        assert not registry.accept(older, B.peer, now, 1001.0 + now)
    assert registry.runs_of(A.peer, LIFE_S + 1.0) == set()


def test_a_full_run_remembers_nobody_who_is_gone() -> None:
    registry, many = Registry(), [Identity.generate() for _ in range(MAX_PER_RUN + 1)]
    for identity in many[:-1]:
        assert registry.accept(announce(identity, RUN, [HERE], 1000.0), B.peer, 0.0, 1000.0)
    newest = announce(many[-1], RUN, [HERE], 1000.0)
    assert not registry.accept(newest, B.peer, 1.0, 1001.0)
    assert registry.accept(newest, B.peer, LIFE_S + 1.0, 1001.0 + LIFE_S)
    assert [news.peer for news in registry.members(RUN, LIFE_S + 1.0)] == [many[-1].peer]


def test_a_flood_of_announcements_pushes_out_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stranger who makes keys as it goes: of many runs, of ours, and of one that somebody else
    is in.
    """
    monkeypatch.setattr(announcements, "MAX_STRANGE", 8)
    monkeypatch.setattr(announcements, "MAX_PER_RUN", 6)
    flooder, friend, keys = (
        Identity.generate().peer,
        Identity.generate(),
        [Identity.generate() for _ in range(20)],
    )
    mine, theirs = RunId("mine"), RunId("theirs")
    registry = Registry({AnnouncedRun(mine)})
    assert registry.accept(announce(A, mine, [HERE], 1000.0), A.peer, 0.0, 1000.0)
    assert registry.accept(announce(B, theirs, [HERE], 1000.0), B.peer, 0.0, 1000.0)
    taken = 0
    for number, key in enumerate(keys):
        for run in (RunId(f"run {number}"), theirs, mine):
            taken += registry.accept(announce(key, run, [HERE], 1000.0), flooder, 0.0, 1000.0)
    assert taken < 20
    for run in (RunId("new"), theirs, mine):
        assert registry.accept(announce(friend, run, [HERE], 1000.0), friend.peer, 1.0, 1001.0)
    assert friend.peer in {news.peer for news in registry.members(RunId("new"), 1.0)}
    assert {B.peer, friend.peer} <= {news.peer for news in registry.members(theirs, 1.0)}
    assert {A.peer, friend.peer} <= {news.peer for news in registry.members(mine, 1.0)}
    assert len(registry.members(mine, 1.0)) == 6
    assert (
        sum(len(registry.members(RunId(run), 1.0)) for run, _ in registry._runs if run != mine) == 8
    )
    registry.drop(theirs)
    registry.members(mine, 1e6)
    assert registry.members(theirs, 1.0) == []


CERTIFIED_RUN = RunId("a" * 26)
INVITE = make_invite(CERTIFIED_RUN, [], A, now_s=1000)


def test_an_announcement_has_room_for_any_certificate_and_a_network_without_runs_takes_none() -> (
    None
):
    assert announcements.MAX_CERTIFICATE_BYTES == capability.MAX_CERTIFICATE_BYTES
    shown = INVITE.certify(B, 1000).encode()
    news = announce(B, CERTIFIED_RUN, [HERE], 1000.0, A.peer, shown)
    assert Registry((), read_invite).accept(news, C.peer, 0.0, 1000.0)
    with pytest.raises(RemoteProtocolError, match="no certificate"):
        Registry().accept(news, C.peer, 0.0, 1000.0)


def test_under_an_organiser_only_its_certificates_are_taken_in_and_no_flood_has_a_place() -> None:
    """By a node that knows nothing of the run: places are by run and organiser, and who asks names
    the organiser.
    """
    registry, run, flooder = Registry((), read_invite), CERTIFIED_RUN, Identity.generate()
    shown = INVITE.certify(B, 1000).encode()
    member, organiser = (
        announce(who, run, [HERE], 1000.0, A.peer, certificate)
        for who, certificate in ((B, shown), (A, b""))
    )
    assert registry.accept(member, C.peer, 0.0, 1000.0)
    assert registry.accept(organiser, C.peer, 0.0, 1000.0)
    own = make_invite(run, [], C, now_s=1000).certify(C, 1000).encode()
    elsewhere = make_invite(RunId("b" * 26), [], A, now_s=1000).certify(C, 1000).encode()
    for worthless in (
        b"",
        shown,
        own,
        elsewhere,
        b"x",
    ):  # of C: nothing, stolen, self-made, another run's
        with pytest.raises(RemoteProtocolError):
            registry.accept(
                announce(C, run, [HERE], 1000.0, A.peer, worthless), C.peer, 0.0, 1000.0
            )
    for altered in (
        msgspec.structs.replace(member, organiser=""),
        msgspec.structs.replace(member, certificate=b"", organiser=B.peer),
        msgspec.structs.replace(member, sequence=member.sequence + 1),
    ):
        with pytest.raises(RemoteProtocolError):
            Registry((), read_invite).accept(altered, C.peer, 0.0, 1000.0)
    for _ in range(MAX_PER_RUN + 10):
        fake = Identity.generate()
        registry.accept(announce(fake, run, [HERE], 1000.0), flooder.peer, 0.0, 1000.0)
    stranger = announce(flooder, run, [HERE], 1000.0, flooder.peer)  # as if the run were its own
    assert registry.accept(stranger, flooder.peer, 0.0, 1000.0)
    found = registry.members(run, 1.0, A.peer)
    assert {news.peer for news in found} == {A.peer, B.peer}
    assert set(registry.missing(run, (), 1.0, A.peer)) == {member, organiser}
    assert len(registry.members(run, 1.0)) == MAX_PER_RUN
    assert [news.peer for news in registry.members(run, 1.0, flooder.peer)] == [flooder.peer]
    assert registry.runs_of(B.peer, 1.0) == {run}


def test_forged_altered_and_ancient_announcements_are_refused() -> None:
    registry, true = Registry(), announce(A, RUN, [HERE], 1000.0)
    for lie in (
        msgspec.structs.replace(true, peer=B.peer),
        msgspec.structs.replace(true, run="other"),
        msgspec.structs.replace(true, addresses=("/ip4/6.6.6.6/tcp/6",)),
        msgspec.structs.replace(true, sequence=true.sequence + 1),
        msgspec.structs.replace(true, peer="x"),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            registry.accept(lie, B.peer, 0.0, 1000.0)
        assert caught.value.peer == B.peer
    assert not registry.accept(true, B.peer, 0.0, 99_000.0)
    assert registry.members(RUN, 0.0) == []


@given(st.binary(max_size=200))
def test_no_bytes_break_the_announcement_decoder(data: bytes) -> None:
    try:
        msgspec.msgpack.decode(data, type=Announcement)
    except msgspec.MsgspecError:
        pass


def test_dht_values_are_bound_to_owner_key_and_time() -> None:
    key, data = records.sign(A, "status", b"payload", 7, 2000)
    assert records.check(key, data, 1000.0).payload == b"payload"
    other_key = records.owner_key(B.peer, "status")
    for wrong_key, wrong_data, now in (
        (other_key, data, 1000.0),
        (records.owner_key(A.peer, "elsewhere"), data, 1000.0),
        (key, data[:-1] + bytes([data[-1] ^ 1]), 1000.0),
        (key, data, 2001.0),
        (key, data, 2000.0 - records.MAX_LIFE_S - records.MAX_SKEW_S - 1),
        (b"/other/x/y", data, 1000.0),
        (key, b"\xff" * 40, 1000.0),
        (key, bytes(records.MAX_VALUE_BYTES + 1), 1000.0),
    ):
        with pytest.raises(ValueError):
            records.check(wrong_key, wrong_data, now)


def test_value_store_keeps_the_newest_and_bounds_each_owner() -> None:
    values = store.ValueStore(0)
    key, old = records.sign(A, "x", b"old", 1, 2000)
    _, new = records.sign(A, "x", b"new", 2, 2000)
    assert values.put(key, new, 1000.0)
    assert values.put(key, new, 1000.0)
    assert not values.put(key, old, 1000.0)
    assert values.get(key, 1000.0) == new
    assert values.get(key, 2001.0) is None
    kept = sum(
        values.put(*records.sign(A, f"k{i}", b"", 1, 2000), 1000.0)
        for i in range(store.MAX_VALUES_PER_OWNER + 5)
    )
    assert kept == store.MAX_VALUES_PER_OWNER
    assert values.put(*records.sign(B, "x", b"", 1, 2000), 1000.0)


def test_value_store_refuses_a_replay_even_when_the_newer_value_has_expired() -> None:
    values = store.ValueStore(0)
    key, long_lived = records.sign(A, "x", b"old", 1, 5000)
    assert values.put(*records.sign(A, "x", b"new", 2, 2000), 1000.0)
    assert values.get(key, 2001.0) is None
    assert not values.put(key, long_lived, 2002.0)
    assert values.put(*records.sign(A, "x", b"newest", 3, 5000), 2002.0)


def test_value_store_names_what_nobody_has_stored_again() -> None:
    values = store.ValueStore(0)
    key, data = records.sign(A, "x", b"", 1, 5000)
    other = records.sign(B, "x", b"", 1, 5000)
    assert values.put(key, data, 1000.0)
    assert values.put(*other, 1000.0)
    later = 1001.0 + store.REPUBLISH_S
    assert values.put(key, data, later - 1)
    assert values.due(later) == [other]
    assert values.due(later) == []
    assert sorted(values.due(later + store.REPUBLISH_S + 1)) == sorted([(key, data), other])
    assert (
        values.due(5000.0 - records.MAX_SKEW_S + 1) == []
    )  # it would have expired by somebody's clock


def test_a_full_value_store_keeps_what_is_nearest_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_VALUES", 8)
    here = position(b"here")
    values = store.ValueStore(here)
    signed = sorted(
        (records.sign(A, f"k{i}", b"", 1, 2000) for i in range(24)),
        key=lambda entry: position(entry[0]) ^ here,
    )
    for number in random.Random(1).sample(range(24), 24):
        values.put(*signed[number], 1000.0)
    assert [values.get(key, 1000.0) == data for key, data in signed] == [True] * 8 + [False] * 16
    assert not values.put(*signed[8], 1000.0)
    assert values.get(signed[3][0], 2001.0) is None  # what is over makes room for anything
    assert values.put(*records.sign(A, "k99", b"", 1, 5000), 2001.0)
    assert (
        sum(
            values.get(key, 2001.0) is not None
            for key, _ in [*signed, records.sign(A, "k99", b"", 1, 5000)]
        )
        == 1
    )


def test_provider_store_expires_and_bounds_each_peer() -> None:
    providers = store.ProviderStore(random.Random(1))
    assert providers.add(b"k", A.peer, 0.0)
    assert providers.add(b"k", B.peer, 100.0)
    assert sorted(providers.get(b"k", 100.0)) == sorted([A.peer, B.peer])
    assert providers.get(b"k", store.PROVIDER_LIFE_S + 50) == [B.peer]
    added = sum(providers.add(b"%d" % i, A.peer, 0.0) for i in range(store.MAX_KEYS_PER_PEER + 5))
    assert added == store.MAX_KEYS_PER_PEER
    for number in range(store.MAX_PROVIDERS + 20):
        providers.add(b"big", PeerId(f"peer{number}"), float(number))
    assert len(providers.get(b"big", 600.0)) == store.ANSWERED_PROVIDERS


def test_routing_table_holds_twenty_per_distance_and_ranks_by_xor() -> None:
    table = RoutingTable(A.peer)
    peers = [Identity(bytes([n // 256, n % 256]) * 16).peer for n in range(200)]
    added = [peer for peer in peers if table.add(peer)]
    assert not table.add(A.peer)
    assert 40 < len(table) == len(added) < 200
    target = position(b"key")
    assert table.closest(target, 5) == closest(added, target, 5)
    table.remove(added[0])
    table.remove(added[0])
    assert len(table) == len(added) - 1


def read_messages(data: bytes, piece: int = 1 << 20) -> list[wire.Rpc]:
    pieces = [data[first : first + piece] for first in range(0, len(data), piece)]

    async def receive(max_bytes: int) -> bytes:
        return pieces.pop(0) if pieces else b""

    async def main() -> list[wire.Rpc]:
        reader, found = wire.MessageReader(receive, A.peer), list[wire.Rpc]()
        while (message := await reader.next()) is not None:
            found.append(message)
        return found

    return trio.run(main)


LOCATED = st.lists(
    st.tuples(
        st.sampled_from([A.peer, B.peer]),
        st.lists(
            st.sampled_from([HERE, "/ip6/::1/tcp/7", "/dns4/a.example/tcp/1"]), unique=True
        ).map(tuple),
    ),
    max_size=5,
).map(tuple)
MESSAGES = st.builds(
    wire.Rpc,
    st.integers(0, 5),
    st.binary(max_size=80),
    st.none() | st.binary(max_size=300),
    LOCATED,
    LOCATED,
)


@given(st.lists(MESSAGES, max_size=5), st.integers(1, 200))
def test_kad_messages_survive_any_cut(messages: list[wire.Rpc], piece: int) -> None:
    assert read_messages(b"".join(map(wire.encode, messages)), piece) == messages


@given(MESSAGES, st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_a_damaged_kad_message_is_refused_or_read_as_another(
    message: wire.Rpc, at: int, damage: bytes
) -> None:
    data = bytearray(wire.encode(message))
    data[at % len(data) : at % len(data) + len(damage)] = damage
    with contextlib.suppress(RemoteProtocolError):  # and nothing else
        for rpc in read_messages(bytes(data)):
            assert all(
                len(addresses_) <= addresses.MAX_ADDRESSES
                for _, addresses_ in (*rpc.closer, *rpc.providers)
            )


def test_kad_messages_round_trip() -> None:
    rpc = wire.Rpc(
        wire.GET_PROVIDERS,
        b"key",
        None,
        ((B.peer, (HERE,)),),
        ((A.peer, (HERE, "/ip6/::1/tcp/7")),),
    )
    put = wire.Rpc(wire.PUT_VALUE, b"key", b"value")
    assert read_messages(wire.encode(rpc) + wire.encode(put)) == [rpc, put]


@given(st.binary(max_size=300))
def test_no_bytes_break_the_kad_reader(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):  # and nothing else
        read_messages(data)


def test_endless_and_huge_kad_lengths_are_refused() -> None:
    for data in (b"\xff" * 10, b"\xff\xff\xff\x7f"):
        with pytest.raises(RemoteProtocolError):
            read_messages(data)


def test_peer_book_round_trip_and_corrupt_cache(tmp_path: Path) -> None:
    book = PeerBook(A.peer)
    book.add(B.peer, [HERE, "nonsense", "/ip4/10.0.0.9/tcp/9"])
    book.add(A.peer, [HERE])
    assert book.peers() == [B.peer]
    book.save(tmp_path / "peers.json")
    again = PeerBook(A.peer)
    again.load(tmp_path / "peers.json")
    assert again.addresses(B.peer) == (HERE, "/ip4/10.0.0.9/tcp/9")
    for content in (
        b"",
        b"{",
        b'{"schema":1,"peers":[{"peer":"x","addresses":["y"]}]}',
        b"\xff" * 2000,
    ):
        (tmp_path / "peers.json").write_bytes(content)
        empty = PeerBook(A.peer)
        empty.load(tmp_path / "peers.json")
        assert empty.peers() == []
    PeerBook(A.peer).load(tmp_path / "missing")


def test_hearsay_displaces_neither_what_was_given_nor_what_a_peer_says_of_itself() -> None:
    """Else whoever answers a question of ours cuts us off from our bootstrap, or from a member, for
    good.
    """
    lies = [f"/ip4/11.0.0.{number}/tcp/9" for number in range(8)]
    book = PeerBook(A.peer)
    book.give(B.peer, HERE)
    book.add(C.peer, ["/ip4/11.9.9.9/tcp/4150"])
    for peer in (B.peer, C.peer):
        book.hear(peer, lies)
        book.add(B.peer, lies)  # its own word, too, cannot take away what our user said
    assert book.addresses(B.peer)[0] == HERE
    assert book.addresses(C.peer) == ("/ip4/11.9.9.9/tcp/4150", *lies[:7])


def test_thousands_of_strangers_push_nobody_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peerbook, "MAX_PEERS", 8)
    monkeypatch.setattr(peerbook, "CACHED_PEERS", 3)
    book = PeerBook(A.peer)
    book.give(B.peer, HERE)
    book.hear(C.peer, ["/ip4/11.9.9.9/tcp/4150"])
    book.confirm(C.peer)  # we were connected
    for number in range(20):
        book.hear(Identity(bytes([number]) * 32).peer, [f"/ip4/11.0.0.{number}/tcp/9"])
    assert book.peers()[:2] == [C.peer, B.peer]
    assert len(book.peers()) == 10
    book.save(tmp_path / "peers.json")
    again = PeerBook(A.peer)
    again.load(tmp_path / "peers.json")
    assert again.peers()[:2] == [C.peer, B.peer]


def test_the_machine_with_the_most_places_gives_one_up() -> None:
    here = door.Door(4)
    assert [here.enter(number, "11.0.0.1") for number in range(5)] == [None] * 4 + [
        4
    ]  # the fifth, of the same machine, goes itself
    assert here.enter("a", "11.0.0.2") == 0  # the oldest
    assert here.enter("b", "::ffff:11.0.0.2") == 1
    assert here.enter("c", "11.0.0.2") == "c"  # it would have more than the other
    assert here.enter("d", "11.0.0.3") == 2
    here.leave("a")
    here.leave("unknown")
    assert here.enter("e", "11.0.0.4") is None
    assert door.machine_of("2a0b::1") == door.machine_of("2a0b::2:0:0:3%eth0")
    assert door.machine_of("2a0b:0:0:1::1") != door.machine_of("2a0b::1")


def test_backoff_grows_to_its_limit_and_starts_again() -> None:
    backoff = Backoff(1.0, 8.0, random.Random(3), factor=2.0)
    delays = [backoff.next_s() for _ in range(6)]
    for delay, middle in zip(delays, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * middle <= delay <= 1.25 * middle
    backoff.reset()
    assert backoff.next_s() <= 1.25


def test_faults_shut_out_for_a_minute() -> None:
    counted = faults.Faults()
    for _ in range(faults.LIMIT):
        assert not counted.shut_out(A.peer, 10.0)
        counted.count(A.peer, 10.0)
    assert counted.shut_out(A.peer, 20.0)
    assert not counted.shut_out(B.peer, 20.0)
    assert not counted.shut_out(A.peer, 10.0 + faults.WINDOW_S + 1)


def test_clock_of_announcements_is_the_wall_clock() -> None:
    assert abs(announce(A, RUN, [HERE], time.time()).sequence / 1000 - time.time()) < 60


def test_who_holds_the_seed_of_one_invite_leaves_places_for_whoever_has_come_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It brings each key it makes from another connection: by sender no announcement is one too
    many.
    """
    monkeypatch.setattr(announcements, "MAX_PER_RUN", 8)
    monkeypatch.setattr(announcements, "MAX_BY_INVITE", 6)
    run, registry = RunId("abcdefghijklmnopqrstuvwxyz"), Registry((), read_invite)
    leaked, other = (make_invite(run, [], A, now_s=1000, life_s=1000) for _ in range(2))

    def comes(who: Identity, invite: Invite) -> bool:
        shown = invite.certify(who, 1000.0).encode()
        news = announce(who, run, [HERE], 1000.0, A.peer, shown)
        return registry.accept(news, who.peer, 0.0, 1000.0)

    keys = [Identity(bytes([number]) * 32) for number in range(20)]
    assert [comes(key, leaked) for key in keys[:12]] == [True] * 6 + [False] * 6
    assert [comes(key, other) for key in keys[12:14]] == [True] * 2
    assert len(registry.members(run, 0.0, A.peer)) == 8

"""Engine threads over real sockets on the loopback interface: bits, lost lanes, garbage, silence."""

from __future__ import annotations

import dataclasses
import socket
import struct
import sys
import threading
import time

import pytest
from engine_kit import (
    PATIENT,
    WAIT_S,
    Peer,
    drain,
    keys,
    link,
    pull_until_complete,
    start,
    swarm,
    tcp_pair,
)
from exchange_kit import LOG, cid_of, make_plan, peers_of, ref_digests, ref_result, vector

from atoll.collectives.digest import chunk_hash
from atoll.collectives.engine import EngineSettings, losses, width
from atoll.collectives.engine import poller as pollers
from atoll.collectives.engine import settings as engine_settings
from atoll.collectives.engine import thread as engine_thread
from atoll.collectives.engine.lane import REPLACED
from atoll.collectives.engine.meter import LaneCounters
from atoll.collectives.errors import ConfigError
from atoll.collectives.exchange import (
    BlobComplete,
    CommandFailed,
    LaneDown,
    LanesWanted,
    LaneUp,
    NonFinite,
    PeerFault,
    ResultComplete,
    blobs,
)
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.record_layer import PLAIN, Sealer

__all__ = ["swarm"]  # a fixture


def test_limits_hold_over_all_lanes_and_change_no_bit(swarm):
    limited = EngineSettings(dead_after_s=15.0, hello_s=15.0, max_up=1_000_000, max_down=800_000)
    peers = swarm(3, settings=limited)
    numel, names = 120_000, [p.engine.me for p in peers]
    vectors = {cid_of(i): vector(numel, i) for i in range(3)}
    plan = make_plan(
        [(name, cid_of(i), 1) for i, name in enumerate(names)], names, numel, 4_096, "fp32"
    )
    began = time.monotonic()
    start(peers, plan, vectors)
    want = ref_result(plan, vectors)
    for peer in peers:
        assert bytes(peer.wait(ResultComplete).data) == want
        received = peer.engine.totals()[1]
        assert received > 4 * numel
        assert (
            time.monotonic() - began
            > (received - limited.max_down * 0.02 - 4096) / limited.max_down - 0.5
        )  # (what came before it began)
        assert peer.engine.pace[:2] == (1_000_000, 800_000)


@pytest.mark.parametrize(
    ("codec", "make", "cipher"),
    [
        ("int8", tcp_pair, "aes-128-gcm"),
        ("fp32", socket.socketpair, "chacha20-poly1305"),
        ("bf16", tcp_pair, PLAIN),
        ("fp32", tcp_pair, PLAIN),
    ],
)
def test_four_engines_agree_bit_for_bit(swarm, codec, make, cipher):
    peers = swarm(4, make=make, cipher=cipher)
    numel = 300_000
    for round_ in (1, 2):
        vectors = {cid_of(i, round_): vector(numel, 10 * round_ + i) for i in range(4)}
        plan = make_plan(
            [(p.engine.me, cid_of(i, round_), 5 + i) for i, p in enumerate(peers)],
            [p.engine.me for p in peers],
            numel,
            16_384,
            codec,
            round_=round_,
        )
        start(peers, plan, vectors)
        want = ref_result(plan, vectors)
        for i, peer in enumerate(peers):
            done = peer.wait(ResultComplete)
            assert bytes(done.data) == want
            assert done.digests == ref_digests(plan, want)
            peer.engine.exchange.close_round(LOG, round_)
            peer.engine.exchange.release(cid_of(i, round_))
    stats = peers[0].engine.stats()
    assert set(stats) == {p.engine.me for p in peers[1:]}
    assert all(s.up and s.path == "direct" and s.bytes_sent > 100_000 for s in stats.values())


def test_a_killed_lane_is_repaired_by_pull_over_a_new_one(swarm):
    peers = swarm(3)
    numel, chunk = 1_500_000, 8_192
    vectors = {cid_of(i): vector(numel, i) for i in range(3)}
    plan = make_plan(
        [(p.engine.me, cid_of(i), 1) for i, p in enumerate(peers)],
        [p.engine.me for p in peers],
        numel,
        chunk,
        "int8",
    )
    start(peers, plan, vectors)
    a, b, _ = peers
    a.engine.drop_lane(b.engine.me)
    assert a.wait(LaneDown).peer == b.engine.me
    assert b.wait(LaneDown).peer == a.engine.me
    link(a, b, number=7)
    pull_until_complete(peers, plan, {cid_of(i): p for i, p in enumerate(peers)})
    want = ref_result(plan, vectors)
    for peer in peers:
        assert bytes(peer.wait(ResultComplete).data) == want


def test_a_lane_that_is_replaced_in_the_middle_loses_nothing(swarm):
    a, b = peers = swarm(2, settings=dataclasses.replace(PATIENT, max_up=4_000_000))
    numel, names = 600_000, [p.engine.me for p in peers]
    vectors = {cid_of(i): vector(numel, i) for i in range(2)}
    plan = make_plan(
        [(name, cid_of(i), 1) for i, name in enumerate(names)], names, numel, 4_096, "fp32"
    )
    start(peers, plan, vectors)
    for number in range(7, 17, 2):
        sent = a.engine.totals()[0]
        if sent > 3 * numel:  # of four: on a busy machine the lanes are faster than we are
            break
        while a.engine.totals()[0] < sent + 100_000:
            assert a.engine.sync(WAIT_S)
        link(a, b, number=number)
        for peer in peers:
            assert peer.wait(LaneDown).reason == REPLACED
    want = ref_result(plan, vectors)
    for peer in peers:
        assert bytes(peer.wait(ResultComplete).data) == want  # nobody has asked for anything again
    assert a.engine.totals()[0] < 1.1 * 4 * numel


def test_several_lanes_share_the_work_and_one_of_them_may_die(swarm):
    peers = swarm(2)
    a, b = peers
    link(a, b, number=3, index=1)
    link(a, b, number=5, index=2)
    numel, chunk = 6_000_000, 8_192
    vectors = {cid_of(i): vector(numel, i) for i in range(2)}
    plan = make_plan(
        [(p.engine.me, cid_of(i), 1) for i, p in enumerate(peers)],
        [p.engine.me for p in peers],
        numel,
        chunk,
        "fp32",
    )
    start(peers, plan, vectors)
    while a.engine.stats()[b.engine.me].bytes_sent < 1_000_000:  # in the middle
        assert a.engine.sync(WAIT_S)
    sockets_of(a, b)[1].shutdown(socket.SHUT_RDWR)
    assert a.wait(LaneDown).number == 2
    assert b.wait(LaneDown).number == 2
    pull_until_complete(peers, plan, {cid_of(i): p for i, p in enumerate(peers)})
    want = ref_result(plan, vectors)
    for peer in peers:
        assert bytes(peer.wait(ResultComplete).data) == want
    carried = [lane.bytes_sent for lane in a.engine._order]
    assert len(carried) == 2
    assert min(carried) > chunk * 4, "both that are left took part"


def sockets_of(one, other):
    return {lane.index: lane.sock for lane in one.engine._order if lane.peer == other.engine.me}


def test_garbage_ends_the_lane_and_harms_nothing_else(swarm):
    a, b = swarm(2)
    one, other = socket.socketpair()
    mine, _ = keys(3)
    a.engine.add_lane("stranger", one, mine, "direct")
    other.sendall(bytes(range(256)) * 4)
    assert a.wait(LaneDown).peer == "stranger"
    other.close()
    # a well-formed header with a body that does not authenticate: the lane ends, nobody is blamed
    one, other = socket.socketpair()
    a.engine.add_lane("stranger", one, mine, "direct")
    other.sendall(wire_header.BEAT_HEADER + bytes(16))
    assert "authenticate" in a.wait(LaneDown).reason
    other.close()
    # a longest possible length: nothing comes of it
    one, other = socket.socketpair()
    a.engine.add_lane("stranger", one, mine, "direct")
    other.sendall(wire_header.pack(wire_header.PART, 17 << 20, 0, bytes(16), bytes(16)))
    other.shutdown(socket.SHUT_WR)
    assert "middle of a record" in a.wait(LaneDown).reason
    other.close()
    assert not [e for e in drain(a) if isinstance(e, PeerFault)]
    vectors = {cid_of(i): vector(1_000, i) for i in range(2)}
    plan = make_plan(
        [(p.engine.me, cid_of(i), 1) for i, p in enumerate((a, b))],
        ["peer-0", "peer-1"],
        1_000,
        100,
        "int8",
    )
    start((a, b), plan, vectors)
    assert (
        bytes(a.wait(ResultComplete).data)
        == bytes(b.wait(ResultComplete).data)
        == ref_result(plan, vectors)
    )


def test_an_authentic_record_that_breaks_a_rule_is_a_peer_fault(swarm):
    (a,) = swarm(1)
    one, other = socket.socketpair()
    mine, theirs = keys(4)
    a.engine.add_lane("liar", one, mine, "direct")
    sealer = Sealer(theirs.send, theirs.cipher)

    def record(header, payload=b""):
        out = bytearray(len(payload) + 16)
        sealer.encrypt(header, payload, memoryview(out))
        return header + bytes(out)

    other.sendall(record(wire_header.BEAT_HEADER))
    assert a.wait(LaneUp).peer == "liar"
    a.engine.exchange.open_round(LOG, 1, ["liar"], 1_000, 100, "int8")
    a.engine.sync(WAIT_S)
    other.sendall(
        record(
            wire_header.pack(wire_header.PART, 3, 0, wire_header.slot_id(LOG, 1), cid_of(1)), b"abc"
        )
    )
    assert a.wait(PeerFault) == PeerFault("liar", "chunk 0 of 3 bytes, expected 104")
    assert a.wait(LaneDown).peer == "liar"
    other.close()
    # data before the greeting
    one, other = socket.socketpair()
    a.engine.add_lane("liar", one, mine, "direct")
    sealer = Sealer(theirs.send, theirs.cipher)
    other.sendall(record(wire_header.pack(wire_header.BLOB, 3, 0, bytes(16), bytes(16)), b"abc"))
    assert "before the first heartbeat" in a.wait(PeerFault).reason
    other.close()


def test_silence_is_death_and_beats_are_life(swarm):
    quick = EngineSettings(beat_s=0.05, dead_after_s=0.4, hello_s=0.3)
    a, b = swarm(2, settings=EngineSettings(beat_s=0.05, dead_after_s=15.0, hello_s=15.0))
    c = Peer("watcher", quick)
    c.engine.start()
    try:
        one, other = socket.socketpair()
        mine, theirs = keys(5)
        out = bytearray(16)
        Sealer(theirs.send, theirs.cipher).encrypt(wire_header.BEAT_HEADER, b"", memoryview(out))
        other.sendall(wire_header.BEAT_HEADER + bytes(out))
        c.engine.add_lane("frozen", one, mine, "direct")
        assert c.wait(LaneUp).peer == "frozen"
        assert "silent" in c.wait(LaneDown).reason  # its kernel still takes our beats
        other.close()
        one, other = socket.socketpair()
        c.engine.add_lane("mute", one, mine, "direct")
        assert "no authentic record" in c.wait(LaneDown).reason
        other.close()
    finally:
        c.engine.stop()
    before = a.engine.stats()[b.engine.me].bytes_received
    deadline = threading.Event()
    for _ in range(100):
        if a.engine.stats()[b.engine.me].bytes_received >= before + 3 * 64:
            break
        deadline.wait(0.05)
    assert a.engine.stats()[b.engine.me].bytes_received >= before + 3 * 64  # idle lanes beat
    assert not [e for e in drain(a) if isinstance(e, LaneDown)]


def test_blobs_and_small_records_flow_beside_a_round(swarm):
    a, b = swarm(2)
    data = bytes(range(251)) * 9_001
    out = bytearray(len(data))
    a.engine.exchange.provide(b"state", memoryview(data), 50_000)
    b.engine.exchange.want(b"state", memoryview(out), 50_000, (), [a.engine.me])
    vectors = {cid_of(i): vector(20_000, i) for i in range(2)}
    plan = make_plan(
        [(p.engine.me, cid_of(i), 1) for i, p in enumerate((a, b))],
        ["peer-0", "peer-1"],
        20_000,
        64,
        "int8",
    )
    b.engine.sync(WAIT_S)
    a.engine.exchange.send_blob(b.engine.me, b"state", [(0, 1000)])
    start((a, b), plan, vectors)
    assert (
        bytes(a.wait(ResultComplete).data)
        == bytes(b.wait(ResultComplete).data)
        == ref_result(plan, vectors)
    )
    b.wait(BlobComplete)
    assert out == data


def test_who_copies_what_it_knows_listens_meanwhile(swarm, monkeypatch):
    """An engine that did not look at its sockets until it had copied a large result took all its
    lanes for dead, and so did their other ends.
    """
    monkeypatch.setattr(blobs, "AT_ONCE", 1)
    a, b = swarm(2)
    plan = make_plan([(a.engine.me, cid_of(0), 1)], [a.engine.me], 8_000, 1, "fp32")
    start((a,), plan, {cid_of(0): vector(8_000, 0)})
    data = a.wait(ResultComplete).data
    result, other = bytearray(len(data)), bytearray(100)
    b.engine.exchange.provide(b"other", memoryview(bytes(range(100))), 100)
    a.engine.exchange.want(b"other", memoryview(other), 100, (), [b.engine.me])
    a.engine.sync(WAIT_S)
    hashes = [chunk_hash(data[at : at + 4]) for at in range(0, len(data), 4)]
    a.engine.exchange.want(b"result", memoryview(result), 4, hashes, [b.engine.me])
    b.engine.exchange.send_blob(a.engine.me, b"other", [(0, 1)])
    complete = [a.wait(BlobComplete).name for _ in range(2)]
    assert (complete, result, list(other)) == ([b"other", b"result"], data, list(range(100)))


def test_commands_that_are_refused_are_reported(swarm):
    a, _ = swarm(2)
    plan = make_plan([(a.engine.me, cid_of(0), 1)], [a.engine.me], 100, 10, "int8")
    a.engine.exchange.execute(plan, [])
    failed = a.wait(CommandFailed)
    assert failed.command == "execute"
    assert "not open" in failed.reason
    bad = vector(100, 0)
    bad[50] = float("nan")
    a.engine.exchange.open_round(LOG, 1, [a.engine.me], 100, 10, "int8")
    a.engine.exchange.freeze(LOG, 1, cid_of(0), bad)
    a.engine.exchange.execute(plan, [])
    assert a.wait(NonFinite).cid == cid_of(0)


def test_a_new_lane_replaces_the_old_one(swarm):
    a, b = swarm(2)
    link(a, b, number=9)
    assert (
        a.wait(LaneDown).number == 1
    )  # whoever opens lanes can tell: not the last; b may have closed it before a did
    assert len(a.engine.stats()) == 1
    a.engine.drop_lane(b.engine.me)
    assert a.wait(LaneDown) == LaneDown(b.engine.me, "dropped", 2)


def test_stopping_at_any_time_joins_and_closes():
    before = sys.getswitchinterval()
    for run in (False, True):
        peer = Peer("x")
        one, other = socket.socketpair()
        if run:
            peer.engine.start()
            assert peer.engine.sync(WAIT_S)
            assert sys.getswitchinterval() == pytest.approx(0.0005)
        peer.engine.add_lane("y", one, keys()[0], "direct")
        peer.engine.stop()
        peer.engine.stop()
        peer.engine.add_lane("z", other, keys()[0], "direct")
        assert one.fileno() == -1
        assert other.fileno() == -1
        assert not peer.engine.sync(0.01)
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("make", [pollers.make_poller, pollers.SelectorPoller])
def test_pollers_agree(make):
    poller = make()
    one, other = socket.socketpair()
    fd = one.fileno()
    poller.watch(fd, pollers.READ)
    assert poller.wait(0) == []
    poller.watch(fd, pollers.READ | pollers.WRITE)
    assert poller.wait(1) == [(fd, pollers.WRITE)]
    other.send(b"x")
    assert poller.wait(1) == [(fd, pollers.READ | pollers.WRITE)]
    poller.watch(fd, pollers.READ)
    assert poller.wait(1) == [(fd, pollers.READ)]
    poller.watch(fd, 0)
    assert poller.wait(0) == []
    poller.watch(fd, pollers.READ)
    one.recv(1)
    other.close()
    ((_, ready),) = poller.wait(1)
    assert ready & pollers.READ
    poller.forget(fd)
    poller.forget(fd)
    one.close()
    poller.close()


def test_a_system_without_poll_runs_on_selectors(monkeypatch, swarm):
    monkeypatch.delattr(pollers.select, "poll")
    assert isinstance(pollers.make_poller(), pollers.SelectorPoller)
    a, b = swarm(2)
    assert isinstance(a.engine._poller, pollers.SelectorPoller)
    vectors = {cid_of(i): vector(50_000, i) for i in range(2)}
    plan = make_plan(
        [(p.engine.me, cid_of(i), 1) for i, p in enumerate((a, b))],
        ["peer-0", "peer-1"],
        50_000,
        4_096,
        "bf16",
    )
    start((a, b), plan, vectors)
    assert (
        bytes(a.wait(ResultComplete).data)
        == bytes(b.wait(ResultComplete).data)
        == ref_result(plan, vectors)
    )


def test_socket_options_are_optional(monkeypatch):
    one, other = tcp_pair()
    settings = EngineSettings(congestion="no such algorithm")
    engine_settings.tune(one, settings)
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for name in ("TCP_CONGESTION", "TCP_NOTSENT_LOWAT", "TCP_USER_TIMEOUT"):
        monkeypatch.delattr(socket, name, raising=False)
    engine_settings.tune(other, settings)
    assert not other.getblocking()
    assert engine_settings.option_number("TCP_NOTSENT_LOWAT", "darwin") == 0x201
    assert engine_settings.option_number("TCP_NOTSENT_LOWAT", "plan9") is None
    one.close()
    other.close()
    with pytest.raises(ConfigError):
        EngineSettings(beat_s=1.0, dead_after_s=1.0)


@pytest.mark.skipif(
    not engine_settings.offers("bbr"), reason="this system does not let us have bbr"
)
def test_bbr_begins_anew_where_it_is_in_use():
    """The kernel's own word (TCP_CC_INFO): the rate that it had seen is forgotten."""

    def seen(sock):  # the first of struct tcp_bbr_info
        return struct.unpack("=Q", sock.getsockopt(socket.IPPROTO_TCP, 26, 8))[0]

    one, other = tcp_pair()
    with one, other:
        engine_settings.begin_bbr(one)
        one.sendall(b"some")
        other.sendall(other.recv(4))
        assert one.recv(4) == b"some"
        assert seen(one) > 0
        engine_settings.begin_bbr(one)
        assert seen(one) == 0
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 4) == b"bbr\0"


def test_an_engine_without_bbr_says_how_many_lanes_it_wants(monkeypatch):
    monkeypatch.setattr(width, "JUDGED_S", 0.3)
    monkeypatch.setattr(width, "SETTLING_S", 0.0)
    began = time.monotonic()

    def kernel(sock):
        """Every lane always sends 10 MB/s, and loses one segment of a hundred."""
        seconds = time.monotonic() - began
        return LaneCounters(
            int(1e7 * seconds), 0, seconds, 0.0, 0.05, 0.05, int(7000 * seconds), int(70 * seconds)
        )

    monkeypatch.setattr(engine_thread, "read_socket", kernel)
    one, other = (
        Peer(name, dataclasses.replace(PATIENT, bbr=bbr))
        for name, bbr in zip(peers_of(2), (False, True), strict=True)
    )
    with one.engine, other.engine:
        assert (one.engine.first_lanes, other.engine.first_lanes) == (2, 1)
        for index in range(2):
            link(one, other, number=index, index=index)
        assert one.wait(LanesWanted) == LanesWanted(other.engine.me, 4)
        for index in range(2, 4):
            link(one, other, number=index, index=index)
        assert one.wait(LanesWanted) == LanesWanted(other.engine.me, 8)
        one.engine.drop_lane(other.engine.me, 1)
        for _ in range(3):
            assert one.wait(LaneDown).reason == "dropped"
        assert one.engine.sync()
        assert one.engine.stats()[other.engine.me].up
        one.engine.drop_lane(other.engine.me)
        assert one.wait(LaneDown).reason == "dropped"
    assert not [event for event in other.seen if isinstance(event, LanesWanted)]


def test_an_engine_whose_packets_are_lost_waits_longer_and_wants_more_lanes(monkeypatch):
    """A fifth of the segments is sent again, until the other end falls silent."""
    began = time.monotonic()

    def kernel(sock):
        sent = int(1000 * (time.monotonic() - began))
        return LaneCounters(0, 0, 0.0, 0.0, 0.05, 0.0, sent, sent // 5)

    monkeypatch.setattr(engine_thread, "read_socket", kernel)
    quick = EngineSettings(beat_s=0.05, dead_after_s=0.4, hello_s=15.0, bbr=True)
    peer = Peer("watcher", quick)
    one, other = socket.socketpair()
    mine, theirs = keys(5)
    out = bytearray(16)
    Sealer(theirs.send, theirs.cipher).encrypt(wire_header.BEAT_HEADER, b"", memoryview(out))
    with peer.engine, other:
        peer.engine.add_lane("far", one, mine, "direct")
        assert peer.wait(LanesWanted) == LanesWanted("far", losses.LANES)
        silence = peer.engine.pace.silences["far"]
        assert 3.0 < silence < losses.MOST_S
        other.sendall(wire_header.BEAT_HEADER + bytes(out))
        assert peer.wait(LaneUp).peer == "far"
        said = time.monotonic()
        assert "silent" in peer.wait(LaneDown).reason
        assert time.monotonic() - said > silence - 0.3 > 10 * quick.beat_s

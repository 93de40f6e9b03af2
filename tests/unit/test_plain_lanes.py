"""Plain lanes: payloads go straight to where they stay, in many steps, and never to where they must
not.
"""

from __future__ import annotations

import random
import socket

import pytest
from engine_kit import WAIT_S, drain, keys, link, pull_until_complete, start, swarm
from exchange_kit import LOG, Net, cid_of, make_plan, ref_result, vector

from atoll.collectives.engine import lane as engine_lane
from atoll.collectives.engine.plain import PlainLane
from atoll.collectives.exchange import (
    BlobComplete,
    BlobProgress,
    Exchange,
    LaneDown,
    LaneUp,
    PeerFault,
    ReductionReport,
    ResultComplete,
)
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.record_layer import DEFAULT_CIPHER, PLAIN, Sealer


def narrow():
    """A pair of sockets that hold so little that a record takes many steps."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
    return pair


__all__ = ["swarm"]  # a fixture


# ---- the exchange: a place is lent, and taken back


class Slow:
    """A lane whose records are filled in steps, with garbage first: what it writes after its place
    was taken back would show.
    """

    def __init__(self, net: Net, a: str, b: str, number: int) -> None:
        self.net, self.a, self.b, self.number = net, a, b, number
        self.header, self.payload, self.left = b"", b"", 0
        self.withdrawn = 0

    def step(self, rng: random.Random) -> bool:
        """Take the next record, or move on with the present one. True when anything moved."""
        node = self.net.nodes[self.b]
        if not self.left:
            record = self.net.nodes[self.a].next_record(self.a_to, self.number)
            if record is None:
                return False
            self.header, self.payload = record.header, bytes(record.payload)
            self.left = rng.randrange(1, 5)
            node.destination(self.a, self.header, self.number)
            return True
        place = node.place(self.a, self.number)
        self.left -= 1
        if place is None:
            self.withdrawn += 1
        else:
            place[:] = (
                self.payload if not self.left else b"\xff" * len(place)
            )  # not a number, wherever it stays
        if not self.left:
            node.received(self.a, self.header, self.number)
        return True

    @property
    def a_to(self) -> str:
        return self.b

    def cut(self) -> None:
        """Lost, with what was on it, and made again."""
        self.left = 0
        for one, other in ((self.a, self.b), (self.b, self.a)):
            self.net.nodes[one].lane_down(other, self.number)
            self.net.nodes[one].lane_up(other, self.number)


def begin(net, plan, vectors):
    """open_round, freeze and execute everywhere."""
    for peer in net.peers:
        node = net.nodes[peer]
        node.open_round(
            plan.log, plan.round, net.peers, plan.numel, plan.chunk_elements, plan.codec
        )
        for c in plan.contributors:
            if c.member.peer == peer:
                node.freeze(plan.log, plan.round, c.cid, vectors[c.cid])
        node.execute(plan, net.peers)


def slow_net(n, seed, lanes=2):
    net = Net(n, seed=seed)
    pairs = [(a, b) for a in net.peers for b in net.peers if a != b]
    for a, b in pairs:
        for number in range(1, lanes):
            net.nodes[a].lane_up(b, number)
    return net, [Slow(net, a, b, number) for a, b in pairs for number in range(lanes)]


@pytest.mark.parametrize("seed", range(30))
def test_late_bytes_land_nowhere_whatever_happens_between_the_steps_of_a_record(seed):
    rng = random.Random(seed)
    net, lanes = slow_net(3, seed)
    numel, chunk, codec = 2_000, 64, "fp32"
    vectors = {cid_of(i): vector(numel, i) for i in range(3)}
    plans = [
        make_plan(
            [(p, cid_of(i), 1) for i, p in enumerate(net.peers[:members])],
            net.peers[:owners],
            numel,
            chunk,
            codec,
            revision=revision,
        )
        for revision, (members, owners) in enumerate(((3, 3), (2, 2), (3, 1)))
    ]
    blob = rng.randbytes(5_000)
    fetched = {peer: bytearray(len(blob)) for peer in net.peers[1:]}
    net.nodes[net.peers[0]].provide(b"blob", memoryview(blob), 512)
    net.nodes[net.peers[2]].provide(b"blob", memoryview(blob), 512)
    for peer, memory in fetched.items():
        net.nodes[peer].want(b"blob", memoryview(memory), 512, (), [net.peers[0], net.peers[2]])
    begin(net, plans[0], vectors)
    current = 0
    for _ in range(1_500):
        what = rng.random()
        if what < 0.004 and current + 1 < len(plans):
            current += 1
            for peer in net.peers:
                net.nodes[peer].execute(plans[current], net.peers)
        elif what < 0.01:
            rng.choice(lanes).cut()
        elif what < 0.03:
            net.repair(plans[current])  # the same again, while it is under way
        elif what < 0.04:
            peer = rng.choice(net.peers[1:])
            for source in (net.peers[0], net.peers[2]):
                if source != peer:
                    net.nodes[source].send_blob(peer, b"blob", [(0, 10)])
        else:
            rng.choice(lanes).step(rng)
    for _ in range(60):
        net.repair(plans[current])
        while sum(lane.step(rng) for lane in lanes):
            pass
    want = ref_result(plans[current], vectors)
    for peer in net.peers:
        (result,) = net.results(peer, plans[current])
        assert bytes(result.data) == want
        assert not net.of(peer, PeerFault)
    for peer, memory in fetched.items():
        if any(isinstance(event, BlobComplete) for event in net.events[peer]):
            assert memory == blob


def test_a_chunk_that_comes_over_two_lanes_at_once_counts_once_and_the_later_one_writes_no_more():
    net, _ = slow_net(2, 0)
    a, b = net.peers
    vectors = {cid_of(i): vector(64, i) for i in range(2)}
    plan = make_plan([(p, cid_of(i), 1) for i, p in enumerate(net.peers)], [a], 64, 64, "fp32")
    begin(net, plan, vectors)
    header, payload = net.nodes[b].next_record(a)
    net.nodes[a].destination(b, header)[:] = payload
    net.nodes[a].received(b, header)
    header, payload = net.nodes[a].next_record(b)
    payload, node = bytes(payload), net.nodes[b]
    first, second = node.destination(a, header, 0), node.destination(a, header, 1)
    second[:] = payload
    first[:] = b"\xff" * len(payload)
    node.received(a, header, 1)
    assert node.place(a, 0) is None
    assert node.place(a, 1) is None
    node.received(a, header, 0)
    (result,) = net.results(b, plan)
    assert bytes(result.data) == payload == ref_result(plan, vectors)
    assert node.destination(a, header, 0) is None


def test_a_part_that_comes_over_two_lanes_at_once_counts_once():
    net, _ = slow_net(3, 0)
    a, b, c = net.peers
    vectors = {cid_of(i): vector(64, i) for i in range(3)}
    plan = make_plan([(p, cid_of(i), 1) for i, p in enumerate(net.peers)], [a], 64, 64, "fp32")
    begin(net, plan, vectors)
    node, (header, payload) = net.nodes[a], net.nodes[b].next_record(a)
    for place in [node.destination(b, header, lane) for lane in (0, 1)]:
        place[:] = payload
    for lane in (0, 1):
        node.received(b, header, lane)
    assert not net.results(a, plan), "one contribution is lacking"
    net.deliver(c, a, *net.nodes[c].next_record(a))
    (result,) = net.results(a, plan)
    assert bytes(result.data) == ref_result(plan, vectors)


def test_a_blob_that_comes_from_two_peers_at_once_is_not_written_to_when_it_is_here():
    net, _ = slow_net(3, 0)
    a, b, c = net.peers
    node, memory, data = net.nodes[a], bytearray(8), b"12345678"
    node.want(b"blob", memoryview(memory), 8, (), [b, c])
    header = wire_header.pack(wire_header.BLOB, 8, 0, wire_header.blob_key(b"blob"), bytes(16))
    first, second = node.destination(b, header), node.destination(c, header)
    first[:4] = b"????"
    second[:] = data
    node.received(c, header)
    assert memory == data
    assert node.place(b) is None
    node.received(b, header)
    assert [type(event) for event in net.events[a] if isinstance(event, BlobComplete)] == [
        BlobComplete
    ]


def test_a_plan_that_is_replaced_takes_its_places_back_and_keeps_parts():
    net, _ = slow_net(2, 0)
    a, b = net.peers
    vectors = {cid_of(i): vector(128, i) for i in range(2)}
    plans = [
        make_plan(
            [(p, cid_of(i), 1) for i, p in enumerate(net.peers)],
            net.peers,
            128,
            64,
            "fp32",
            revision=revision,
        )
        for revision in (0, 1)
    ]
    begin(net, plans[0], vectors)
    node = net.nodes[a]
    header, payload = net.nodes[b].next_record(a)
    part = node.destination(b, header, 0)
    result = wire_header.pack(
        wire_header.RESULT, 256, 1, plans[0].plan_id, wire_header.slot_id(LOG, 1)
    )
    assert node.destination(b, result, 1) is not None
    node.execute(plans[1], net.peers)
    assert node.place(b, 1) is None
    assert node.place(b, 0) is part
    part[:] = payload
    node.received(b, header, 0)
    node.report(plans[1].plan_id)
    (report,) = net.of(a, ReductionReport)
    assert report.missing == {}
    # a result of the next plan that is on its way when the plan comes finds it
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], [b], 128, 64, "fp32", revision=2
    )
    early = wire_header.pack(wire_header.RESULT, 256, 1, plan.plan_id, wire_header.slot_id(LOG, 1))
    node.destination(b, early, 1)[:] = payload
    node.execute(plan, net.peers)
    node.received(b, early, 1)
    node.report(plan.plan_id)
    assert net.of(a, ReductionReport)[-1].lacking == {b: ((0, 1),)}


def test_a_closed_round_and_a_forgotten_blob_take_their_places_back():
    net, _ = slow_net(2, 0)
    a, b = net.peers
    node = net.nodes[a]
    node.open_round(LOG, 1, net.peers, 128, 64, "fp32")
    header = wire_header.pack(wire_header.PART, 256, 0, wire_header.slot_id(LOG, 1), cid_of(1))
    early = wire_header.pack(wire_header.RESULT, 256, 1, bytes(16), wire_header.slot_id(LOG, 1))
    lent = [node.destination(b, header, 0), node.destination(b, early, 1)]
    assert [node.place(b, 0), node.place(b, 1)] == lent
    node.close_round(LOG, 1)
    assert node.place(b, 0) is None
    assert node.place(b, 1) is None
    memory = bytearray(8)
    node.want(b"blob", memoryview(memory), 4, (), [b])
    header = wire_header.pack(wire_header.BLOB, 4, 1, wire_header.blob_key(b"blob"), bytes(16))
    assert node.destination(b, header, 0) is not None
    assert len(node.place(b, 0)) == 4
    node.unwant(b"blob")
    assert node.place(b, 0) is None
    node.want(b"blob", memoryview(memory), 4, (), [b])
    assert node.destination(b, header, 0) is not None
    node.lane_down(b, 0)
    assert node.place(b, 0) is None


# ---- the lane


@pytest.mark.parametrize(
    ("codec", "cipher"),
    [("fp32", PLAIN), ("int8", PLAIN), ("fp32", DEFAULT_CIPHER), ("int8", DEFAULT_CIPHER)],
)
def test_records_in_many_steps_plans_that_change_and_lanes_that_break_change_no_bit(
    swarm, monkeypatch, codec, cipher
):
    monkeypatch.setattr(engine_lane, "SEGMENT_BYTES", 10_000)
    peers = swarm(3, make=narrow, cipher=cipher)
    a, b, _ = peers
    link(a, b, narrow, number=3, index=1, cipher=cipher)
    numel, names = 1_000_000, [p.engine.me for p in peers]
    vectors = {cid_of(i): vector(numel, i) for i in range(3)}
    first = make_plan(
        [(name, cid_of(i), 1) for i, name in enumerate(names)], names, numel, 40_000, codec
    )
    plan = make_plan(
        [(name, cid_of(i), 1) for i, name in enumerate(names[:2])],
        names[:2],
        numel,
        40_000,
        codec,
        revision=1,
    )
    start(peers, first, vectors)
    while a.engine.stats()[b.engine.me].bytes_sent < 200_000:  # in the middle
        assert a.engine.sync(WAIT_S)
    for peer in peers:
        peer.engine.exchange.execute(plan, names)
    a.engine.drop_lane(b.engine.me)
    for _ in range(2):
        assert a.wait(LaneDown).peer == b.engine.me
        assert b.wait(LaneDown).peer == a.engine.me
    link(a, b, narrow, number=7, cipher=cipher)
    pull_until_complete(peers, plan, {cid_of(i): p for i, p in enumerate(peers)})
    want = ref_result(plan, vectors)
    for peer in peers:
        assert (
            bytes(peer.wait(ResultComplete, lambda event: event.plan_id == plan.plan_id).data)
            == want
        )
        assert not [event for event in drain(peer) if isinstance(event, PeerFault)]


@pytest.mark.parametrize("cipher", [PLAIN, DEFAULT_CIPHER])
def test_a_vector_may_change_as_soon_as_it_is_released_though_a_record_of_it_is_half_sent(
    swarm, cipher
):
    a, b = swarm(2, make=narrow, cipher=cipher)
    chunk, names = 1 << 20, [a.engine.me, b.engine.me]
    vectors = {cid_of(i): vector(chunk, i) for i in range(2)}
    want_part = vectors[cid_of(0)].clone()
    plan = make_plan(
        [(name, cid_of(i), 1) for i, name in enumerate(names)], [b.engine.me], chunk, chunk, "fp32"
    )
    start([a, b], plan, vectors)
    while not (sent := a.engine.stats()[b.engine.me].bytes_sent) > 4_096:  # more than heartbeats
        assert a.engine.sync(WAIT_S)
    a.engine.exchange.release(cid_of(0))
    assert a.engine.sync(WAIT_S)
    vectors[cid_of(0)].fill_(float("nan"))  # what would be sent of it now
    vectors[cid_of(0)] = want_part
    assert bytes(b.wait(ResultComplete).data) == ref_result(plan, vectors), f"{sent} bytes had gone"


@pytest.mark.parametrize("cipher", [PLAIN, DEFAULT_CIPHER])
def test_a_lane_lets_go_of_memory_once_it_is_sent(swarm, monkeypatch, cipher):
    monkeypatch.setattr(engine_lane, "SEGMENT_BYTES", 10_000)
    a, b = swarm(2, cipher=cipher)
    for length in (9_000, 50_000):
        data, out = bytearray(length), bytearray(b"x" * length)
        a.engine.exchange.provide(b"state", memoryview(data), length)
        b.engine.exchange.want(b"state", memoryview(out), length, (), [a.engine.me])
        assert b.engine.sync(WAIT_S)
        a.engine.exchange.send_blob(b.engine.me, b"state", [(0, 1)])
        b.wait(BlobComplete)
        a.engine.exchange.withdraw(b"state")
        b.engine.exchange.unwant(b"state")
        assert a.engine.sync(WAIT_S)
        data.append(0)  # a BufferError while anybody has a view of it


def test_one_long_record_at_a_time_is_received_however_many_are_there():
    """Who takes in all that has come before it sends anything leaves the other end without anything
    to do.
    """
    pair, both, chunks, events = socket.socketpair(), keys(9, PLAIN), 6, []
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        end.setblocking(False)
    giver, taker = Exchange("giver", emit=events.append), Exchange("taker", emit=events.append)
    out, back = (
        PlainLane(peer, sock, key, "direct", 0.0)
        for peer, sock, key in zip(("giver", "taker"), pair, both, strict=True)
    )
    for lane, other in ((out, taker), (back, giver)):  # the first heartbeats
        lane.send(other, 0.0)
    for lane, other in ((out, taker), (back, giver)):
        lane.receive(other, 0.0)
        assert lane.up
    data, into = bytes(range(200)) * 100, bytearray(20_000 * chunks)
    giver.provide(b"state", memoryview(data * chunks), len(data))
    taker.want(b"state", memoryview(into), len(data), (), ["giver"])
    giver.send_blob("taker", b"state", [(0, chunks)])
    while back.send(giver, 0.0):
        pass
    assert not back.wants_write, "the socket holds all of them"
    for have in range(1, chunks + 1):
        assert out.receive(taker, 0.0)
        assert [event.have for event in events if isinstance(event, BlobProgress)][-1] == have
    assert into == data * chunks
    for lane in (out, back):
        lane.close()


def plain_lane(a):
    """A lane of an engine whose other end is ours: the socket, and what makes a record's header and
    tag.
    """
    one, other = socket.socketpair()
    mine, theirs = keys(4, PLAIN)
    a.engine.add_lane("liar", one, mine, "direct")
    sealer = Sealer(theirs.send, PLAIN)

    def head(header):
        out = bytearray(16)
        sealer.encrypt(header, b"", memoryview(out))
        return header + bytes(out)

    return other, head


@pytest.mark.parametrize(
    ("kind", "length", "fault"),
    [
        (wire_header.PART, 3, "chunk 0 of 3 bytes, expected 104"),
        (wire_header.PART, (17 << 20) + 1, "record of 17825793 bytes"),
        (wire_header.BEAT, 1, "heartbeat with content"),
        (9, 104, "unknown record"),
    ],
)
def test_an_authentic_header_that_breaks_a_rule_is_a_peer_fault(swarm, kind, length, fault):
    (a,) = swarm(1)
    a.engine.exchange.open_round(LOG, 1, ["liar"], 1_000, 100, "int8")
    a.engine.sync(WAIT_S)
    other, head = plain_lane(a)
    other.sendall(head(wire_header.BEAT_HEADER))
    assert a.wait(LaneUp).peer == "liar"
    other.sendall(
        head(wire_header.pack(kind, length, 0, wire_header.slot_id(LOG, 1), cid_of(1))) + b"abc"
    )
    assert fault in a.wait(PeerFault).reason
    assert a.wait(LaneDown).peer == "liar"
    other.close()


def test_forged_cut_and_early_records_end_a_plain_lane(swarm):
    (a,) = swarm(1)
    part = wire_header.pack(wire_header.PART, 104, 0, wire_header.slot_id(LOG, 1), cid_of(1))
    other, head = plain_lane(a)
    other.sendall(wire_header.BEAT_HEADER + bytes(16))
    assert "authenticate" in a.wait(LaneDown).reason
    other.close()
    for cut in (10, 64, 100):  # in the header, behind the tag, in the payload
        other, head = plain_lane(a)
        other.sendall((head(wire_header.BEAT_HEADER) + head(part) + bytes(104))[: 64 + cut])
        assert a.wait(LaneUp).peer == "liar"
        other.shutdown(socket.SHUT_WR)
        assert "middle of a record" in a.wait(LaneDown).reason
        other.close()
    assert not [event for event in drain(a) if isinstance(event, PeerFault)]
    other, head = plain_lane(a)
    other.sendall(head(part) + bytes(104))
    assert "before the first heartbeat" in a.wait(PeerFault).reason
    other.close()


def test_a_record_for_nobody_is_read_past(swarm):
    (a,) = swarm(1)
    a.engine.exchange.open_round(LOG, 1, ["liar"], 1_000, 100, "int8")
    a.engine.sync(WAIT_S)
    other, head = plain_lane(a)
    other.sendall(head(wire_header.BEAT_HEADER))
    strange = wire_header.pack(
        wire_header.PART, 300_000, 0, bytes(16), cid_of(1)
    )  # of no round that is open
    wrong = wire_header.pack(wire_header.PART, 3, 0, wire_header.slot_id(LOG, 1), cid_of(1))
    data = head(strange) + bytes(300_000) + head(wire_header.BEAT_HEADER) + head(wrong)
    other.settimeout(WAIT_S)
    other.sendall(data)
    assert a.wait(PeerFault).reason == "chunk 0 of 3 bytes, expected 104", (
        "the records behind it were understood"
    )
    other.close()

"""The data plane between exchanges in one process: any order, loss, revisions; bits against a numpy
reference.
"""

from __future__ import annotations

import weakref
from itertools import count

import msgspec
import numpy as np
import pytest
import torch
from exchange_kit import (
    LOG,
    Net,
    chunking_of,
    cid_of,
    decoded,
    expected_bytes,
    make_plan,
    ref_digests,
    ref_result,
    vector,
)

from atoll.collectives.codec_names import FACTS
from atoll.collectives.codecs.codec import CODECS
from atoll.collectives.codecs.ranges import ranges_of
from atoll.collectives.digest import chunk_hash
from atoll.collectives.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from atoll.collectives.exchange import (
    BadChunk,
    BlobComplete,
    BlobProgress,
    Exchange,
    NonFinite,
    PartReduced,
    PeerFault,
    ReductionReport,
    ResultComplete,
)
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.group import Part, Plan, Topology
from atoll.collectives.identifiers import PeerId
from atoll.collectives.pace import Lead
from atoll.collectives.round.state import Shape


def start(net, plan, vectors, *, audience=None, open_all=True):
    """open_round, freeze and execute everywhere."""
    for peer in net.peers:
        if peer in net.down:
            continue
        node = net.nodes[peer]
        if open_all:
            node.open_round(
                plan.log, plan.round, net.peers, plan.numel, plan.chunk_elements, plan.codec
            )
        for c in plan.contributors:
            if c.member.peer == peer and c.cid in vectors:
                node.freeze(plan.log, plan.round, c.cid, vectors[c.cid])
        node.execute(plan, audience or net.peers)


def check(net, plan, vectors, peers=None):
    want = ref_result(plan, vectors)
    assert len(want) == expected_bytes(plan)
    for peer in peers or [p for p in net.peers if p not in net.down]:
        (done,) = net.results(peer, plan)
        assert bytes(done.data) == want, peer
        assert done.digests == ref_digests(plan, want)


# in one chunk, over several, over a few values, to the end
MIXED = "bf16:300+int8:1100+fp32:2611+bf16:5+int4"
SPARSE = "bf16:300+sparse64:1100+int4:900+stat2:1500+int8"  # results are bf16, int4, int8


@pytest.mark.parametrize("codec", [*CODECS, MIXED, SPARSE])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_weighted_mean_bits(codec, n):
    net = Net(n, seed=n)
    numel, chunk = 5_003, 700
    vectors = {cid_of(i): vector(numel, i) for i in range(n)}
    plan = make_plan(
        [(net.peers[i], cid_of(i), 3 * i + 2) for i in range(n)], net.peers, numel, chunk, codec
    )
    start(net, plan, vectors)
    net.run()
    check(net, plan, vectors)
    mean = sum(v.double() * (3 * i + 2) for i, v in enumerate(vectors.values())) / sum(
        3 * i + 2 for i in range(n)
    )
    error = np.abs(
        decoded(plan, bytes(net.results(net.peers[0], plan)[0].data)) - mean.numpy()
    ).max()
    coarsest = max(FACTS[name].round_error for name, _, _ in ranges_of(codec, numel))
    assert error < 1e-6 + 10 * coarsest  # of the largest value; `check` has compared the bits
    for peer in net.peers:
        parts = list(net.of(peer, PartReduced))
        assert [plan.parts[e.part].owner for e in parts] == [peer]
        assert parts[0].digest == ref_digests(plan, ref_result(plan, vectors))[parts[0].part]


@pytest.mark.parametrize("seed", range(12))
def test_loss_and_broken_lanes_are_repaired_by_pull(seed):
    net = Net(4, seed=seed, loss=0.3, eager=bool(seed % 2))
    numel, chunk = 3_000, 64
    vectors = {
        cid_of(i): vector(numel, i) for i in range(3)
    }  # the fourth contributes nothing, but is in the audience
    contributors = [(net.peers[i], cid_of(i), 1 + i) for i in (2, 0, 1)]
    plan = make_plan(contributors, net.peers[:3], numel, chunk, "int8")
    start(net, plan, vectors)
    for turn in range(60):
        net.run(limit=200)
        net.cut(*net.rng.sample(net.peers, 2))
        if turn > 20:
            net.loss = 0.0
        net.repair(plan)
        if all(net.results(peer, plan) for peer in net.peers):
            break
    check(net, plan, vectors)


@pytest.mark.parametrize("seed", range(6))
def test_parts_and_results_before_the_plan(seed):
    net = Net(3, seed=seed)
    numel, chunk = 2_000, 100
    vectors = {cid_of(i): vector(numel, i) for i in range(2)}
    plan = make_plan(
        [(net.peers[0], cid_of(0), 1), (net.peers[1], cid_of(1), 1)],
        net.peers[:2],
        numel,
        chunk,
        "int8",
    )
    for i, peer in enumerate(net.peers):
        net.nodes[peer].open_round(LOG, 1, net.peers, numel, chunk, "int8")
        if i < 2:
            net.nodes[peer].freeze(LOG, 1, cid_of(i), vectors[cid_of(i)])
    net.nodes[net.peers[0]].execute(plan, net.peers)
    net.run()  # parts reach peer 1, which has no plan
    net.nodes[net.peers[1]].execute(plan, net.peers)
    net.run()  # results reach peer 2, which has no plan
    assert not net.results(net.peers[2], plan)
    net.nodes[net.peers[2]].execute(plan, net.peers)
    check(net, plan, vectors)  # without one more record


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_revised_plan_takes_the_place_of_the_one_before_in_memory(codec):
    made, most = list[weakref.ref[np.ndarray]](), list[int]()

    def buffer(plan: Plan) -> memoryview:
        array = np.empty(4 * plan.numel + 4096, dtype=np.uint8)
        made.append(weakref.ref(array))
        most.append(sum(held() is not None for held in made))
        return array.data

    net = Net(3, seed=3, result_buffer=buffer)
    numel, chunk = 3_000, 100
    vectors = {cid_of(i): vector(numel, i) for i in range(3)}
    for i, peer in enumerate(net.peers):
        net.nodes[peer].open_round(LOG, 1, net.peers, numel, chunk, codec)
        net.nodes[peer].freeze(LOG, 1, cid_of(i), vectors[cid_of(i)])
    for revision in range(3):
        plan = make_plan(
            [(p, cid_of(i), 1 + i) for i, p in enumerate(net.peers)],
            net.peers,
            numel,
            chunk,
            codec,
            revision=revision,
        )
        for peer in net.peers:
            net.nodes[peer].execute(plan, net.peers)
        net.run(40)  # something of every plan is under way, reduced and received
    net.run()
    check(net, plan, vectors)
    assert most == [1, 2, 3, 3, 3, 3, 3, 3, 3]


def test_revision_reuses_what_came_and_sends_only_new_ranges():
    net = Net(4, seed=5)
    a, b, c, d = net.peers
    numel, chunk = 4_000, 100
    vectors = {cid_of(i): vector(numel, i) for i in range(4)}
    first = make_plan(
        [(p, cid_of(i), 1 + i) for i, p in enumerate(net.peers)], net.peers, numel, chunk, "int8"
    )
    for peer in (a, b, c):
        node = net.nodes[peer]
        node.open_round(LOG, 1, net.peers, numel, chunk, "int8")
        node.freeze(LOG, 1, cid_of(net.peers.index(peer)), vectors[cid_of(net.peers.index(peer))])
        node.execute(first, net.peers)
    net.kill(d)
    net.run()
    assert not any(net.results(peer, first) for peer in net.peers)
    # d's part goes to b; the others keep their ranges
    parts = (Part(a, 0, 10), Part(b, 10, 20), Part(c, 20, 30), Part(b, 30, 40))
    assert [p.first for p in first.parts] == [0, 10, 20, 30]
    second = make_plan(
        [(p, cid_of(i), 1 + i) for i, p in enumerate(net.peers[:3])],
        net.peers[:3],
        numel,
        chunk,
        "int8",
        revision=1,
        parts=parts,
    )
    kinds: list[tuple[int, int]] = []
    deliver = net.deliver

    def spy(x: PeerId, y: PeerId, header: bytes, payload: bytes) -> None:
        record = wire_header.parse(header, x)
        kinds.append((record.kind, record.chunk))
        deliver(x, y, header, payload)

    net.deliver = spy
    for peer in (a, b, c):
        net.nodes[peer].execute(second, net.peers)
    net.run()
    check(net, second, vectors)
    assert sorted(c for k, c in kinds if k == wire_header.PART) == sorted(
        [*range(30, 40), *range(30, 40)]
    )  # from a and c, to b
    # a smaller plan changes nothing any more
    net.nodes[a].execute(first, net.peers)
    net.run()
    assert not net.results(a, first)


@pytest.mark.parametrize("seed", range(20))
def test_revisions_at_any_moment(seed):
    net = Net(5, seed=seed, loss=0.1)
    numel, chunk = 1_500, 50
    vectors = {cid_of(i): vector(numel, i) for i in range(5)}
    for peer in net.peers:
        net.nodes[peer].open_round(LOG, 1, net.peers, numel, chunk, "int8")
    dead = net.peers[net.rng.randrange(5)]
    plan = make_plan(
        [(p, cid_of(i), 2) for i, p in enumerate(net.peers)], net.peers, numel, chunk, "int8"
    )
    start(net, plan, vectors, open_all=False)
    net.run(limit=net.rng.randrange(400))
    net.kill(dead)
    live = [p for p in net.peers if p != dead]
    for revision in (1, 2):
        net.rng.shuffle(live)
        contributors = [
            (p, cid_of(net.peers.index(p)), 1 + revision + net.peers.index(p))
            for p in live[revision - 1 :]
        ]
        plan = make_plan(
            contributors, net.rng.sample(live, 3), numel, chunk, "int8", revision=revision
        )
        for peer in live:
            net.nodes[peer].execute(plan, net.peers)
            if net.rng.random() < 0.5:
                net.run(limit=net.rng.randrange(100))
    net.loss = 0.0
    for _ in range(10):
        net.run()
        net.repair(plan)
    net.run()
    check(net, plan, vectors)


def test_two_rounds_of_two_logs_interleaved():
    net = Net(3, seed=1)
    plans = []
    for log, numel, chunk, codec in (("a", 3_000, 100, "int8"), ("b", 900, 128, "fp32")):
        vectors = {cid_of(i, 1 if log == "b" else 0): vector(numel, i) for i in range(3)}
        plan = make_plan(
            [(net.peers[i], cid, 1) for i, cid in enumerate(vectors)],
            net.peers,
            numel,
            chunk,
            codec,
            log=log,
        )
        start(net, plan, vectors)
        plans.append((plan, vectors))
    records = [net.nodes[net.peers[0]].next_record(net.peers[1]) for _ in range(6)]
    slots = [wire_header.parse(r.header, net.peers[0]).key for r in records if r is not None]
    assert (
        slots == [wire_header.slot_id("a", 1), wire_header.slot_id("b", 1)] * 3
    )  # turn and turn about
    net.run()
    for plan, _ in plans:
        net.repair(plan)
    net.run()
    for plan, vectors in plans:
        check(net, plan, vectors)


def test_report_names_what_is_missing():
    net = Net(3)
    a, b, c = net.peers
    vectors = {cid_of(i): vector(600, i) for i in range(3)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 600, 10, "fp32"
    )
    for peer in net.peers:
        net.nodes[peer].open_round(LOG, 1, net.peers, 600, 10, "fp32")
    net.nodes[a].freeze(LOG, 1, cid_of(0), vectors[cid_of(0)])
    net.nodes[a].execute(plan, net.peers)
    net.nodes[a].report(plan.plan_id)
    (report,) = net.of(a, ReductionReport)
    assert report == ReductionReport(
        plan.plan_id,
        {cid_of(1): ((0, 20),), cid_of(2): ((0, 20),)},
        {b: ((20, 40),), c: ((40, 60),)},
        0,
    )
    net.nodes[b].execute(plan, net.peers)  # its own vector is not frozen yet
    net.run()
    net.nodes[b].report(plan.plan_id)
    (report,) = net.of(b, ReductionReport)
    assert report.missing == {cid_of(1): ((20, 40),), cid_of(2): ((20, 40),)}
    net.nodes[b].freeze(LOG, 1, cid_of(1), vectors[cid_of(1)])
    net.nodes[c].freeze(LOG, 1, cid_of(2), vectors[cid_of(2)])
    net.nodes[c].execute(plan, net.peers)
    net.run()
    check(net, plan, vectors)
    net.nodes[a].report(bytes(16))  # unknown: no answer
    assert len(net.of(a, ReductionReport)) == 1


@pytest.mark.parametrize("codec", [*CODECS, "int8:650+bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused_at_the_source(codec, bad):
    net = Net(2)
    vectors = {cid_of(i): vector(1_000, i) for i in range(2)}
    vectors[cid_of(1)][700] = bad
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 1_000, 100, codec
    )
    start(net, plan, vectors)
    net.run()
    assert net.of(net.peers[1], NonFinite) == [NonFinite(cid_of(1))]
    assert not net.of(net.peers[0], PeerFault)
    assert not net.of(net.peers[0], ResultComplete)
    assert not net.of(net.peers[1], ResultComplete)
    net.nodes[net.peers[1]].report(plan.plan_id)
    (report,) = net.of(net.peers[1], ReductionReport)
    assert cid_of(1) in report.missing


@pytest.mark.parametrize(
    "codec",
    ["fp32", "bf16", "int8", "int4", "int8:30+bf16", "stat2", "sparse32"],
)
def test_non_finite_from_a_peer_is_its_fault(codec):
    net = Net(3)
    a, b, _c = net.peers
    vectors = {cid_of(i): vector(1_000, i) for i in range(3)}
    plan = make_plan([(p, cid_of(i), 1) for i, p in enumerate(net.peers)], [a], 1_000, 100, codec)
    start(net, plan, vectors)
    record = net.nodes[b].next_record(a)
    assert record is not None
    payload = np.frombuffer(bytes(record.payload), np.uint8).copy()
    payload[:4] = 0xFF  # NaN in every format here
    net.deliver(b, a, record.header, payload.tobytes())
    net.run()
    assert [e.peer for e in net.of(a, PeerFault)] == [b]
    net.nodes[a].report(plan.plan_id)
    (report,) = net.of(a, ReductionReport)
    assert set(report.missing) == {cid_of(1)}
    assert report.missing[cid_of(1)] == ((0, 10),)
    second = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers) if p != b],
        [a],
        1_000,
        100,
        codec,
        revision=1,
    )
    for peer in net.peers:
        net.nodes[peer].execute(second, net.peers)
    net.run()
    check(net, second, vectors)


def _indices(first: int, second: int) -> bytes:
    return (first | second << 12).to_bytes(3, "little")


@pytest.mark.parametrize(
    ("at", "harm"),
    [
        (0, np.float32(-1.0).tobytes()),
        (4, np.float32(np.inf).tobytes()),
        (0, np.float32(np.nan).tobytes()),
        (8, _indices(5, 5)),
        (8, _indices(7, 3)),
        (8, _indices(3, 100)),
        (8, _indices(4094, 4095)),
    ],
)
@pytest.mark.parametrize("reducer", ["mean", "max"])
def test_sparse_bytes_that_no_encoder_makes_are_the_fault_of_their_sender(at, harm, reducer):
    """Levels that are no magnitudes; indices that do not ascend, come twice, or lie outside a chunk
    of 100 values: two are kept of it.
    """
    net = Net(3)
    a, b, _c = net.peers
    vectors = {cid_of(i): vector(1_000, i) for i in range(3)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)],
        [a],
        1_000,
        100,
        "sparse64",
        reducer=reducer,
    )
    start(net, plan, vectors)
    record = net.nodes[b].next_record(a)
    raw = bytes(record.payload)
    net.deliver(b, a, record.header, raw[:at] + harm + raw[at + len(harm) :])
    net.run()
    (fault,) = net.of(a, PeerFault)
    assert fault.peer == b
    assert "not what its codec makes" in fault.reason
    assert not net.of(a, ResultComplete)
    second = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers) if p != b],
        [a],
        1_000,
        100,
        "sparse64",
        revision=1,
    )
    for peer in net.peers:
        net.nodes[peer].execute(second, net.peers)
    net.run()
    check(net, second, vectors)


def test_records_of_contributions_and_of_results_have_lengths_of_their_own():
    net = Net(2)
    a, b = net.peers
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], [a, b], 200, 100, "sparse64"
    )
    start(net, plan, {cid_of(i): vector(200, i) for i in range(2)})
    part, result, slot = 8 + 3 + 1, 4 + 2 * 2 + 50 + 2, wire_header.slot_id(plan.log, plan.round)

    def part_of(length: int) -> bytes:
        return wire_header.pack(wire_header.PART, length, 0, slot, cid_of(1))

    def result_of(length: int) -> bytes:
        return wire_header.pack(wire_header.RESULT, length, 1, plan.plan_id, slot)

    node = net.nodes[a]
    for header, words in (
        (part_of(result), f"of {result} bytes, expected {part}"),
        (result_of(part), f"of {part} bytes, expected {result}"),
    ):
        with pytest.raises(RemoteProtocolError, match=words) as caught:
            node.destination(b, header)
        assert caught.value.peer == b
    assert len(node.destination(b, part_of(part))) == part
    assert len(node.destination(b, result_of(result))) == result


def test_a_codec_whose_results_are_others_has_no_partial_sums():
    net = Net(3)
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)],
        net.peers,
        200,
        100,
        "stat2",
        topology=Topology("ring", ()),
    )
    with pytest.raises(ConfigError, match="stat2 works in a butterfly only"):
        start(net, plan, {cid_of(i): vector(200, i) for i in range(3)})
    assert not Shape(200, 100, "stat2", topology="ring").fits(plan)
    assert Shape(200, 100, "int4", topology="ring").fits(
        msgspec.structs.replace(plan, codec="int4")
    )


def test_huge_but_finite_values_are_blamed_on_the_largest():
    net = Net(2)
    a, b = net.peers
    vectors = {cid_of(0): torch.full((64,), 1e38), cid_of(1): torch.full((64,), 3.3e38)}
    plan = make_plan([(a, cid_of(0), 1), (b, cid_of(1), 1)], [a], 64, 64, "fp32")
    start(net, plan, vectors)
    net.run()
    assert [e.peer for e in net.of(a, PeerFault)] == [b]


def test_hostile_headers_are_refused_before_any_buffer():
    net = Net(2)
    a, b = net.peers
    node = net.nodes[a]
    node.open_round(LOG, 1, net.peers, 1_000, 100, "int8")
    slot = wire_header.slot_id(LOG, 1)
    good = wire_header.pack(wire_header.PART, 104, 3, slot, cid_of(1))
    assert node.destination(b, good) is not None
    for header in (
        wire_header.pack(wire_header.PART, 105, 3, slot, cid_of(1)),  # wrong length
        wire_header.pack(wire_header.PART, 104, 10, slot, cid_of(1)),  # chunk beyond the chunking
        wire_header.pack(wire_header.PART, 104, 1 << 63, slot, cid_of(1)),
        wire_header.pack(wire_header.PART, (17 << 20) + 1, 3, slot, cid_of(1)),
        wire_header.pack(9, 104, 3, slot, cid_of(1)),
        wire_header.pack(0, 104, 3, slot, cid_of(1)),
        wire_header.pack(wire_header.BEAT, 1, 0, bytes(16), bytes(16)),
        wire_header.BEAT_HEADER,
        wire_header.pack(
            wire_header.RESULT, 4, 3, bytes(16), slot
        ),  # early result of a wrong length
        b"\2" + good[1:],
        good[:2] + b"\1" + good[3:],
        good[:-1],
        b"",
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            node.destination(b, header)
        assert caught.value.peer == b
    stranger = PeerId("stranger")
    assert node.destination(stranger, good) is None
    assert (
        node.destination(
            b, wire_header.pack(wire_header.PART, 104, 3, wire_header.slot_id(LOG, 2), cid_of(1))
        )
        is None
    )
    plan = make_plan([(a, cid_of(0), 1), (b, cid_of(1), 1)], [a], 1_000, 100, "int8")
    node.execute(plan, net.peers)
    with pytest.raises(RemoteProtocolError):  # b owns nothing
        node.destination(b, wire_header.pack(wire_header.RESULT, 104, 0, plan.plan_id, slot))


def test_a_peer_cannot_fill_memory_or_speak_for_another():
    net = Net(3)
    a, b, c = net.peers
    node = net.nodes[a]
    node.open_round(LOG, 1, net.peers, 1_000, 100, "int8")
    slot = wire_header.slot_id(LOG, 1)

    def send(peer: PeerId, cid: bytes, chunk: int) -> bool:
        header = wire_header.pack(wire_header.PART, 104, chunk, slot, cid)
        view = node.destination(peer, header)
        if view is None:
            return False
        view[:] = bytes(104)
        node.received(peer, header)
        return True

    for life in range(5):
        for chunk in range(10):
            assert send(b, cid_of(1, life), chunk)  # a newer cid pushes the older out
            assert not send(b, cid_of(1, life), chunk)
    stored = node._slots[slot]._parts[b]
    assert sum(map(len, stored.values())) == 10
    plan = make_plan([(b, cid_of(1, 4), 1), (c, cid_of(2), 1)], [a], 1_000, 100, "int8")
    node.execute(plan, net.peers)
    assert not send(b, cid_of(1, 9), 0)  # what the plan uses is not pushed out
    for chunk in range(10):
        assert (
            send(b, cid_of(2), chunk) is False or chunk < 10
        )  # under c's cid: never counted as c's
    node.report(plan.plan_id)
    (report,) = [e for e in net.events[a] if isinstance(e, ReductionReport)]
    assert report.missing == {cid_of(2): ((0, 10),)}


def test_closing_frees_and_lingers_for_the_slow():
    net = Net(3)
    a, b, c = net.peers
    numel, chunk = 2_000, 100
    vectors = {cid_of(i): vector(numel, i) for i in range(3)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, numel, chunk, "int8"
    )
    start(net, plan, vectors)
    fast = {
        (a, b),
        (b, a),
        (a, c),
        (b, c),
        (c, a),
    }  # c hears a and b; b does not get c's results yet
    for _ in range(200):
        for pair in fast:
            net.pull(*pair)
            for header, payload in net.flying.pop(pair, []):
                net.deliver(*pair, header, payload)
        for header, payload in net.flying.pop((c, b), []):
            net.deliver(c, b, header, payload)
        record = net.nodes[c].next_record(b) if not net.results(c, plan) else None
        if record is not None:
            net.deliver(c, b, record.header, bytes(record.payload))
    assert net.results(c, plan)
    net.nodes[c].close_round(LOG, 1)
    while (record := net.nodes[c].next_record(b)) is not None:
        net.deliver(c, b, record.header, bytes(record.payload))
    check(net, plan, vectors, [a, b, c])
    assert not net.nodes[c]._plans
    assert not net.nodes[c]._slots
    assert not net.nodes[c]._lingering
    for peer in (a, b):
        net.nodes[peer].close_round(LOG, 1, linger=False)
        net.nodes[peer].close_round(LOG, 1)
        assert not net.nodes[peer]._plans
        assert not net.nodes[peer]._slots
    for i, peer in enumerate(net.peers):
        net.nodes[peer].release(cid_of(i))
        assert not net.nodes[peer]._frozen


def test_misuse_is_a_local_protocol_error():
    net = Net(2)
    a, b = net.peers
    node = net.nodes[a]
    plan = make_plan([(a, cid_of(0), 1), (b, cid_of(1), 1)], net.peers, 1_000, 100, "int8")
    with pytest.raises(LocalProtocolError):
        node.execute(plan, net.peers)  # not open
    with pytest.raises(ConfigError):
        node.open_round(LOG, 1, net.peers, 1_000, 100, "int7")
    node.open_round(LOG, 1, net.peers, 1_000, 100, "int8")
    with pytest.raises(LocalProtocolError):
        node.open_round(LOG, 1, net.peers, 1_001, 100, "int8")
    with pytest.raises(LocalProtocolError):
        node.freeze(LOG, 1, cid_of(0), torch.zeros(999))
    with pytest.raises(LocalProtocolError):
        node.freeze(LOG, 1, cid_of(0), torch.zeros(1_000, dtype=torch.float64))
    gap = make_plan(
        [(a, cid_of(0), 1)], [a], 1_000, 100, "int8", parts=(Part(a, 0, 4), Part(b, 5, 10))
    )
    with pytest.raises(LocalProtocolError):
        node.execute(gap, net.peers)
    with pytest.raises(ConfigError):
        node.execute(
            make_plan([(a, cid_of(0), 1)], [a], 1_000, 100, "int8", reducer="median"), net.peers
        )


def test_blobs():
    net = Net(3)
    a, b, c = net.peers
    data = bytes(range(256)) * 41
    chunks = [data[i : i + 1000] for i in range(0, len(data), 1000)]
    hashes = [chunk_hash(x) for x in chunks]
    net.nodes[a].provide(b"state", memoryview(data), 1000)
    bad = bytearray(data)
    bad[2500] ^= 1
    net.nodes[b].provide(b"state", memoryview(bad), 1000)
    out = bytearray(len(data))
    net.nodes[c].want(b"state", memoryview(out), 1000, hashes, [a, b])
    net.nodes[b].send_blob(c, b"state", [(0, 6)])
    net.run()
    assert net.of(c, BadChunk) == [BadChunk(b, b"state", 2)]  # and b is not listened to any more
    assert net.of(c, BlobProgress) == [
        BlobProgress(b"state", 1, 11, ((1, 11),), b),
        BlobProgress(b"state", 2, 11, ((2, 11),), b),
    ]
    net.nodes[c].report_blob(b"state")
    net.nodes[c].report_blob(b"something else")
    assert net.events[c][-1] == BlobProgress(b"state", 2, 11, ((2, 11),))
    net.nodes[a].send_blob(c, b"state", [(5, 6)])
    net.run()
    assert net.events[c][-1] == BlobProgress(b"state", 3, 11, ((2, 5), (6, 11)), a)
    net.nodes[a].send_blob(c, b"state", [(2, 100)])
    net.nodes[a].send_blob(b, b"nothing", [(2, 100)])
    net.run()
    assert net.of(c, BlobComplete) == [BlobComplete(b"state", tuple(hashes))]
    assert out == data
    # unverified: the hashes are told
    fresh = bytearray(len(data))
    net.nodes[c].want(b"state", memoryview(fresh), 1000, (), [a])
    net.nodes[a].send_blob(c, b"state", [(0, 11)])
    net.nodes[a].withdraw(b"state")
    net.run()
    assert fresh == bytes(len(data))  # withdrawn before it was pulled
    net.nodes[c].unwant(b"state")
    empty = bytearray()
    net.nodes[c].want(b"empty", memoryview(empty), 1000, (), [a])
    assert net.events[c][-1] == BlobComplete(b"empty", ())


@pytest.mark.parametrize("seed", range(6))
def test_of_a_result_that_is_fetched_what_has_come_already_is_not_asked_for(seed: int):
    """An owner died; it costs its part."""
    net = Net(3, seed=seed)
    a, b, c = net.peers
    vectors = {cid_of(i): vector(4_000, i) for i in range(3)}
    plan = make_plan(
        [(peer, cid_of(i), 1) for i, peer in enumerate(net.peers)], [a, b, c], 4_000, 100, "int8"
    )
    start(net, plan, vectors)
    net.flying[b, c] = []
    while not net.results(a, plan):
        net.run(1)
        net.flying[b, c] = [
            record
            for record in net.flying[b, c]
            if record[0][1] != wire_header.RESULT or net.rng.random() < 0.5
        ]
    net.kill(b)
    net.run()
    assert not net.results(c, plan)
    net.nodes[c].report(plan.plan_id)
    lacking = net.of(c, ReductionReport)[-1].lacking
    assert list(lacking) == [b]
    data, results = net.results(a, plan)[0].data, chunking_of(plan).results
    views = results.views(data)
    net.nodes[a].provide(b"result", data, results.bounds)
    out = bytearray(len(data))
    net.nodes[c].want(
        b"result", memoryview(out), results.bounds, [chunk_hash(view) for view in views], [a]
    )
    net.nodes[c].report_blob(b"result")
    have = len(views) - sum(stop - first for first, stop in lacking[b])
    assert net.events[c][-1] == BlobProgress(b"result", have, len(views), lacking[b])
    net.nodes[a].send_blob(c, b"result", lacking[b])
    net.run()
    assert out == data
    again = bytearray(len(data))
    net.nodes[a].want(
        b"result", memoryview(again), results.bounds, [chunk_hash(view) for view in views], [c]
    )
    assert again == data
    assert [type(event) for event in net.events[a][-2:]] == [BlobProgress, BlobComplete]
    assert net.of(a, BlobProgress)[-1].missing == ()


def forty_chunks_of_two() -> tuple[Net, Plan, memoryview, list[bytes]]:
    """A round that is over, its result at the first of both, and the hashes of its chunks of 400
    bytes.
    """
    net = Net(2, eager=False)
    plan = make_plan(
        [(peer, cid_of(i), 1) for i, peer in enumerate(net.peers)], net.peers, 4_000, 100, "fp32"
    )
    start(net, plan, {cid_of(i): vector(4_000, i) for i in range(2)})
    net.run()
    data = net.results(net.peers[0], plan)[0].data
    return net, plan, data, [chunk_hash(view) for view in chunking_of(plan).results.views(data)]


def test_what_is_known_of_a_blob_is_copied_a_little_at_a_time_while_its_plan_is_in_force():
    """Gigabytes at once would keep all lanes, and their heartbeats, waiting; and the plan's memory
    is another's once it is gone.
    """
    net, plan, data, hashes = forty_chunks_of_two()
    a, b = net.peers
    kept, out, node = bytes(data), bytearray(len(data)), net.nodes[a]
    net.nodes[b].provide(b"result", memoryview(kept), 400)
    node.want(b"result", memoryview(out), 400, hashes, [b])
    node.report_blob(b"result")
    assert (net.of(a, BlobProgress), any(out)) == ([], False)
    assert node.work()
    assert out == kept[: 16 * 400] + bytes(24 * 400)
    net.nodes[b].send_blob(a, b"result", [(20, 21)])
    early = net.nodes[b].next_record(a)
    assert early is not None
    assert node.destination(b, early.header) is None
    state = weakref.ref(node._plans[plan.plan_id])
    net.events[a].clear()
    node.close_round(plan.log, plan.round, linger=False)
    assert state() is None
    data[:] = bytes(len(data))
    assert not node.work()
    assert net.of(a, BlobProgress) == [BlobProgress(b"result", 16, 40, ((16, 40),))]
    net.nodes[b].send_blob(a, b"result", [(16, 40)])
    net.run()
    assert out == kept
    assert net.of(a, BlobComplete) == [BlobComplete(b"result", tuple(hashes))]


def test_a_blob_that_is_not_wanted_any_more_is_not_filled_on():
    net, _, data, hashes = forty_chunks_of_two()
    a, b = net.peers
    first, second, node = bytearray(len(data)), bytearray(len(data)), net.nodes[a]
    node.want(b"result", memoryview(first), 400, hashes, [b])
    assert node.work()
    node.unwant(b"result")
    node.want(b"result", memoryview(second), 400, hashes, [b])
    while node.work():
        pass
    assert (first, second) == (data[: 16 * 400].tobytes() + bytes(24 * 400), data)
    assert net.of(a, BlobComplete) == [BlobComplete(b"result", tuple(hashes))]


def test_a_blob_that_is_complete_is_not_written_to_where_it_is_wanted_again_before_that_is_known():
    """One more source was told of it, while the last event waited to be heard."""
    net = Net(3, eager=False)
    a, b, c = net.peers
    good, out, node = bytes(range(100)), bytearray(100), net.nodes[a]
    node.want(b"x", memoryview(out), 100, [chunk_hash(good)], [b])
    head = wire_header.pack(
        wire_header.BLOB, 100, 0, wire_header.blob_key(b"x"), wire_header.NO_KEY
    )
    net.deliver(b, a, head, good)
    assert net.of(a, BlobComplete) == [BlobComplete(b"x", (chunk_hash(good),))]
    node.want(b"x", memoryview(out), 100, [chunk_hash(good)], [b, c])
    assert node.destination(c, head) is None
    node.unwant(b"x")
    assert (out, len(net.of(a, BlobComplete))) == (good, 1)
    other = bytearray(100)
    node.want(b"x", memoryview(other), 100, [chunk_hash(good)], [c])
    node.want(b"x", memoryview(out), 100, [chunk_hash(good)], [c])
    net.deliver(c, a, head, good)
    assert (any(other), len(net.of(a, BlobComplete))) == (False, 2)


def test_of_many_gaps_some_are_told():
    """Whoever sends every second chunk, unasked, makes as many; who fetches looks at all it is told
    each time that one comes.
    """
    net = Net(2)
    a, b = net.peers
    out, key = bytearray(2000), wire_header.blob_key(b"x")
    net.nodes[a].want(b"x", memoryview(out), 1, [chunk_hash(b"g")] * 2000, [b])
    for chunk in range(0, 2000, 2):
        net.deliver(
            b, a, wire_header.pack(wire_header.BLOB, 1, chunk, key, wire_header.NO_KEY), b"g"
        )
    assert net.events[a][-1] == BlobProgress(
        b"x", 1000, 2000, tuple((chunk, chunk + 1) for chunk in range(1, 513, 2)), b
    )


def test_rounds_go_before_blobs_and_results_between_parts():
    net = Net(2)
    a, b = net.peers
    vectors = {cid_of(i): vector(400, i) for i in range(2)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 400, 10, "fp32"
    )
    net.nodes[a].provide(b"x", memoryview(bytes(100)), 10)
    net.nodes[a].send_blob(b, b"x", [(0, 10)])
    start(net, plan, vectors)
    while (
        record := net.nodes[b].next_record(a)
    ) is not None:  # all of b's parts: a can reduce everything
        net.deliver(b, a, record.header, bytes(record.payload))
    kinds = []
    while (record := net.nodes[a].next_record(b)) is not None:
        kinds.append(wire_header.parse(record.header, a).kind)
    assert kinds == [wire_header.PART, wire_header.RESULT] * 20 + [wire_header.BLOB] * 10


def test_events_may_give_commands():
    net = Net(2)
    vectors = {cid_of(i): vector(500, i) for i in range(2)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 500, 50, "int8"
    )
    got: dict[PeerId, bytes] = {}

    def hook(peer):
        def emit(event):
            net.events[peer].append(event)
            if isinstance(event, ResultComplete):
                got[peer] = bytes(event.data)
                net.nodes[peer].close_round(LOG, 1)
                net.nodes[peer].open_round(LOG, 2, net.peers, 500, 50, "int8")

        return emit

    for peer in net.peers:
        net.nodes[peer]._emit = hook(peer)
    start(net, plan, vectors)
    net.run()
    want = ref_result(plan, vectors)
    assert got == dict.fromkeys(net.peers, want)


def two_with_a_clock(lazily: bool = False):
    """Two exchanges that send again after 1 s, at their clock's time; all records of ``a`` towards
    ``b`` have been handed out.
    """
    net, clock = Net(2), [100.0]
    a, b = net.peers
    node = net.nodes[a] = Exchange(
        a, emit=net.events[a].append, clock=lambda: clock[0], resend_after_s=lambda: 1.0
    )
    if lazily:
        node.lanes_up({a, b})
    else:
        node.lane_up(b)
    vectors = {cid_of(i): vector(600, i) for i in range(2)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 600, 100, "fp32"
    )
    node.open_round(LOG, 1, net.peers, 600, 100, "fp32")
    node.freeze(LOG, 1, cid_of(0), vectors[cid_of(0)])
    node.execute(plan, net.peers)
    assert sum(1 for _ in iter(lambda: node.next_record(b), None)) == 3
    return node, b, plan, clock


def asked_again(node, b, plan):
    """How many records follow from a request for all of b's part."""
    node.resend_parts(b, plan.plan_id, cid_of(0), ((0, 6),))
    return sum(1 for _ in iter(lambda: node.next_record(b), None))


def test_what_is_under_way_is_not_sent_again():
    node, b, plan, clock = two_with_a_clock()
    assert asked_again(node, b, plan) == 0
    clock[0] += 0.9
    assert asked_again(node, b, plan) == 0
    clock[0] += 0.1
    assert asked_again(node, b, plan) == 3
    assert asked_again(node, b, plan) == 0


def test_a_record_is_under_way_until_the_lane_asks_for_more():
    node, b, plan, clock = two_with_a_clock()
    clock[0] += 1.0
    node.resend_parts(b, plan.plan_id, cid_of(0), ((3, 4),))
    assert node.next_record(b) is not None
    clock[0] += 50.0  # a slow lane: still the same record
    node.resend_parts(b, plan.plan_id, cid_of(0), ((3, 4),))
    assert node.next_record(b) is None


@pytest.mark.parametrize("lazily", [False, True])
def test_what_a_lost_lane_had_is_sent_again_at_once(lazily):
    node, b, plan, _ = two_with_a_clock(lazily)
    node.lane_down(b)
    node.lane_up(b)
    assert asked_again(node, b, plan) == 3


def test_of_several_lanes_a_lost_one_costs_what_was_on_it():
    net, clock = Net(2), [100.0]
    a, b = net.peers
    node = net.nodes[a] = Exchange(
        a, emit=net.events[a].append, clock=lambda: clock[0], resend_after_s=lambda: 1.0
    )
    other = net.nodes[b]
    node.lane_up(b, 1)
    node.lane_up(b, 2)
    other.lane_down(a)
    other.lane_up(a, 1)
    other.lane_up(a, 2)
    vectors = {cid_of(i): vector(1000, i) for i in range(2)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 1000, 100, "fp32"
    )
    start(net, plan, vectors)
    other.report(plan.plan_id)
    turns = [1, 2, 2, 1, 2]  # each record goes over the lane that has room
    sent = {lane: [] for lane in turns}
    for lane in turns:
        record = node.next_record(b, lane)
        sent[lane].append((record.header, bytes(record.payload)))
    assert node.next_record(b, 1) is None
    for header, payload in sent[1]:
        other.destination(a, header)[:] = payload
        other.received(a, header)
    for one, peer in ((node, b), (other, a)):
        one.lane_down(peer, 2)  # with its three records
    other.report(plan.plan_id)
    report = net.of(b, ReductionReport)[-1]
    assert report.resumed == {a}
    missing = report.missing[cid_of(0)]
    assert sum(stop - first for first, stop in missing) == 3
    node.resend_parts(
        b, plan.plan_id, cid_of(0), ((0, 10),)
    )  # whoever asks for more does not get what the other lane has
    again = [record.header for record in iter(lambda: node.next_record(b, 1), None)]
    assert again == [header for header, _ in sorted(sent[2])]


def test_a_report_names_lanes_that_came_up_once():
    net = Net(2)
    vectors = {cid_of(i): vector(600, i) for i in range(2)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 600, 100, "fp32"
    )
    start(net, plan, vectors)
    a, b = net.peers
    net.cut(a, b)
    net.nodes[a].report(plan.plan_id)
    net.nodes[a].report(plan.plan_id)
    assert [report.resumed for report in net.of(a, ReductionReport)] == [{b}, set()]


def test_an_owner_gets_parts_a_little_ahead_of_its_results():
    net = Net(3, lead=Lead(1, 0))
    a, b, c = net.peers
    vectors = {cid_of(i): vector(1500, i) for i in range(3)}
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 1500, 100, "fp32"
    )
    start(net, plan, vectors)

    def sent(one, other):
        """(part or result, chunk) of what ``one`` sends the other now."""
        found = []
        for record in iter(lambda: net.nodes[one].next_record(other), None):
            net.deliver(one, other, record.header, bytes(record.payload))
            head = wire_header.parse(record.header, one)
            found.append((head.kind == wire_header.PART, head.chunk))
        return found

    assert sent(a, b) == [
        (True, 5),
        (True, 6),
        (True, 7),
    ]  # of b's part, and no more before c gave its own to these
    assert sent(a, b) == []
    assert sent(c, b) == [(True, 5), (True, 6), (True, 7)]
    assert sent(b, a) == [(True, 0), (False, 5), (True, 1), (False, 6), (True, 2), (False, 7)]
    assert sent(a, b) == [(True, 8), (True, 9)]
    net.run()
    check(net, plan, vectors)


def test_beside_each_other_nobody_gives_far_more_than_it_gets_while_the_other_gives_at_all():
    now = [0.0]
    net = Net(2, lead=Lead(near=True), clock=lambda: now[0])
    a, b = net.peers
    vectors = {cid_of(i): vector(2000, i) for i in range(2)}
    start(
        net,
        make_plan(
            [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 2000, 100, "fp32"
        ),
        vectors,
    )

    def parts(one, other, most):
        """Chunks of contributions that ``one`` sends now."""
        found = []
        while len(found) < most and (record := net.nodes[one].next_record(other)) is not None:
            net.deliver(one, other, record.header, bytes(record.payload))
            head = wire_header.parse(record.header, one)
            found += [head.chunk] if head.kind == wire_header.PART else []
        return found

    assert parts(a, b, 10) == [10, 11, 12]
    assert parts(b, a, 1) == [0]
    assert parts(a, b, 10) == [13]
    assert parts(b, a, 10) == [1, 2, 3, 4, 5, 6]  # four were given to it
    now[0] += 0.02  # b falls silent, perhaps since it waits for a
    net.nodes[a].report(next(iter(net.nodes[a]._plans)))
    assert parts(a, b, 10) == [14, 15, 16, 17, 18, 19]
    net.run()
    check(
        net,
        make_plan(
            [(p, cid_of(i), 1) for i, p in enumerate(net.peers)], net.peers, 2000, 100, "fp32"
        ),
        vectors,
    )


@pytest.mark.parametrize("seed", range(6))
def test_beside_each_other_too_records_get_lost_and_the_bits_stay(seed):
    ticks = count()
    net = Net(
        2,
        seed=seed,
        loss=0.2,
        eager=seed % 2 == 0,
        lead=Lead(near=True),
        clock=lambda: next(ticks) / 1000,
    )
    vectors = {cid_of(i): vector(4000, i) for i in range(2)}
    contributors = [(p, cid_of(i), i + 1) for i, p in enumerate(net.peers)]
    start(net, make_plan(contributors, net.peers, 4000, 100, "int8"), vectors)
    net.run(limit=20)
    net.cut(*net.peers)
    plan = make_plan(contributors, net.peers, 4000, 100, "int8", revision=1)
    start(net, plan, vectors, open_all=False)
    for _ in range(40):
        net.run()
        net.repair(plan)
    check(net, plan, vectors)


@pytest.mark.parametrize("seed", range(6))
def test_short_of_room_records_get_lost_and_plans_change_and_the_bits_stay(seed):
    net = Net(4, seed=seed, loss=0.2, eager=seed % 2 == 0, lead=Lead(1, 0))
    vectors = {cid_of(i): vector(4000, i) for i in range(4)}
    contributors = [(p, cid_of(i), i + 1) for i, p in enumerate(net.peers)]
    first = make_plan(contributors, net.peers, 4000, 100, "int8")
    start(net, first, vectors)
    net.run(limit=40)
    net.cut(net.peers[0], net.peers[1])
    net.run(limit=20)
    gone = net.peers[3]
    net.kill(gone)
    plan = make_plan(contributors[:3], net.peers[:3], 4000, 100, "int8", revision=1)
    start(net, plan, vectors, open_all=False)
    for _ in range(40):
        net.run()
        net.repair(plan)
    check(net, plan, vectors, net.peers[:3])

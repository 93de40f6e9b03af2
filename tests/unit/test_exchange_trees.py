"""Rings, two levels and three between exchanges in one process: bits against a numpy reference, revisions,
refusals, bytes between sites.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from exchange_kit import (
    LOG,
    Net,
    cid_of,
    decoded,
    expected_bytes,
    make_plan,
    peers_of,
    ref_digests,
    ref_result,
    ref_tree,
    ref_tree_result,
    vector,
    ways,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs.codec import CODECS
from atoll.collectives.codecs.ranges import has_partial_sums
from atoll.collectives.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from atoll.collectives.exchange import NonFinite, PartReduced, ReductionReport
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.group import Plan, Topology
from atoll.collectives.reduce import MEAN
from atoll.collectives.reducers import REDUCERS
from atoll.collectives.trees import trees_of

KINDS = ("butterfly", "ring", "two-level", "checked", "three-level")
FOURS = (0, 0, 0, 0, 1, 1, 1, 1)
PAIRS = (0, 0, 1, 1, 0, 0, 1, 1)  # hosts of two at each site


def start(net: Net, plan: Plan, vectors) -> None:
    for peer in net.peers:
        if peer not in net.down:
            node = net.nodes[peer]
            node.open_round(
                plan.log, plan.round, net.peers, plan.numel, plan.chunk_elements, plan.codec
            )
            for c in plan.contributors:
                if c.member.peer == peer:
                    node.freeze(plan.log, plan.round, c.cid, vectors[c.cid])
            node.execute(plan, net.peers)


def check(net: Net, plan: Plan, vectors) -> bytes:
    want = ref_tree_result(plan, vectors)
    assert len(want) == expected_bytes(plan)
    for peer in net.peers:
        if peer not in net.down:
            (done,) = net.results(peer, plan)
            assert bytes(done.data) == want, peer
            assert done.digests == ref_digests(plan, want)
    return want


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, Plan]:
    """A plan of any kind, and among how many peers it is carried out."""
    n = draw(st.integers(2, 7))
    peers = draw(st.permutations(peers_of(n)))
    numel, chunk = draw(st.integers(1, 900)), draw(st.integers(1, 300))
    givers = peers[: draw(st.integers(1, n))]
    weights = draw(
        st.lists(
            st.integers(1, draw(st.sampled_from([1, 9, 1 << 30]))),
            min_size=len(givers),
            max_size=len(givers),
        )
    )
    codec = draw(
        st.sampled_from([*CODECS, "bf16:300+int8", "sparse64:300+bf16"])
        if numel > 300
        else st.sampled_from(CODECS)
    )
    groups = draw(
        st.sampled_from(
            [
                (),
                tuple(
                    draw(st.lists(st.integers(0, 2), min_size=len(givers), max_size=len(givers)))
                ),
            ]
        )
    )
    owners = draw(st.permutations(peers))[: draw(st.integers(1, n))]
    plan = make_plan(
        [
            (peer, cid_of(peers_of(n).index(peer)), weight)
            for peer, weight in zip(givers, weights, strict=True)
        ],
        owners,
        numel,
        chunk,
        codec,
        topology=ways(
            draw(st.sampled_from(KINDS if has_partial_sums(codec) else KINDS[:1])),
            groups,
            draw(st.lists(st.integers(0, 2), min_size=len(groups), max_size=len(groups))),
        ),
    )
    return n, plan


@given(plans(), st.integers(0, 1 << 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_tree_gives_the_bits_of_its_reference(drawn, seed, eager):
    n, plan = drawn
    net = Net(n, seed=seed, eager=eager)
    vectors = {c.cid: vector(plan.numel, c.cid[0]) for c in plan.contributors}
    start(net, plan, vectors)
    for _ in range(2 * n):  # a step of `run` that only reduces ends it
        net.run()
    check(net, plan, vectors)


@given(plans())
@settings(max_examples=80, deadline=None)
def test_every_contribution_is_summed_once_and_reaches_the_owner(drawn):
    _, plan = drawn
    for number, tree in enumerate(trees_of(plan, MEAN)):
        found = []

        def gather(peer, tree=tree, found=found):
            found.extend(
                term.cid
                if term.peer == peer or tree.sum(term.peer) is None
                else gather(term.peer) or b""
                for term in tree.sum(peer).terms
            )

        gather(tree.owner)
        assert sorted(cid for cid in found if cid) == sorted(c.cid for c in plan.contributors)
        assert {
            one: [term.peer for term in tree.sum(one).terms] for one in ref_tree(plan, number)
        } == ref_tree(plan, number)


@pytest.mark.parametrize("kind", ["ring", "two-level", "three-level"])
def test_a_butterfly_and_a_tree_agree_on_integers_but_not_in_their_digests(kind):
    """Sums of small integers are exact in any order; what the bytes mean is not the same."""
    net = Net(4, seed=1)
    vectors = {cid_of(i): vector(500, i).mul(100).round() for i in range(4)}
    contributors = [(net.peers[i], cid_of(i), 3 * i + 1) for i in range(4)]
    star = make_plan(contributors, net.peers, 500, 64, "fp32")
    plan = make_plan(
        contributors, net.peers, 500, 64, "fp32", topology=ways(kind, (0, 1, 0, 1), (0, 1, 1, 0))
    )
    start(net, plan, vectors)
    net.run()
    assert check(net, plan, vectors) == ref_result(star, vectors)
    assert not set(ref_digests(plan, ref_result(star, vectors))) & set(
        ref_digests(star, ref_result(star, vectors))
    )
    other = make_plan(
        contributors, net.peers, 500, 64, "fp32", topology=ways(kind, (0, 0, 1, 1), (0, 1, 1, 1))
    )
    assert not set(ref_digests(plan, ref_result(star, vectors))) & set(
        ref_digests(other, ref_result(star, vectors))
    )
    assert [e.part for peer in net.peers for e in net.of(peer, PartReduced)] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["ring", "two-level", "three-level"])
def test_a_sum_over_a_tree(kind):
    net = Net(5, seed=2)
    vectors = {cid_of(i): vector(300, i).mul(50).round() for i in range(5)}
    plan = make_plan(
        [(p, cid_of(i), 7) for i, p in enumerate(net.peers)],
        net.peers,
        300,
        32,
        "fp32",
        reducer="sum",
        topology=ways(kind, (0, 0, 0, 1, 1), (0, 1, 1, 0, 0)),
    )
    start(net, plan, vectors)
    net.run()
    want = sum(vectors.values()).numpy().tobytes()
    assert [bytes(net.results(peer, plan)[0].data) for peer in net.peers] == [want] * 5


def crossing(kind: str, seed: int = 0) -> tuple[int, int]:
    """(payload bytes between two sites of four, encoded bytes of the vector) in one reduction."""
    net = Net(8, seed=seed)
    vectors = {cid_of(i): vector(8_000, i) for i in range(8)}
    contributors = [(p, cid_of(i), 1) for i, p in enumerate(net.peers)]
    plan = make_plan(contributors, net.peers, 8_000, 100, "int8", topology=ways(kind, FOURS, PAIRS))
    site, crossed = dict(zip(net.peers, FOURS, strict=True)), []
    deliver = net.deliver

    def spy(a, b, header, payload):
        if site[a] != site[b]:
            crossed.append(len(payload))
        deliver(a, b, header, payload)

    net.deliver = spy
    start(net, plan, vectors)
    net.run()
    check(net, plan, vectors)
    return sum(crossed), expected_bytes(plan)


def test_a_site_sends_its_sum_once():
    """In halves of a vector: in the butterfly 4 members send one each and get as much, in both
    directions; with two levels, or three, a site sends one sum and gets one result. A ring crosses twice for
    most owners: its own site is both where it begins and where it ends."""
    size = crossing("two-level")[1]
    crossed = {kind: crossing(kind)[0] for kind in KINDS}
    accounts = 80 * 2 * (1 + 4) * 32  # of each chunk two, of the sum and what is in it: a hash each
    assert crossed == {
        "butterfly": 8 * size,
        "two-level": 2 * size,
        "three-level": 2 * size,
        "checked": 2 * size + accounts,
        "ring": 3.5 * size,
    }


@pytest.mark.parametrize(("kind", "seed"), list(product(KINDS[1:], range(15))))
def test_death_at_any_moment_and_two_revisions(kind, seed):
    """Whoever dies, owner, head or middle of a chain: the rest reduces under a new tree, with lost
    records and broken lanes.
    """
    net = Net(6, seed=seed, loss=0.1, eager=bool(seed % 2))
    numel, chunk = 1_500, 50
    vectors = {cid_of(i): vector(numel, i) for i in range(6)}
    groups = {peer: net.rng.randrange(3) for peer in net.peers}
    hosts = {peer: net.rng.randrange(2) for peer in net.peers}
    dead = net.peers[net.rng.randrange(6)]
    contributors = [(p, cid_of(i), 2) for i, p in enumerate(net.peers)]
    plan = make_plan(
        contributors,
        net.peers,
        numel,
        chunk,
        "int8",
        topology=ways(kind, [groups[p] for p in net.peers], [hosts[p] for p in net.peers]),
    )
    start(net, plan, vectors)
    net.run(limit=net.rng.randrange(400))
    net.kill(dead)
    live = [p for p in net.peers if p != dead]
    for revision in (1, 2):
        keep = live[revision - 1 :]
        contributors = [
            (p, cid_of(net.peers.index(p)), 2 + net.peers.index(p) * (revision - 1)) for p in keep
        ]
        topology = ways(kind, [groups[p] for p in keep], [hosts[p] for p in keep])
        plan = make_plan(
            contributors, keep, numel, chunk, "int8", revision=revision, topology=topology
        )
        for peer in live:
            net.nodes[peer].execute(plan, net.peers)
            if net.rng.random() < 0.5:
                net.run(limit=net.rng.randrange(100))
        net.cut(*net.rng.sample(live, 2))
    net.loss = 0.0
    for _ in range(12):
        net.run()
        net.repair(plan)
    net.run()
    check(net, plan, vectors)


def test_what_does_not_change_is_not_sent_again():
    """A member of site 1 dies: site 0's sums stay what they are, and those whose owner and head
    stay have been sent.
    """
    net = Net(6, seed=4)
    numel, chunk = 600, 100
    vectors = {cid_of(i): vector(numel, i) for i in range(6)}
    everybody = [(p, cid_of(i), 1) for i, p in enumerate(net.peers)]
    topology = Topology("two-level", (0, 0, 0, 1, 1, 1))
    first = make_plan(everybody, net.peers, numel, chunk, "int8", topology=topology)
    for i, peer in enumerate(net.peers):
        net.nodes[peer].open_round(LOG, 1, net.peers, numel, chunk, "int8")
        if i != 5:
            net.nodes[peer].freeze(LOG, 1, cid_of(i), vectors[cid_of(i)])
            net.nodes[peer].execute(first, net.peers)
    net.kill(net.peers[5])
    net.run()
    sent: list[tuple[int, int]] = []
    deliver = net.deliver

    def spy(a, b, header, payload):
        record = wire_header.parse(header, a)
        if record.kind == wire_header.PARTIAL:
            sent.append((net.peers.index(a), record.chunk))
        deliver(a, b, header, payload)

    net.deliver = spy
    owners = [
        *net.peers[:5],
        net.peers[4],
    ]  # the heads of site 0 are the same: one in turn for each part of site 1
    second = make_plan(
        everybody[:5],
        net.peers,
        numel,
        chunk,
        "int8",
        revision=1,
        topology=Topology("two-level", (0, 0, 0, 1, 1)),
        parts=tuple(part for part in make_plan(everybody, owners, numel, chunk, "int8").parts),
    )
    for peer in net.peers[:5]:
        net.nodes[peer].execute(second, net.peers)
    net.run()
    check(net, second, vectors)
    assert sorted(sent) == [
        (2, 5),
        (3, 0),
        (3, 2),
        (4, 1),
    ]  # to the new owner, and site 1's new sums


def test_a_partial_sum_over_another_set_is_refused():
    net = Net(4)
    a, b, c, _d = net.peers
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)],
        [a, b, c],
        300,
        100,
        "fp32",
        topology=Topology("two-level", (0, 0, 1, 1)),
    )
    node = net.nodes[a]
    node.open_round(LOG, 1, net.peers, 300, 100, "fp32")
    slot = wire_header.slot_id(LOG, 1)
    wrong = wire_header.pack(
        wire_header.PARTIAL, 400, 0, wire_header.partial_key(slot, plan.plan_id), bytes(16)
    )
    assert (
        node.destination(c, wrong) is not None
    )  # the plan is not known yet: kept, and of no use later
    node.execute(plan, net.peers)
    for peer in (b, c):  # not the head, and the head with another sum
        with pytest.raises(RemoteProtocolError, match="another set") as caught:
            node.destination(peer, wrong)
        assert caught.value.peer == peer
    right = trees_of(plan, MEAN)[0].sent(c)
    assert right is not None
    assert (
        node.destination(
            c,
            wire_header.pack(
                wire_header.PARTIAL, 400, 0, wire_header.partial_key(slot, plan.plan_id), right.cid
            ),
        )
        is not None
    )
    other = wire_header.partial_key(slot, bytes(16))
    assert (
        node.destination(c, wire_header.pack(wire_header.PARTIAL, 400, 0, other, bytes(16)))
        is not None
    )  # another plan's: nobody's fault
    for header in (
        wire_header.pack(wire_header.PARTIAL, 400, 3, other, bytes(16)),
        wire_header.pack(wire_header.PARTIAL, 404, 0, other, bytes(16)),
    ):
        with pytest.raises(RemoteProtocolError, match="chunk") as caught:
            node.destination(c, header)
        assert caught.value.peer == c
    assert (
        node.destination(c, wire_header.pack(wire_header.PARTIAL, 400, 0, bytes(16), bytes(16)))
        is None
    )  # no such round


def test_a_peer_may_have_two_vectors_here_and_no_more():
    net = Net(2)
    a, b = net.peers
    plan = make_plan(
        [(p, cid_of(i), 1) for i, p in enumerate(net.peers)],
        [a],
        300,
        100,
        "fp32",
        topology=Topology("ring"),
    )
    node = net.nodes[a]
    node.open_round(LOG, 1, net.peers, 300, 100, "fp32")
    node.execute(plan, net.peers)
    slot, held = wire_header.slot_id(LOG, 1), 0
    for cid in (cid_of(1), *(bytes([9, life]) * 8 for life in range(4))):
        for chunk in range(3):
            view = node.destination(b, wire_header.pack(wire_header.PART, 400, chunk, slot, cid))
            assert view is not None  # the oldest that no plan wants makes room
            node.received(b, b"")
            held += 1
    (opened,) = node._slots.values()
    assert held == 15
    assert (
        sum(
            len(opened.parts_of(b, cid))
            for cid in (cid_of(1), *(bytes([9, life]) * 8 for life in range(4)))
        )
        == 6
    )
    assert len(opened.parts_of(b, cid_of(1))) == 3


def test_non_finite_values_stop_at_their_source_and_a_report_says_what_is_lacking():
    net = Net(4)
    vectors = {cid_of(i): vector(400, i) for i in range(4)}
    vectors[cid_of(3)][10] = float("nan")
    contributors = [(p, cid_of(i), 1) for i, p in enumerate(net.peers)]
    plan = make_plan(
        contributors, net.peers[:1], 400, 100, "fp32", topology=Topology("two-level", (0, 0, 1, 1))
    )
    start(net, plan, vectors)
    net.run()
    assert net.of(net.peers[3], NonFinite) == [NonFinite(cid_of(3))]
    head, owner = net.peers[2], net.peers[0]
    name = trees_of(plan, MEAN)[0].sent(head)
    assert name is not None
    for peer in (head, owner):
        net.nodes[peer].report(plan.plan_id)
    (of_head,), (of_owner,) = net.of(head, ReductionReport), net.of(owner, ReductionReport)
    assert of_head.missing == {cid_of(3): ((0, 4),)}
    assert of_owner.missing == {name.cid: ((0, 4),)}
    net.nodes[net.peers[3]].report(plan.plan_id)
    (of_leaf,) = net.of(net.peers[3], ReductionReport)
    assert list(of_leaf.lacking) == [head]  # who gets its results from the head


@pytest.mark.parametrize("reducer", ["max", "copy", "gather"])
def test_what_has_no_partial_sums_is_refused_in_a_tree(reducer):
    net = Net(2)
    contributors = [(p, cid_of(i), 1) for i, p in enumerate(net.peers)]
    plan = make_plan(
        contributors, net.peers, 300, 100, "fp32", reducer=reducer, topology=Topology("ring")
    )
    net.nodes[net.peers[0]].open_round(LOG, 1, net.peers, 300, 100, "fp32")
    with pytest.raises(ConfigError):
        net.nodes[net.peers[0]].execute(plan, net.peers)
    assert reducer in REDUCERS
    odd = make_plan(contributors, net.peers, 300, 100, "fp32", topology=Topology("ring", (0,)))
    with pytest.raises(LocalProtocolError, match="1 groups of 2 contributors"):
        net.nodes[net.peers[0]].execute(odd, net.peers)


def test_the_error_grows_with_the_number_of_sums():
    """int8, 8 equal contributions of independent values: against a butterfly 1.1 times the error
    with two levels, 1.2 with three, 1.7 with a ring.
    """
    errors = {}
    for kind in KINDS:
        net = Net(8, seed=5)
        vectors = {cid_of(i): vector(40_000, i) for i in range(8)}
        contributors = [(p, cid_of(i), 1) for i, p in enumerate(net.peers)]
        plan = make_plan(
            contributors, net.peers, 40_000, 5_000, "int8", topology=ways(kind, FOURS, PAIRS)
        )
        start(net, plan, vectors)
        net.run()
        exact = np.mean([v.numpy().astype(np.float64) for v in vectors.values()], axis=0)
        off = decoded(plan, bytes(net.results(net.peers[0], plan)[0].data)) - exact
        errors[kind] = np.sqrt((off**2).mean() / (exact**2).mean())
    assert 0.008 < errors["butterfly"] < 0.012
    assert 1.05 < errors["two-level"] / errors["butterfly"] < 1.2
    assert 1.1 < errors["three-level"] / errors["butterfly"] < 1.35
    assert 1.5 < errors["ring"] / errors["butterfly"] < 1.8

"""Rules of whole rows in the data plane: everybody gets, to the bit, what one process makes of all
contributions; and owners that lie or are lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from codec_kit import reference
from exchange_kit import Net, cid_of, make_plan, peers_of, ref_decode, ref_encode, start, vector

from atoll.collectives.exchange import PeerFault, ResultComplete
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.group import Plan
from atoll.collectives.identifiers import PeerId
from atoll.security.rule_names import BY_GRAM
from atoll.security.rules import aggregate
from atoll.security.rules.aggregate import BY_GRAM as WEIGHTS
from atoll.security.rules.before import arc, nnm
from atoll.security.rules.centre import centred_clip, spread
from atoll.security.rules.gram import gram, mixed_gram
from atoll.security.rules.numbers import product
from atoll.security.rules.reducers import find_reducer
from atoll.security.rules.selection import krum, multi_krum
from atoll.security.rules.triangle import diagonal, impossible, pairs, square, triangle

NUMEL, CHUNK = 1_500, 128


def hostile(n: int) -> dict[bytes, torch.Tensor]:
    """What n members hold: near each other, but the second is 1000 times its negative."""
    common = vector(NUMEL, 99)
    return {
        cid_of(i): (common + 0.3 * vector(NUMEL, i)) * (-1000 if i == 1 else 1) for i in range(n)
    }


def plan_of(name: str, n: int, codec: str, owners: int | None = None, revision: int = 0) -> Plan:
    peers = peers_of(n)
    contributors = [(p, cid_of(i), 1 + 10**6 * (i == 1)) for i, p in enumerate(peers)]
    return make_plan(
        contributors, peers[: owners or n], NUMEL, CHUNK, codec, reducer=name, revision=revision
    )


def central(plan: Plan, vectors: dict[bytes, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """(decoded contributions, their Gram matrix): the triangles of chunks added up in order, in
    parts, without the compiled kernel.
    """
    sent = [vectors[c.cid].numpy() for c in plan.contributors]
    cut = [[row[at : at + CHUNK] for at in range(0, NUMEL, CHUNK)] for row in sent]
    rows = np.stack(
        [
            np.concatenate([ref_decode(plan.codec, ref_encode(plan.codec, x), len(x)) for x in row])
            for row in cut
        ]
    )
    total = np.zeros(pairs(len(rows)))
    for part in plan.parts:
        of_part = np.zeros(pairs(len(rows)))
        for chunk in range(part.first, part.stop):
            of_part += triangle(
                torch.from_numpy(rows[:, chunk * CHUNK : (chunk + 1) * CHUNK].copy()), None
            )
        total += of_part
    return rows, square(total, len(rows))


def weighted(plan: Plan, vectors: dict[bytes, torch.Tensor], weights: np.ndarray) -> bytes:
    """The encoded weighted sum, by the independent codecs."""
    out = b""
    for at in range(0, NUMEL, CHUNK):
        used = [
            (vectors[c.cid][at : at + CHUNK].numpy(), float(np.float32(w)))
            for c, w in zip(plan.contributors, weights, strict=True)
            if w
        ]
        encoded = [ref_encode(plan.codec, values) for values, _ in used]
        out += reference.mean(
            plan.codec, encoded, [weight for _, weight in used], 1.0, len(used[0][0])
        )
    return out


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("before", ["", "nnm"])
@pytest.mark.parametrize("rule", BY_GRAM)
def test_everybody_gets_the_rule_of_all_contributions(rule: str, before: str, codec: str) -> None:
    net = Net(5, reducers=find_reducer)
    vectors, plan = hostile(5), plan_of("+".join(filter(None, [before, f"{rule}:1"])), 5, codec)
    start(net, plan, vectors)
    net.run()
    _, products = central(plan, vectors)
    mixing = nnm(products, 1) if before else np.eye(5)
    weights = product(
        WEIGHTS[rule](mixed_gram(products, mixing) if before else products, 1)[None], mixing
    )[0]
    results = [net.results(peer, plan)[0] for peer in net.peers]
    assert {bytes(result.data) for result in results} == {weighted(plan, vectors, weights)}
    assert {result.weights for result in results} == {tuple(float(np.float32(w)) for w in weights)}
    assert abs(weights[1]) < 1e-3


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "meamed"])
def test_a_rule_by_coordinate_of_mixtures(rule: str, codec: str) -> None:
    """After nearest-neighbour mixing; each mixture is added up in float32 in the order of the rows."""
    net = Net(4, reducers=find_reducer, eager=False)
    vectors, plan = hostile(4), plan_of(f"arc+nnm+{rule}:1", 4, codec)
    start(net, plan, vectors)
    net.run()
    rows, products = central(plan, vectors)
    clipped = arc(np.diagonal(products), 1)
    mixing = product(nnm(mixed_gram(products, clipped), 1), clipped)
    mixed = np.zeros((4, NUMEL), np.float32)
    for target, weights in zip(mixed, mixing.astype(np.float32), strict=True):
        terms = [weight * row for weight, row in zip(weights, rows, strict=True) if weight]
        target[:] = terms[0]
        for term in terms[1:]:
            target += term
    value = aggregate(torch.from_numpy(mixed), rule, 1).value
    want = b"".join(ref_encode(codec, part.numpy()) for part in value.split(CHUNK))
    assert {bytes(net.results(peer, plan)[0].data) for peer in net.peers} == {want}
    assert value.abs().max() < 10


def test_buckets_follow_from_the_ids_of_all_contributions() -> None:
    net = Net(9, reducers=find_reducer)
    vectors, plan = hostile(9), plan_of("bucketing2+krum:1", 9, "fp32")
    start(net, plan, vectors)
    net.run()
    results = [net.results(peer, plan)[0] for peer in net.peers]
    assert len({(bytes(result.data), result.weights) for result in results}) == 1
    assert sorted(results[0].weights) in ([0.0] * 7 + [0.5] * 2, [0.0] * 8 + [1.0])
    assert results[0].weights[1] == 0


@pytest.mark.parametrize("seed", range(6))
def test_lost_records_and_lanes_change_no_bit(seed: int) -> None:
    """Statements of owners are asked for again like results; some come before their plan."""
    net = Net(5, seed=seed, loss=0.2, reducers=find_reducer)
    vectors, plan = hostile(5), plan_of("centred_clip:1", 5, "int8", owners=3)
    late = net.peers[seed % 5]
    node, held = net.nodes[late], net.nodes[late].execute
    node.execute = lambda plan, audience: None  # type: ignore[method-assign]
    start(net, plan, vectors)
    net.run()
    node.execute = held  # type: ignore[method-assign]
    node.execute(plan, net.peers)
    for _ in range(30):
        net.run()
        net.cut(*net.rng.sample(net.peers, 2))
        net.repair(plan)
    _, products = central(plan, vectors)
    assert {bytes(net.results(peer, plan)[0].data) for peer in net.peers} == {
        weighted(plan, vectors, WEIGHTS["centred_clip"](products, 1))
    }


def test_an_owner_that_is_lost_while_they_weigh() -> None:
    """Nothing is reduced without its statement; under the next plan, without it, all is measured
    again from what is here.
    """
    net = Net(6, reducers=find_reducer)
    vectors, first = hostile(6), plan_of("krum:1", 6, "fp32")
    for peer in net.peers[:5]:
        drop_statements(net, net.peers[5], peer)
    start(net, first, vectors)
    net.run()
    assert not any(net.results(peer, first) for peer in net.peers[:5])
    net.kill(net.peers[5])
    again = plan_of("krum:1", 5, "fp32", revision=1)
    for peer in net.peers[:5]:
        net.nodes[peer].execute(again, net.peers)
    net.run()
    _, products = central(again, vectors)
    want = weighted(again, vectors, WEIGHTS["krum"](products, 1))
    assert {bytes(net.results(peer, again)[0].data) for peer in net.peers[:5]} == {want}


def drop_statements(net: Net, sender: PeerId, receiver: PeerId) -> None:
    """What an owner says of its part never arrives there."""
    pull = net.nodes[sender].next_record

    def without(peer: PeerId, lane: int = 0) -> object:
        found = pull(peer, lane)
        while found is not None and peer == receiver and found.header[1] == wire_header.MEASURE:
            found = pull(peer, lane)
        return found

    net.nodes[sender].next_record = without  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("lie", ["not finite", "too close", "my norm"])
def test_an_owner_that_states_what_is_not_so(lie: str) -> None:
    """Nobody reduces anything with it: who sees it says so, and takes nothing more from that owner."""
    net = Net(5, reducers=find_reducer)
    liar, vectors, plan = net.peers[1], hostile(5), plan_of("multi_krum:1", 5, "fp32")
    for peer in net.peers:
        if peer != liar:
            drop_statements(net, liar, peer)
    start(net, plan, vectors)
    net.run()
    rows, _ = central(plan, vectors)
    part = plan.parts[1]
    triangles = [
        triangle(torch.from_numpy(rows[:, c * CHUNK : (c + 1) * CHUNK].copy()))
        for c in range(part.first, part.stop)
    ]
    values = np.sum(triangles, axis=0) if len(triangles) == 1 else np.add.accumulate(triangles)[-1]
    if lie == "not finite":
        values[3] = np.nan
    elif lie == "too close":
        values[1] = 1e9  # of the first and the liar itself
    else:
        values[diagonal(5)[2]] *= 1 + 1e-12  # only the third can know
    header = wire_header.pack(
        wire_header.MEASURE,
        8 * pairs(5),
        1,
        plan.plan_id,
        wire_header.slot_id(plan.log, plan.round),
    )
    for peer in net.peers:
        if peer != liar:
            net.deliver(liar, peer, header, values.astype("<f8").tobytes())
    net.run()
    saw = {
        peer
        for peer in net.peers
        if any(isinstance(e, PeerFault) and e.peer == liar for e in net.events[peer])
    }
    assert saw == ({net.peers[2]} if lie == "my norm" else set(net.peers) - {liar})
    assert not any(isinstance(e, ResultComplete) for peer in net.peers for e in net.events[peer])
    net.nodes[net.peers[2]].report(plan.plan_id)
    assert cid_of(1) in net.events[net.peers[2]][-1].missing  # type: ignore[union-attr]


def test_what_no_rows_can_be() -> None:
    rows = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    good = triangle(rows)
    assert impossible(good, 4) is None
    assert impossible(np.zeros(10), 4) is None
    for index, value in ((0, -1.0), (0, 1e200), (2, np.inf), (9, np.nan), (1, 1e4), (1, -1e4)):
        bad = good.copy()
        bad[index] = value
        assert impossible(bad, 4) is not None


@pytest.mark.parametrize("before", ["", "nnm+", "arc+", "bucketing2+clipping1+nnm+"])
@pytest.mark.parametrize("rule", [*BY_GRAM, "median"])
def test_any_statement_comes_to_weights(rule: str, before: str) -> None:
    """Also of matrices that no vectors have, as far as they pass: finite numbers, the same every
    time.
    """
    reducer, rng = find_reducer(f"{before}{rule}:1"), np.random.default_rng(5)
    if reducer is None or reducer.form != "two-phase":
        return
    cids = [cid_of(i) for i in range(9)]
    for scale in (0.0, 1e-300, 1.0, 1e80):
        for _ in range(4):
            norms = scale * rng.random(9) * 10.0 ** rng.integers(-5, 6, 9)
            inner = rng.choice([-1.0, 0.0, 1.0, 0.5], (9, 9)) * np.sqrt(np.outer(norms, norms))
            np.fill_diagonal(inner, norms)
            values = inner[np.triu_indices(9)]
            assert impossible(values, 9) is None
            found = reducer.weigh(values, cids)
            assert np.isfinite(found.weights).all()
            assert reducer.weigh(values, cids).weights == found.weights


def test_what_a_rule_is_told_reaches_it() -> None:
    """By the name that a plan has for it, and by what contributors state; the spread goes back to
    who weighed.
    """
    products, cids = gram(torch.stack(list(hostile(9).values()))), [cid_of(i) for i in range(9)]
    values = products[np.triu_indices(9)]

    def weighed(name: str, norms: list[float | None]) -> Any:
        reducer = find_reducer(name)
        assert reducer is not None
        assert reducer.form == "two-phase"
        return reducer.weigh(values, cids, norms)

    def weights(name: str) -> list[float]:
        return list(weighed(name, []).weights)

    assert weights("multi_krum:2") == pytest.approx(multi_krum(products, 2).tolist())
    assert sum(weight > 0 for weight in weights("multi_krum:2")) == 7
    assert weights("multi_krum/k2:2") == pytest.approx(multi_krum(products, 2, chosen=5).tolist())
    assert weights("multi_krum/k2/n1:2") == pytest.approx(
        multi_krum(products, 2, neighbours=6, chosen=5).tolist()
    )
    assert weights("krum/n1:2") == pytest.approx(krum(products, 2, neighbours=6).tolist())
    own = centred_clip(products, 2)
    clipped = centred_clip(products, 2, radius=1000.0)
    assert np.abs(own - clipped).max() > 1e-3
    told: list[float | None] = [1000.0, 1e-9, 1e9, None, 1000.0, 1000.0, None, None, None]
    found = weighed("centred_clip/running:2", told)
    assert list(found.weights) == pytest.approx(clipped.tolist(), rel=1e-6)
    assert found.spread == spread(products, clipped)
    assert list(weighed("centred_clip/running:2", told[:4]).weights) == pytest.approx(
        own.tolist(), rel=1e-6
    )
    assert weighed("centred_clip:2", told).spread is None
    assert list(weighed("centred_clip:2", told).weights) == pytest.approx(own.tolist(), rel=1e-6)

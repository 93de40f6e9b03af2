"""Robust rules in the data plane: the reducers by name, and what everybody gets when one
contributor lies, is lost or sends what is no number.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exchange_kit import LOG, Net, cid_of, decoded, make_plan, ref_decode, ref_encode, start, vector

from atoll.collectives.errors import ConfigError
from atoll.collectives.exchange import PeerFault
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.identifiers import PeerId
from atoll.collectives.reduce import least_of
from atoll.collectives.reducers import REDUCERS
from atoll.collectives.round.state import Shape
from atoll.collectives.swarm import MAX_REDUCER
from atoll.security.rule_names import BY_COORDINATE, MAX_F, parse_reducer
from atoll.security.rules import aggregate
from atoll.security.rules.reducers import find_reducer


def hostile(
    net: Net, numel: int, codec: str
) -> tuple[list[tuple[PeerId, bytes, int]], dict[bytes, torch.Tensor], np.ndarray]:
    """Contributions, of which the second is -1000 times what it should be and claims a great
    weight; and all as everybody decodes them.
    """
    vectors = {
        cid_of(i): vector(numel, i) * (-1000 if i == 1 else 1) for i in range(len(net.peers))
    }
    rows = np.stack(
        [ref_decode(codec, ref_encode(codec, v.numpy()), numel) for v in vectors.values()]
    )
    return [(p, cid_of(i), 1 + 10**6 * (i == 1)) for i, p in enumerate(net.peers)], vectors, rows


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("rule", BY_COORDINATE)
def test_everybody_gets_the_rule_of_the_decoded_contributions(rule: str, codec: str) -> None:
    net = Net(4, reducers=find_reducer)
    contributors, vectors, rows = hostile(net, 1_024, codec)
    plan = make_plan(contributors, net.peers, 1_024, 256, codec, reducer=f"{rule}:1")
    start(net, plan, vectors)
    net.run()
    value = aggregate(torch.from_numpy(rows), rule, 1).value
    assert value.abs().max() < 10 < np.abs(rows[1]).max()
    want = b"".join(ref_encode(codec, part.numpy()) for part in value.split(256))
    assert {bytes(net.results(peer, plan)[0].data) for peer in net.peers} == {want}


def test_the_rule_over_those_who_are_left() -> None:
    """The plan is revised without a contributor that never came; too few are refused."""
    net = Net(4, reducers=find_reducer)
    contributors, vectors, rows = hostile(net, 1_000, "fp32")
    del vectors[cid_of(3)]
    first = make_plan(contributors, net.peers[:3], 1_000, 64, "fp32", reducer="median:1")
    start(net, first, vectors)
    net.run()
    assert not any(net.results(peer, first) for peer in net.peers)
    again = make_plan(
        contributors[:3], net.peers[:3], 1_000, 64, "fp32", reducer="median:1", revision=1
    )
    for peer in net.peers:
        net.nodes[peer].execute(again, net.peers)
    net.run()
    want = aggregate(torch.from_numpy(rows[:3]), "median", 1).value.numpy()
    for peer in net.peers:
        assert np.array_equal(decoded(again, bytes(net.results(peer, again)[0].data)), want)
    with pytest.raises(ConfigError, match="median:1"):
        net.nodes[net.peers[0]].execute(
            make_plan(
                contributors[:2], net.peers[:3], 1_000, 64, "fp32", reducer="median:1", revision=2
            ),
            net.peers,
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_its_senders_fault(value: float) -> None:
    net = Net(4, reducers=find_reducer)
    owner, liar = net.peers[:2]
    contributors, vectors, _ = hostile(net, 100, "fp32")
    bad = vectors.pop(cid_of(1))
    bad[7] = value
    plan = make_plan(contributors, [owner], 100, 100, "fp32", reducer="trimmed_mean:1")
    start(net, plan, vectors)
    net.deliver(
        liar,
        owner,
        wire_header.pack(wire_header.PART, 400, 0, wire_header.slot_id(LOG, 1), cid_of(1)),
        bad.numpy().tobytes(),
    )
    net.run()
    assert [
        (e.peer, "not finite" in e.reason) for e in net.events[owner] if isinstance(e, PeerFault)
    ] == [(liar, True)]
    assert not net.results(owner, plan)


def test_names() -> None:
    for rule in BY_COORDINATE:
        for f in (0, 1, MAX_F):
            reducer = find_reducer(f"{rule}:{f}")
            assert reducer is not None
            assert (reducer.name, reducer.form, least_of(reducer)) == (
                f"{rule}:{f}",
                "rows",
                2 * f + 1,
            )
            assert parse_reducer(reducer.name) == (rule, f, (), ())
    for name, least in {
        "krum:1": 5,
        "mda:2": 5,
        "nnm+median:1": 3,
        "bucketing2+krum:1": 9,
        "bucketing2+arc+nnm+meamed:2": 9,
    }.items():
        reducer = find_reducer(name)
        assert reducer is not None
        assert (reducer.name, reducer.form, least_of(reducer)) == (name, "two-phase", least)
    told = {
        "krum/n1:1": 3,
        "multi_krum/n1:1": 3,
        "multi_krum/k2:1": 5,
        "nnm+multi_krum/k2/n1:2": 7,
        "centred_clip/running:1": 3,
    }
    for name, least in told.items():
        reducer = find_reducer(name)
        assert reducer is not None
        assert (reducer.name, reducer.form, least_of(reducer)) == (name, "two-phase", least)
    assert parse_reducer("multi_krum/k2/n1:2") == ("multi_krum", 2, (), ("k2", "n1"))
    longest = parse_reducer(
        "bucketing2+clipping999999.99999+arc+nnm+centred_clip/running:63"
    )  # more is not for 256 contributors
    assert longest is not None
    assert (
        longest.least,
        len("bucketing2+clipping999999.99999+arc+nnm+centred_clip/running:63") <= MAX_REDUCER,
    ) == (253, True)
    assert parse_reducer("clipping0.5+flag:1") == ("flag", 1, (("clipping", 0.5),), ())
    wrong = (
        "median",
        "median:",
        "median:-1",
        "median:01",
        "median:128",
        "median:1 ",
        "MEDIAN:1",
        "median:1\n",
        "median:१",
        "mda:3",
        "monna:1",
    )
    for name in (
        *wrong,
        "nnm+nnm+krum:1",
        "clipping0+krum:1",
        "clipping1.50+krum:1",
        "bucketing1+krum:1",
        "bucketing17+krum:1",
        "+krum:1",
        "nnm:1",
        "krum/k2:1",
        "multi_krum/n1/k2:1",
        "multi_krum/k2/k2:1",
        "multi_krum/:1",
        "median/running:1",
    ):
        assert find_reducer(name) is None
    assert all(find_reducer(name) is reducer for name, reducer in REDUCERS.items())


def test_a_plan_of_too_few_fits_no_round() -> None:
    shape = Shape(200, 100, "int8", "median:1", least=3)
    a = PeerId("a")
    plans = {
        n: make_plan(
            [(PeerId(f"p{i}"), cid_of(i), 1) for i in range(n)],
            [a],
            200,
            100,
            "int8",
            reducer="median:1",
        )
        for n in (2, 3)
    }
    assert (shape.fits(plans[2]), shape.fits(plans[3])) == (False, True)
    assert not shape.fits(
        make_plan(
            [(PeerId(f"p{i}"), cid_of(i), 1) for i in range(3)],
            [a],
            200,
            100,
            "int8",
            reducer="median:0",
        )
    )

"""Schemes as data: what is compiled adds up what a star does, bit for bit where values are exact;
what is no scheme, or has no plan, is refused with the reason.
"""

from __future__ import annotations

import pytest
import torch
from exchange_kit import Net, cid_of, expected_bytes, make_plan, ref_result, start
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.group import Topology
from atoll.collectives.identifiers import PeerId
from atoll.collectives.schemes import Places, compile_places, peers_in, places
from atoll.collectives.trees import topology_at
from atoll.optim.lab.schemes import (
    CompiledScheme,
    ExchangeScheme,
    check_scheme,
    compile_scheme,
    full,
    gossip,
    master_worker,
    ring,
)

NAMES = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=7, unique=True)
LABELS = st.sampled_from(["lab", "home", "a-1", "b.2"])
HOSTS = st.dictionaries(LABELS, st.integers(1, 3), min_size=1, max_size=3)
SITES = st.dictionaries(LABELS, st.one_of(st.integers(1, 3), HOSTS), min_size=1, max_size=3)
REDUCING = st.one_of(
    NAMES.map(full),
    NAMES.map(ring),
    NAMES.map(lambda names: master_worker("m", names)),
    SITES.filter(lambda sizes: peers_in(sizes) <= 9).map(places),
)


@given(REDUCING, st.integers(0, 1 << 20), st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_compiled_adds_up_what_a_star_does(
    scheme: ExchangeScheme, seed: int, data: st.DataObject
) -> None:
    compiled = compile_scheme(scheme)
    assert compiled.plan is not None
    net = Net(len(scheme.machines), seed=seed)
    ids = dict(zip(data.draw(st.permutations(scheme.machines)), net.peers, strict=True))
    giving = [name for name in ids if name != compiled.master]
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids)))
    contributors = [(ids[name], cid_of(index), weights[index]) for index, name in enumerate(giving)]
    numel = 120
    vectors = {
        cid: torch.randint(-1000, 1000, (numel,), generator=torch.Generator().manual_seed(index))
        .float()
        .contiguous()
        for index, (_, cid, _) in enumerate(contributors)
    }
    owners = [ids[compiled.master]] if compiled.master else list(ids.values())
    at = topology_at(compiled.plan, {ids[name]: compiled.labels.get(name, "") for name in giving})
    assert at.fault(len(giving)) is None
    star = make_plan(contributors, owners, numel, 10, "fp32")
    plan = make_plan(contributors, owners, numel, 10, "fp32", topology=at)
    start(net, plan, vectors)
    for _ in range(2 * len(ids)):
        net.run()
    want = ref_result(star, vectors)
    assert len(want) == expected_bytes(star)
    for peer in net.peers:
        (done,) = net.results(peer, plan)
        assert bytes(done.data) == want


@given(SITES)
def test_a_hierarchy_is_the_plan_of_its_depth_with_the_labels_of_its_places(sizes: Places) -> None:
    scheme = places(sizes)
    compiled = compile_places(scheme)
    assert compile_scheme(scheme) == CompiledScheme(compiled.plan, compiled.labels)
    deep = any(not isinstance(each, int) for each in sizes.values())
    assert compiled.plan == ("three-level" if deep else "two-level")
    assert len(compiled.labels) == len(scheme.machines) == peers_in(sizes)
    for name, label in compiled.labels.items():
        assert name.rpartition("#")[0] == label
    sites = {label.partition("/")[0] for label in compiled.labels.values()}
    assert sites == {*sizes}
    found = topology_at(
        compiled.plan, {PeerId(name): label for name, label in compiled.labels.items()}
    )
    assert len({*found.groups}) == len(sizes)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=8, unique=True), st.data())
def test_no_contribution_counts_twice_or_never(names: list[str], data: st.DataObject) -> None:
    """A tree whose nodes each send to an earlier one is reducible; with an edge more, or less, it
    is not, whichever it is."""
    edges = {(name, names[data.draw(st.integers(0, at))]) for at, name in enumerate(names[1:])}
    nodes = dict.fromkeys(names, "peer")
    check_scheme(ExchangeScheme(nodes, frozenset(edges)))  # type: ignore[arg-type]
    order = {name: number for number, name in enumerate(names)}
    more = [
        (one, other)
        for one in names[1:]
        for other in names
        if order[other] < order[one] and (one, other) not in edges
    ]
    if more:
        extra = data.draw(st.sampled_from(more))
        with pytest.raises(
            ConfigError, match=f"what {extra[0]} contributes reaches {names[0]} more than"
        ):
            check_scheme(ExchangeScheme(nodes, frozenset(edges | {extra})))  # type: ignore[arg-type]
    less = data.draw(st.sampled_from(sorted(edges)))
    with pytest.raises(ConfigError, match="has no way to"):
        check_scheme(ExchangeScheme(nodes, frozenset(edges - {less})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        (ExchangeScheme({}, frozenset()), "no machine"),
        (ExchangeScheme({"a": "peer"}, frozenset({("a", "b")})), "names b, which is no node"),
        (ExchangeScheme({"a": "peer"}, frozenset({("a", "a")})), "a sends to itself"),
        (
            ExchangeScheme(
                dict.fromkeys("abcd", "peer"),  # type: ignore[arg-type]
                frozenset({("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"), ("a", "c")}),
            ),
            "does not reach a|more than once",
        ),
        (
            ExchangeScheme(dict.fromkeys("abc", "peer"), frozenset({("a", "b"), ("a", "c")})),  # type: ignore[arg-type]
            "contributions end at b and at c",
        ),
        (
            ExchangeScheme(dict.fromkeys("abc", "peer"), frozenset({("a", "b"), ("b", "c")})),  # type: ignore[arg-type]
            "a tree of fixed machines",
        ),
        (
            ExchangeScheme(
                {"m": "master", "n": "master", "a": "worker"}, frozenset({("a", "n"), ("n", "m")})
            ),
            "masters and workers in another shape",
        ),
        (places({"a": {"b": {"c": 1}}}), "a/b/c is a place within a host"),
        (places({"a b": 1}), "a place called 'a b'"),
        (
            ExchangeScheme({"s": "place", "a": "worker"}, frozenset({("a", "s")})),
            "a is a worker that sends to s",
        ),
        (gossip("abcd", [("a", "b"), ("b", "c"), ("c", "d")]), "gossip along a given graph"),
        (
            ExchangeScheme(dict.fromkeys("ab", "peer"), frozenset({("a", "b")}), mixing=True),  # type: ignore[arg-type]
            "in one direction",
        ),
        (
            ExchangeScheme(
                {"a": "peer", "m": "master"}, frozenset({("a", "m"), ("m", "a")}), mixing=True
            ),
            "gossip of other nodes",
        ),
    ],
)
def test_what_is_no_scheme_or_has_no_plan_is_refused_with_the_reason(
    scheme: ExchangeScheme, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        compile_scheme(scheme)
    assert refused.value.key == "$.exchange.tree"


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({}, "no machine"),
        ({"a": {}}, "no machine"),
        ({"world": 2}, "two places called world"),
        ({"a": {"b": 1}, "a/b": 1}, "two places called a/b"),
        ({"a b": 1}, "a place called 'a b'"),
        ({"a": {"b": {"c": 1}}}, "a/b/c is a place within a host"),
    ],
)
def test_places_that_are_no_tree_of_a_run_are_refused_with_the_reason(
    sizes: Places, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        compile_places(places(sizes))
    assert refused.value.key == "$.exchange.tree"


def test_gossip_is_averages_in_pairs() -> None:
    assert compile_scheme(gossip("abcde")).average == "gossip"
    square = gossip("abcd", [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
    assert compile_scheme(square).average == "pairwise"
    assert compile_scheme(square).plan is None


def test_more_peers_than_a_run_has_are_not_even_named() -> None:
    with pytest.raises(ConfigError, match="4,097 peers"):
        places({"a": 4096, "b": 1})
    assert topology_at("butterfly", {PeerId("a"): "lab"}) == Topology()

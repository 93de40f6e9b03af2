"""Parts: they cover everything once, in order, by bandwidth."""

from __future__ import annotations

import msgspec
import pytest
from exchange_kit import cid_of, make_plan, peers_of
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.group import Contributor, Entry, Member, Part, Topology
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Ready
from atoll.collectives.partition import (
    SAME,
    check_plan,
    comparable,
    fair_share,
    is_fair,
    parts_for,
)
from atoll.collectives.round.routes import topology_of

rates = st.lists(st.one_of(st.just(0.0), st.floats(1e3, 1e9)), min_size=1, max_size=20)


def times(parts, peers, chunks):
    """Seconds each peer needs for its 1 + (n-2)p vectors."""
    n = len(peers)
    share = {p.owner: (p.stop - p.first) / chunks for p in parts}
    return [(1 + (n - 2) * share.get(peer, 0.0)) / rate for peer, rate in peers if rate > 0]


@given(st.integers(1, 5_000), rates, st.floats(0, 0.999))
def test_cover_once_in_order(chunks, bandwidths, lacking):
    peers = [(f"p{i}", rate) for i, rate in enumerate(bandwidths)]
    parts = parts_for(chunks - lacking, peers)
    assert parts == parts_for(chunks - lacking, peers)
    position = 0
    for part in parts:
        assert part.first == position < part.stop
        position = part.stop
    assert position == chunks
    order = [p for p, _ in peers]
    owners = [part.owner for part in parts]
    assert owners == sorted(set(owners), key=order.index)
    if any(bandwidths):
        assert all(dict(peers)[owner] > 0 for owner in owners)


@given(st.integers(4, 500), st.floats(0, 0.99))
def test_who_has_the_short_chunk_has_one_more_where_there_is_one_more(chunks, lacking):
    peers = [(f"p{i}", 1.0) for i in range(4)]
    lengths = [part.stop - part.first for part in parts_for(chunks - lacking, peers)]
    lengths[-1] -= lacking
    assert max(lengths) - min(lengths) <= 1.0 + 1e-9
    assert max(lengths) < (chunks - lacking) / 4 + 1


@given(st.lists(st.floats(1e6, 1e8), min_size=3, max_size=12))
def test_no_peer_is_much_slower_than_it_must_be(bandwidths):
    peers = [(f"p{i}", rate) for i, rate in enumerate(bandwidths)]
    chunks = 100_000
    slowest = max(times(parts_for(chunks, peers), peers, chunks))
    n = len(peers)
    bound = max(
        max(1 / r for r in bandwidths), 2 * (n - 1) / sum(bandwidths)
    )  # sending alone; everybody together
    assert slowest <= bound * 1.001


@given(st.integers(1, 500), rates, st.integers(0, 5), st.floats(0, 0.999))
def test_nobody_owns_more_than_a_fair_share_where_members_may_lie(chunks, bandwidths, lying, lack):
    peers = [(f"p{i}", rate) for i, rate in enumerate(bandwidths)]
    most = fair_share(chunks, len(peers), lying)
    parts = parts_for(chunks - lack, peers, most)
    assert [part.first for part in parts] + [chunks] == [0] + [part.stop for part in parts]
    assert max(part.stop - part.first for part in parts) <= most
    plain = parts_for(chunks - lack, peers)
    if max(part.stop - part.first for part in plain) <= most:
        assert parts == plain


def test_what_is_over_a_fair_share_goes_to_owners_then_to_the_slow_then_to_the_rest():
    a, b, c, d = peers_of(4)
    lengths = lambda peers, most: {  # noqa: E731
        part.owner: part.stop - part.first for part in parts_for(100, peers, most)
    }
    assert fair_share(100, 4, 1) == 50
    assert fair_share(100, 5, 2) == 34
    assert fair_share(100, 1, 1) == 100  # alone it owns all: it is its own contribution
    # of 100 chunks the fastest would own 70
    assert lengths([(a, 2), (b, 1), (c, 1), (d, 1)], None) == {a: 70, b: 10, c: 10, d: 10}
    assert lengths([(a, 2), (b, 1), (c, 1), (d, 1)], 50) == {a: 50, b: 17, c: 17, d: 16}
    # a thin link owns something only where there is nobody else
    assert lengths([(a, 10), (b, 1), (c, 0), (d, 0)], 50) == {a: 50, b: 50}
    assert lengths([(a, 10), (b, 10), (c, 1), (d, 1)], 50) == {a: 50, b: 50}
    assert lengths([(a, 10), (b, 0), (c, 0), (d, 0)], 50) == {a: 50, b: 17, c: 17, d: 16}


def test_a_plan_that_gives_its_convener_more_than_its_fair_share():
    a, b, c, d = peers_of(4)
    plan = make_plan(
        [(peer, cid_of(at), 1) for at, peer in enumerate((a, b, c, d))],
        [a, b, c, d],
        100,
        10,
        "fp32",
    )
    own = msgspec.structs.replace(plan, parts=(Part(a, 0, 5), Part(b, 5, 10)))
    assert is_fair(plan, 1)
    assert is_fair(own, 1)
    assert not is_fair(own, 2)
    assert not is_fair(msgspec.structs.replace(plan, parts=(Part(a, 0, 6), Part(b, 6, 10))), 1)
    again = (Part(a, 0, 3), Part(b, 3, 7), Part(a, 7, 10))
    assert not is_fair(msgspec.structs.replace(plan, parts=again), 1)
    nothing = msgspec.structs.replace(plan, parts=(), contributors=())
    assert is_fair(nothing, 1)


def test_known_shares():
    a, b, c, d = peers_of(4)
    assert parts_for(191, [(a, 1), (b, 1), (c, 1), (d, 1)]) == (
        Part(a, 0, 48),
        Part(b, 48, 96),
        Part(c, 96, 144),
        Part(d, 144, 191),
    )
    assert [p.stop - p.first for p in parts_for(244.14, [(a, 1), (b, 1), (c, 1), (d, 1)])] == [
        61,
        61,
        61,
        62,
    ]
    assert parts_for(10, [(a, 5), (b, 0), (c, 0)]) == (Part(a, 0, 10),)
    assert parts_for(10, [(a, 0), (b, 0)]) == (Part(a, 0, 5), Part(b, 5, 10))
    assert parts_for(10, [(a, 1), (b, 100)]) == (Part(a, 0, 5), Part(b, 5, 10))
    assert parts_for(1, [(a, 1), (b, 1)]) == (Part(a, 0, 1),)
    # a link of a tenth carries only its own vector: it owns nothing
    assert [p.owner for p in parts_for(300, [(a, 10), (b, 10), (c, 1), (d, 10)])] == [a, b, d]
    # twice the bandwidth finishes at the same time
    parts = parts_for(10_000, [(a, 2.0), (b, 1.0), (c, 1.0)])
    assert [p.stop - p.first for p in parts] == [10_000]  # p_i = T b_i - 1, with T = 1
    parts = parts_for(10_000, [(a, 1.5), (b, 1.0), (c, 1.0)])
    spent = times(parts, [(a, 1.5), (b, 1.0), (c, 1.0)], 10_000)
    assert max(spent) - min(spent) < 0.001
    for bad in ((0, [(a, 1)]), (5, [])):
        with pytest.raises(LocalProtocolError):
            parts_for(*bad)


def test_check_plan():
    a, b = peers_of(2)
    good = [(a, cid_of(0), 1), (b, cid_of(1), 1)]
    assert check_plan(make_plan(good, [a, b], 1000, 10, "int8")) is None

    def fault(contributors, parts, numel=1000):
        return check_plan(make_plan(contributors, [a], numel, 10, "int8", parts=parts))

    assert fault([], (Part(a, 0, 100),))
    assert fault([(a, cid_of(0), 1), (b, cid_of(0), 1)], (Part(a, 0, 100),))
    assert fault([(a, cid_of(0), 1), (a, cid_of(1), 1)], (Part(a, 0, 100),))
    for parts in (
        (Part(a, 0, 99),),
        (Part(a, 1, 100),),
        (Part(a, 0, 101),),
        (Part(a, 0, 50), Part(b, 40, 100)),
        (Part(a, 0, 0), Part(b, 0, 100)),
    ):
        assert fault(good, parts)


paces = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(1, 10**12)), st.one_of(st.just(0), st.integers(1, 10**12))
    ),
    min_size=1,
    max_size=20,
)


@given(paces, st.integers(1, 2_000))
def test_announced_paces_give_parts_that_cover_everything(announced, chunks):
    rates = comparable(announced)
    assert len(rates) == len(announced)
    assert all(rate > 0 for rate in rates)
    said = [min((way for way in pace if way), default=0) for pace in announced]
    for one, rate in zip(said, rates, strict=True):
        for other, theirs in zip(said, rates, strict=True):
            assert not (0 < one <= other and rate > theirs)  # who says more is not taken for less
            if one > 0 and other > SAME * one:
                assert theirs > rate
    peers = [(f"p{index}", rate) for index, rate in enumerate(rates)]
    parts = parts_for(chunks, peers)
    assert [part.first for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == chunks


@given(
    st.integers(10_000, 10**9),
    st.lists(st.floats(1.0, SAME), min_size=1, max_size=12),
    st.integers(1, 2_000),
)
def test_members_that_are_alike_have_equal_parts(slowest, factors, chunks):
    announced = [(slowest, 0), *((int(slowest * factor), 0) for factor in factors)]
    assert len(set(comparable(announced))) == 1
    even = parts_for(chunks, [(f"p{index}", 1.0) for index in range(len(announced))])
    assert (
        parts_for(chunks, [(f"p{index}", rate) for index, rate in enumerate(comparable(announced))])
        == even
    )


def test_known_paces():
    assert comparable([(0, 0), (0, 0)]) == [1.0, 1.0]
    assert comparable([(12_000_000, 0), (0, 0), (1_200_000, 0), (11_000_000, 5_000_000)]) == [
        12e6,
        5e6,
        1.2e6,
        5e6,
    ]
    assert comparable([(100, 0), (140, 0), (40, 200), (0, 0)]) == [120.0, 120.0, 40.0, 120.0]
    shares = parts_for(
        100, list(zip("abcd", comparable([(100, 0), (95, 0), (10, 0), (110, 0)]), strict=True))
    )
    assert [(part.owner, part.stop - part.first) for part in shares] == [
        ("a", 34),
        ("b", 33),
        ("d", 33),
    ]


def test_places_that_cannot_be_are_no_plan() -> None:
    assert Topology("three-level", (0, 0, 1), (0, 1, 2)).fault(3) is None
    assert Topology("three-level", (0, 0, 1)).fault(3) is None
    assert Topology("ring", (0, 1)).fault(3) == "2 groups of 3 contributors"
    assert Topology("three-level", (0, 0, 1), (0, 1)).fault(3) == "2 hosts of 3 contributors"
    assert Topology("two-level", (0, 0, 1), (0, 1, 2)).fault(3) == "hosts in a two-level plan"
    assert Topology("three-level", (0, 0, 1), (0, 1, 1)).fault(3) == "a host at several sites"
    assert Topology("three-level", (), (0, 1, 1)).fault(3) == "a host at several sites"


def test_a_label_says_a_site_and_with_three_levels_a_host() -> None:
    labels = ["lab/1", "lab/2", "lab/1", "lab", "", "home/1", "", "lab"]
    members = [Member(PeerId(f"p{number}"), 0) for number in range(len(labels))]
    offers = [Contributor(member, bytes([i]) * 16, 1) for i, member in enumerate(members)]
    ready = {
        member: Ready(bytes(32), None, 0, False, site=label)
        for member, label in zip(members, labels, strict=True)
        if label
    }
    sites, hosts = (0, 0, 0, 0, 1, 2, 3, 0), (0, 1, 0, 2, 3, 4, 5, 6)
    found = topology_of("three-level", offers, ready, set())
    assert found == Topology("three-level", sites, hosts)
    assert found.fault(len(offers)) is None
    assert topology_of("two-level", offers, ready, set()) == Topology("two-level", sites)
    assert topology_of("ring", offers, ready, set()) == Topology("ring", sites)
    apart = topology_of("three-level", offers, ready, {PeerId("p2")})
    assert apart.groups[2] not in {*apart.groups[:2], *apart.groups[3:]}


def test_an_entry_without_hosts_has_the_hash_it_had_before_there_were_any() -> None:
    """Else the logs of runs that have begun would continue nothing."""
    entry = Entry(
        "main/r",
        3,
        b"b" * 32,
        b"r" * 32,
        (),
        (Part(PeerId("p0"), 0, 2),),
        (b"d" * 32,),
        8,
        4,
        "int8",
        "mean",
        (),
        topology=Topology("two-level", (0, 0, 1)),
    )
    before = "c1ca8efd9fe1848ec25a45d8cfd7904fa5f3e5595d0d39f4806141674a2a62a8"
    assert entry.hash().hex() == before
    hosted = Topology("three-level", (0, 0, 1), (0, 1, 2))
    assert hosted.named == ("three-level", (0, 0, 1), (0, 1, 2))

"""Masked sums of buckets, and a robust rule over their means: exact for every drop pattern, closed
below a bucket's threshold, not to be spoiled.
"""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest
import torch
from msgspec import structs
from secure_kit import SECURE, TERMS
from session_table import LAYOUT, Peer, Table

from atoll.collectives.errors import LocalProtocolError, NotEnoughPeersError, RemoteProtocolError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.modes.secure.vectors import least_buckets, threshold_of
from atoll.node.session import events as ev
from atoll.node.session.mode_events import Unmasked
from atoll.security.identity import Identity
from atoll.security.masking import Binding, Buckets, Client, Memory, Ring, Unmasking

PEOPLE = {person.peer: person for person in (Identity(bytes([number]) * 32) for number in range(6))}
ROSTER = tuple(sorted(PEOPLE))
RING = Ring(4, clip=1.0, members=6)
BINDING = Binding(RunId("run"), 3, 0, ROSTER, 4, RING.length, 32)
BUCKETS = Buckets((frozenset(ROSTER[::2]), frozenset(ROSTER[1::2])), least=2)
ROBUST = structs.replace(SECURE, secure=structs.replace(TERMS, buckets=3, rule="median:1"))


def masked() -> tuple[
    dict[PeerId, Client], dict[PeerId, np.ndarray], dict[PeerId, np.ndarray], tuple[dict, dict]
]:
    """All six up to the third step: clients, plain and masked vectors, what was said."""
    clients = {peer: Client(BINDING, PEOPLE[peer], Memory(), Random(peer)) for peer in ROSTER}
    keys = {peer: client.keys() for peer, client in clients.items()}
    deals = {peer: client.deal(keys) for peer, client in clients.items()}
    plain = {
        peer: RING.encode(RING.quantise(np.full(4, number / 8, np.float32), Random(number)), 1)
        for number, peer in enumerate(ROSTER)
    }
    hidden = {peer: words.copy() for peer, words in plain.items()}
    for peer in ROSTER:
        clients[peer].mask(hidden[peer], peer.encode(), deals, BUCKETS)
    return clients, plain, hidden, (keys, deals)


@pytest.mark.parametrize(
    "survivors", [each for count in (4, 5, 6) for each in combinations(ROSTER, count)]
)
def test_sums_of_buckets_are_exact_for_every_drop_pattern(survivors: tuple[PeerId, ...]) -> None:
    """And of a bucket with one vector nothing is revealed: neither share of anybody in it, so
    nobody can unmask it.
    """
    clients, plain, hidden, (keys, deals) = masked()
    consents = {peer: clients[peer].consent(survivors) for peer in survivors}
    unmasking = Unmasking(BINDING, keys, deals, survivors, BUCKETS)
    closed = [index for index in (0, 1) if len(BUCKETS.members[index] & set(survivors)) < 2]
    for peer in survivors:
        reveal = clients[peer].reveal(consents)
        told = {ROSTER[number] for number, _ in (*reveal.seeds, *reveal.pairs)}
        assert told == set(ROSTER) - {
            member for index in closed for member in BUCKETS.members[index]
        }
        assert not {number for number, _ in reveal.seeds} & {number for number, _ in reveal.pairs}
        unmasking.add(peer, reveal)
    assert list(unmasking.open) == [index for index in (0, 1) if index not in closed]
    for index in (0, 1):
        among = [peer for peer in survivors if peer in BUCKETS.members[index]]
        total = np.sum([hidden[peer] for peer in among], axis=0, dtype=np.uint32)
        if index in closed:
            with pytest.raises(NotEnoughPeersError, match="has fewer than 2 vectors"):
                unmasking.unmask(total, bucket=index)
            continue
        unmasking.unmask(total, bucket=index)
        assert (total == np.sum([plain[peer] for peer in among], axis=0, dtype=np.uint32)).all()


def test_shares_of_a_closed_bucket_are_refused_by_name() -> None:
    """A member that thinks of one sum of all would reveal what is to stay hidden: it is not taken."""
    clients, _, _, (keys, deals) = masked()
    survivors = (*ROSTER[::2], ROSTER[1])
    consents = {peer: clients[peer].consent(survivors) for peer in survivors}
    clients[ROSTER[0]]._buckets = Buckets.one(ROSTER)
    reveal = clients[ROSTER[0]].reveal(consents)
    with pytest.raises(RemoteProtocolError, match="other members than it was asked for") as caught:
        Unmasking(BINDING, keys, deals, survivors, BUCKETS).add(ROSTER[0], reveal)
    assert caught.value.peer == ROSTER[0]


def test_buckets_are_of_all_who_dealt_and_equally_large() -> None:
    for count in range(9, 30):
        peers = [PeerId(f"p{number}") for number in range(count)]
        dealt = Buckets.dealt(b"seed", peers, 4, 3)
        assert dealt == Buckets.dealt(b"seed", peers[::-1], 4, 3)
        assert sorted(peer for members in dealt.members for peer in members) == sorted(peers)
        sizes = {len(members) for members in dealt.members}
        assert len(dealt.members) == min(4, count // 3)
        assert min(sizes) >= 3
        assert max(sizes) - min(sizes) <= 1
        assert dealt != Buckets.dealt(b"other", peers, 4, 3)
    clients = masked()[0]
    with pytest.raises(LocalProtocolError, match="each in one"):
        clients[ROSTER[0]]._among(Buckets((frozenset(ROSTER[:3]),), 2), dict.fromkeys(ROSTER))  # type: ignore[arg-type]


def test_thresholds_of_a_round_in_buckets() -> None:
    terms = ROBUST.secure
    assert terms is not None
    assert least_buckets(terms) == 3
    assert [threshold_of(terms, members) for members in (9, 12, 20)] == [9, 9, 14]
    assert least_buckets(TERMS) == 1


def contributed(peers: list[Peer], values: dict[PeerId, float], round_: int) -> None:
    for index, peer in enumerate(peers):
        if peer.node is not None:
            peer.contribute(f"{round_}/{index}", values[peer.name])


def test_a_hostile_site_does_not_move_the_rule_over_buckets() -> None:
    """Nine sites in three buckets, one with values far away: the round is the median of the
    buckets' means, at all sites bit-equal.
    """
    table = Table(9, ROBUST)
    peers = table.all_in()
    values = {peer.name: 0.5 + number / 64 for number, peer in enumerate(peers)}
    values[peers[4].name] = 15.0
    contributed(peers, values, 0)
    table.until(lambda: all(peer.session.completed == 1 for peer in peers))
    told = [next(event for event in peer.heard if isinstance(event, Unmasked)) for peer in peers]
    assert len({event.sums for event in told}) == 1
    sums = told[0].sums
    assert sorted(len(members) for members in sums) == [3, 3, 3]
    assert told[0].threshold == 3
    means = [float(np.mean([values[peer] for peer in members])) for members in sums]
    anchors = [peer.session.replica.anchor[: LAYOUT.numel].clone() for peer in peers]  # type: ignore[union-attr]
    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    assert float(-anchors[0].mean()) == pytest.approx(float(np.median(means)), abs=1e-4)
    assert max(means) > 5
    table.end()


def test_with_too_few_for_three_buckets_the_round_waits() -> None:
    """Eight of nine are left: two buckets of three would do for no median against one liar, so
    nothing is unmasked until the ninth is back.
    """
    table = Table(9, ROBUST)
    peers = table.all_in()
    peers[8].kill()
    values = {peer.name: 0.25 for peer in peers}
    contributed(peers, values, 0)
    table.wait(10.0)
    assert not any(isinstance(event, Unmasked) for peer in peers for event in peer.heard)
    peers[8].start().attach()
    table.until(lambda: peers[8].inside and peers[8].session.machine is not None)
    peers[8].contribute("0/8", 0.25)
    table.until(lambda: all(peer.session.completed >= 1 for peer in peers[:8]))
    table.end()


def test_a_site_that_drops_out_closes_its_bucket_and_the_others_go_on() -> None:
    """Twelve sites in four buckets of three; one dies when its masked vector is due. Its bucket
    stays masked, three are enough for the rule, and the two who were in it are told to train anew:
    what they gave is not given again."""
    settings = structs.replace(SECURE, secure=structs.replace(TERMS, buckets=4, rule="median:1"))
    table = Table(12, settings)
    peers = table.all_in()
    values = {peer.name: 0.125 + number / 64 for number, peer in enumerate(peers)}
    struck: list[PeerId] = []

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: object) -> bool:
        if channel == "record" and not struck:
            struck.append(sender)
            table.world.after(0.0, next(peer for peer in peers if peer.name == sender).kill)
        return sender in struck

    table.network.tap = tap
    contributed(peers, values, 0)
    living = lambda: [peer for peer in peers if peer.name not in struck]  # noqa: E731
    table.until(lambda: bool(struck) and all(peer.session.completed >= 1 for peer in living()))
    first = next(event for peer in living() for event in peer.heard if isinstance(event, Unmasked))
    counted = [peer for peer in living() if any(event.counted for event in peer.rounds())]
    assert {peer.name for peer in counted} == set(first.members)
    assert struck[0] not in first.members
    left_out = [peer for peer in living() if peer.name not in first.members]
    assert [len(members) for members in first.sums] == [3, 3, 3]
    assert len(left_out) == 2
    for peer in left_out:
        (refused,) = [event for event in peer.heard if isinstance(event, ev.ContributionRefused)]
        assert refused.unfit
        assert "a masked vector is never used twice" in refused.reason
    means = [float(np.mean([values[peer] for peer in members])) for members in first.sums]
    anchors = [peer.session.replica.anchor[: LAYOUT.numel].clone() for peer in living()]  # type: ignore[union-attr]
    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    assert float(-anchors[0].mean()) == pytest.approx(float(np.median(means)), abs=1e-4)
    table.end()

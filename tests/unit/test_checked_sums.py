"""Partial sums that a second member adds up, too: one that is not what it should be is not used,
and who is wrong is named; nobody else ever is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from codec_kit import reference
from exchange_kit import (
    Net,
    cid_of,
    make_plan,
    ref_encode,
    ref_result,
    ref_tree_result,
    start,
    vector,
)

from atoll.collectives.digest import chunk_hash
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.exchange import PeerFault, ReductionReport
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.exchange.header import ACCOUNT, PART, PARTIAL, Header
from atoll.collectives.group import Plan, Topology
from atoll.collectives.identifiers import HASH_BYTES, PeerId
from atoll.collectives.messages import Disputed
from atoll.collectives.reduce import MEAN
from atoll.collectives.trees import trees_of

NUMEL, CHUNK = 640, 64
SITES = (0, 0, 0, 1, 1, 1)


@dataclass
class Lab:
    """Two sites of three; the first member owns everything, so one of the other site's is head, one
    its witness, one neither.
    """

    codec: str = "fp32"
    net: Net = field(default_factory=lambda: Net(6, seed=5))

    def __post_init__(self) -> None:
        self.vectors = {cid_of(i): vector(NUMEL, i) for i in range(6)}
        self.offers = [(peer, cid_of(i), 2 + i) for i, peer in enumerate(self.net.peers)]
        self.plan = self.planned(0, Topology("checked", SITES))
        (self.check,) = trees_of(self.plan, MEAN)[0].checks()
        self.owner, self.head, self.witness = (
            self.net.peers[0],
            self.check.partial.peer,
            self.check.witness,
        )
        (self.third,) = {*self.net.peers[3:]} - {self.head, self.witness}

    def planned(self, revision: int, topology: Topology) -> Plan:
        return make_plan(
            self.offers,
            [self.net.peers[0]],
            NUMEL,
            CHUNK,
            self.codec,
            revision=revision,
            topology=topology,
        )

    def forge(self, change: Callable[[PeerId, PeerId, Header, bytes], bytes]) -> None:
        deliver = self.net.deliver

        def forged(a: PeerId, b: PeerId, header: bytes, payload: bytes) -> None:
            record = wire_header.parse(header, a)
            payload = change(a, b, record, payload)
            deliver(
                a,
                b,
                wire_header.pack(record.kind, len(payload), record.chunk, record.key, record.sub),
                payload,
            )

        self.net.deliver = forged

    def truth(self, chunk: int) -> bytes:
        """What head and witness should make of a chunk."""
        of = self.check.of
        rows = [
            ref_encode(
                self.codec, self.vectors[term.cid][CHUNK * chunk : CHUNK * (chunk + 1)].numpy()
            )
            for term in of.terms
        ]
        return reference.mean(
            self.codec, rows, [*of.factors.multipliers], of.factors.divisor, CHUNK
        )

    def run(self) -> None:
        """The checked plan, which does not come to its end."""
        start(self.net, self.plan, self.vectors)
        self.net.run()
        self.net.repair(self.plan)
        self.net.run()
        assert not any(self.net.results(peer, self.plan) for peer in self.net.peers)

    def report(self) -> Disputed | None:
        """What the owner said last of itself."""
        return self.net.of(self.owner, ReductionReport)[-1].disputed

    def disputed(self) -> Disputed | None:
        """What the owner reported last."""
        self.net.nodes[self.owner].report(self.plan.plan_id)
        return self.net.of(self.owner, ReductionReport)[-1].disputed

    def by_star(self) -> Plan:
        """Everybody carries out a plan without partial sums."""
        star = self.planned(1, Topology())
        for peer in self.net.peers:
            self.net.nodes[peer].execute(star, self.net.peers)
        for _ in range(3):
            self.net.run()
            self.net.repair(star)
        want = ref_result(star, self.vectors)
        assert all(bytes(self.net.results(peer, star)[0].data) == want for peer in self.net.peers)
        return star

    def named(self) -> set[PeerId]:
        return {fault.peer for peer in self.net.peers for fault in self.net.of(peer, PeerFault)}


def values(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload, np.float32).copy()


def one_element(lab: Lab, chunk: int, payload: bytes) -> bytes:
    found = values(payload)
    found[7] = np.nextafter(found[7], np.float32(np.inf))
    return found.tobytes()


def scaled(lab: Lab, chunk: int, payload: bytes) -> bytes:
    return (values(payload) * np.float32(1.5)).tobytes()


def zeros(lab: Lab, chunk: int, payload: bytes) -> bytes:
    return bytes(len(payload))


def left_out(lab: Lab, chunk: int, payload: bytes) -> bytes:
    of = lab.check.of
    rows = [
        (m, lab.vectors[t.cid][CHUNK * chunk : CHUNK * (chunk + 1)])
        for m, t in zip(of.factors.multipliers, of.terms, strict=True)
    ]
    return (sum(m * row for m, row in rows[1:]) / of.factors.divisor).numpy().tobytes()


LIES = [one_element, scaled, zeros, left_out]


AT = 4
"""The chunk that is lied about."""


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("account", ["of the lie", "of the truth"])
def test_a_head_that_states_another_sum_is_named_and_its_sum_is_not_used(lie, account: str) -> None:
    lab = Lab()
    stated = lie(lab, AT, lab.truth(AT))
    assert stated != lab.truth(AT)

    def change(a: PeerId, b: PeerId, record: Header, payload: bytes) -> bytes:
        if (a, record.chunk, record.kind) == (lab.head, AT, PARTIAL):
            assert payload == lab.truth(AT)
            return stated
        if (a, record.chunk, record.kind) == (lab.head, AT, ACCOUNT) and account == "of the lie":
            return chunk_hash(stated) + payload[HASH_BYTES:]
        return payload

    lab.forge(change)
    lab.run()
    assert lab.disputed() == Disputed(lab.plan.plan_id, AT, lab.head, lab.witness)
    lab.by_star()
    assert lab.named() == {lab.head}
    assert lab.report() == Disputed(lab.plan.plan_id, AT, lab.head, lab.witness, (lab.head,))


def test_a_witness_that_doubts_a_true_sum_is_named_and_the_head_is_not() -> None:
    lab = Lab()
    lab.forge(
        lambda a, b, record, payload: (
            bytes(32) + payload[32:] if (a, record.kind) == (lab.witness, ACCOUNT) else payload
        )
    )
    lab.run()
    assert lab.disputed() == Disputed(lab.plan.plan_id, 0, lab.head, lab.witness)
    lab.by_star()
    assert lab.named() == {lab.witness}


@pytest.mark.parametrize("whom", ["head", "witness"])
def test_a_member_that_sends_the_two_different_things_gets_nobody_named(whom: str) -> None:
    """What it sends the owner itself is what counts then."""
    lab = Lab()
    receiver = lab.head if whom == "head" else lab.witness
    lab.forge(
        lambda a, b, record, payload: (
            one_element(lab, 0, payload)
            if (a, b, record.kind) == (lab.third, receiver, PART)
            else payload
        )
    )
    lab.run()
    assert lab.disputed() == Disputed(lab.plan.plan_id, 0, lab.head, lab.witness)
    lab.by_star()
    assert lab.named() == set()
    assert lab.report() == Disputed(lab.plan.plan_id, 0, lab.head, lab.witness)


def test_a_head_that_says_it_was_given_something_else_is_not_believed_and_not_named() -> None:
    """It might be so: its sum is not used, and it adds up for nobody for a while (`APART_ROUNDS`)."""
    lab = Lab()

    def change(a: PeerId, b: PeerId, record: Header, payload: bytes) -> bytes:
        if a == lab.head and record.kind == PARTIAL:
            return scaled(lab, record.chunk, payload)
        if a == lab.head and record.kind == ACCOUNT:
            return (
                chunk_hash(scaled(lab, record.chunk, lab.truth(record.chunk)))
                + bytes(32)
                + payload[64:]
            )
        return payload

    lab.forge(change)
    lab.run()
    lab.by_star()
    assert lab.named() == set()


def test_an_account_over_other_terms_in_number_names_its_giver() -> None:
    lab = Lab()
    lab.forge(
        lambda a, b, record, payload: (
            payload[:-32] if (a, record.kind) == (lab.head, ACCOUNT) else payload
        )
    )
    lab.run()
    lab.by_star()
    assert lab.named() == {lab.head}


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("seed", range(4))
def test_honest_members_never_disagree(codec: str, seed: int) -> None:
    """Whatever is lost on the way, and whoever's lane breaks."""
    lab = Lab(codec, Net(6, seed=seed, loss=0.2, eager=bool(seed % 2)))
    start(lab.net, lab.plan, lab.vectors)
    lab.net.run(limit=60)
    lab.net.cut(lab.witness, lab.owner)
    lab.net.cut(lab.third, lab.witness)
    for _ in range(40):
        lab.net.run()
        lab.net.repair(lab.plan)
    want = ref_tree_result(lab.plan, lab.vectors)
    assert all(bytes(lab.net.results(peer, lab.plan)[0].data) == want for peer in lab.net.peers)
    assert lab.disputed() is None
    assert lab.named() == set()


def test_every_head_has_a_witness_of_its_site_which_another_entry_before_would_have_made_another() -> (
    None
):
    lab, drawn = Lab(), set[PeerId]()
    for number in range(40):
        (check,) = trees_of(msgspec.structs.replace(lab.plan, base=bytes([number]) * 32), MEAN)[
            0
        ].checks()
        assert check.witness in {*lab.net.peers[3:]} - {check.partial.peer}
        drawn.add(check.witness)
    assert len(drawn) == 2
    alone = lab.planned(0, Topology("checked", (0, 0, 0, 1, 2, 2)))
    assert [check.partial.peer for check in trees_of(alone, MEAN)[0].checks()] == [
        lab.net.peers[4]
    ]  # who is alone adds up for nobody


def test_what_is_no_account_is_refused_and_none_takes_more_room_than_an_honest_one() -> None:
    lab = Lab()
    node, slot = lab.net.nodes[lab.owner], wire_header.slot_id(lab.plan.log, 1)
    node.open_round(lab.plan.log, 1, lab.net.peers, NUMEL, CHUNK, "fp32")
    key = wire_header.partial_key(slot, lab.plan.plan_id)

    def offer(length: int, chunk: int, name: bytes = b"n" * 16) -> memoryview | None:
        return node.destination(lab.third, wire_header.pack(ACCOUNT, length, chunk, key, name))

    for length, chunk in (
        (33, 0),
        (0, 0),
        (32, 10),
        (32 * 8, 0),
    ):  # the last is of more terms than there are members
        with pytest.raises(RemoteProtocolError, match="an account of"):
            offer(length, chunk)
    for number in range(40):
        name, chunk = bytes([number // 10]) * 16, number % 10
        header = wire_header.pack(ACCOUNT, 64, chunk, key, name)
        view = node.destination(lab.third, header)
        assert (view is not None) == (number < 20)  # head of some parts, witness of others
        if view is not None:
            node.received(lab.third, header)
    node.execute(lab.plan, lab.net.peers)
    with pytest.raises(RemoteProtocolError, match="does not want"):
        offer(32 * 4, 0)

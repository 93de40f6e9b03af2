"""Each part's sum is stated by f + 1 members, where f may lie: who, what it costs, and what two
different statements prove.
"""

from __future__ import annotations

import msgspec
import pytest
from exchange_kit import Net, cid_of, make_plan, peers_of, ref_digests, ref_result, vector
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives import messages as m
from atoll.collectives.digest import chunk_hash, meaning, meaning_preimage, merkle_root
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.exchange import PartGiven, PartReduced
from atoll.collectives.group import Part, Topology
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.modes.byzantine.missums import (
    Refuted,
    SumStatement,
    dispute,
    disputed_parts,
    owned_by_others,
    refuted,
)
from atoll.collectives.modes.byzantine.signed import account_payload, given_payload, receipts_digest
from atoll.collectives.witnesses import stated_by
from atoll.node.modes.byzantine import MISSUMMED, UNFOUNDED, missummed, unfounded
from atoll.node.run.evidence import WHAT, accused, check
from atoll.node.run.proof import twice
from atoll.node.service.ports import DOMAIN
from atoll.security.identity import Identity, verify

NUMEL, CHUNK = 4_000, 100


def plan_of(n: int, owners: int | None = None, chunk: int = CHUNK):
    peers = peers_of(n)
    return make_plan(
        [(peer, cid_of(at), 1) for at, peer in enumerate(peers)],
        peers[:owners],
        NUMEL,
        chunk,
        "int8",
    )


@given(st.integers(4, 12), st.integers(0, 3), st.integers(0, 9))
def test_each_part_has_as_many_witnesses_as_may_lie_and_each_owner_sees_as_many_parts(n, f, round_):
    plan = msgspec.structs.replace(plan_of(n), round=round_)
    found = stated_by(plan, f)
    assert [peers[0] for peers in found] == [part.owner for part in plan.parts]
    assert {len(set(peers)) for peers in found} == {f + 1}
    seen = [peer for peers in found for peer in peers[1:]]
    assert {seen.count(part.owner) for part in plan.parts} == {f}


def test_witnesses_own_parts_and_change_with_the_round_and_the_entry_before():
    plan = plan_of(9, owners=5)
    owners = {part.owner for part in plan.parts}
    drawn = [
        stated_by(msgspec.structs.replace(plan, round=at, base=bytes([at]) * 32), 1)
        for at in range(20)
    ]
    assert all(peer in owners for found in drawn for peers in found for peer in peers)
    assert {found[0][1] for found in drawn} == owners - {plan.parts[0].owner}
    # nothing else of a plan changes who they are: not its ballot, nor its revision
    other = msgspec.structs.replace(plan, ballot=3, revision=7)
    assert stated_by(other, 1) == stated_by(plan, 1)
    tree = msgspec.structs.replace(plan, topology=Topology("ring"))
    assert stated_by(tree, 1) == tuple((part.owner,) for part in plan.parts)


def test_of_few_owners_contributors_are_witnesses_and_of_few_contributors_all():
    one = plan_of(4, owners=1)
    (peers,) = stated_by(one, 2)
    assert peers[0] == one.parts[0].owner
    assert len(set(peers)) == 3
    alone = msgspec.structs.replace(one, contributors=one.contributors[:1])
    assert stated_by(alone, 2) == ((one.parts[0].owner,),)


def played(n: int, f: int, codec: str = "int8", reducer: str = "mean"):
    """The plan, what came of it everywhere, and its bytes on all links."""
    net, plan = Net(n, seed=n), plan_of(n)
    plan = msgspec.structs.replace(plan, codec=codec, reducer=reducer)
    vectors = {cid_of(at): vector(NUMEL, at) for at in range(n)}
    for peer in net.peers:
        node = net.nodes[peer]
        node.open_round(plan.log, 1, net.peers, NUMEL, CHUNK, codec, witnesses=f)
        for c in plan.contributors:
            if c.member.peer == peer:
                node.freeze(plan.log, 1, c.cid, vectors[c.cid])
        node.execute(plan, net.peers)
    net.run()
    return net, plan, vectors


@pytest.mark.parametrize(("n", "f"), [(4, 1), (5, 1), (7, 2)])
@pytest.mark.parametrize("codec", ["fp32", "int8", "bf16"])
def test_owner_and_witnesses_state_the_same_sum_of_the_same_inputs(n, f, codec):
    net, plan, vectors = played(n, f, codec)
    want = ref_result(plan, vectors)
    digests = ref_digests(plan, want)
    said: dict[int, list[tuple[PeerId, bytes, tuple[bytes, ...]]]] = {}
    for peer in net.peers:
        (done,) = net.results(peer, plan)
        assert bytes(done.data) == want
        for event in net.of(peer, PartReduced):
            said.setdefault(event.part, []).append((peer, event.digest, event.inputs))
    for index, peers in enumerate(stated_by(plan, f)):
        assert {peer for peer, _, _ in said[index]} == set(peers)
        assert {digest for _, digest, _ in said[index]} == {digests[index]}
        assert len({inputs for *_, inputs in said[index]}) == 1
        assert [len(inputs) for *_, inputs in said[index]] == [n] * (f + 1)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_each_contributor_knows_the_root_of_what_each_part_was_sent(codec):
    net, plan, _ = played(5, 1, codec)
    inputs = {event.part: event.inputs for peer in net.peers for event in net.of(peer, PartReduced)}
    for at, c in enumerate(plan.contributors):
        given = [(event.part, event.root) for event in net.of(c.member.peer, PartGiven)]
        assert sorted(given) == [(part, roots[at]) for part, roots in sorted(inputs.items())]
    plain, *_ = played(5, 0, codec)
    assert not any(list(plain.of(peer, PartGiven)) for peer in plain.peers)


def test_under_another_plan_it_is_known_without_being_sent_again():
    net, plan, _ = played(5, 1)
    first, second, *rest = plan.parts
    parts = (
        Part(second.owner, first.first, first.stop),
        Part(first.owner, second.first, second.stop),
        *rest,
    )
    other = msgspec.structs.replace(plan, revision=1, parts=parts)
    for peer in net.peers:
        net.nodes[peer].execute(other, net.peers)
    net.run()
    for c in plan.contributors:
        of = {plan.plan_id: dict[int, bytes](), other.plan_id: dict[int, bytes]()}
        for event in net.of(c.member.peer, PartGiven):
            of[event.plan_id][event.part] = event.root
        assert of[plan.plan_id] == of[other.plan_id]
        assert len(of[other.plan_id]) == len(plan.parts)


def test_inputs_are_the_merkle_roots_of_what_was_contributed_to_the_part():
    net, plan, vectors = played(4, 1, "fp32")
    (event,) = (e for e in net.of(plan.parts[0].owner, PartReduced) if e.part == 0)
    part = plan.parts[0]
    for at in range(4):
        flat = vectors[cid_of(at)]
        hashes = [
            chunk_hash(flat[chunk * CHUNK : (chunk + 1) * CHUNK].numpy().tobytes())
            for chunk in range(part.first, part.stop)
        ]
        assert event.inputs[at] == merkle_root(hashes)


@pytest.mark.parametrize(("n", "f", "most"), [(5, 1, 1.6), (7, 2, 2.01), (10, 3, 2.51)])
def test_what_witnesses_cost_in_bytes(n, f, most):
    def sent(witnesses: int) -> int:
        net, plan, _ = played(n, witnesses)
        return sum(net.results(peer, plan)[0].bytes_received for peer in net.peers)

    # contributions go to f + 1, results are sent once: 1 + f / 2 times as much
    assert 1 + f / 2 - 0.1 < sent(f) / sent(0) <= most


# ---- different sums
A, B, C, D = (PeerId(f"peer-{at}") for at in range(4))
INPUTS, OTHERS = (b"i" * 32, b"j" * 32), (b"i" * 32, b"k" * 32)
RECEIPTS = (b"r" * 64, b"t" * 64)


def said(peer: PeerId, of: bytes, sums: dict[int, bytes], inputs=INPUTS) -> SumStatement:
    parts = tuple((at, digest * 32) for at, digest in sorted(sums.items()))
    account = m.Account((inputs,) * len(parts), (RECEIPTS,) * len(parts), b"s" * 64)
    return SumStatement(peer, of, parts, account)


def test_who_is_in_dispute():
    plan = msgspec.structs.replace(
        plan_of(4), parts=(Part(A, 0, 20), Part(B, 20, 40)), contributors=plan_of(2).contributors
    )
    of, by = meaning(plan), ((A, B), (B, A))
    here = (b"x" * 32, b"y" * 32)
    right = said(A, of, {0: b"x", 1: b"y"})
    assert dispute(plan, here, [right, said(B, of, {0: b"x", 1: b"y"})], by) is None
    assert dispute(plan, here, [right], by) is None  # who says nothing is late, no more
    assert dispute(plan, here, [right, said(B, of, {0: b"z", 1: b"y"})], by) == ({A, B}, set())
    assert disputed_parts(of, here, [right, said(B, of, {0: b"z", 1: b"y", 7: b"z"})]) == {0}
    assert disputed_parts(of, here, [right, said(B, b"o" * 32, {0: b"z", 1: b"z"})]) == set()
    # an owner that states another sum than it has sent is alone in it
    assert dispute(plan, here, [right, said(B, of, {0: b"x", 1: b"z"})], by) == ({B}, set())
    # what is no statement of this plan, or of nobody who is asked, disputes nothing
    assert dispute(plan, here, [right, said(B, b"o" * 32, {0: b"z", 1: b"z"})], by) is None
    assert dispute(plan, here, [right, said(C, of, {0: b"z", 1: b"z"})], by) is None
    assert dispute(plan, here, [right, said(B, of, {7: b"z"})], by) is None


def test_the_parts_of_members_in_dispute_go_to_the_others_in_fair_shares():
    a, b, c, d = peers_of(4)
    plan = msgspec.structs.replace(
        plan_of(4), parts=(Part(a, 0, 2), Part(b, 2, 3), Part(c, 3, 5), Part(d, 5, 6))
    )
    assert owned_by_others(plan, {c, d}, 1) == (
        Part(a, 0, 2),
        Part(b, 2, 3),
        Part(b, 3, 5),
        Part(a, 5, 6),
    )
    assert owned_by_others(plan, {b, c, d}, 1) is None  # who would state what it adds up?
    lumps = msgspec.structs.replace(plan, parts=(Part(a, 0, 1), Part(b, 1, 2), Part(c, 2, 8)))
    assert owned_by_others(lumps, {c}, 1) is None


def owned(*shares: tuple[PeerId, int]) -> tuple[Part, ...]:
    parts, first = [], 0
    for peer, size in shares:
        parts.append(Part(peer, first, first + size))
        first += size
    return tuple(parts)


def test_of_parts_in_dispute_the_largest_is_dealt_first():
    a, b, c, d = peers_of(4)
    plan = msgspec.structs.replace(plan_of(4), parts=owned((a, 1), (b, 3), (c, 1), (d, 3)))
    # in the order of the plan a would own 5 of 8, where 4 are fair, and the ranges would be lost
    assert owned_by_others(plan, {c, d}, 1) == owned((a, 1), (b, 3), (b, 1), (a, 3))
    # where that is not enough, the others change parts among themselves, too
    plan = msgspec.structs.replace(plan_of(4), parts=owned((c, 2), (a, 1), (d, 5), (b, 1)))
    assert owned_by_others(plan, {c, d}, 1) == owned((b, 2), (b, 1), (a, 5), (b, 1))


def test_contributors_that_own_nothing_own_parts_in_dispute_where_owners_are_too_few():
    a, b, c, d, e = peers_of(5)
    plan = msgspec.structs.replace(plan_of(5), parts=owned((a, 1), (b, 1), (c, 1)))
    assert owned_by_others(plan, {a, b}, 1) == owned((d, 1), (e, 1), (c, 1))
    assert owned_by_others(plan, {a, b}, 1, slow={d}) == owned((e, 1), (c, 1), (c, 1))
    assert owned_by_others(plan, {a, b}, 1, slow={c, d, e}) == owned((d, 1), (e, 1), (c, 1))


def test_a_part_in_dispute_is_exchanged_where_nobody_can_own_it_besides():
    a, b, c, d = peers_of(4)
    plan = msgspec.structs.replace(plan_of(4), parts=owned((b, 3), (c, 3), (d, 3)))
    assert owned_by_others(plan, {c, d}, 1, slow={a}) is None  # 6 of 9 are too many
    found = owned_by_others(plan, {c, d}, 1, slow={a}, disputed={2})
    assert found == owned((d, 3), (c, 3), (b, 3))
    # both are: one of them can be given to somebody else
    found = owned_by_others(plan, {c, d}, 1, slow={a}, disputed={1, 2})
    assert found == owned((c, 3), (b, 3), (d, 3))
    assert owned_by_others(plan, {b, c, d}, 1, slow={a}, disputed={2}) is None


def test_a_statement_is_refuted_by_one_more_than_may_lie_over_the_same_inputs():
    of = b"m" * 32
    wrong = said(A, of, {3: b"z"})
    voices = [said(B, of, {3: b"x"}), said(C, of, {2: b"q", 3: b"x"}), said(D, of, {3: b"x"})]
    assert refuted([wrong, *voices[:1]], 1) is None
    assert refuted([wrong, *voices[:2]], 1) == Refuted(wrong, 3, tuple(voices[:2]))
    assert refuted([wrong, *voices[:2]], 2) is None
    assert refuted([wrong, *voices], 2) == Refuted(wrong, 3, tuple(voices))
    # nor by one voice twice, by other inputs, of another part, or of another meaning
    assert refuted([wrong, voices[0], voices[0]], 1) is None
    assert refuted([said(A, of, {3: b"z"}, OTHERS), *voices], 1) is None
    assert refuted([said(A, of, {2: b"x"}), *voices], 1) is None
    assert refuted([said(A, b"o" * 32, {3: b"z"}), *voices], 1) is None


RUN = RunId("a" * 26)
LIAR, *HONEST = (Identity(bytes([at]) * 32) for at in range(1, 6))
OF = b"m" * 32


def signed(who: Identity, digest: bytes, inputs=INPUTS, run: str = RUN) -> SumStatement:
    parts, of_parts = ((2, b"q" * 32), (3, digest * 32)), (INPUTS, inputs)
    receipts = (RECEIPTS, RECEIPTS)
    payload = account_payload(run, who.peer, OF, parts, of_parts, receipts_digest(receipts))
    account = m.Account(of_parts, receipts, who.sign(DOMAIN, payload))
    return SumStatement(who.peer, OF, parts, account)


def checked(data: bytes, lying: int = 1, without: Identity | None = None) -> tuple[PeerId, str]:
    members = [who.peer for who in (LIAR, *HONEST) if who is not without]
    return check(
        data,
        RUN,
        lambda peer, payload, signature: verify(peer, DOMAIN, payload, signature),
        HONEST[0].peer,
        (),
        lying,
        [[PeerId("somebody")], members],
    )


def proof(wrong: SumStatement, *others: SumStatement, part: int = 3) -> bytes:
    return missummed(*Refuted(wrong, part, others).proof)


def test_a_wrong_sum_is_proven_offline():
    one, two, three = (signed(who, b"x") for who in HONEST[:3])
    data = proof(signed(LIAR, b"z"), one, two)
    assert accused(data) == LIAR.peer
    assert checked(data) == (LIAR.peer, MISSUMMED)
    assert checked(proof(signed(LIAR, b"z"), one, two, three), 2) == (LIAR.peer, MISSUMMED)


@pytest.mark.parametrize(
    ("data", "lying", "without", "told"),
    [
        (proof(signed(LIAR, b"z"), signed(HONEST[0], b"x")), 1, None, "too few"),
        (proof(signed(LIAR, b"z"), *[signed(HONEST[0], b"x")] * 2), 1, None, "too few"),
        (proof(signed(LIAR, b"z"), *(signed(h, b"x") for h in HONEST[:2])), 0, None, "too few"),
        (proof(signed(LIAR, b"z"), *(signed(h, b"x") for h in HONEST[:2])), 2, None, "too few"),
        (
            proof(signed(LIAR, b"z"), *(signed(h, b"x") for h in HONEST[:2])),
            1,
            HONEST[1],
            "no members",
        ),
        (proof(signed(LIAR, b"z"), signed(LIAR, b"x"), signed(HONEST[0], b"x")), 1, None, "few"),
        (proof(signed(LIAR, b"x"), *(signed(h, b"x") for h in HONEST[:2])), 1, None, "may both"),
        (
            proof(signed(LIAR, b"z", OTHERS), *(signed(h, b"x") for h in HONEST[:2])),
            1,
            None,
            "may both",
        ),
        (
            proof(signed(LIAR, b"z"), signed(HONEST[0], b"x"), signed(HONEST[1], b"y")),
            1,
            None,
            "no one part",
        ),
        (
            proof(signed(LIAR, b"z"), *(signed(h, b"x") for h in HONEST[:2]), part=7),
            1,
            None,
            "no one part",
        ),
        (
            proof(signed(LIAR, b"z", run="b" * 26), *(signed(h, b"x") for h in HONEST[:2])),
            1,
            None,
            "has not signed",
        ),
        (
            proof(
                signed(LIAR, b"z")._replace(peer=HONEST[2].peer),
                *(signed(h, b"x") for h in HONEST[:2]),
            ),
            1,
            None,
            "has not signed",
        ),
    ],
)
def test_what_is_no_proof_of_a_wrong_sum(data, lying, without, told):
    with pytest.raises(RemoteProtocolError, match=told) as caught:
        checked(data, lying, without)
    assert caught.value.peer == HONEST[0].peer


# ---- inputs that nobody contributed, and two contributions of one id
def founded(
    stater: Identity = LIAR,
    *,
    signs: tuple[Identity, Identity] | None = None,
    root: bytes = b"i" * 32,
    log: str = "main/0",
    run: str = RUN,
    rows: int = 2,
    index: int = 1,
) -> bytes:
    """What ``stater`` has stated of the part 1 of a plan of two honest contributors; ``signs``: who
    has signed its inputs, in truth both. ``root``: what the first has signed, where b"i" * 32 is
    stated."""
    givers = HONEST[:2]
    plan = make_plan(
        [(who.peer, cid_of(at), 1) for at, who in enumerate(givers)],
        [who.peer for who in givers],
        NUMEL,
        CHUNK,
        "int8",
    )
    plan = msgspec.structs.replace(plan, log=log)
    part, inputs = plan.parts[1], (b"i" * 32, b"j" * 32)
    receipts = tuple(
        who.sign(
            DOMAIN,
            given_payload(
                RUN, plan.log, plan.round, plan.base, c.cid, part.first, part.stop, signed_root
            ),
        )
        for who, c, signed_root in zip(
            signs or givers, plan.contributors, (root, b"j" * 32), strict=True
        )
    )
    parts, of = ((1, b"d" * 32),), meaning(plan)
    account = (inputs[:rows],), (receipts[:rows],)
    payload = account_payload(run, stater.peer, of, parts, account[0], receipts_digest(account[1]))
    said = m.Account(*account, stater.sign(DOMAIN, payload))
    return unfounded(stater.peer, parts, said, meaning_preimage(plan), index)


@pytest.mark.parametrize(
    "data",
    [
        founded(root=b"x" * 32),  # the first has signed another thing
        founded(signs=(HONEST[1], HONEST[1])),  # or another has signed it
        founded(signs=(LIAR, HONEST[1])),
        founded(rows=1),  # or an input is not shown at all
    ],
)
def test_who_states_inputs_that_nobody_contributed_is_proven_to_lie(data):
    assert accused(data) == LIAR.peer
    assert checked(data) == (LIAR.peer, UNFOUNDED)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (founded(), "of a sum of what was contributed"),
        (founded(root=b"x" * 32, run="b" * 26), "has not signed"),
        (founded(root=b"x" * 32, log="op/1"), "not of a log of this run"),
        (founded(root=b"x" * 32, index=0), "malformed"),
        (founded(root=b"x" * 32)[:-1] + b"?", "has not signed"),
    ],
)
def test_what_is_no_proof_of_inputs_that_nobody_contributed(data, told):
    with pytest.raises(RemoteProtocolError, match=told):
        checked(data)


def test_two_things_under_one_id_are_proven_and_of_two_ids_or_parts_are_none():
    def given_by(who: Identity, root: bytes, cid: int = 0, stop: int = 4) -> tuple[bytes, bytes]:
        payload = given_payload(RUN, "main/0", 3, b"b" * 32, cid_of(cid), 0, stop, root * 32)
        return payload, who.sign(DOMAIN, payload)

    data = twice(LIAR.peer, given_by(LIAR, b"x"), given_by(LIAR, b"y")).encode()
    assert checked(data) == (LIAR.peer, WHAT["atoll/given/1"])
    for other in (given_by(LIAR, b"y", cid=1), given_by(LIAR, b"y", stop=5)):
        with pytest.raises(RemoteProtocolError, match="one slot"):
            checked(twice(LIAR.peer, given_by(LIAR, b"x"), other).encode())

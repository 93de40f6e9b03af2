"""What one member makes of the messages of liars, lie by lie: refused in the name of whoever said
it, proved where it can be, without effect.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.rounds.lying_plants import DEAR_PLANTS
from lying_kit import Scene, reasons

from atoll.collectives import messages as m
from atoll.collectives.digest import chunk_hash, meaning, part_digest, part_meaning
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.group import (
    LAST_BALLOT,
    NO_READING,
    Certified,
    Contributor,
    Entry,
    Member,
    Part,
    Vote,
    is_quorum,
)
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.modes.byzantine.acceptor import FAULTS, ByzantineAcceptor
from atoll.collectives.modes.byzantine.judge import Judge
from atoll.collectives.modes.byzantine.signed import Kind, reduced_payload, slot_payload
from atoll.collectives.reach import reach
from atoll.collectives.round import check_log, vote_payload
from atoll.node.run.evidence import RELABELLED, Relabelled, accused, check
from atoll.node.run.proof import Twice, twice
from atoll.node.service.ports import DOMAIN
from atoll.node.session.events import Equivocated
from atoll.node.session.serving import chunking_of
from atoll.node.simulation.process import sign_as, verify_as
from atoll.node.storage.journal import FileJournal
from atoll.security.identity import verify
from atoll.security.key_file import load_or_create


@pytest.fixture
def scene() -> Scene:
    return Scene()


def proves(event: Equivocated) -> tuple[PeerId, str, set[bytes]]:
    """Whom the evidence is against, of what kind, and the two hashes that were signed."""
    _, peer, *both = msgspec.msgpack.decode(event.evidence)
    fields = [msgspec.msgpack.decode(payload) for payload in both[::2]]
    assert fields[0][:-1] == fields[1][:-1]
    assert all(
        verify_as(peer, payload, signature)
        for payload, signature in zip(both[::2], both[1::2], strict=True)
    )
    return peer, fields[0][0], {fields[0][-1], fields[1][-1]}


def test_an_honest_proposal_is_echoed_and_voted_for_when_a_quorum_has_echoed(scene: Scene) -> None:
    entry, owner = scene.entry(), scene.order[0]
    assert scene.hear(owner, scene.propose(entry)) == []
    assert len(scene.said(m.Echo)) == 4
    assert scene.machine.journal.echoed == (0, entry)
    for who in scene.others[:2]:
        scene.hear(who, scene.echo(who, 0, entry.hash()))
        assert not scene.said(m.Accepted), "three of five echoes are a majority, and no quorum"
    scene.hear(scene.others[2], scene.echo(scene.others[2], 0, entry.hash()))
    assert len(scene.said(m.Accepted)) == 4
    assert scene.machine.journal.accepted == (0, entry)
    assert len(scene.machine.journal.proof) == 4


def test_bytes_of_a_plan_are_no_bytes_of_an_entry_with_other_contributors(scene: Scene) -> None:
    machine, (a, b, c, _) = scene.machine, scene.others
    three = tuple(Contributor(who, who.peer.encode() * 8, 3) for who in sorted((a, b, c)))
    plan, digests = scene.plan(three), (b"d" * 32,)
    machine.on_result(scene.swarm.world.now, plan, digests)
    entry = scene.entry(contributors=three, parts=plan.parts, part_digests=digests)
    assert machine.has_bytes(entry)
    heavier = (msgspec.structs.replace(three[0], weight=4), *three[1:])
    for said in (three[1:], (*three[:2],), heavier, three[::-1]):
        assert not machine.has_bytes(msgspec.structs.replace(entry, contributors=said))
    owner = msgspec.structs.replace(plan.parts[0], owner=a.peer)
    assert machine.has_bytes(msgspec.structs.replace(entry, parts=(owner,))), "the bytes are one's"


def test_a_part_that_its_owner_has_not_signed_is_not_echoed(scene: Scene) -> None:
    machine, (a, b, c, _) = scene.machine, scene.others
    claims = tuple(scene.claim(who, cid=who.peer.encode() * 8, weight=3) for who in sorted((a, b)))
    two = tuple(Contributor(who, claim.cid, claim.weight) for who, claim in claims if claim.cid)
    parts, digests = (Part(a.peer, 0, 1), Part(c.peer, 1, 3)), (b"d" * 32, b"e" * 32)
    whole = scene.plan(two).parts[0].stop
    parts = (parts[0], msgspec.structs.replace(parts[1], stop=whole)) if whole > 1 else parts[:1]
    entry = scene.entry(contributors=two, parts=parts, part_digests=digests[: len(parts)])

    def signed(by: PeerId, of: Entry, *said: tuple[int, bytes]) -> tuple[PeerId, bytes]:
        return by, sign_as(by, reduced_payload(machine.run, by, meaning(of), said))

    right = {
        part.owner: signed(part.owner, entry, (at, digests[at]))[1] for at, part in enumerate(parts)
    }
    other = msgspec.structs.replace(entry, contributors=two[:1])
    judge = machine.acceptor.judge  # type: ignore[attr-defined]
    for wrong in (
        {},
        {**right, a.peer: signed(a.peer, other, (0, digests[0]))[1]},
        {**right, a.peer: signed(a.peer, entry, (0, b"x" * 32))[1]},
        {**right, a.peer: signed(b.peer, entry, (0, digests[0]))[1]},
    ):
        body = scene.propose(entry, 0, *claims, reduced=tuple(wrong.items()))
        assert judge.why_not(body, ()) == "parts that their owners have not reduced so"
    body = scene.propose(entry, 0, *claims, reduced=tuple(right.items()))
    assert judge.why_not(body, ()) == ""


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_proposes_bytes_as_another_result_is_proved_to_lie(scene: Scene, when: str) -> None:
    """The bytes may come before the proposal or after it. The proof holds offline, for the liar,
    and for nobody else.
    """
    machine, owner, (a, b, c, _) = scene.machine, scene.order[0], scene.others
    claims = tuple(
        scene.claim(who, cid=who.peer.encode() * 8, weight=3) for who in sorted((a, b, c))
    )
    three = tuple(Contributor(who, claim.cid, claim.weight) for who, claim in claims if claim.cid)
    plan = scene.plan(three)
    data = memoryview(bytearray(b"\x01" * chunking_of(scene.entry()).nbytes))
    hashes = [chunk_hash(view) for view in chunking_of(scene.entry()).views(data)]
    digests = (part_digest(plan, plan.parts[0], hashes),)
    true = scene.entry(contributors=three, parts=plan.parts, part_digests=digests)
    false = msgspec.structs.replace(true, contributors=three[1:])
    machine.open.plan = plan

    def arrive() -> list[object]:
        scene.events.clear()
        scene.session.actions.results[digests] = data
        machine.on_result(scene.swarm.world.now, plan, digests)
        scene.swarm.world.run(until=scene.swarm.world.now + 0.01)
        return [event for event in scene.events if isinstance(event, Equivocated)]

    if when == "before":
        assert arrive() == []
        found = scene.hear(owner, scene.propose(false, 0, *claims))
        scene.swarm.world.run(until=scene.swarm.world.now + 0.01)
        found = [event for event in scene.events if isinstance(event, Equivocated)]
    else:
        assert "have not reduced so" in reasons(scene.hear(owner, scene.propose(false, 0, *claims)))
        found = arrive()
    assert not scene.said(m.Echo)
    ((peer, evidence),) = [(event.peer, event.evidence) for event in found]
    run = RunId(machine.run)
    assert peer == owner.peer
    assert check(evidence, run, verify_as, a.peer) == (owner.peer, RELABELLED)
    assert accused(evidence) == owner.peer
    proof = msgspec.msgpack.decode(evidence, type=Relabelled)
    of, part = part_meaning(true, true.parts[0]), proof.index
    assert (proof.meaning, part) == (of, 0)
    signature = scene.propose(true).signature
    payload = slot_payload("propose", *machine.slot, 0, true.hash())
    for wrong in (
        msgspec.structs.replace(proof, entry=true),
        msgspec.structs.replace(proof, entry=true, payload=payload, signature=signature),
        msgspec.structs.replace(proof, peer=machine.me.peer),
        msgspec.structs.replace(proof, meaning=part_meaning(false, false.parts[0])),
        msgspec.structs.replace(proof, root=b"r" * 32),
        msgspec.structs.replace(proof, index=1),
        msgspec.structs.replace(
            proof, payload=slot_payload("echo", *machine.slot, 0, false.hash())
        ),
    ):
        with pytest.raises(RemoteProtocolError):
            check(msgspec.msgpack.encode(wrong), run, verify_as, a.peer)
    with pytest.raises(RemoteProtocolError):
        check(evidence, RunId("b" * 26), verify_as, a.peer)


@pytest.mark.parametrize(
    "bent",
    [{"base": b"b" * 32}, {"round": 9}, {"part_digests": ()}, {"digests": 2}],
    ids=["base", "round", "no digest", "two digests"],
)
def test_a_proposal_that_proves_nothing_is_refused_and_harms_nobody(
    scene: Scene, bent: dict[str, object]
) -> None:
    """Another name for bytes that are here, in an entry of another slot or with another number of
    digests than parts: no proof can be made of it, and none is tried."""
    machine, owner, (a, b, c, _) = scene.machine, scene.order[0], scene.others
    claims = tuple(
        scene.claim(who, cid=who.peer.encode() * 8, weight=3) for who in sorted((a, b, c))
    )
    three = tuple(Contributor(who, claim.cid, claim.weight) for who, claim in claims if claim.cid)
    plan = scene.plan(three)
    data = memoryview(bytearray(b"\x01" * chunking_of(scene.entry()).nbytes))
    hashes = [chunk_hash(view) for view in chunking_of(scene.entry()).views(data)]
    digest = part_digest(plan, plan.parts[0], hashes)
    false = scene.entry(contributors=three[1:], parts=plan.parts, part_digests=(digest,))
    if "digests" in bent:
        bent = {"part_digests": (digest, digest)}
    machine.open.plan = plan
    scene.session.actions.results[digest,] = data
    scene.hear(owner, scene.propose(msgspec.structs.replace(false, **bent), 0, *claims))
    machine.on_result(scene.swarm.world.now, plan, (digest,))
    scene.swarm.world.run(until=scene.swarm.world.now + 0.01)
    assert machine.open.reduced is not None
    assert not [event for event in scene.events if isinstance(event, Equivocated)]
    assert not scene.said(m.Echo)


def test_a_second_proposal_is_not_echoed_and_proves_a_lie(scene: Scene) -> None:
    owner, one, other = (
        scene.order[0],
        scene.entry(),
        scene.entry(next_config=scene.machine.config[:4]),
    )
    scene.hear(owner, scene.propose(one))
    found = scene.hear(owner, scene.propose(other))
    assert not scene.said(m.Echo)
    (lie,) = found
    assert isinstance(lie, Equivocated)
    assert proves(lie) == (owner.peer, "atoll/propose/2", {one.hash(), other.hash()})
    assert owner.peer in scene.machine.caught
    assert scene.machine.silent(owner)


def test_a_proposal_that_others_were_told_comes_out_by_their_echoes(scene: Scene) -> None:
    owner, one, other = (
        scene.order[0],
        scene.entry(),
        scene.entry(next_config=scene.machine.config[:4]),
    )
    scene.hear(owner, scene.propose(one))
    teller = next(who for who in scene.others if who != owner)
    (lie,) = scene.hear(teller, scene.echo(teller, 0, other.hash(), scene.propose(other).signature))
    assert isinstance(lie, Equivocated)
    assert proves(lie)[0] == owner.peer
    assert "not" in reasons(scene.hear(teller, scene.echo(teller, 0, b"z" * 32, b"?" * 32)))


@pytest.mark.parametrize("kind", ["echo", "vote"])
def test_two_echoes_or_votes_of_one_ballot_prove_a_lie(scene: Scene, kind: str) -> None:
    who = scene.others[0]

    def said(digest: bytes) -> m.Body:
        return (
            scene.echo(who, 0, digest)
            if kind == "echo"
            else m.Accepted(0, digest, sign_as(who.peer, vote_payload(*scene.slot, 0, digest)))
        )

    assert scene.hear(who, said(b"1" * 32)) == []
    (lie,) = scene.hear(who, said(b"2" * 32))
    assert isinstance(lie, Equivocated)
    assert proves(lie) == (who.peer, f"atoll/{kind}/2", {b"1" * 32, b"2" * 32})


def test_signatures_of_others_do_not_count(scene: Scene) -> None:
    owner, who, entry = scene.order[0], scene.others[0], scene.entry()
    assert "propose" in reasons(scene.hear(owner, scene.propose(entry, signature=b"?" * 32)))
    for other in scene.others[1:]:
        assert "echo" in reasons(scene.hear(who, scene.echo(other, 0, entry.hash())))
        assert "vote" in reasons(
            scene.hear(
                who,
                m.Accepted(
                    0, entry.hash(), sign_as(other.peer, vote_payload(*scene.slot, 0, entry.hash()))
                ),
            )
        )
        assert "claim" in reasons(scene.hear(who, scene.claim(other)[1]))
    assert not scene.machine.open.votes


def test_contributors_that_offered_nothing_of_the_kind(scene: Scene) -> None:
    owner, who = scene.order[0], scene.others[0]
    named = Contributor(who, b"c" * 16, 7)
    right = scene.claim(who, cid=b"c" * 16, weight=7)
    wrong = [
        (),
        (scene.claim(who, cid=b"d" * 16, weight=7),),
        (scene.claim(who, cid=b"c" * 16, weight=8),),
        (scene.claim(owner, cid=b"c" * 16, weight=7),),
    ]
    for claims in wrong:
        fresh = Scene()
        judge = fresh.machine.acceptor
        assert isinstance(judge, ByzantineAcceptor)
        assert "offered" in judge.judge._invented(fresh.entry(contributors=(named,)), claims)
        assert judge.judge._invented(fresh.entry(contributors=(named,)), (right,)) == ""
    assert "nobody made" in reasons(
        scene.hear(owner, scene.propose(scene.entry(), 0, (who, scene.claim(owner)[1])))
    )


def test_nobody_is_evicted_or_let_in_by_one_member(scene: Scene) -> None:
    machine, owner = scene.machine, scene.order[0]
    victim, new = next(who for who in scene.others if who != owner), Member(PeerId("new"), 0)
    less = tuple(member for member in machine.config if member != victim)
    more = tuple(sorted((*machine.config, new)))
    voices = [who for who in machine.config if who != victim]
    judge = machine.acceptor.judge  # type: ignore[attr-defined]
    cases = [
        (less, [scene.claim(owner, suspects=(victim,))], "neither left nor is silent"),
        (less, [scene.claim(who, suspects=(victim,)) for who in voices[:2]], ""),
        (less, [scene.claim(victim, leave=True)], ""),
        (less, [scene.claim(owner, leave=True)], "neither left nor is silent"),
        (less[:3], [scene.claim(who, leave=True) for who in machine.config], "of 3 members"),
        (more, [scene.claim(owner, admits=(new,))], "nobody admitted"),
        (more, [scene.claim(who, admits=(new,)) for who in voices[:2]], ""),
        ((*machine.config, machine.config[-1]), [], "twice"),
    ]
    for config, claims, why in cases:
        told = judge._invented(scene.entry(next_config=config), claims)
        assert (why in told) if why else told == "", (why, told)
    assert "neither left" in reasons(
        scene.hear(owner, scene.propose(scene.entry(next_config=less)))
    )
    assert not scene.said(m.Echo)


def test_a_later_life_of_a_member_takes_the_place_of_the_earlier(scene: Scene) -> None:
    machine = scene.machine
    old = scene.others[1]
    new = Member(old.peer, old.incarnation + 1)
    config = tuple(sorted((*(member for member in machine.config if member != old), new)))
    judge = machine.acceptor.judge  # type: ignore[attr-defined]
    voices = [who for who in machine.config if who != old]
    assert (
        judge._invented(
            scene.entry(next_config=config), [scene.claim(who, admits=(new,)) for who in voices[:2]]
        )
        == ""
    )
    earlier = tuple(
        sorted((*(member for member in machine.config if member != old), Member(old.peer, 10**6)))
    )
    assert "nobody admitted" in judge._invented(
        scene.entry(next_config=earlier), [scene.claim(who, admits=(new,)) for who in voices[:2]]
    )


def test_a_ballot_is_entered_when_more_are_in_it_than_may_lie(scene: Scene) -> None:
    machine, (one, two, *_) = scene.machine, scene.others
    far = 1 << 40
    scene.hear(one, m.Turn(far))
    assert machine.ballot == 0
    owner = scene.order[1]
    scene.hear(owner, m.Prepare(1))
    assert not scene.said(m.Pledge) or machine.ballot == 1
    scene.hear(two, m.Turn(2))
    assert machine.ballot == 2
    assert {body.ballot for body in scene.said(m.Turn) if isinstance(body, m.Turn)} == {2}
    scene.hear(scene.order[2], m.Prepare(2))
    (pledge,) = scene.said(m.Pledge)
    assert isinstance(pledge, m.Pledge)
    assert (pledge.accepted, machine.journal.promised) == (None, 2)
    owns_far = next(ballot for ballot in range(far, far + 9) if machine.convener_of(ballot) == one)
    scene.hear(one, m.Prepare(owns_far))
    assert machine.journal.promised == 2


def test_nobody_leaves_the_last_ballot_that_can_be_said(scene: Scene) -> None:
    machine, now = scene.machine, scene.swarm.world.now
    one, two, *_ = scene.others
    scene.hear(one, m.Turn(LAST_BALLOT))
    assert machine.ballot == 0, "one may lie"
    scene.hear(
        two, m.Turn(LAST_BALLOT - 1)
    )  # two do: the round may stand still, and nobody honest says what cannot be said
    assert machine.ballot == LAST_BALLOT - 1
    for who in scene.others[2:]:
        machine.on_message(now, who.peer, who.incarnation, machine.round, m.Turn(LAST_BALLOT - 1))
    for step in range(1, 1000):
        machine.tick(now + step)
    assert machine.ballot == LAST_BALLOT
    assert {body.ballot for body in scene.said(m.Turn) if isinstance(body, m.Turn)} == {
        LAST_BALLOT - 1,
        LAST_BALLOT,
    }


def test_a_later_ballot_must_propose_what_was_pledged(scene: Scene) -> None:
    machine, (a, b, c, d) = scene.machine, scene.others
    one, other = scene.entry(), scene.entry(next_config=machine.config[:4])
    pledges = tuple(scene.pledged(who, 1) for who in (a, b, c, d))
    told = (*pledges[:3], scene.pledged(d, 1, 0, one.hash()))
    proof, owner = scene.proof(0, one.hash()), scene.order[1]
    wrong: list[tuple[m.Propose, str]] = [
        (scene.propose(one, 1), "no quorum"),
        (scene.propose(one, 1, pledges=pledges[:3]), "no quorum"),
        (scene.propose(one, 1, pledges=(*pledges[:3], pledges[0])), "no quorum"),
        (scene.propose(one, 1, pledges=(*pledges[:3], scene.pledged(d, 2))), "nobody gave"),
        (
            scene.propose(one, 1, pledges=(*pledges[:3], scene.pledged(d, 1, 1, one.hash()))),
            "nobody gave",
        ),
        (scene.propose(other, 1, pledges=told, proof=proof), "another entry"),
        (scene.propose(one, 1, pledges=told), "another entry"),
        (scene.propose(one, 1, pledges=told, proof=proof[:3]), "another entry"),
        (scene.propose(one, 1, pledges=told, proof=scene.proof(1, one.hash())), "another entry"),
    ]
    judge = machine.acceptor.judge  # type: ignore[attr-defined]
    for body, why in wrong:
        assert why in judge.why_not(body, ()), why
    assert judge.why_not(scene.propose(one, 1, pledges=told, proof=proof), ()) == ""
    assert judge.why_not(scene.propose(one, 1, pledges=pledges), ()) == ""
    scene.hear(owner, scene.propose(one, 1, pledges=told, proof=proof))
    assert machine.journal.echoed == (1, one)
    assert machine.ballot == 1


def test_what_was_promised_echoed_and_voted_is_never_gone_back_on(scene: Scene) -> None:
    machine, (a, b, c, d) = scene.machine, scene.others
    one = scene.entry()
    pledges = tuple(scene.pledged(who, 1) for who in (a, b, c, d))
    scene.hear(scene.order[1], scene.propose(one, 1, pledges=pledges))
    scene.hear(scene.order[0], scene.propose(scene.entry(next_config=machine.config[:4]), 0))
    assert not scene.said(m.Echo), "ballot 0 is over here"
    for who in (a, b, c, d):
        scene.hear(who, scene.echo(who, 0, one.hash()))
    assert machine.journal.accepted is None
    for who in (a, b, c):
        scene.hear(who, scene.echo(who, 1, one.hash()))
    assert machine.journal.accepted == (1, one)


def test_pledges_that_name_what_was_not_accepted_are_refused(scene: Scene) -> None:
    machine = scene.machine
    one, who = scene.entry(), scene.others[0]
    for proof in ((), scene.proof(0, one.hash(), 3), scene.proof(1, one.hash())):
        shown = scene.pledged(who, 1, 0, one.hash())
        assert "pledge" in reasons(
            scene.hear(who, m.Pledge(1, m.Accepted1(0, one), proof, None, shown.signature))
        )
    assert machine.open.known.get(one.hash()) is None


def test_whoever_sends_bad_signatures_is_soon_heard_no_more(scene: Scene) -> None:
    who, checked = scene.others[0], list[PeerId]()
    scene.machine.actions.verify = lambda peer, payload, signature: checked.append(peer) is not None  # type: ignore[method-assign]
    told = [
        len(scene.hear(who, m.Echo(0, bytes([number]) * 32, b"?" * 64, b"")))
        for number in range(100)
    ]
    assert told == [1] * FAULTS + [0] * (100 - FAULTS)
    assert len(checked) == FAULTS
    assert len(scene.hear(scene.others[1], m.Echo(0, b"e" * 32, b"?" * 64, b""))) == 1, (
        "the others are heard"
    )


def test_a_ballot_ends_whatever_seems_to_go_on_in_it(scene: Scene) -> None:
    machine, now = scene.machine, scene.swarm.world.now
    scene.hear(scene.others[0], m.Turn(1))
    assert machine.engaged
    turned = list[float]()
    for step in range(1, 2000):
        at = now + 0.1 * step
        machine.progress(at)  # a convener that lets its plans trickle
        machine.tick(at)
        if machine.ballot > len(turned):
            turned.append(at - now)
            for who in scene.others:
                machine.on_message(
                    at, who.peer, who.incarnation, machine.round, m.Turn(machine.ballot)
                )
        if len(turned) == 2:
            break
    assert len(turned) == 2
    assert turned[1] - turned[0] > turned[0], "each has more time than the one before"


def test_a_member_that_is_ahead_waits_until_a_quorum_has_come(scene: Scene) -> None:
    """Each member's patience is its own. One that went on alone each time would never be caught up
    with where the others are no quorum without it, and need not follow one member.
    """
    machine, at = scene.machine, scene.swarm.world.now
    machine.contribute(at, b"c" * 16, 7)

    def left_after_s(ballot: int) -> float:
        """How long the ballot lasts here, at most 100 s."""
        nonlocal at
        since = at
        while machine.ballot == ballot and at - since < 100.0:
            at += 0.1
            machine.tick(at)
        return at - since

    left_after_s(0)
    ballot = machine.ballot
    assert ballot > 0
    assert left_after_s(ballot) >= 100.0
    for who in scene.others[:3]:  # of five; one may lie, so four are a quorum
        assert machine.acceptor.ahead
        machine.on_message(at, who.peer, who.incarnation, machine.round, m.Turn(ballot))
    assert not machine.acceptor.ahead
    assert machine.timing.takeover_s < left_after_s(ballot) < 100.0, "its time began just now"
    assert machine.ballot > ballot


def test_quorums_and_who_is_needed() -> None:
    config = tuple(Member(PeerId(name), 0) for name in "abcdefg")
    for size, lying, quorum in ((4, 1, 3), (5, 1, 4), (6, 1, 4), (7, 1, 5), (7, 2, 5)):
        members = config[:size]
        assert not is_quorum(members, members[: quorum - 1], PeerId("a"), lying)
        assert is_quorum(members, members[:quorum], PeerId("a"), lying)
        assert (
            reach({who.peer: True for who in members}, PeerId("a"), tolerated=lying).needed
            == quorum
        )
    assert is_quorum(config[:3], config[:1], PeerId("a"), 1), (
        "founding: the organiser's member alone"
    )
    assert not is_quorum(config[:3], config[1:3], PeerId("a"), 1)
    assert (
        str(reach({PeerId("a"): True, PeerId("b"): True}, PeerId("a"), tolerated=1))
        == "too few: 2 of 2 members reachable; the open round waits for 4"
    )


def test_a_chain_takes_the_larger_quorum_and_no_organisers_word(scene: Scene) -> None:
    machine, entry = scene.machine, scene.entry()

    def certified(count: int, removed: tuple[Member, ...] = ()) -> Certified:
        voters = machine.config[:count]
        votes = tuple(
            Vote(who, 0, sign_as(who.peer, vote_payload(*scene.slot, 0, entry.hash())))
            for who in voters
        )
        return Certified(entry, votes, removed)

    def check(what: Certified, lying: int) -> None:
        check_log(
            [what],
            run=machine.run,
            log=machine.log,
            base=machine.base,
            config=machine.config,
            organiser=machine.organiser,
            verify=verify_as,
            peer=PeerId("x"),
            tolerated=lying,
        )

    check(certified(3), 0)
    check(certified(4), 1)
    for wrong in (certified(3), certified(4, (machine.config[0],))):
        with pytest.raises(RemoteProtocolError, match="no quorum"):
            check(wrong, 1)


@settings(max_examples=60)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_a_message_or_refused(noise: bytes, at: int) -> None:
    member = Member(PeerId("p"), 0)
    claim = m.Claim(b"b" * 32, b"c" * 16, 3, NO_READING, False, (member,), (member,), 7, b"s" * 64)
    entry = Entry("log", 1, b"b" * 32, b"r" * 32, (), (), (), 1, 1, "fp32", "mean", (member,))
    body = m.Propose(
        0,
        entry,
        ((member, claim),),
        (m.Pledged(member, -1, b"", b"s"),),
        (Vote(member, 0, b"s"),),
        b"s",
    )
    data = m.encode(m.Envelope("log", 1, 0, body))
    assert m.decode(data, PeerId("p")).body == body
    with contextlib.suppress(RemoteProtocolError):
        m.decode(data[:at] + noise + data[at + len(noise) :], PeerId("p"))


def test_the_journal_keeps_echo_and_proof(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    member = Member(PeerId("p"), 0)
    entry = Entry("log", 0, b"b" * 32, b"r" * 32, (), (), (), 1, 1, "fp32", "mean", (member,))
    journal = FileJournal(folder)
    journal.echo(2, entry)
    journal.accept(2, entry, (Vote(member, 2, b"s"),))
    journal.echo(5, msgspec.structs.replace(entry, numel=2))
    journal.close(clean=False)
    again = FileJournal(folder)
    assert (again.promised, again.accepted, again.proof) == (
        5,
        (2, entry),
        (Vote(member, 2, b"s"),),
    )
    assert again.echoed == (5, msgspec.structs.replace(entry, numel=2))
    again.append(Certified(entry, ()))
    assert (again.promised, again.accepted, again.proof, again.echoed) == (-1, None, (), None)
    again.close()


@pytest.mark.parametrize("kind", ["propose", "echo"])
def test_evidence_is_checked_offline(kind: Kind, tmp_path: Path) -> None:
    liar, run = load_or_create(tmp_path / "key" / "identity"), RunId("run")

    def said(
        digest: bytes, *, log: str = "main/run", base: bytes = bytes(32), ballot: int = 0
    ) -> tuple[bytes, bytes]:
        payload = slot_payload(kind, run, log, 3, base, ballot, digest * 32)
        return payload, liar.sign(DOMAIN, payload)

    one, other = said(b"1"), said(b"2")

    def verified(peer: PeerId, payload: bytes, signature: bytes) -> bool:
        return verify(peer, DOMAIN, payload, signature)

    proof = twice(liar.peer, one, other)
    assert check(proof.encode(), run, verified, PeerId("x"))[0] == liar.peer
    wrong = [
        twice(liar.peer, one, one),
        twice(liar.peer, one, said(b"2", ballot=1)),
        twice(
            liar.peer, one, said(b"2", base=b"b" * 32)
        ),  # another history: the organiser lost all and founded the run again, say
        twice(liar.peer, said(b"1", log="op/x"), said(b"2", log="op/x")),
        twice(liar.peer, one, (other[0], one[1])),
    ]
    for forged in wrong:
        assert isinstance(forged, Twice)
        with pytest.raises(RemoteProtocolError):
            check(forged.encode(), run, verified, PeerId("x"))
    with pytest.raises(RemoteProtocolError):
        check(proof.encode(), RunId("another"), verified, PeerId("x"))


def test_an_entry_that_lets_a_peer_in_ever_again_is_echoed_ever_later(scene: Scene) -> None:
    machine, now = scene.machine, scene.swarm.world.now
    (a, b, c, _), detect_s = scene.others, scene.machine.timing.detect_s
    lives = [msgspec.structs.replace(a, incarnation=a.incarnation + 1 + at) for at in range(14)]
    fresh, waits = Member(PeerId("new"), 0), list[float]()

    def with_life(life: Member) -> tuple[Member, ...]:
        return tuple(sorted((*(who for who in machine.config if who.peer != a.peer), life)))

    for life in lives:
        config = with_life(life)
        judge = Judge(machine)
        waits.append(judge.empty_after_s(config) / detect_s)
        assert judge.empty_after_s(tuple(sorted((*config, fresh)))) == 0, "another comes, too"
        assert judge.empty_after_s(tuple(who for who in config if who != b)) == 0, "another goes"
        entry = scene.entry(next_config=config, round=machine.round, base=machine.base)
        machine.journal.entries.append(Certified(entry, ()))
    usual = waits.index(4)
    assert waits[:usual] == [0] * usual
    assert 1 <= usual <= 2, "the first coming was that of the founding, if it is in the window"
    assert waits[usual:] == [4.0 * 2 ** min(at, 8) for at in range(len(waits) - usual)]
    assert Judge(machine).empty_after_s(machine.config) == 4 * detect_s
    machine._open(now)
    machine.root = machine.root or b"r" * 32
    life = msgspec.structs.replace(a, incarnation=a.incarnation + 99)
    entry = scene.entry(next_config=with_life(life))
    owner = machine.convener_of(0)
    claims = [scene.claim(who, admits=(life,)) for who in (b, c)]
    machine.open.born = now - 0.7 * 1024 * detect_s
    assert scene.hear(owner, scene.propose(entry, 0, *claims)) == []
    assert scene.said(m.Echo) == []
    machine.open.born = now - 0.8 * 1024 * detect_s
    machine.acceptor.step(now)
    assert machine.journal.echoed == (0, entry)


def test_an_entry_that_changes_nothing_is_echoed_late_in_its_round(scene: Scene) -> None:
    machine, now, owner = scene.machine, scene.swarm.world.now, scene.order[0]
    machine.open.born = now - 2 * machine.timing.detect_s
    assert scene.hear(owner, scene.propose(scene.entry())) == []
    assert machine.journal.echoed is None
    machine.open.born = now - 4 * machine.timing.detect_s
    machine.acceptor.step(now)
    assert machine.journal.echoed == (0, scene.entry())


def test_what_an_earlier_ballot_has_proof_of_is_echoed_at_once(scene: Scene) -> None:
    machine, now = scene.machine, scene.swarm.world.now
    machine.open.born = now
    entry = scene.entry()
    machine.enter(now, 1)
    pledges = tuple(scene.pledged(who, 1, 0, entry.hash()) for who in machine.config[:4])
    body = scene.propose(entry, 1, pledges=pledges, proof=scene.proof(0, entry.hash()))
    assert scene.hear(machine.convener_of(1), body) == []
    assert machine.journal.echoed == (1, entry)


def evicts_by_what_was_taken_back(scene: Scene) -> bool:
    """Whether this member echoes that a liar and a suspicion that is held no more leave somebody
    out; it echoes one that is held again.
    """
    machine, owner = scene.machine, scene.machine.convener_of(0)
    victim, honest = [who for who in scene.others if who != owner][:2]
    less = tuple(member for member in machine.config if member != victim)
    _, said = scene.claim(honest, suspects=(victim,), number=1)
    _, back = scene.claim(honest, number=2)
    assert scene.hear(honest, said) == []
    assert scene.hear(honest, back) == []
    assert scene.hear(honest, said) == [], "it came late"
    entry = scene.entry(next_config=less)
    shown = (scene.claim(owner, suspects=(victim,)), (honest, said))
    assert scene.hear(owner, scene.propose(entry, 0, *shown)) == [], "nobody is accused"
    if machine.journal.echoed is not None:
        return True
    again = scene.claim(honest, suspects=(victim,), number=3)
    body = scene.propose(entry, 0, shown[0], again)
    assert scene.hear(owner, body) == []
    assert machine.journal.echoed == (0, entry)
    return False


def test_a_suspicion_that_was_taken_back_evicts_nobody(scene: Scene) -> None:
    assert not evicts_by_what_was_taken_back(scene)


def test_where_retractions_are_ignored_a_suspicion_that_was_taken_back_evicts() -> None:
    with DEAR_PLANTS["retractions-ignored"]().planted():
        assert evicts_by_what_was_taken_back(Scene())


def test_who_seems_silent_is_left_out_only_by_a_convener_that_liars_cannot_fool(
    scene: Scene,
) -> None:
    convening = scene.machine.convening
    victim, *voices = scene.others
    voiced = list[bool]()
    for who in voices:
        scene.hear(*scene.claim(who, suspects=(victim,), number=1))
        voiced.append(victim not in convening._next_config(0.0, set()))
    assert voiced == [False, False, True], "one may lie and take its word back: two must be left"
    scene.hear(*scene.claim(voices[0], number=2))
    assert victim in convening._next_config(0.0, set())


def test_claims_are_numbered_on_over_a_restart(scene: Scene) -> None:
    machine, now = scene.machine, scene.swarm.world.now
    machine.unix_offset_s, numbers = 1e9, list[int]()
    for at, leaving in enumerate((True, False, True)):
        machine.leaving = leaving
        scene.sent.clear()
        machine.acceptor.claim(now + at / 1e6)  # in one millisecond
        numbers += {body.number for body in scene.said(m.Claim) if isinstance(body, m.Claim)}
    first = int((1e9 + now) * 1000)
    assert numbers == [first, first + 1, first + 2]
    machine._open(now)
    machine.acceptor.claim(now + 1.0)
    assert scene.said(m.Claim)[-1].number == first + 1000  # type: ignore[attr-defined]

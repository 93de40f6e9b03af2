"""Contributions that liars offer, plans that cannot be carried out, and who asks to be let in."""

from __future__ import annotations

import msgspec
import pytest
from lying_kit import Scene

from atoll.collectives import messages as m
from atoll.collectives.group import Certified, Contributor, Member, Part
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.byzantine.acceptor import OFFERS, ByzantineAcceptor


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_who_calls_anothers_contribution_its_own_takes_nothing_from_it(scene: Scene) -> None:
    machine, owner, liar = scene.machine, scene.order[0], scene.others[0]
    cid, mine = b"c" * 16, machine.me
    claims = [scene.claim(who, cid=cid, weight=7) for who in (mine, liar)]
    both = [Contributor(mine, cid, 7), Contributor(liar, cid, 7)]
    judge = machine.acceptor.judge  # type: ignore[attr-defined]
    assert "offered nothing of the kind" in judge._invented(
        scene.entry(contributors=tuple(both)), claims
    )
    for one in both:
        assert judge._invented(scene.entry(contributors=(one,)), claims) == ""
    scene.hear(owner, m.PlanMessage(scene.plan(tuple(both))))
    assert machine.open.plan is None
    parts = scene.plan(()).parts
    machine.contribute(scene.swarm.world.now, cid, 7)
    told = list[bool]()
    machine.actions.decided = lambda certified, counted: told.append(counted)  # type: ignore[method-assign]
    machine._note(Certified(scene.entry(contributors=(both[1],), parts=parts), ()))
    machine.contribute(scene.swarm.world.now, cid, 7)
    machine._note(Certified(scene.entry(contributors=(both[0],), parts=parts), ()))
    assert told == [False, True]


def test_a_plan_that_cannot_be_carried_out_ends_no_node(scene: Scene) -> None:
    owner, offers = (
        scene.order[0],
        tuple(Contributor(who, who.peer.encode() * 8, 1) for who in scene.others),
    )
    chunks = scene.plan(offers).parts[0].stop
    who = scene.machine.me.peer
    wrong = [
        scene.plan(()),
        scene.plan((*offers, offers[0])),
        scene.plan((offers[0], msgspec.structs.replace(offers[1], cid=offers[0].cid))),
        scene.plan(offers, Part(who, 0, 0), Part(who, 0, chunks)),
        scene.plan(offers, Part(who, 0, chunks + 1), Part(who, chunks + 1, chunks)),
        scene.plan(offers, Part(who, 0, chunks + 1)),
        scene.plan(offers, Part(PeerId("stranger"), 0, chunks)),
    ]
    for plan in wrong:
        scene.hear(owner, m.PlanMessage(plan))
        assert scene.machine.open.plan is None, plan
    scene.hear(owner, m.PlanMessage(scene.plan(offers)))
    assert scene.machine.open.plan == scene.plan(offers)


def test_the_newest_four_offers_of_a_member_are_kept(scene: Scene) -> None:
    who, acceptor = scene.others[0], scene.machine.acceptor
    assert isinstance(acceptor, ByzantineAcceptor)
    names = [bytes([number]) * 16 for number in range(1, 7)]
    for cid in names:
        assert scene.hear(*scene.claim(who, cid=cid, weight=1)) == []
    assert [cid for cid, (of, _) in acceptor.offered.items() if of == who] == names[-OFFERS:]


def test_one_peer_asks_to_be_let_in_as_one_member(scene: Scene) -> None:
    machine, peer = scene.machine, PeerId("new")
    for incarnation in (3, *range(50), 2):
        scene.hear(Member(peer, incarnation), m.Join())
    assert [who for who in machine.entrance.joiners if who.peer == peer] == [Member(peer, 49)]
    for incarnation in range(50, 2000):  # more than a peer's budget of messages
        scene.hear(Member(peer, incarnation), m.Join())
    assert len([who for who in machine.entrance.joiners if who.peer == peer]) == 1

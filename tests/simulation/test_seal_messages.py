"""Seals and their answers from other members: bounded, signed, and without effect where they break
a rule.
"""

from __future__ import annotations

import functools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.rounds.swarm import Options, SimSwarm

from atoll.collectives import messages as m
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.group import MAX_MEMBERS, Certified, Entry, Member, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import check_log, seal_payload, sealed_payload
from atoll.collectives.round.certificate import recertified_payload
from atoll.node.session import Session
from atoll.node.session.events import PeerMisbehaved
from atoll.node.simulation.process import sign_as

P0, P1, P2 = map(PeerId, ("p0", "p1", "p2"))
GONE = (Member(P2, 0),)


class Scene:
    """Of three, p2 is dead; p0 is the organiser, p1 hears what the test writes in the name of p0,
    and the other way round.
    """

    def __init__(self, hears: PeerId) -> None:
        swarm = SimSwarm(4, Options(peers=(3, 3), faults=(), rounds=4))
        swarm._start()
        swarm.faults.plan.heal_s = 1e9
        swarm.world.run(until=3.0)
        swarm.crash(P2)
        swarm.world.run(until=3.1)
        process = swarm.members[hears].process
        assert process is not None
        self.swarm, self.events, self.sent = swarm, list[object](), list[m.Envelope]()
        self.session: Session = process.session
        self.session.ports.emit = self.events.append  # type: ignore[method-assign]
        self.session.ports.send = lambda peer, data: (
            self.sent.append(m.decode(data[1:], peer)) if data[:1] == b"R" else None
        )  # type: ignore[method-assign]
        assert self.session.machine is not None
        self.machine = self.session.machine

    def seal(self, signer: PeerId = P0, **changes: object) -> m.Seal:
        payload = seal_payload(
            self.machine.run, self.machine.log, self.machine.round, self.machine.base, GONE
        )
        return msgspec.structs.replace(
            m.Seal(self.machine.base, GONE, sign_as(signer, payload)), **changes
        )

    def sealed(self, **changes: object) -> m.Sealed:
        """p1's answer, signed after the changes."""
        body = msgspec.structs.replace(m.Sealed(GONE, None, b""), **changes)
        payload = sealed_payload(
            self.machine.run, self.machine.log, self.machine.round, self.machine.base, body
        )
        return msgspec.structs.replace(body, signature=sign_as(P1, payload))

    def hear(self, peer: PeerId, body: m.Body, raw: bytes | None = None) -> list[object]:
        """What is said after this message."""
        self.events.clear()
        self.sent.clear()
        data = (
            raw
            if raw is not None
            else m.encode(m.Envelope(self.session.log, self.machine.round, 0, body))
        )
        self.session.on_message(self.swarm.world.now, peer, b"R" + data)
        return [type(event) for event in self.events]


@functools.cache
def member() -> Scene:
    """Made once: nothing that is sent to it may seal it."""
    return Scene(P1)


@pytest.mark.parametrize("who", [P0, P1, P2])
def test_only_the_organisers_own_seal_counts(who: PeerId) -> None:
    here = member()
    forged = [
        here.seal(P1),
        here.seal(removed=(Member(P2, 0), Member(P1, 0))),
        here.seal(base=b"x" * 32),
    ]
    for seal in [*forged, *([here.seal()] if who != P0 else [])]:
        assert here.hear(who, seal) == [PeerMisbehaved]
    assert not here.machine.sealing.active
    assert here.machine.journal.sealed is None


def test_a_sealed_member_answers_and_ignores_plans_ballots_and_the_removed() -> None:
    here = Scene(P1)
    assert here.hear(P0, here.seal()) == []
    [answer] = [envelope.body for envelope in here.sent if isinstance(envelope.body, m.Sealed)]
    assert (answer.removed, answer.accepted) == (GONE, None)
    payload = sealed_payload(
        here.machine.run, here.machine.log, here.machine.round, here.machine.base, answer
    )
    assert answer.signature == sign_as(P1, payload)
    assert here.machine.sealing.active
    promised = here.machine.journal.promised
    ballot = next(b for b in range(1, 9) if here.machine.convener_of(b).peer == P0)
    assert here.hear(P0, m.Prepare(ballot)) == []
    assert [e.body for e in here.sent if isinstance(e.body, m.Promise)] == []
    assert here.machine.journal.promised == promised
    here.hear(P2, m.Fetch())
    assert here.sent == []


def test_a_member_that_lags_is_sealed_for_the_round_to_come() -> None:
    here = Scene(P1)
    later, base = here.machine.round + 3, b"b" * 32
    seal = m.Seal(
        base, GONE, sign_as(P0, seal_payload(here.machine.run, here.machine.log, later, base, GONE))
    )
    here.session.on_message(
        here.swarm.world.now, P0, b"R" + m.encode(m.Envelope(here.session.log, later, 0, seal))
    )
    [answer] = [envelope for envelope in here.sent if isinstance(envelope.body, m.Sealed)]
    assert answer.round == later
    assert not here.machine.sealing.active
    assert here.machine.journal.sealed is not None
    assert here.machine.journal.sealed.round == later


def test_answers_that_are_forged_or_of_another_round_do_not_count() -> None:
    here = Scene(P0)
    here.session.tick(here.swarm.world.now + 3.0)  # until p2 is suspected
    here.machine.sealing.ask(GONE)
    here.machine.sealing.tick(here.swarm.world.now + 3.0)
    if not here.machine.sealing.active:  # the organiser and p1 are a quorum: it would not seal
        here.machine.sealing._seal(here.machine.round, here.machine.base, GONE)
    other = msgspec.structs.replace(here.machine.journal.entries[-1].entry)
    assert here.hear(P1, msgspec.structs.replace(here.sealed(), signature=b"s" * 64)) == [
        PeerMisbehaved
    ]
    assert here.hear(P1, here.sealed(accepted=m.Accepted1(1, other))) == [PeerMisbehaved]
    assert here.hear(P1, here.sealed(removed=(Member(P1, 7),))) == []
    assert P1 not in here.machine.sealing.answers
    assert here.hear(P1, here.sealed()) == []
    assert P1 in here.machine.sealing.answers


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_seals_never_raise_and_never_seal(data: st.DataObject) -> None:
    here = member()
    body = data.draw(st.sampled_from([here.seal(), here.sealed()]))
    whole = m.encode(m.Envelope(here.session.log, here.machine.round, 0, body))
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(1, len(raw)))])
    if cut == whole or _same_seal(cut, here):
        return
    here.hear(P0, m.Fetch(), cut)
    assert here.machine.journal.sealed is None


def _same_seal(raw: bytes, here: Scene) -> bool:
    """Whether what was damaged is not what is signed (the sender's incarnation, say)."""
    try:
        envelope = m.decode(raw, P0)
    except RemoteProtocolError:
        return False
    return envelope.body == here.seal() and (envelope.log, envelope.round) == (
        here.session.log,
        here.machine.round,
    )


def test_the_removed_are_bounded() -> None:
    for count, fits in ((1, True), (MAX_MEMBERS, True), (MAX_MEMBERS + 1, False), (0, False)):
        data = m.encode(
            m.Envelope("main/x", 1, 0, m.Seal(b"b" * 32, (Member(P1, 0),) * count, b"s"))
        )
        if fits:
            m.decode(data, P1)
        else:
            with pytest.raises(RemoteProtocolError):
                m.decode(data, P1)


@pytest.mark.parametrize("broken", ["", "signer", "removed", "log", "votes", "organiser"])
def test_a_certificate_is_a_quorum_or_the_organisers_word(broken: str) -> None:
    config = (Member(P0, 0), Member(P1, 0), Member(P2, 0))
    entry = Entry(
        "main/x", 1, b"b" * 32, b"s" * 32, (), (), (), 4, 4, "fp32", "mean", (Member(P0, 0),)
    )
    signer = P1 if broken == "signer" else P0
    signature = sign_as(
        signer,
        recertified_payload("x", "main/y" if broken == "log" else "main/x", 1, entry.hash(), GONE),
    )
    votes = () if broken == "votes" else (Vote(Member(P0, 0), 0, signature),)
    certified = Certified(entry, votes, (Member(P1, 0),) if broken == "removed" else GONE)

    def check() -> None:
        check_log(
            [certified],
            run="x",
            log="main/x",
            base=b"b" * 32,
            config=config,
            organiser=None if broken == "organiser" else P0,
            verify=lambda peer, payload, given: given == sign_as(peer, payload),
            peer=P2,
        )

    if broken:
        with pytest.raises(RemoteProtocolError):
            check()
    else:
        check()

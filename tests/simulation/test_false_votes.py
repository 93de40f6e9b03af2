"""Well-formed messages of a member that is authenticated: votes that it has not signed, votes of
others that a certificate is padded with, and ballots that nobody can have come to.
"""

from __future__ import annotations

import pytest
from session_table import Table

from atoll.collectives import messages as m
from atoll.collectives.group import LAST_BALLOT, Certified, Contributor, Entry, Member, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import LastSaid, check_log, vote_payload
from atoll.node.session import events as ev
from atoll.node.simulation.process import NodeProcess, sign_as

A, B, C, D = (Member(PeerId(name), 0) for name in "abcd")
STRANGER = Member(PeerId("x"), 0)
BASE = bytes(32)


def test_votes_that_pad_a_certificate_are_not_kept() -> None:
    """A quorum is there; of c an unsigned vote, of a later life of d one, and one of a stranger.
    None of them tells what anybody has said, and those of no member are not even verified.
    """
    counted = (Contributor(A, bytes(16), 1),)
    entry = Entry("main/x", 1, BASE, BASE, counted, (), (), 8, 4, "fp32", "mean", (A, B, C, D))
    payload = vote_payload("run", "main/x", 1, BASE, 0, entry.hash())
    signed = tuple(Vote(who, 0, sign_as(who.peer, payload)) for who in (A, B, D))
    false = tuple(
        Vote(who, 0, b"junk") for who in (C, Member(D.peer, 7), STRANGER, Member(STRANGER.peer, 1))
    )
    verified = list[PeerId]()

    def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
        verified.append(peer)
        return signature == sign_as(peer, data)

    [kept] = check_log(
        [Certified(entry, (*false, *signed))],
        run="run",
        log="main/x",
        base=BASE,
        config=(A, B, C, D),
        organiser=A.peer,
        verify=verify,
        peer=D.peer,
    )
    assert kept.entry is entry
    assert kept.votes == signed
    assert sorted(verified) == ["a", "b", "c", "d"]
    heard = LastSaid([kept], at_once=True)
    assert heard.of(C.peer) is None
    assert heard.of(D.peer) == m.Said(0, 1, 0)


@pytest.mark.parametrize("early", [False, True])
def test_a_vote_that_is_not_signed_is_in_no_certificate(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came with the other votes, or before the entry that it names. Who comes later believes
    the log."""
    table = Table(5)
    table.found()
    *inside, late = table.peers
    for peer in inside[1:]:
        peer.start().attach()
    table.until(lambda: all(len(p.session.config_peers()) == 4 for p in inside))
    liar, honest = inside[-1], NodeProcess.sign

    def sign(process: NodeProcess, payload: bytes) -> bytes:
        false = process.peer == liar.name and b"atoll/vote/" in payload[:16]
        return b"junk" if false else honest(process, payload)

    monkeypatch.setattr(NodeProcess, "sign", sign)
    if early:  # entries come late: votes are there first
        seen = set[object]()

        def tap(sender: PeerId, receiver: PeerId, channel: str, payload: object) -> bool:
            if channel != "control" or not isinstance(payload, bytes) or payload[:1] != b"R":
                return False
            envelope = m.decode(payload[1:], sender)
            first = isinstance(envelope.body, m.Accept) and (
                (receiver, envelope.round) not in seen and receiver != liar.name
            )
            seen.add((receiver, envelope.round))
            return first

        table.network.tap = tap
    for number in range(4):
        rounds = [peer.session.completed for peer in inside[:3]]
        for peer in inside:
            peer.contribute(f"{number} {peer.name}")
        table.until(
            lambda rounds=rounds: all(
                peer.session.completed > before
                for peer, before in zip(inside, rounds, strict=False)
            )
        )
    table.network.tap = None
    for peer in inside[:3]:
        for certified in peer.machine.journal.entries[-4:]:
            assert {vote.member.peer for vote in certified.votes} <= {
                each.name for each in inside[:3]
            }
    late.start().attach()
    table.until(lambda: late.inside)
    accused = {
        event.peer
        for peer in (*inside[:3], late)
        for event in peer.heard
        if isinstance(event, ev.PeerMisbehaved)
    }
    assert accused == {liar.name}
    table.end()


def test_a_ballot_that_nobody_can_have_come_to_is_not_followed() -> None:
    """A member that owns the last ballot there is would else end the log for all."""
    table = Table(3)
    peers = table.all_in()
    first, second, liar = peers
    machine = liar.machine
    last = next(
        ballot
        for ballot in range(LAST_BALLOT, LAST_BALLOT - 3, -1)
        if machine.convener_of(ballot) == machine.me
    )
    rounds = first.session.completed
    liar.do(lambda _, now: [machine.tell(peer.name, m.Prepare(last)) for peer in peers])
    table.wait(1.0)
    for peer in peers:
        assert peer.machine.journal.promised < 1 << 20
        peer.contribute(f"1 {peer.name}")
    table.until(lambda: all(peer.session.completed > rounds for peer in (first, second)))
    table.end()

"""One attempt at a masking: a leader that tells members different things, and words of hostile
bytes, lead to no common sum.
"""

from __future__ import annotations

import random

import pytest

from atoll.collectives.errors import BadSignatureError, RemoteProtocolError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.modes.secure.masking import Masking, MaskingStep
from atoll.node.modes.secure.wire import (
    PREFIX,
    AttemptMessage,
    AuthoredMessage,
    Fixed,
    Want,
    decode,
    encode,
)
from atoll.security.identity import Identity
from atoll.security.masking import Binding, Memory

PEOPLE = {
    identity.peer: identity for identity in (Identity(bytes([number]) * 32) for number in range(4))
}
ROSTER = tuple(sorted(PEOPLE))
BINDING = Binding(RunId("run"), 1, 0, ROSTER, 3, 9, 32)


def meeting(leader: PeerId = ROSTER[0]) -> dict[PeerId, Masking]:
    """Four members who have told each other their keys."""
    found = {peer: Masking(BINDING, leader, peer, "config") for peer in ROSTER}
    for peer, masking in found.items():
        masking.join(PEOPLE[peer], Memory(), random.Random(peer))
    talk(found)
    return found


def talk(members: dict[PeerId, Masking]) -> None:
    """Everything said arrives."""
    while any(masking.out for masking in members.values()):
        for peer, masking in members.items():
            out, masking.out = masking.out, []
            for to, body in out:
                for each in members if to is None else (to,):
                    if each != peer and isinstance(body, AuthoredMessage):
                        members[each].hear(peer, body)
                    elif each != peer and isinstance(body, Fixed):
                        members[each].fix(peer, body)
                    elif each != peer and isinstance(body, Want):
                        members[each].answer(peer, body.stage, body.numbers)
        for masking in members.values():
            masking.advance()


def test_all_who_are_told_the_same_know_the_same_masking() -> None:
    members = meeting()
    leader = members[ROSTER[0]]
    assert leader.lead((), (), late=False)
    talk(members)
    assert all(masking.messages[1].keys() == set(ROSTER) for masking in members.values())
    assert leader.lead((), (), late=False)
    talk(members)
    assert len({masking.digest for masking in members.values()}) == 1
    assert all(
        masking.step == MaskingStep.MASKED and masking.takes_part for masking in members.values()
    )


def test_a_leader_that_fixes_two_sets_makes_two_sums() -> None:
    """Each told three of four: no set of three agrees with another, so none of the sums has the
    three vectors it needs.
    """
    members = meeting()
    assert members[ROSTER[0]].lead((), (), late=False)
    talk(members)
    for left_out, masking in zip((3, 2, 1), [members[peer] for peer in ROSTER[1:]], strict=True):
        numbers = tuple(number for number in range(4) if number != left_out)
        masking.fix(ROSTER[0], Fixed(1, numbers))
        masking.advance()
    digests = [members[peer].digest for peer in ROSTER[1:]]
    assert None not in digests
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    "fixed",
    [
        Fixed(0, (0, 1)),
        Fixed(0, (0, 1, 1)),
        Fixed(0, (2, 1, 0)),
        Fixed(0, (0, 1, 4)),
        Fixed(1, (0, 1, 2)),
    ],
)
def test_sets_that_cannot_be_are_refused(fixed: Fixed) -> None:
    masking = meeting()[ROSTER[1]]
    if fixed.stage:
        assert not masking.fix(ROSTER[0], fixed)  # before it is known whose keys count
        return
    with pytest.raises(RemoteProtocolError, match="cannot be") as caught:
        masking.fix(ROSTER[0], fixed)
    assert caught.value.peer == ROSTER[0]


def test_only_the_leader_fixes_and_the_second_word_does_not_count() -> None:
    masking = meeting()[ROSTER[1]]
    assert not masking.fix(ROSTER[2], Fixed(0, (0, 1, 2)))
    assert masking.fix(ROSTER[0], Fixed(0, (0, 1, 2)))
    assert not masking.fix(ROSTER[0], Fixed(0, (1, 2, 3)))
    assert masking.fixed == [ROSTER[:3]]


def test_words_of_others_are_checked_whoever_hands_them_on() -> None:
    members = meeting()
    fresh = Masking(BINDING, ROSTER[0], ROSTER[3], "config")
    keys = members[ROSTER[1]].messages[0][ROSTER[1]]
    with pytest.raises(BadSignatureError):
        fresh.hear(ROSTER[0], AuthoredMessage(2, keys))
    with pytest.raises(RemoteProtocolError):
        fresh.hear(ROSTER[0], AuthoredMessage(200, keys))
    assert fresh.hear(ROSTER[2], AuthoredMessage(1, keys))
    assert not fresh.hear(ROSTER[1], AuthoredMessage(1, keys))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x93\x01\x02",
        encode(AttemptMessage(1, 0, Want(0, (0,))))[1:-1],
        bytes(2 << 20),
    ],
)
def test_hostile_bytes_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data, ROSTER[0])
    assert caught.value.peer == ROSTER[0]


def test_every_message_survives_the_wire() -> None:
    members = meeting()
    bodies = [
        Fixed(1, (0, 2)),
        Want(3, (1,)),
        *(
            AuthoredMessage(number, members[peer].messages[0][peer])
            for number, peer in enumerate(ROSTER)
        ),
    ]
    for body in bodies:
        data = encode(AttemptMessage(7, 3, body))
        assert data[:1] == PREFIX
        assert decode(data[1:], ROSTER[0]) == AttemptMessage(7, 3, body)


def test_who_lacks_keys_that_count_waits_for_them_though_all_shares_are_here() -> None:
    """A member left out of the attempt, whose copy of others' keys was lost, knows nothing to add
    up yet, and asks.
    """
    members = meeting()
    leader, last = members[ROSTER[0]], members[ROSTER[3]]
    assert leader.lead((), (ROSTER[3],), late=False)
    talk(members)
    assert leader.lead((), (ROSTER[3],), late=False)
    del last.messages[0][ROSTER[1]]
    talk(members)
    assert last.messages[1].keys() >= set(last.fixed[1])
    assert last.digest is None
    assert last.missing() == (0, (1,))

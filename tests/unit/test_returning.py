"""What a process that has just begun is told, and what it concludes (`round.returning`)."""

from __future__ import annotations

import pytest

from atoll.collectives import messages as m
from atoll.collectives.group import Certified, Contributor, Entry, Member, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round.returning import MOST_LIVES, CopyCheck, LastSaid

A, B, C = (Member(PeerId(name), 0) for name in "abc")
ALL = {A.peer, B.peer, C.peer}
NOTHING = m.Said(0, 4, -1)


def certified(
    round_: int, voters: dict[Member, int], removed: tuple[Member, ...] = ()
) -> Certified:
    entry = Entry(
        "main/x",
        round_,
        bytes(32),
        bytes(32),
        (Contributor(C, bytes(16), 1),),
        (),
        (),
        8,
        4,
        "fp32",
        "mean",
        (A, B, C),
    )
    votes = tuple(Vote(who, ballot, b"") for who, ballot in voters.items())
    return Certified(entry, votes, removed)


def test_what_was_heard_is_the_newest_life_round_and_ballot() -> None:
    heard = LastSaid((), at_once=True)
    assert heard.of(A.peer) is None
    heard.message(A, 4, m.Ready(bytes(32), None, 0, False))
    assert heard.of(A.peer) == m.Said(0, 4, -1)
    heard.message(A, 4, m.Promise(3, None, None))
    heard.message(A, 4, m.Accepted(2, bytes(32), b""))
    assert heard.of(A.peer) == m.Said(0, 4, 3)
    heard.message(A, 9, m.Fetch())  # it asks for what it lacks
    heard.message(A, 9, m.Join())
    assert heard.of(A.peer) == m.Said(0, 4, 3)
    heard.message(Member(A.peer, 1), 2, m.Accepted(0, bytes(32), b""))
    assert heard.of(A.peer) == m.Said(1, 2, 0)


@pytest.mark.parametrize("at_once", [True, False])
def test_certificates_tell_of_votes_and_contributions(at_once: bool) -> None:
    """Not where a contribution may be counted later than it was given, nor where the organiser's
    word stands for votes."""
    heard = LastSaid([certified(5, {A: 1}), certified(6, {B: 0}, removed=(C,))], at_once=at_once)
    assert heard.of(A.peer) == m.Said(0, 5, 1)
    assert heard.of(B.peer) is None
    assert heard.of(C.peer) == (m.Said(0, 5, -1) if at_once else None)


@pytest.mark.parametrize(
    ("heard", "life"),
    [
        (None, 0),
        (m.Said(0, 4, -1), 0),
        (m.Said(0, 4, 0), 1),  # a vote or a promise in the round that is open to the copy
        (m.Said(0, 5, -1), 1),
        (m.Said(3, 1, 0), 4),
        (m.Said(MOST_LIVES, 1, 0), MOST_LIVES + 1),
        (m.Said(MOST_LIVES + 1, 1, 0), 0),  # no home is so old: one word would use up all numbers
    ],
)
def test_more_than_the_journal_knows_is_an_old_copy(heard: m.Said | None, life: int) -> None:
    asking = CopyCheck(NOTHING, 1, 0)
    asking.on_answer(A, 5, heard)
    assert asking.later_life(ALL, None) == life


def test_what_this_process_has_said_since_is_no_proof() -> None:
    asking = CopyCheck(NOTHING, 1, 0)
    asking.on_answer(A, 5, m.Said(0, 5, 1))
    assert asking.later_life(ALL, m.Said(0, 5, 1)) == 0
    assert asking.later_life(ALL, m.Said(0, 5, 0)) == 1


def test_as_many_as_may_lie_prove_nothing() -> None:
    asking = CopyCheck(NOTHING, 1, 1)
    asking.on_answer(A, 5, m.Said(7, 5, 1))
    assert asking.later_life(ALL, None) == 0
    asking.on_answer(B, 5, m.Said(0, 5, 0))
    assert asking.later_life(ALL, None) == 1


def test_as_many_as_may_lie_are_counted_among_members_of_one_configuration() -> None:
    """A and B may both lie where they are members of different ones."""
    asking = CopyCheck(NOTHING, 1, 1)
    for liar in (A, B):
        asking.on_answer(liar, 5, m.Said(9, 9, 9))
    assert asking.later_life({A.peer, C.peer}, None) == 0
    asking.on_answer(C, 5, m.Said(0, 5, 0))
    assert asking.later_life({A.peer, C.peer}, None) == 1


def test_who_answered_and_goes_on_as_another_life_is_asked_again() -> None:
    """Only members of the configuration make a quorum."""
    asking, later = CopyCheck(NOTHING, 1, 0), Member(A.peer, 1)
    asking.on_answer(A, 5, None)
    assert asking.lacking([later, B]) == [A.peer, B.peer]
    asking.on_answer(later, 5, None)
    assert asking.lacking([later, B]) == [B.peer]
    assert asking.answered(5) == [A, later]


def test_an_answer_counts_once_what_was_decided_by_then_is_known() -> None:
    asking = CopyCheck(NOTHING, 1, 0)
    assert asking.lacking([A, B]) == [A.peer, B.peer]
    asking.on_answer(A, 6, None)
    asking.on_answer(A, 60, None)  # rounds go on: that is no reason to wait longer
    assert asking.lacking([A, B]) == [B.peer]
    assert asking.answered(5) == []
    assert asking.answered(6) == [A]

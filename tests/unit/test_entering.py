"""By what peers enter the configuration: the tally of limited invites, and what a certificate is
worth to an acceptor.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from atoll.collectives.group import Admitted, Certified, Entry, Member
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.round import Log, entering
from atoll.collectives.round.entering import KEPT_S, OPEN, InviteTally, crowded
from atoll.node.run.banning import Ban, Bans
from atoll.node.run.capability import Role
from atoll.node.run.doors import SKEW_S, RunDoors
from atoll.node.run.gate import Gate, Policy
from atoll.node.run.inner_doors import InnerDoors, doors_of
from atoll.node.run.invite import Invite, make_invite
from atoll.security.identity import Identity

RUN = RunId("abcdefghijklmnopqrstuvwxyz")
NOW_S = 1_800_000_000.0
ORGANISER, MEMBER, NEW, OTHER, STRANGER = (Identity(bytes([each]) * 32) for each in range(1, 6))


def by(
    peer: str, invite: bytes = b"i", uses: int = 1, issued_s: int = 0, expires_s: int = 100
) -> Admitted:
    return Admitted(PeerId(peer), b"certificate", invite, uses, issued_s, expires_s)


# ---- the tally
def test_an_invite_for_two_lets_in_two_and_them_again() -> None:
    one = InviteTally().after([by("a", uses=2)])
    assert one is not None
    two = one.after([by("b", uses=2)])
    assert two is not None
    assert two.after([by("c", uses=2)]) is None
    assert two.after([by("a", uses=2)]) == two
    assert two.after([by("c", uses=0)]) is two  # for any number: not counted
    assert InviteTally().after([by("a", uses=2), by("b", uses=2), by("c", uses=2)]) is None


def test_the_hash_says_whom_each_invite_has_let_in_in_whatever_order() -> None:
    tally, empty = InviteTally(), InviteTally()
    forth = tally.after([by("a", uses=3), by("b", b"j"), by("c", uses=3)])
    back = tally.after([by("c", uses=3), by("a", uses=3), by("b", b"j")])
    assert forth is not None
    assert back is not None
    assert forth.hash == back.hash
    others = [forth.after([by("d", uses=3)]), tally.after([by("a", uses=3), by("b", b"j")])]
    hashes = {each.hash for each in [forth, *others] if each is not None}
    assert len(hashes) == 3
    assert {len(each) for each in hashes} == {32}
    assert empty.hash == b""


def test_what_has_let_in_too_many_is_forgotten_only_where_it_ended_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entering, "MOST_TALLIED", 3)
    full = InviteTally().after([by("a"), by("b", b"j", expires_s=10_000_000), by("c", b"k")])
    assert full is not None
    assert full.size == 3
    assert full.after([by("d", b"l", issued_s=100 + KEPT_S)]) is None  # k and i: not over yet
    later = full.after([by("d", b"l", issued_s=101 + KEPT_S, expires_s=10_000_000)])
    assert later is not None
    assert set(later.spent) == {b"j", b"l"}


def test_an_entry_that_lets_in_nobody_has_the_hash_that_it_had_before_entries_named_them() -> None:
    entry = Entry(
        "log", 1, bytes(32), bytes(32), (), (), (), 8, 4, "fp32", "mean", (Member(PeerId("p"), 0),)
    )
    new = msgspec.structs.replace(entry, admitted=(by("a"),))
    counted = msgspec.structs.replace(entry, tally=b"t" * 32)
    assert len({each.hash() for each in (entry, new, counted)}) == 3
    assert OPEN.valid([PeerId("p")], ())
    assert not OPEN.valid([PeerId("a")], new.admitted)


def test_by_one_invite_come_three_quarters_of_the_most_members() -> None:
    came = {PeerId(f"m{index}"): b"i" for index in range(191)}  # of 256 places
    one, two = by("a", uses=0), by("b", uses=0)
    assert not crowded(came, [*came, PeerId("a")], [one])
    assert crowded(came, [*came, PeerId("a"), PeerId("b")], [one, two])
    assert not crowded(came, [*came, PeerId("a"), PeerId("b")], [one, by("b", b"j", uses=0)])
    assert not crowded(came, [*list(came)[1:], PeerId("a"), PeerId("b")], [one, two])
    full = {**came, PeerId("a"): b"i"}
    assert not crowded(full, [*full], [])  # nobody is evicted for it


def test_the_log_knows_by_which_invite_each_of_its_members_came() -> None:
    log = Log(lambda first, stop: [])

    def append(members: str, *admitted: Admitted) -> None:
        config = tuple(Member(PeerId(each), 0) for each in members)
        entry = Entry(
            "log", log.length, bytes(32), bytes(32), (), (), (), 8, 4, "fp32", "mean", config
        )
        log.append(Certified(msgspec.structs.replace(entry, admitted=admitted), ()))

    append("o")
    append("oab", by("a", uses=0), by("b", b"j"))
    append("oa")
    assert (log.came, set(log.tally.spent)) == ({"a": b"i"}, {b"j"})
    append("oac", by("c", b"k", uses=0))
    assert log.came == {"a": b"i", "c": b"k"}


# ---- certificates
class Place:
    """A run by invite, as one of its members knows it."""

    def __init__(self, folder: Path, policy: Policy = "invite") -> None:
        self.bans = Bans(folder, RUN, ORGANISER.peer)
        gate = Gate(RUN, ORGANISER.peer, self.bans, lambda: [ORGANISER.peer, MEMBER.peer])
        gate.policy = policy
        self.now_s = NOW_S
        self.doors: RunDoors = doors_of(gate, lambda: self.now_s)


def invite(role: Role = "train", uses: int = 1, peer: str = "") -> Invite:
    return make_invite(
        RUN, [], ORGANISER, now_s=NOW_S, life_s=1000.0, uses=uses, role=role, peer=peer
    )


def test_what_a_peer_has_shown_is_what_lets_it_in_and_nobody_else(tmp_path: Path) -> None:
    place = Place(tmp_path)
    doors, came = place.doors, invite()
    certificate = came.certify(NEW, NOW_S)
    assert doors.warrant(NEW.peer) is None
    doors.note(OTHER.peer, certificate.encode())  # another's
    assert doors.warrant(OTHER.peer) is None
    doors.note(NEW.peer, certificate.encode())
    word = doors.warrant(NEW.peer)
    assert word == Admitted(
        NEW.peer, certificate.encode(), came.capability.id, 1, int(NOW_S), int(NOW_S) + 1000
    )
    assert doors.valid([NEW.peer], [word])
    assert doors.valid([NEW.peer, ORGANISER.peer], [word])
    assert doors.warrant(ORGANISER.peer) == Admitted(ORGANISER.peer, b"")
    assert not doors.valid([NEW.peer], [])  # the lie of a convener that lets in a stranger
    assert not doors.valid([NEW.peer, STRANGER.peer], [word])
    assert doors.valid([], [word])  # a guest, who is counted
    free = invite(uses=0).certify(OTHER, NOW_S)
    doors.note(OTHER.peer, free.encode())
    unlimited = doors.warrant(OTHER.peer)
    assert unlimited is not None
    assert not doors.valid([], [unlimited])
    assert (doors.guest(NEW.peer), doors.guest(OTHER.peer)) == (word, None)
    assert [doors.limited(who.peer) for who in (NEW, OTHER, STRANGER, ORGANISER)] == [
        True,
        False,
        True,  # who has shown nothing
        False,
    ]
    for lie in (
        msgspec.structs.replace(word, uses=0),
        msgspec.structs.replace(word, invite=b"another invite!!"),
        msgspec.structs.replace(word, issued_s=0),
        msgspec.structs.replace(word, expires_s=1 << 39),
        msgspec.structs.replace(word, certificate=certificate.encode()[:-1] + b"x"),
    ):
        assert not doors.valid([NEW.peer], [lie])
    stolen = msgspec.structs.replace(word, peer=STRANGER.peer)
    assert not doors.valid([STRANGER.peer], [stolen])


def test_an_observer_enters_no_configuration(tmp_path: Path) -> None:
    doors = Place(tmp_path).doors
    doors.note(NEW.peer, invite("observe").certify(NEW, NOW_S).encode())
    assert doors.warrant(NEW.peer) is None
    certificate, came = invite("observe").certify(NEW, NOW_S), invite("observe").capability
    word = Admitted(NEW.peer, certificate.encode(), came.id, 1, int(NOW_S), int(NOW_S) + 1000)
    assert not doors.valid([NEW.peer], [word])


def test_what_is_revoked_banned_or_over_is_objected_to_and_still_proves_itself(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    doors, came = place.doors, invite()
    doors.note(NEW.peer, came.certify(NEW, NOW_S).encode())
    word = doors.warrant(NEW.peer)
    assert word is not None
    assert doors.objection([NEW.peer], [word]) == ""
    place.now_s = NOW_S + 1001
    assert doors.warrant(NEW.peer) is None  # not by this member
    assert doors.objection([NEW.peer], [word]) == ""  # a convener whose clock is behind may
    place.now_s = NOW_S + 1001 + SKEW_S
    assert "has expired" in doors.objection([NEW.peer], [word])
    place.now_s = NOW_S
    place.bans.revoke(came.capability.id, ORGANISER)
    assert doors.objection([NEW.peer], [word]) == "its invite was revoked"
    assert doors.warrant(NEW.peer) is None
    assert doors.valid([NEW.peer], [word])  # whoever was let in before stays, and the log is right
    place.bans.change(Ban(OTHER.peer, "why", 1), OTHER.peer, ORGANISER)
    assert doors.objection([OTHER.peer], []) == "the run's organiser has banned it"


def test_open_runs_and_lists_ask_for_no_certificate(tmp_path: Path) -> None:
    free = Place(tmp_path, "open").doors
    assert free.warrant(STRANGER.peer) == Admitted(STRANGER.peer, b"")
    assert free.valid([STRANGER.peer], [])
    named = Place(tmp_path, "allow").doors
    named.allow = frozenset([NEW.peer])
    assert named.warrant(STRANGER.peer) is None
    assert not named.valid([STRANGER.peer], [])
    assert named.valid([NEW.peer, ORGANISER.peer], [])
    assert named.warrant(NEW.peer) == Admitted(NEW.peer, b"")


def test_who_comes_by_a_limited_invite_enters_the_first_fragment_before_the_others(
    tmp_path: Path,
) -> None:
    place, inside = Place(tmp_path), set[PeerId]()
    inner = InnerDoors(place.doors, inside.__contains__)
    for who, uses in ((NEW, 1), (OTHER, 0)):
        place.doors.note(who.peer, invite(uses=uses).certify(who, NOW_S).encode())
    word = place.doors.warrant(NEW.peer)
    assert word is not None
    assert inner.warrant(NEW.peer) is None
    assert inner.warrant(OTHER.peer) is not None
    assert "is not in the first fragment" in inner.objection([NEW.peer], [word])
    inside.add(NEW.peer)
    assert inner.warrant(NEW.peer) == word
    assert inner.objection([NEW.peer], [word]) == ""
    assert inner.valid([NEW.peer], [word])


def test_of_those_who_have_shown_one_the_newest_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.run.doors.MOST_SHOWN", 2)
    doors, general = Place(tmp_path).doors, invite(uses=0)
    rng = random.Random(0)
    people = [Identity(rng.randbytes(32)) for _ in range(3)]
    for who in people:
        doors.note(who.peer, general.certify(who, NOW_S).encode())
    assert [doors.warrant(who.peer) is not None for who in people] == [False, True, True]


def test_who_holds_a_seed_pushes_nobody_out_who_has_come_by_another_invite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.run.doors.MOST_SHOWN", 8)
    monkeypatch.setattr("atoll.node.run.doors.MOST_BY_ONE", 6)
    doors, leaked, own = Place(tmp_path).doors, invite(uses=0), invite()
    doors.note(NEW.peer, own.certify(NEW, NOW_S).encode())
    doors.note(OTHER.peer, own.certify(OTHER, NOW_S).encode())
    rng = random.Random(0)
    for _ in range(20):
        minted = Identity(rng.randbytes(32))
        doors.note(minted.peer, leaked.certify(minted, NOW_S).encode())
    assert doors.warrant(NEW.peer) is not None
    assert doors.warrant(OTHER.peer) is not None
    assert len(doors._shown) == 8

"""Who is let in at a run's gate, by what it shows and what the node knows; and who is believed to
be of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.collectives.errors import BadSignatureError, NotAdmittedError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.run.banning import Ban, Bans
from atoll.node.run.gate import Gate, Policy
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity

RUN = RunId("abcdefghijklmnopqrstuvwxyz")
ORGANISER, MEMBER, GUEST, STRANGER = (Identity(bytes([n]) * 32) for n in range(1, 5))
NOW_S, LATE_S = 1050.0, 5000.0
INVITE = make_invite(RUN, [], ORGANISER, now_s=1000, life_s=100)
GUESTS, MEMBERS = (INVITE.certify(who, NOW_S).encode() for who in (GUEST, MEMBER))
OTHER_RUN = make_invite(RunId("b" * 26), [], ORGANISER, now_s=1000).certify(STRANGER, NOW_S)
SELF_MADE = make_invite(RUN, [], STRANGER, now_s=1000).certify(STRANGER, NOW_S).encode()


def gate(
    folder: Path, policy: Policy | None = "invite", members: Sequence[PeerId] = (MEMBER.peer,)
) -> Gate:
    bans = Bans(folder, RUN, ORGANISER.peer)
    made = Gate(RUN, ORGANISER.peer, bans, lambda: members)
    made.policy, made.allow = policy, frozenset([GUEST.peer])
    return made


def admits(gate: Gate, peer: PeerId, shown: bytes, now_s: float = NOW_S) -> bool:
    try:
        gate.admit(peer, shown, now_s)
    except NotAdmittedError:
        return False
    return True


def accepts(gate: Gate, peer: PeerId, shown: bytes, now_s: float = NOW_S) -> bool:
    try:
        gate.accept(peer, shown, now_s)
    except NotAdmittedError:
        return False
    return True


@pytest.mark.parametrize("policy", ["invite", None])
def test_by_invite_only_a_certificate_of_its_own_lets_in(
    tmp_path: Path, policy: Policy | None
) -> None:
    there = gate(tmp_path, policy)
    for shown in (b"", GUESTS, MEMBERS, OTHER_RUN.encode(), SELF_MADE):
        assert not admits(there, STRANGER.peer, shown)
    assert admits(there, GUEST.peer, GUESTS)
    assert not admits(there, GUEST.peer, GUESTS, LATE_S)
    assert admits(there, MEMBER.peer, MEMBERS, LATE_S)
    assert admits(there, MEMBER.peer, b"", LATE_S)
    assert admits(there, ORGANISER.peer, b"", LATE_S)


def test_what_a_member_shows_may_be_in_force_no_more(tmp_path: Path) -> None:
    there = gate(tmp_path, "invite")
    found = there.admit(MEMBER.peer, MEMBERS, LATE_S)
    assert found is not None
    assert (there.in_force(found, NOW_S), there.in_force(found, LATE_S)) == (True, False)
    there._bans.revoke(found.capability.id, ORGANISER)
    assert there.admit(MEMBER.peer, MEMBERS, NOW_S) == found
    assert not there.in_force(found, NOW_S)


def test_open_and_allowed(tmp_path: Path) -> None:
    assert admits(gate(tmp_path, "open"), STRANGER.peer, b"")
    listed = gate(tmp_path, "allow")
    assert admits(listed, GUEST.peer, b"")
    for shown in (b"", GUESTS, SELF_MADE):
        assert not admits(listed, STRANGER.peer, shown)


def test_a_member_shows_its_certificate_only_to_whom_it_believes(tmp_path: Path) -> None:
    there = gate(tmp_path)
    for shown in (b"", GUESTS, SELF_MADE, OTHER_RUN.encode()):
        assert not accepts(there, STRANGER.peer, shown)
        assert not there.hears_of(STRANGER.peer, shown, NOW_S)
    assert accepts(there, GUEST.peer, GUESTS)
    assert not accepts(there, GUEST.peer, GUESTS, LATE_S)
    assert accepts(there, MEMBER.peer, MEMBERS, LATE_S)
    assert there.hears_of(MEMBER.peer, MEMBERS, LATE_S)


def test_a_newcomer_believes_members_whose_certificates_have_expired(tmp_path: Path) -> None:
    """It does not know yet who is a member; it gives away nothing but its own certificate."""
    there = gate(tmp_path, members=())
    assert accepts(there, MEMBER.peer, MEMBERS, LATE_S)
    for shown in (b"", GUESTS, SELF_MADE):
        assert not accepts(there, STRANGER.peer, shown)
    assert not admits(there, MEMBER.peer, MEMBERS, LATE_S)
    unknown = gate(tmp_path, None, ())
    assert accepts(unknown, STRANGER.peer, b"")  # it is asked for the manifest, no more


def test_who_is_banned_or_came_by_a_revoked_invite_is_out_unless_it_is_a_member(
    tmp_path: Path,
) -> None:
    bans = Bans(tmp_path, RUN, ORGANISER.peer)
    there = Gate(RUN, ORGANISER.peer, bans, lambda: [MEMBER.peer])
    there.policy = "invite"
    bans.revoke(INVITE.capability.id, ORGANISER)
    assert not admits(there, GUEST.peer, GUESTS)
    assert not accepts(there, GUEST.peer, GUESTS)
    assert not there.hears_of(GUEST.peer, GUESTS, NOW_S)
    assert admits(there, MEMBER.peer, MEMBERS)
    assert there.hears_of(MEMBER.peer, MEMBERS, NOW_S)
    bans.change(Ban(MEMBER.peer, "why", 1), MEMBER.peer, ORGANISER)
    assert not admits(there, MEMBER.peer, MEMBERS)
    assert not accepts(there, MEMBER.peer, MEMBERS)
    there.policy = "open"
    assert not admits(there, MEMBER.peer, b"")
    assert not there.hears_of(MEMBER.peer, MEMBERS, NOW_S)


def test_a_membership_record_is_kept_of_whom_its_certificate_proves(tmp_path: Path) -> None:
    there = gate(tmp_path)
    assert there.believes(GUEST.peer, GUESTS)
    assert there.believes(MEMBER.peer, b"")
    assert there.believes(ORGANISER.peer, b"")
    for shown in (b"", GUESTS, MEMBERS, OTHER_RUN.encode(), SELF_MADE):
        with pytest.raises(BadSignatureError):
            there.believes(STRANGER.peer, shown)
    there._bans.revoke(INVITE.capability.id, ORGANISER)
    assert not there.believes(GUEST.peer, GUESTS)
    assert there.believes(MEMBER.peer, MEMBERS)  # who is in stays
    assert gate(tmp_path / "open", "open").believes(STRANGER.peer, b"")
    named = gate(tmp_path / "allow", "allow")
    assert named.believes(GUEST.peer, b"")
    with pytest.raises(BadSignatureError):
        named.believes(STRANGER.peer, b"")

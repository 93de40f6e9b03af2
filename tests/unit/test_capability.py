"""Capabilities and certificates: a certificate lets in its own peer, into its own run, until its
end; nothing else does.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import NotAdmittedError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.run import capability as c
from atoll.node.run.invite import make_invite, parse_invite
from atoll.security.identity import Identity, public_key_of

RUN, OTHER = RunId("abcdefghijklmnopqrstuvwxyz"), RunId("b" * 26)
ORGANISER, MEMBER, THIEF = (Identity(letter * 32) for letter in (b"o", b"m", b"t"))
INVITE = make_invite(RUN, [], ORGANISER, now_s=1000, life_s=100)
SHOWN = INVITE.certify(MEMBER, 1000).encode()


def check(data: bytes, peer: PeerId = MEMBER.peer, run: RunId = RUN, now_s: float = 1050) -> bool:
    """Whether it lets ``peer`` in."""
    try:
        found = c.check_certificate(
            data, run_id=run, organiser=ORGANISER.peer, peer=peer, now_s=now_s
        )
    except NotAdmittedError as error:
        return error.code != "E201"
    assert (found.peer, found.capability.run_id) == (peer, run)
    return True


def test_a_certificate_lets_its_own_peer_into_its_own_run_until_its_end() -> None:
    assert len(SHOWN) <= 300
    assert check(SHOWN)
    assert not check(SHOWN, peer=THIEF.peer)
    assert not check(SHOWN, run=OTHER)
    assert not check(SHOWN, now_s=1101)
    assert not check(b"")
    assert not check(bytes(5000))
    known = c.recognise(SHOWN, run_id=RUN, organiser=ORGANISER.peer, peer=MEMBER.peer)
    assert known is not None
    assert (known.expires_s, known.capability.id) == (1100, INVITE.capability.id)


def test_who_saw_a_certificate_cannot_make_one() -> None:
    """The thief has the capability, but not the invite key that signs peers; any other key signs in
    vain.
    """
    seen = msgspec.msgpack.decode(SHOWN, type=c.Certificate)
    own = msgspec.structs.replace(seen, peer_key=public_key_of(THIEF.peer))
    assert not check(own.encode(), peer=THIEF.peer)
    for key in (THIEF, MEMBER, ORGANISER):
        forged = msgspec.structs.replace(
            own, signature=key.sign(c.CERTIFICATE_DOMAIN, own.signed_bytes())
        )
        assert not check(forged.encode(), peer=THIEF.peer)
    # With an own invite key in the capability the organiser's signature is wrong.
    swapped = msgspec.structs.replace(seen.capability, bearer=public_key_of(THIEF.peer))
    assert not swapped.genuine()
    assert not check(c.certify(swapped, THIEF, THIEF.peer, now_s=1000).encode(), peer=THIEF.peer)


def test_another_organiser_lets_nobody_in() -> None:
    foreign = make_invite(RUN, [], THIEF, now_s=1000).certify(THIEF, 1000)
    assert foreign.capability.genuine()
    assert not check(foreign.encode(), peer=THIEF.peer)


def test_for_one_peer_it_is_no_other_peers() -> None:
    mine = make_invite(RUN, [], ORGANISER, now_s=1000, life_s=100, peer=MEMBER.peer)
    assert check(mine.certify(MEMBER, 1000).encode())
    with pytest.raises(NotAdmittedError, match=f"for {MEMBER.peer[-8:]} only"):
        mine.certify(THIEF, 1000)
    freed = msgspec.structs.replace(mine.capability, only=b"")  # the signature is over the name
    assert not freed.genuine()
    # Also where the invite key, which a thief of the whole invite has, names another peer.
    around = msgspec.structs.replace(mine, capability=freed).certify(THIEF, 1000)
    back = msgspec.structs.replace(around, capability=mine.capability)
    assert not check(back.encode(), peer=THIEF.peer)


@pytest.mark.parametrize("change", [{"role_index": 2}, {"uses": 0}, {"uses": 3}, {"expires_s": 9}])
def test_role_uses_and_end_are_signed(change: dict[str, int]) -> None:
    two = make_invite(RUN, [], ORGANISER, now_s=1000, role="observe", uses=2).capability
    assert (two.role, two.uses, two.reissuable) == ("observe", 2, True)
    assert two.genuine()
    assert not msgspec.structs.replace(two, **change).genuine()


def test_a_sites_name_is_signed_and_goes_with_the_certificate() -> None:
    named = make_invite(RUN, [], ORGANISER, now_s=1000, life_s=100, name="clinic-a")
    assert parse_invite(named.encode(), now_s=1000) == named
    shown = named.certify(MEMBER, 1000)
    assert check(shown.encode())
    found = c.genuine(shown.encode())
    assert found is not None
    assert (found.capability.name, found.capability.reissuable) == ("clinic-a", False)
    for other in ("clinic-b", ""):
        assert not msgspec.structs.replace(named.capability, name=other).genuine()
    plain = INVITE.certify(MEMBER, 1000)
    before = msgspec.structs.astuple(plain.capability)[:-1]  # as before there were names
    fields = (before, plain.peer_key, plain.not_after_s)
    assert plain.signed_bytes() == msgspec.msgpack.encode(fields)
    assert plain.encode() == msgspec.msgpack.encode((*fields, plain.signature))


def test_an_expired_invite_makes_no_certificate() -> None:
    with pytest.raises(NotAdmittedError, match="expired"):
        INVITE.certify(MEMBER, 1101)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(SHOWN) - 1), st.integers(1, 255))
def test_any_changed_byte_makes_it_worthless(position: int, change: int) -> None:
    bad = bytearray(SHOWN)
    bad[position] ^= change
    assert not check(bytes(bad))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_garbage(data: bytes) -> None:
    assert not check(data)


def test_names_of_capabilities() -> None:
    name = c.capability_name(INVITE.capability.id)
    assert len(name) == 26
    assert c.capability_id(name) == c.capability_id(name.upper()) == INVITE.capability.id
    for bad in ("", "abc", name[:-1], name + "a", name[:-1] + "1"):
        assert c.capability_id(bad) is None
    assert c.run_key(RUN) != c.run_key(OTHER)
    for wrong in ("", "a" * 25, "A" * 26, "1" * 26):
        with pytest.raises(ValueError, match=r"run id|digit"):
            c.run_key(RunId(wrong))

"""Invites: one string, signed, with an end; changed or stale ones open nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import NotAdmittedError
from atoll.collectives.identifiers import RunId
from atoll.node import invite as v
from atoll.security.identity import Identity

RUN, OTHER = RunId("a" * 26), RunId("b" * 26)
ORGANISER, MEMBER = Identity(b"o" * 32), Identity(b"m" * 32)
ADDRESS = f"/ip4/127.0.0.1/tcp/4150/p2p/{ORGANISER.peer}"
INVITE = v.make_invite(RUN, [ADDRESS], ORGANISER, now_s=1000, life_s=100)


def test_round_trip_also_wrapped_and_shouted() -> None:
    text = str(INVITE)
    assert text.startswith("atoll1:")
    assert text == text.lower()
    for variant in (text, f"  {text[:50]}\n {text[50:]}\n", text.upper()):
        assert v.parse_invite(variant, now_s=1100) == INVITE
    assert (INVITE.run_id, INVITE.organiser, INVITE.expires_s, INVITE.bootstrap) == (
        RUN,
        ORGANISER.peer,
        1100,
        (ADDRESS,),
    )


def test_expiry() -> None:
    with pytest.raises(NotAdmittedError, match="expired 2 hours ago") as caught:
        v.parse_invite(str(INVITE), now_s=1100 + 7300)
    assert caught.value.code == "E201"
    assert caught.value.exit_code == 77
    assert v.inspect_invite(str(INVITE)) == INVITE


def test_a_clock_that_is_behind() -> None:
    assert v.parse_invite(str(INVITE), now_s=900) == INVITE
    with pytest.raises(NotAdmittedError, match="15 minutes behind") as caught:
        v.parse_invite(str(INVITE), now_s=50)
    assert (caught.value.code, caught.value.exit_code) == ("E120", 75)


@pytest.mark.parametrize(
    "text",
    ["", "hello", "atoll1:", "atoll1:!!!", "atoll2:abc", str(INVITE)[:-30], "atoll1:" + "a" * 9000],
)
def test_unreadable(text: str) -> None:
    with pytest.raises(NotAdmittedError) as caught:
        v.parse_invite(text, now_s=0)
    assert caught.value.code == "E201"
    assert caught.value.hint


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_changed_character_is_noticed(data: st.DataObject) -> None:
    text = str(INVITE)
    position = data.draw(st.integers(len(v.PREFIX), len(text) - 2))
    char = data.draw(
        st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda c: c != text[position])
    )
    with pytest.raises(NotAdmittedError):
        v.parse_invite(text[:position] + char + text[position + 1 :], now_s=1000)


def test_other_contents_under_the_signature() -> None:
    moved = msgspec.structs.replace(INVITE, bootstrap=("/ip4/6.6.6.6/tcp/1",))
    longer = msgspec.structs.replace(
        INVITE, token=msgspec.structs.replace(INVITE.token, expires_s=9999)
    )
    self_made = v.reissue(
        longer, [ADDRESS], MEMBER
    )  # a valid outer signature around a token the organiser did not sign
    for bad in (moved, longer, self_made):
        with pytest.raises(NotAdmittedError) as caught:
            v.parse_invite(str(bad), now_s=1000)
        assert caught.value.code == "E202"


def test_a_member_issues_with_the_same_admission() -> None:
    again = v.parse_invite(str(v.reissue(INVITE, ["/ip4/10.0.0.9/tcp/4150"], MEMBER)), now_s=1000)
    assert again.issuer == MEMBER.peer
    assert again.token == INVITE.token
    assert again.bootstrap == ("/ip4/10.0.0.9/tcp/4150",)


def test_tokens_open_their_run_only() -> None:
    data = INVITE.token_bytes()
    assert (
        v.check_token(data, run_id=RUN, organiser=ORGANISER.peer, now_s=1100, peer=MEMBER.peer)
        == INVITE.token
    )
    foreign = v.make_invite(RUN, [], MEMBER, now_s=1000).token_bytes()
    for bad, run, now in (
        (data, OTHER, 1000),
        (data, RUN, 1200),
        (foreign, RUN, 1000),
        (b"", RUN, 1000),
        (bytes(5000), RUN, 1000),
    ):
        with pytest.raises(NotAdmittedError):
            v.check_token(bad, run_id=run, organiser=ORGANISER.peer, now_s=now, peer=MEMBER.peer)


def test_an_invite_for_one_peer_is_no_other_peers() -> None:
    own = v.parse_invite(
        str(v.make_invite(RUN, [ADDRESS], ORGANISER, now_s=1000, peer=MEMBER.peer)), now_s=1000
    )
    assert own.token.peer == MEMBER.peer
    shown = {"run_id": RUN, "organiser": ORGANISER.peer, "now_s": 1000}
    assert v.check_token(own.token_bytes(), peer=MEMBER.peer, **shown) == own.token
    with pytest.raises(NotAdmittedError, match=f"for {MEMBER.peer[-8:]} only"):
        v.check_token(own.token_bytes(), peer=ORGANISER.peer, **shown)
    freed = msgspec.structs.replace(own.token, peer="")  # the signature is over the name
    with pytest.raises(NotAdmittedError):
        v.check_token(msgspec.msgpack.encode(freed), peer=ORGANISER.peer, **shown)


def test_a_token_of_before_invites_were_for_one_peer_is_still_good() -> None:
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(INVITE.token_bytes())[:-1])
    assert (
        v.check_token(old, run_id=RUN, organiser=ORGANISER.peer, now_s=1000, peer=MEMBER.peer)
        == INVITE.token
    )


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_tokens(data: bytes) -> None:
    with pytest.raises(NotAdmittedError):
        v.check_token(data, run_id=RUN, organiser=ORGANISER.peer, now_s=0, peer=MEMBER.peer)


def test_a_role_is_signed_and_an_invite_to_train_is_as_before_there_were_roles() -> None:
    plain, watching = (
        v.make_invite(RUN, ["/ip4/10.0.0.1/tcp/1"], ORGANISER, now_s=1000, role=role)
        for role in ("train", "observe")
    )
    assert len(msgspec.msgpack.decode(plain.token.signed_bytes())) == 5
    shown = watching.token_bytes()
    assert v.parse_invite(str(watching), now_s=1000).token.role == "observe"
    about = {"run_id": RUN, "organiser": ORGANISER.peer, "peer": MEMBER.peer}
    assert v.genuine_token(shown, **about) == watching.token
    assert v.genuine_token(plain.token_bytes(), **about) == plain.token
    promoted = msgspec.structs.replace(
        watching.token, role="aggregate"
    )  # nobody but the organiser gives roles: it opens nothing
    for nothing in (b"", b"\xff", msgspec.msgpack.encode(promoted)):
        assert v.genuine_token(nothing, **about) is None
    assert v.genuine_token(shown, **{**about, "run_id": OTHER}) is None
    with pytest.raises(NotAdmittedError):
        v.check_token(msgspec.msgpack.encode(promoted), now_s=1000, **about)


def test_how_many_an_invite_admits_is_signed() -> None:
    two = v.make_invite(RUN, [ADDRESS], ORGANISER, now_s=1000, uses=2)
    assert v.parse_invite(str(v.reissue(two, [ADDRESS], MEMBER)), now_s=1000).token.uses == 2
    about = {"run_id": RUN, "organiser": ORGANISER.peer, "now_s": 1000, "peer": MEMBER.peer}
    assert v.check_token(two.token_bytes(), **about) == two.token
    for uses in (0, 3):
        with pytest.raises(NotAdmittedError):
            v.check_token(
                msgspec.msgpack.encode(msgspec.structs.replace(two.token, uses=uses)), **about
            )

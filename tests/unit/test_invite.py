"""Invites: one line, signed by the organiser, with an end, never shown by accident; changed or
stale ones open nothing.
"""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import NotAdmittedError, VersionMismatchError
from atoll.collectives.identifiers import RunId
from atoll.node.run import invite as v
from atoll.node.run.capability import CERTIFICATE_DOMAIN, genuine, recognise
from atoll.security.identity import Identity, encode_base58

RUN = RunId("abcdefghijklmnopqrstuvwxyz")
ORGANISER, MEMBER, RELAY = (Identity(letter * 32) for letter in (b"o", b"m", b"r"))
ADDRESS = f"/ip4/203.0.113.117/tcp/41500/p2p/{ORGANISER.peer}"
INVITE = v.make_invite(RUN, [ADDRESS], ORGANISER, now_s=1000, life_s=100)
LINE = INVITE.encode()


def test_round_trip_also_wrapped() -> None:
    assert LINE.startswith("atoll2:")
    for variant in (LINE, f"  {LINE[:50]}\n {LINE[50:]}\n", "ATOLL2:" + LINE[7:]):
        assert v.parse_invite(variant, now_s=1100) == INVITE
    assert (INVITE.run_id, INVITE.organiser, INVITE.expires_s, INVITE.bootstrap) == (
        RUN,
        ORGANISER.peer,
        1100,
        (ADDRESS,),
    )


@pytest.mark.parametrize("peer", ["", MEMBER.peer])
@pytest.mark.parametrize(
    "address",
    [
        ADDRESS,
        f"/ip4/203.0.113.117/tcp/41500/p2p/{RELAY.peer}",
        f"/ip6/2001:db8:1111:2222:3333:4444:5555:6666/tcp/41500/p2p/{RELAY.peer}",
        f"/dns4/atoll.example.org/tcp/4150/p2p/{RELAY.peer}",
        "/dnsaddr/atoll.example.org",
        f"/ip4/203.0.113.117/tcp/41500/p2p/{RELAY.peer}/p2p-circuit/p2p/{ORGANISER.peer}",
        f"/ip6/2001:db8:1111:2222:3333:4444:5555:6666/tcp/41500/p2p/{RELAY.peer}/p2p-circuit/p2p/{ORGANISER.peer}",
    ],
)
def test_with_one_address_it_has_at_most_300_characters(address: str, peer: str) -> None:
    line = v.make_invite(
        RUN, [address], ORGANISER, now_s=1_800_000_000, uses=1000, peer=peer
    ).encode()
    assert len(line) <= 300
    found = v.inspect_invite(line)
    assert (found.bootstrap, found.capability.peer) == ((address,), peer or None)


def test_an_invite_for_one_peer_holds_no_secret_and_lets_in_nobody_else() -> None:
    """Whoever reads it can make certificates with its key, for anybody; members know none but that
    peer's.
    """
    line = v.make_invite(RUN, [], ORGANISER, now_s=1000, peer=MEMBER.peer).encode()
    assert line == v.make_invite(RUN, [], ORGANISER, now_s=1000, peer=MEMBER.peer).encode()
    found = v.parse_invite(line, now_s=1000)
    assert found.certify(MEMBER, 1000).peer == MEMBER.peer
    freed = msgspec.structs.replace(found.capability, only=b"")
    forged = msgspec.structs.replace(found, capability=freed).certify(RELAY, 1000)
    own = msgspec.structs.replace(forged, capability=found.capability)
    own = msgspec.structs.replace(
        own,
        signature=v._invite_key(found.secret).sign(CERTIFICATE_DOMAIN, own.signed_bytes()),
    )
    about = {"run_id": RUN, "organiser": ORGANISER.peer, "peer": RELAY.peer}
    assert genuine(own.encode()) is not None  # signed as it should be
    assert recognise(own.encode(), **about) is None
    assert recognise(forged.encode(), **about) is None
    others = {"now_s": 1000, "peer": MEMBER.peer}
    kinds = [
        v.make_invite(RUN, [], ORGANISER, **{**others, **more}).capability.id
        for more in ({}, {"uses": 1}, {"role": "observe"}, {"life_s": 9}, {"now_s": 1001})
    ]
    assert len({found.capability.id, *kinds}) == len(kinds)


@pytest.mark.parametrize("rest", [b"\x06" * 3000, b"\x16\x16\x00", b"\x06"])
def test_circuits_of_circuits_are_no_addresses(rest: bytes) -> None:
    body = INVITE.encode()
    data = v.decode_base58(body[len(v.PREFIX) :], most=v.MAX_INVITE_CHARS)[: -v.CHECK_BYTES]
    data = data[: v._HEAD.size + v.SECRET_BYTES] + v._pack_length(len(rest)) + rest
    with pytest.raises(ValueError, match="no address"):
        v._unpack(data)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.from_regex(r"\A[!-~]{1,80}\Z"), max_size=16))
def test_any_address_is_given_back_as_it_was(kept: list[str]) -> None:
    assert v.inspect_invite(v.reissue(INVITE, kept).encode()).bootstrap == tuple(kept)


@pytest.mark.parametrize(
    "address", ["/dns4/a\x1b[2J/tcp/1", "/ip4/1.2.3.4/tcp/1\n", "/dnsaddr/\u202ex"]
)
def test_an_address_that_a_terminal_would_obey_is_refused(address: str) -> None:
    with pytest.raises(NotAdmittedError):
        v.inspect_invite(v.reissue(INVITE, [address]).encode())


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/1.2.3.4/tcp/00005",
        "/ip4/1.2.3.4/tcp/99999",
        f"/ip6/FE80::1/tcp/1/p2p/{RELAY.peer}",
        f"/p2p/{RELAY.peer}",
        f"/ip4/1.1.1.1/tcp/1/p2p/{RELAY.peer}/p2p-circuit/p2p/{ORGANISER.peer}",
        f"/ip4/1.1.1.1/tcp/1/p2p/{RELAY.peer}/p2p-circuit",
        f"/ip4/1.1.1.1/tcp/1/p2p-circuit/p2p/{MEMBER.peer}",
        f"/p2p-circuit/p2p/{MEMBER.peer}",
        "/p2p-circuit",
        f"/p2p/{RELAY.peer}/p2p-circuit/p2p-circuit/p2p/{ORGANISER.peer}",
        "/p2p/",
    ],
)
def test_odd_addresses_are_given_back_as_they_were(address: str) -> None:
    assert v.inspect_invite(v.reissue(INVITE, [address]).encode()).bootstrap == (address,)


def test_neither_text_nor_repr_shows_the_line_or_the_secret() -> None:
    for shown in (str(INVITE), repr(INVITE), f"{INVITE}", f"{[INVITE]}"):
        assert LINE[7:40] not in shown
        assert repr(INVITE.secret)[2:-1] not in shown
        assert RUN in shown


def test_expiry() -> None:
    with pytest.raises(NotAdmittedError, match="expired 2 hours ago") as caught:
        v.parse_invite(LINE, now_s=1100 + 7300)
    assert caught.value.code == "E201"
    assert caught.value.exit_code == 77
    assert v.inspect_invite(LINE) == INVITE


def test_a_clock_that_is_behind() -> None:
    assert v.parse_invite(LINE, now_s=900) == INVITE
    with pytest.raises(NotAdmittedError, match="15 minutes behind") as caught:
        v.parse_invite(LINE, now_s=50)
    assert (caught.value.code, caught.value.exit_code) == ("E120", 75)


@pytest.mark.parametrize(
    "text", ["", "hello", "atoll2:", "atoll2:!!!", "atoll3:abc", LINE[:-30], "atoll2:" + "a" * 9000]
)
def test_unreadable(text: str) -> None:
    with pytest.raises(NotAdmittedError) as caught:
        v.parse_invite(text, now_s=0)
    assert caught.value.code == "E201"
    assert caught.value.hint


def test_an_invite_of_the_version_before_is_told_by_its_code() -> None:
    with pytest.raises(VersionMismatchError) as caught:
        v.parse_invite("atoll1:ssmluylbmfqw", now_s=0)
    assert caught.value.code == "E140"
    assert v.is_invite("atoll1:x")
    assert v.is_invite(LINE)
    assert not v.is_invite("tide")


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_changed_character_is_noticed(data: st.DataObject) -> None:
    position = data.draw(st.integers(len(v.PREFIX), len(LINE) - 1))
    char = data.draw(st.sampled_from("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijk"))
    changed = LINE[:position] + char + LINE[position + 1 :]
    if char == LINE[position]:
        return
    with pytest.raises(NotAdmittedError) as caught:
        v.parse_invite(changed, now_s=1000)
    assert caught.value.code == "E201"


def test_other_contents_under_the_signature() -> None:
    longer = msgspec.structs.replace(INVITE.capability, expires_s=9999)
    other_run = msgspec.structs.replace(INVITE.capability, run=bytes(17))
    own_key = v.make_invite(RUN, [ADDRESS], MEMBER, now_s=1000).capability
    stolen = msgspec.structs.replace(own_key, organiser_key=INVITE.capability.organiser_key)
    for capability in (longer, other_run, stolen):
        bad = msgspec.structs.replace(INVITE, capability=capability)
        with pytest.raises(NotAdmittedError) as caught:
            v.parse_invite(bad.encode(), now_s=1000)
        assert caught.value.code == "E202"


def test_with_another_secret_the_signature_is_wrong() -> None:
    """The capability is over the public half of the invite key, which follows from the secret."""
    with pytest.raises(NotAdmittedError) as caught:
        v.inspect_invite(msgspec.structs.replace(INVITE, secret=bytes(16)).encode())
    assert caught.value.code == "E202"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_with_a_right_checksum(data: bytes) -> None:
    line = v.PREFIX + encode_base58(data + blake3(data).digest(4))
    with pytest.raises(NotAdmittedError):
        v.inspect_invite(line)


def test_a_member_hands_on_the_same_capability_with_other_addresses() -> None:
    again = v.parse_invite(v.reissue(INVITE, ["/ip4/10.0.0.9/tcp/4150"]).encode(), now_s=1000)
    assert again.capability == INVITE.capability
    assert again.bootstrap == ("/ip4/10.0.0.9/tcp/4150",)
    first, second = (each.certify(MEMBER, 1000) for each in (INVITE, again))
    assert first == second

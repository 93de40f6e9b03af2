"""Lane records: whatever is not the next record of this direction does not open."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives import record_layer
from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.record_layer import (
    KEY_BYTES,
    PLAIN,
    LaneKeys,
    Opener,
    Sealer,
    derive_lane_keys,
)

PEER = PeerId("peer")
A, B = bytes(range(32)), bytes(range(32, 64))


def pair(cipher="aes-128-gcm", transcript=b"t"):
    return (
        derive_lane_keys(A, B, transcript, initiator=True, cipher=cipher),
        derive_lane_keys(B, A, transcript, initiator=False, cipher=cipher),
    )


def seal(sealer: Sealer, header: bytes, payload: bytes) -> bytes:
    out = bytearray(len(payload) + 16)
    sealer.encrypt(header, payload, memoryview(out))
    return bytes(out)


def open_(opener: Opener, header: bytes, sealed: bytes) -> bytes:
    out = bytearray(max(0, len(sealed) - 16))
    opener.open(header, memoryview(sealed), memoryview(out), PEER)
    return bytes(out)


@pytest.mark.parametrize("cipher", KEY_BYTES)
@given(st.lists(st.tuples(st.binary(max_size=48), st.binary(max_size=300)), min_size=1, max_size=6))
@settings(max_examples=15)
def test_round_trip_both_ways(cipher, records):
    mine, theirs = pair(cipher)
    assert (mine.send, mine.receive) == (theirs.receive, theirs.send)
    assert mine.send != mine.receive
    for one, other in ((mine, theirs), (theirs, mine)):
        sealer, opener = Sealer(one.send, cipher), Opener(other.receive, cipher)
        for header, payload in records:
            sealed = seal(sealer, header, payload)
            assert open_(opener, header, sealed) == payload


@given(st.integers(0, 3), st.data())
@settings(max_examples=60)
def test_anything_but_the_next_record_is_refused(kind, data):
    mine, theirs = pair()
    sealer, opener = Sealer(mine.send, "aes-128-gcm"), Opener(theirs.receive, "aes-128-gcm")
    sent = [(b"header %d" % i, seal(sealer, b"header %d" % i, b"payload %d" % i)) for i in range(4)]
    opened = data.draw(st.integers(0, 2))
    for header, sealed in sent[:opened]:
        open_(opener, header, sealed)
    header, sealed = sent[opened]
    if kind == 0:  # flipped, in header or payload
        spot = data.draw(st.integers(0, len(header) + len(sealed) - 1))
        both = bytearray(header + sealed)
        both[spot] ^= 1 << data.draw(st.integers(0, 7))
        header, sealed = bytes(both[: len(header)]), bytes(both[len(header) :])
    elif kind == 1:  # cut
        sealed = sealed[: data.draw(st.integers(0, len(sealed) - 1))]
    elif kind == 2:  # replayed or reordered
        header, sealed = sent[data.draw(st.sampled_from([i for i in range(4) if i != opened]))]
    else:  # spliced in from the other direction, or from another lane
        keys = data.draw(st.sampled_from([theirs.send, pair(transcript=b"other")[0].send]))
        other = Sealer(keys, "aes-128-gcm")
        for _ in range(opened + 1):
            sealed = seal(other, header, b"payload %d" % opened)
    with pytest.raises(RemoteProtocolError) as caught:
        open_(opener, header, sealed)
    assert caught.value.peer == PEER


def test_headers_of_a_plain_lane_are_sealed_with_nothing_in_them_under_a_key_of_its_own():
    mine, theirs = pair(PLAIN)
    sealer, opener = Sealer(mine.send, PLAIN), Opener(theirs.receive, PLAIN)
    first, second = seal(sealer, b"one", b""), seal(sealer, b"two", b"")
    assert len(first) == 16
    assert first != second
    assert open_(opener, b"one", first) == b""
    for header, sealed in ((b"tow", second), (b"two", second[:-1]), (b"two", bytes(16))):
        with pytest.raises(RemoteProtocolError):
            open_(opener if header == b"two" else Opener(theirs.receive, PLAIN), header, sealed)
    with pytest.raises(RemoteProtocolError):  # not one that was agreed to be encrypted
        open_(Opener(pair()[1].receive, PLAIN), b"one", first)


def test_keys_step_forward_at_the_same_record(monkeypatch):
    monkeypatch.setattr(record_layer, "REKEY_RECORDS", 3)
    mine, theirs = pair()
    sealer, opener = Sealer(mine.send, "aes-128-gcm"), Opener(theirs.receive, "aes-128-gcm")
    keys = set()
    for i in range(10):
        assert open_(opener, b"h", seal(sealer, b"h", b"%d" % i)) == b"%d" % i
        keys.add(sealer._key)
    assert len(keys) == 4


def test_open_in_place():
    mine, theirs = pair()
    sealed = bytearray(seal(Sealer(mine.send, "aes-128-gcm"), b"h", b"x" * 1000))
    view = memoryview(sealed)
    Opener(theirs.receive, "aes-128-gcm").open(b"h", view, view[:1000], PEER)
    assert sealed[:1000] == b"x" * 1000


def test_secrets_and_ciphers_are_checked():
    with pytest.raises(LocalProtocolError):
        derive_lane_keys(A[:31], B, b"", initiator=True)
    with pytest.raises(LocalProtocolError):
        derive_lane_keys(A, B, b"", initiator=True, cipher="none")
    with pytest.raises(LocalProtocolError):
        Sealer(bytes(15), "aes-128-gcm")
    assert A.hex() not in repr(LaneKeys(A, B))
    assert pair()[0] != pair(transcript=b"u")[0]

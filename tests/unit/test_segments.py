"""Long records of an encrypted lane: sealed, and opened, a segment at a time."""

from __future__ import annotations

import socket

import pytest
from engine_kit import WAIT_S, drain, keys, swarm

from atoll.collectives.engine import lane as engine_lane
from atoll.collectives.exchange import BlobComplete, LaneDown, LaneUp, PeerFault
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.record_layer import Sealer

__all__ = ["swarm"]  # a fixture
SEGMENT, NAME = 1_000, b"state"
KEY = wire_header.blob_key(NAME)
DATA = bytes(range(250)) * 14  # three segments and a half
LENGTH = len(DATA)


class Liar:
    """The other end of a lane, which seals what it likes. It is up; ``a`` wants DATA of it, in one
    chunk, as ``out``.
    """

    def __init__(self, a, monkeypatch):
        monkeypatch.setattr(engine_lane, "SEGMENT_BYTES", SEGMENT)
        one, self.end = socket.socketpair()
        self.end.settimeout(WAIT_S)
        mine, theirs = keys(4)
        self._sealer = Sealer(theirs.send, theirs.cipher)
        self.out = bytearray(len(DATA))
        a.engine.exchange.want(NAME, memoryview(self.out), len(DATA), (), ["liar"])
        a.engine.add_lane("liar", one, mine, "direct")
        self.end.sendall(self.record(wire_header.BEAT_HEADER))
        assert a.wait(LaneUp).peer == "liar"

    def segments(self, header, payload=b""):
        """Sealed segments, without the header."""
        found = []
        for start in range(0, max(1, len(payload)), SEGMENT):
            part = payload[start : start + SEGMENT]
            sealed = bytearray(len(part) + 16)
            self._sealer.encrypt(header, part, memoryview(sealed))
            found.append(bytes(sealed))
        return found

    def record(self, header, payload=b""):
        return header + b"".join(self.segments(header, payload))


def blob(length=LENGTH, key=KEY):
    return wire_header.pack(wire_header.BLOB, length, 0, key, bytes(16))


@pytest.mark.parametrize("step", [1, 7, 1_016, 5_000])
def test_a_long_record_is_whole_however_it_comes(swarm, monkeypatch, step):
    (a,) = swarm(1)
    liar = Liar(a, monkeypatch)
    data = liar.record(blob(), DATA) + liar.record(wire_header.BEAT_HEADER)
    for start in range(0, len(data), step):
        liar.end.sendall(data[start : start + step])
    assert a.wait(BlobComplete).name == NAME
    assert liar.out == DATA
    liar.end.close()


def flipped(segments):
    segments[2] = segments[2][:500] + bytes([segments[2][500] ^ 1]) + segments[2][501:]


def swapped(segments):
    segments[1], segments[2] = segments[2], segments[1]


def repeated(segments):
    segments[2] = segments[1]


def dropped(segments):
    del segments[1]
    segments.append(bytes(1_016))


@pytest.mark.parametrize("harm", [flipped, swapped, repeated, dropped])
def test_a_segment_that_is_not_the_next_one_ends_the_lane_and_nothing_counts(
    swarm, monkeypatch, harm
):
    (a,) = swarm(1)
    liar = Liar(a, monkeypatch)
    segments = liar.segments(blob(), DATA)
    harm(segments)
    liar.end.sendall(blob() + b"".join(segments))
    assert "authenticate" in a.wait(LaneDown).reason
    assert not [event for event in drain(a) if isinstance(event, PeerFault | BlobComplete)]
    liar.end.close()


def test_a_record_that_ends_between_two_segments_is_cut(swarm, monkeypatch):
    (a,) = swarm(1)
    liar = Liar(a, monkeypatch)
    liar.end.sendall(blob() + b"".join(liar.segments(blob(), DATA)[:2]))
    liar.end.shutdown(socket.SHUT_WR)
    assert "middle of a record" in a.wait(LaneDown).reason
    assert not [event for event in drain(a) if isinstance(event, BlobComplete)]
    liar.end.close()


def test_a_long_record_that_breaks_a_rule_is_its_senders_fault_and_a_forged_one_is_nobodys(
    swarm, monkeypatch
):
    (a,) = swarm(1)
    liar = Liar(a, monkeypatch)
    liar.end.sendall(
        blob() + b"".join(liar.segments(blob(len(DATA) - 1), DATA[:-1]))
    )  # its length was changed on the way
    assert "authenticate" in a.wait(LaneDown).reason
    assert not [event for event in drain(a) if isinstance(event, PeerFault)]
    liar.end.close()
    liar = Liar(a, monkeypatch)
    liar.end.sendall(
        blob(2_000) + liar.segments(blob(2_000), bytes(2_000))[0]
    )  # the beginning tells
    assert a.wait(PeerFault) == PeerFault(
        "liar", f"blob chunk 0 of 2000 bytes, expected {len(DATA)}"
    )
    assert a.wait(LaneDown).peer == "liar"
    liar.end.close()


def test_a_long_record_for_nobody_is_read_past(swarm, monkeypatch):
    (a,) = swarm(1)
    liar = Liar(a, monkeypatch)
    strange = blob(4_321, bytes(16))
    liar.end.sendall(liar.record(strange, bytes(4_321)) + liar.record(blob(), DATA))
    assert a.wait(BlobComplete).name == NAME
    assert liar.out == DATA
    liar.end.close()

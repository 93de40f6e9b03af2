"""Compression on lanes: only where it pays, the same bytes at the other end, and nothing believed
that a packed record says.
"""

from __future__ import annotations

import socket

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.engine import lane as engine_lane
from atoll.collectives.engine.lane import SEGMENT_BYTES, Lane, PeerFaultError
from atoll.collectives.engine.packing import FASTEST, TRY_EVERY, Packer, full_length, unpack
from atoll.collectives.engine.plain import PlainLane
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.exchange import Outgoing
from atoll.collectives.exchange import header as wire_header
from atoll.collectives.exchange.header import MAX_PAYLOAD_BYTES
from atoll.collectives.record_layer import DEFAULT_CIPHER, PLAIN, derive_lane_keys

SPARSE = bytes(60_000) + np.random.default_rng(0).bytes(5_536)
DENSE = np.random.default_rng(1).bytes(65_536)


class Clock:
    """A clock that advances by the same step at every look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def at_rate(rate: float, step: float = 1e-4) -> Packer:
    packer = Packer(Clock(step))
    for index in range(12):
        packer.sent(int(rate / 10), index / 10)
    return packer


def packs(packer: Packer, payload: bytes, count: int = 2 * TRY_EVERY) -> int:
    return sum(packer.pack(memoryview(payload)) is not None for _ in range(count))


def test_a_rate_is_that_of_uninterrupted_sending() -> None:
    packer = Packer(Clock(0))
    packer.sent(10_000_000, 0.0)  # into empty buffers
    assert packer.rate is None
    for index in range(1, 5):
        packer.sent(200_000, index / 10)
    assert packer.rate == pytest.approx(2e6)
    packer.idle()
    packer.sent(10_000_000, 100.0)
    packer.sent(200_000, 100.1)
    packer.idle()  # too short to tell
    packer.sent(1, 200.0)
    assert packer.rate == pytest.approx(2e6)


def test_it_is_used_where_it_pays_and_tried_now_and_then_where_it_does_not() -> None:
    assert packs(Packer(Clock(1e-4)), SPARSE) == 0  # no rate yet
    assert packs(at_rate(2 * FASTEST), SPARSE) == 0
    assert packs(at_rate(1e6), SPARSE) == 2 * TRY_EVERY
    assert packs(at_rate(1e6), DENSE) == 0
    assert (
        packs(at_rate(1e6, step=1.0), SPARSE) == 2
    )  # a processor so slow that only the two tries are packed
    assert packs(at_rate(1e6), SPARSE[:4000]) == 0
    packer = at_rate(1e6)
    packs(packer, DENSE)
    assert (
        packs(packer, SPARSE, 2 * TRY_EVERY) > TRY_EVERY
    )  # it found out that the values have changed


@given(payload=st.one_of(st.binary(min_size=1, max_size=300), st.sampled_from([SPARSE, DENSE])))
@settings(max_examples=30)
def test_packed_bytes_are_the_same_bytes(payload: bytes) -> None:
    packed = memoryview(zstandard.ZstdCompressor(level=1).compress(payload))
    assert full_length(packed, "x") == len(payload)
    target = memoryview(bytearray(len(payload)))
    unpack(packed, target, "x")
    assert target == payload


def frame(payload: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(payload)


def test_lengths_are_checked_before_anything_is_unpacked() -> None:
    huge = bytearray(
        zstandard.ZstdCompressor(level=1).compress(bytes(MAX_PAYLOAD_BYTES + 1))
    )  # a small bomb
    for packed in (
        b"",
        b"abc",
        bytes(100),
        bytes(huge),
        frame(SPARSE, write_content_size=False),
        frame(b""),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            full_length(memoryview(packed), "x")
        assert caught.value.peer == "x"


@given(
    cut=st.integers(0, 200),
    flips=st.lists(st.tuples(st.integers(18, 5_000), st.integers(1, 255)), max_size=3),
    tail=st.binary(max_size=5),
)
@settings(max_examples=60)
def test_damaged_frames_are_refused_or_the_right_length(
    cut: int, flips: list[tuple[int, int]], tail: bytes
) -> None:
    packed = bytearray(frame(SPARSE))
    for at, bits in flips:
        packed[at] ^= bits
    packed = packed[: len(packed) - cut] + tail
    target = memoryview(bytearray(len(SPARSE)))
    refused = False
    try:
        unpack(memoryview(packed), target, "x")
    except RemoteProtocolError:
        refused = True
    assert refused == (target == bytes(len(SPARSE)))  # all is written, or nothing
    assert refused or flips or (cut, tail) == (0, b"")


class Records:
    """Sends what it is given; receives blobs of one length."""

    def __init__(self, payloads: list[bytes], length: int) -> None:
        self.payloads, self.length = payloads, length
        self.got: list[bytes] = []
        self._view = memoryview(b"")

    def next_record(self, peer: str, lane: int) -> Outgoing | None:
        if not self.payloads:
            return None
        payload = self.payloads.pop(0)
        return Outgoing(
            wire_header.pack(wire_header.BLOB, len(payload), 7, bytes(16), bytes(16)),
            memoryview(payload),
        )

    def destination(self, peer: str, header: bytes, lane: int) -> memoryview | None:
        record = wire_header.parse(header, peer)
        if record.length != self.length:
            raise RemoteProtocolError(f"{record.length} bytes", peer=peer)
        self._view = memoryview(bytearray(record.length))
        return self._view

    def place(self, peer: str, lane: int) -> memoryview | None:
        return self._view

    def received(self, peer: str, header: bytes, lane: int) -> None:
        self.got.append(bytes(self._view))


@pytest.mark.parametrize(("make", "cipher"), [(Lane, DEFAULT_CIPHER), (PlainLane, PLAIN)])
@pytest.mark.parametrize("segment", [64, SEGMENT_BYTES])
def test_a_slow_lane_carries_packed_records_and_hands_out_unpacked_ones(
    monkeypatch: pytest.MonkeyPatch, make: type[Lane], cipher: str, segment: int
) -> None:
    monkeypatch.setattr(engine_lane, "SEGMENT_BYTES", segment)
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    secrets = (b"a" * 32, b"b" * 32)
    keys = [
        derive_lane_keys(secrets[i], secrets[1 - i], b"t", initiator=i == 0, cipher=cipher)
        for i in range(2)
    ]
    lanes = [make("x", end, key, "", 0.0) for end, key in zip(ends, keys, strict=True)]
    payloads = [SPARSE, DENSE, SPARSE, SPARSE]
    source, sink = Records(list(payloads), 65_536), Records([], 65_536)
    lanes[0].packer = at_rate(1e6)

    def move(times: int) -> None:
        for _ in range(times):
            for lane, records in zip(lanes, (source, sink), strict=True):
                lane.can_read = lane.can_write = True
                lane.send(records, 0.0)
                lane.receive(records, 0.0)

    move(200)
    assert sink.got == payloads
    assert len(DENSE) < lanes[0].bytes_sent < 2 * len(DENSE)
    sink.length = 65_535  # not what the receiver expects: refused by what the record says of itself
    source.payloads = [SPARSE]
    with pytest.raises(PeerFaultError, match="65536 bytes"):
        move(50)
    for lane in lanes:
        lane.close()

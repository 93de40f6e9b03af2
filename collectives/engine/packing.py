"""Compression of the records on a lane, where it is measured to pay: on slow links, and for values
that repeat.

A record is packed whole, by zstd, and says so in its header; the lane unpacks it before anybody
else sees it. So encoded bytes, hashes and results are the same with and without. A packed record
says how long it is in full: that must be the length the receiver expects, and is checked before
anything is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable

import zstandard

from ..errors import RemoteProtocolError
from ..exchange.header import MAX_PAYLOAD_BYTES
from ..foreign import quoted
from ..identifiers import PeerId

LEVEL = 1  # higher ones never saved enough to be worth their time
SHORTEST = 4096  # bytes of a payload that may be packed
# bytes/s of a lane above which nothing is tried: int8 never pays there, and a busy processor looks
# like a slow lane
FASTEST = 25e6
TRY_EVERY = 64  # payloads, while it does not pay
WORTH = 2.0  # seconds saved on the link for a second of the processor's: it has a model to train
WINDOW_S, WINDOW_BYTES = 0.2, 262_144  # of uninterrupted sending that give a rate


class Packer:
    """When to pack payloads of a lane. ``clock``: seconds, for the time that packing takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rate: float | None = None
        """Bytes/s while the lane was busy; None: never yet, for long enough to tell."""
        self._clock = clock
        self._zstd = zstandard.ZstdCompressor(level=LEVEL)
        self._since: float | None = None
        self._bytes = 0
        self._turn = 0
        self._saved = self._cost = 0.0

    @property
    def pays(self) -> bool:
        """Whether packing saves more time on the link than it takes, by far."""
        return self.rate is not None and self._saved / self.rate > WORTH * self._cost > 0

    def sent(self, count: int, now: float) -> None:
        """The socket took ``count`` bytes."""
        if self._since is None:
            self._since, self._bytes = now, 0  # what went into empty buffers says nothing
            return
        self._bytes += count
        if now - self._since >= WINDOW_S and self._bytes >= WINDOW_BYTES:
            rate = self._bytes / (now - self._since)
            self.rate = rate if self.rate is None else (self.rate + rate) / 2
            self._since, self._bytes = now, 0

    def idle(self) -> None:
        """There is nothing to send."""
        self._since = None

    def pack(self, payload: memoryview) -> bytes | None:
        """The payload packed, or None: send it as it is."""
        if self.rate is None or self.rate > FASTEST or len(payload) < SHORTEST:
            return None
        self._turn += 1
        if not self.pays and self._turn % TRY_EVERY != 1:
            return None
        started = self._clock()
        packed = self._zstd.compress(payload)
        cost, saved = (self._clock() - started) / len(payload), 1 - len(packed) / len(payload)
        first = self._turn == 1
        self._cost, self._saved = (
            (cost, saved) if first else ((self._cost + cost) / 2, (self._saved + saved) / 2)
        )
        return packed if len(packed) < len(payload) else None


def full_length(packed: memoryview, peer: PeerId) -> int:
    """What a packed payload says of its length, within bounds. Raises RemoteProtocolError."""
    try:
        frame = zstandard.get_frame_parameters(packed)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"packed record: {quoted(error)}", peer=peer) from None
    if not 0 < frame.content_size <= MAX_PAYLOAD_BYTES or frame.dict_id:
        raise RemoteProtocolError(
            "packed record without a length, or with a senseless one", peer=peer
        )
    return frame.content_size


def unpack(packed: memoryview, target: memoryview, peer: PeerId) -> None:
    """Fill ``target``, which has `full_length`. Raises RemoteProtocolError when the payload is
    anything else than what it says.
    """
    try:
        plain = zstandard.ZstdDecompressor(max_window_size=2 * MAX_PAYLOAD_BYTES).decompress(
            packed, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"packed record: {quoted(error)}", peer=peer) from None
    if len(plain) != len(target):
        raise RemoteProtocolError(
            f"packed record of {len(plain)} bytes, expected {len(target)}", peer=peer
        )
    target[:] = plain

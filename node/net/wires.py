"""Wires: TCP connections for control messages, beside libp2p. A message on a libp2p stream costs
each end a millisecond of Python, on a wire a tenth of it.

A wire takes the place of one message stream (`streams`), whose greeting it was agreed on with: the
opener's greeting carries a secret, the answer another one, a token and addresses of the lane
listener. The opener dials as for a lane. It is never a lane: a message must not wait behind bulk
data.

On the wire: records of u32 length (big-endian, the associated data) and the sealed bytes of the
message stream, at most 64 KiB. Keys, numbers and their uniqueness are those of
`collectives.record_layer`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Annotated

import msgspec
import trio

from ...collectives.engine.settings import control
from ...collectives.errors import PeerLostError, RemoteProtocolError
from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId
from ...collectives.record_layer import SECRET_BYTES, TAG_BYTES, Opener, Sealer, derive_lane_keys
from .transport.addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES
from .transport.lane_sockets import TOKEN_BYTES

PIECE_BYTES = 65_536
_LENGTH = struct.Struct(">I")
_MAX_SEALED = PIECE_BYTES + TAG_BYTES


class WireOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where a wire in place of this stream may be dialled, and with what."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS, pattern=PLAIN)], ...],
        msgspec.Meta(max_length=MAX_ADDRESSES),
    ]


class Wire:
    """Our end of a wire; it owns the socket (connected, non-blocking). Used like a `PeerStream`,
    from the trio thread only.
    """

    def __init__(
        self,
        peer: PeerId,
        sock: socket.socket,
        mine: bytes,
        theirs: bytes,
        transcript: bytes,
        *,
        opener: bool,
    ) -> None:
        """``mine``, ``theirs``: the secrets; ``transcript``: who opened which topic at whom, alike
        at both ends.
        """
        keys = derive_lane_keys(mine, theirs, b"wire|" + transcript, initiator=opener)
        self.peer = peer
        self._socket = sock
        control(sock, "bbr")  # a few messages fill no link; losses at random must not slow them
        self._sealer, self._unsealer = (
            Sealer(keys.send, keys.cipher),
            Opener(keys.receive, keys.cipher),
        )
        self._unsent, self._received = bytearray(), bytearray()

    @property
    def blocked(self) -> bool:
        """Whether TCP has not taken everything that was written."""
        return bool(self._unsent)

    def write(self, data: bytes) -> None:
        """Send what TCP takes now; the rest goes with `flush`. Raises PeerLostError."""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            header, sealed = _LENGTH.pack(len(piece) + TAG_BYTES), bytearray(len(piece) + TAG_BYTES)
            self._sealer.encrypt(header, piece, memoryview(sealed))
            self._unsent += header + sealed
        self._push()

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise PeerLostError(f"the wire to {self.peer} broke: {error}", peer=self.peer) from None

    async def flush(self) -> None:
        """Until TCP has taken everything. Raises PeerLostError. Cancellation loses nothing."""
        while self._unsent:
            if self.closed:
                raise PeerLostError(f"the wire to {self.peer} was closed", peer=self.peer)
            try:
                await trio.lowlevel.wait_writable(self._socket)
            except (trio.ClosedResourceError, OSError, ValueError):
                raise PeerLostError(f"the wire to {self.peer} was closed", peer=self.peer) from None
            self._push()

    async def send_all(self, data: bytes) -> None:
        """`write` and `flush`."""
        self.write(data)
        await self.flush()

    async def receive_some(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """What came in one record; b"" when the wire has ended, in whatever way: a record that does
        not authenticate ends it, too, and is nobody's fault, since anybody on the path could have
        made it. Cancellation loses nothing."""
        with contextlib.suppress(
            OSError, ValueError, trio.ClosedResourceError, RemoteProtocolError
        ):
            while True:
                payload = self._next()
                if payload:
                    return payload
                if self.closed:
                    break
                await trio.lowlevel.wait_readable(self._socket)
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    data = self._socket.recv(max_bytes)
                    if not data:
                        break
                    self._received += data
        self.close()
        return b""

    def _next(self) -> bytes | None:
        """The next whole record, opened; None if not here yet. Raises RemoteProtocolError."""
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        if not TAG_BYTES < length <= _MAX_SEALED:
            raise RemoteProtocolError(f"record of {length} bytes on a wire", peer=self.peer)
        end = _LENGTH.size + length
        if len(received) < end:
            return None
        header, sealed, payload = (
            bytes(received[: _LENGTH.size]),
            bytes(received[_LENGTH.size : end]),
            bytearray(length - TAG_BYTES),
        )
        self._unsealer.open(header, memoryview(sealed), memoryview(payload), self.peer)
        del received[:end]
        return bytes(payload)

    @property
    def closed(self) -> bool:
        """Whether `close` was called. To wait for a closed socket leaves trio with a waiter for no
        descriptor, at which every later one fails.
        """
        return self._socket.fileno() < 0

    def close(self) -> None:
        """End it at once; whoever waits for it learns that. Idempotent."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    async def aclose(self) -> None:
        """`close`."""
        self.close()

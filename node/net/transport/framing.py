"""Frames on a byte stream: u32 length (big-endian), then that many bytes. The length is checked
before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from ....collectives.errors import LocalProtocolError, RemoteProtocolError
from ....collectives.foreign import quoted
from ....collectives.identifiers import PeerId

MAX_FRAME_BYTES = 1 << 20
READ_BYTES = 65_536

_LENGTH = struct.Struct(">I")
T = TypeVar("T")


def frame(payload: bytes) -> bytes:
    """The frame of a payload (0 to 1 MiB; an empty one means "I am alive"). Raises
    LocalProtocolError when it is too long.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise LocalProtocolError(f"frame of {len(payload)} bytes, limit {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Takes frames out of a byte stream."""

    def __init__(self, receive: Callable[[int], Awaitable[bytes]], peer: PeerId) -> None:
        """``receive(max_bytes)`` returns bytes, b"" at the end; ``peer`` is named in errors."""
        self._receive = receive
        self._peer = peer
        self._buffer = bytearray()

    async def next(self, limit: int = MAX_FRAME_BYTES) -> bytes | None:
        """The next frame's payload; None when the stream has ended (an unfinished frame is
        dropped).

        Raises RemoteProtocolError when a frame announces more than ``limit`` bytes. Cancellation
        loses nothing.
        """
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > limit:
                    raise RemoteProtocolError(
                        f"frame of {length} bytes, limit {limit}", peer=self._peer
                    )
                end = _LENGTH.size + length
                if len(self._buffer) >= end:
                    payload = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    return payload
            data = await self._receive(READ_BYTES)
            if not data:
                return None
            self._buffer += data

    def rest(self) -> bytes:
        """What was received beyond the last frame; the reader must not be used afterwards."""
        data = bytes(self._buffer)
        self._buffer.clear()
        return data


def decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes, peer: PeerId) -> T:
    """A typed message from a peer's bytes. Raises RemoteProtocolError naming the peer."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {quoted(error)}", peer=peer) from None

"""Frames of the control socket: a length, and one message in msgpack."""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from ...collectives.errors import RemoteProtocolError

MAX_FRAME_BYTES = 1 << 20
LENGTH = struct.Struct(">I")
T = TypeVar("T")


class Frames(Generic[T]):
    """Bytes in, messages out. Holds at most one incomplete frame; refuses a length before any of it
    is stored.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages that ``data`` completes. Raises RemoteProtocolError; the connection is then
        of no more use.
        """
        self._buffer += data
        messages: list[T] = []
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, at)
            if size > MAX_FRAME_BYTES:
                raise RemoteProtocolError(f"control frame of {size} bytes, limit {MAX_FRAME_BYTES}")
            stop = at + LENGTH.size + size
            if len(self._buffer) < stop:
                break
            messages.append(self._decode(bytes(self._buffer[at + LENGTH.size : stop])))
            at = stop
        del self._buffer[:at]
        return messages

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"malformed control message: {error}") from None

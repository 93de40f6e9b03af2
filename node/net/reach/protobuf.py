"""Protobuf as libp2p's small protocols use it: numbered fields, each a number or bytes; on a stream
with a varint length before it.

Messages are written as ``{field: value or list of values}`` and read as ``{field: [values]}``: an
unknown field does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libp2p.utils.varint import encode_uvarint

from ....collectives.errors import PeerLostError, RemoteProtocolError
from ....collectives.foreign import quoted
from ..transport.host import PeerStream

MAX_MESSAGE_BYTES = 8192
MAX_FIELDS = 256
Value = int | bytes
Fields = dict[int, list[Value]]


def encode(fields: Mapping[int, Value | Sequence[Value]]) -> bytes:
    """The message, in order of the mapping."""
    out = bytearray()
    for number, given in fields.items():
        for value in [given] if isinstance(given, int | bytes) else given:
            if isinstance(value, int):
                out += encode_uvarint(number << 3) + encode_uvarint(value)
            else:
                out += encode_uvarint(number << 3 | 2) + encode_uvarint(len(value)) + value
    return bytes(out)


def decode(data: bytes) -> Fields:
    """What a message holds. Raises ValueError when it is none, or has more than MAX_FIELDS."""
    found: Fields = {}
    at = count = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        value: Value
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        else:
            raise ValueError(f"field of kind {kind}")
        count += 1
        if at > len(data) or count > MAX_FIELDS:
            raise ValueError(
                "a field ends after the message"
                if at > len(data)
                else f"more than {MAX_FIELDS} fields"
            )
        found.setdefault(number, []).append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for index in range(10):
        if at + index >= len(data):
            break
        byte = data[at + index]
        number |= (byte & 127) << 7 * index
        if byte < 128:
            return number, at + index + 1
    raise ValueError("a number without an end")


def number(fields: Fields, field: int, default: int = 0) -> int:
    """A field that is a number; the last one counts. Raises ValueError."""
    value = fields.get(field, [default])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {field} is not a number")
    return value


def octets(fields: Fields, field: int) -> bytes:
    """A field that is bytes, b"" where there is none. Raises ValueError."""
    value = fields.get(field, [b""])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"field {field} is not bytes")
    return value


async def send(stream: PeerStream, fields: Mapping[int, Value | Sequence[Value]]) -> None:
    """Send a message. Raises PeerLostError."""
    body = encode(fields)
    await stream.send_all(encode_uvarint(len(body)) + body)


async def receive(stream: PeerStream) -> Fields:
    """The next message, and not a byte more of the stream. Raises PeerLostError at its end,
    RemoteProtocolError when it is malformed.
    """
    length = shift = 0
    while True:
        byte = (await _exactly(stream, 1))[0]
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
        if shift > 28:
            raise RemoteProtocolError("a length without an end", peer=stream.peer)
    if length > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"message of {length} bytes, limit {MAX_MESSAGE_BYTES}", peer=stream.peer
        )
    try:
        return decode(await _exactly(stream, length))
    except ValueError as error:
        raise RemoteProtocolError(f"malformed message: {quoted(error)}", peer=stream.peer) from None


async def _exactly(stream: PeerStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await stream.receive_some(count - len(data))
        if not piece:
            raise PeerLostError(
                f"{stream.peer} ended a conversation in the middle", peer=stream.peer
            )
        data += piece
    return data

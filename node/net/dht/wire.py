"""kad-dht messages: protobuf, each with a varint length before it. Everything a peer sends is
bounded and typed here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache

from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.utils.varint import encode_uvarint

from ....collectives.errors import RemoteProtocolError
from ....collectives.foreign import quoted
from ....collectives.identifiers import PeerId
from ....security.identity import decode_base58, encode_base58, is_peer_id
from ..transport.packed import pack, unpack

MAX_MESSAGE_BYTES = 128 << 10
MAX_PEERS = 64
READ_BYTES = 65_536

PUT_VALUE, GET_VALUE, ADD_PROVIDER, GET_PROVIDERS, FIND_NODE, PING = range(6)

Located = tuple[PeerId, tuple[str, ...]]
"""A peer and its addresses."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A request or an answer. ``value`` None: no record."""

    kind: int
    key: bytes = b""
    value: bytes | None = None
    closer: tuple[Located, ...] = ()
    providers: tuple[Located, ...] = ()


@lru_cache(maxsize=4096)
def _packed_peer(peer: PeerId) -> bytes:
    return decode_base58(peer)


@lru_cache(maxsize=4096)
def _peer(packed: bytes) -> PeerId:
    """ "" when it is no peer id."""
    text = encode_base58(packed)
    return PeerId(text if is_peer_id(text) else "")


def encode(rpc: Rpc) -> bytes:
    """Wire bytes, length included."""
    message = Message()
    message.type = Message.MessageType.Name(rpc.kind)  # pyright: ignore[reportAttributeAccessIssue]
    message.key = rpc.key
    if rpc.value is not None:
        message.record.key, message.record.value = rpc.key, rpc.value
    for peers, field in ((rpc.closer, message.closerPeers), (rpc.providers, message.providerPeers)):
        for peer, addresses in peers:
            entry = field.add()
            entry.id = _packed_peer(peer)
            entry.addrs.extend(pack(addresses))
    body = message.SerializeToString()
    return encode_uvarint(len(body)) + body


def decode(body: bytes, peer: PeerId) -> Rpc:
    """A message from ``peer``. Raises RemoteProtocolError."""
    message = Message()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError, and ValueError for broken strings
        raise RemoteProtocolError(f"malformed kad message: {quoted(error)}", peer=peer) from None
    value = message.record.value if message.HasField("record") else None
    return Rpc(
        int(message.type),
        message.key,
        value,
        _located(message.closerPeers),
        _located(message.providerPeers),
    )


def _located(entries: object) -> tuple[Located, ...]:
    found: list[Located] = []
    for entry in list(entries)[:MAX_PEERS]:  # pyright: ignore[reportArgumentType, reportCallIssue]
        peer = _peer(entry.id) if len(entry.id) <= 64 else ""
        if peer:
            found.append((PeerId(peer), unpack(entry.addrs)))
    return tuple(found)


class MessageReader:
    """Takes messages out of a byte stream, 64 KiB at a time (libp2p reads lengths byte by byte, a
    frame each).
    """

    def __init__(self, receive: Callable[[int], Awaitable[bytes]], peer: PeerId) -> None:
        self._receive, self._peer, self._buffer = receive, peer, bytearray()

    async def next(self) -> Rpc | None:
        """The next message; None at the end. Raises RemoteProtocolError on an oversized or
        malformed one.
        """
        while True:
            header = self._length()
            if header is not None and len(self._buffer) >= header[0] + header[1]:
                start, length = header
                body = bytes(self._buffer[start : start + length])
                del self._buffer[: start + length]
                return decode(body, self._peer)
            data = await self._receive(READ_BYTES)
            if not data:
                return None
            self._buffer += data

    def _length(self) -> tuple[int, int] | None:
        """Bytes of the prefix and of the message, once the prefix is there."""
        length = 0
        for index, byte in enumerate(self._buffer[:5]):
            length |= (byte & 127) << 7 * index
            if byte < 128:
                if length > MAX_MESSAGE_BYTES:
                    raise RemoteProtocolError(
                        f"kad message of {length} bytes, limit {MAX_MESSAGE_BYTES}", peer=self._peer
                    )
                return index + 1, length
        if len(self._buffer) >= 5:
            raise RemoteProtocolError("kad message without an end to its length", peer=self._peer)
        return None

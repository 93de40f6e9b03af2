"""Frames of BTARD as control messages of a run. Vectors go over lanes: they are offered here, and
taken. Bytes of a peer: bounded, validated.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from blake3 import blake3

from ....collectives.errors import RemoteProtocolError
from ....collectives.foreign import quoted
from ....collectives.group import Hash
from ....collectives.identifiers import PeerId
from ....security.btard.messages import Bundle, Signed
from ....security.btard.wire import MAX_CONTROL_BYTES, VectorHeader

PREFIX = b"V"
MOST_SPANS = 1024


class Offered(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sender has the vector of this header, of so many values, for the receiver."""

    header: VectorHeader
    elements: Annotated[int, msgspec.Meta(ge=1, lt=1 << 34)]

    def name(self, sender: PeerId) -> bytes:
        """What the vector is called on lanes: 32 bytes."""
        return blake3(
            b"atoll/btard/vector\0" + sender.encode() + b"\0" + msgspec.msgpack.encode(self)
        ).digest()


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Send me the vector of this name; ``spans`` of its chunks."""

    name: Hash
    spans: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(min_length=1, max_length=MOST_SPANS)]


BtardMessage = Signed | Bundle | Offered | Taken
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BtardMessage)


def encode(message: BtardMessage) -> bytes:
    """Bytes for the wire, `PREFIX` first."""
    return PREFIX + _encoder.encode(message)


def decode(data: bytes, peer: PeerId) -> BtardMessage:
    """Of bytes after `PREFIX`. Raises RemoteProtocolError, naming the peer."""
    if len(data) > MAX_CONTROL_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes about a step", peer=peer)
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed message about a step: {quoted(error)}", peer=peer
        ) from None

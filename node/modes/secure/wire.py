"""What members tell each other of a masking. Bytes of a peer: bounded, validated, signed by whom
they are of, whoever handed them on.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ....collectives.errors import RemoteProtocolError
from ....collectives.foreign import quoted
from ....collectives.identifiers import PeerId
from ....security.masking.binding import MOST_MEMBERS
from ....security.masking.messages import Message, Number

PREFIX = b"K"
MAX_BYTES = 1 << 20
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
Stage = Literal[0, 1, 2, 3]
"""Keys, shares, consents, reveals."""


class AuthoredMessage(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """What the member ``number`` of the roster has said; it signed it."""

    number: Number
    message: Message


class Fixed(msgspec.Struct, frozen=True, array_like=True, tag="fixed"):
    """From the attempt's leader: these members' keys (0) or shares (1) count."""

    stage: Literal[0, 1]
    numbers: Numbers


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """I lack what these members said at this stage."""

    stage: Stage
    numbers: Numbers


class Pass(msgspec.Struct, frozen=True, array_like=True, tag="pass"):
    """I have nothing to contribute: do not wait for me."""


Body = AuthoredMessage | Fixed | Want | Pass


class AttemptMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message, and which attempt at which round it is of."""

    round: Count
    attempt: Count
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AttemptMessage)


def encode(talk: AttemptMessage) -> bytes:
    """Bytes for the wire, `PREFIX` first."""
    return PREFIX + _encoder.encode(talk)


def decode(data: bytes, peer: PeerId) -> AttemptMessage:
    """Of bytes after `PREFIX`. Raises RemoteProtocolError, naming the peer."""
    if len(data) > MAX_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes about a masking", peer=peer)
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed message about a masking: {quoted(error)}", peer=peer
        ) from None

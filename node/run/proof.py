"""What a member keeps and hands on of two words of one peer that exclude each other, encoded.
`evidence` checks it, and says what that and other kinds prove.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...collectives.foreign import PLAIN
from ...collectives.group import MAX_PEER_ID
from ...collectives.identifiers import PeerId

MAX_PAYLOAD, MAX_EVIDENCE = 2048, 1 << 17

Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Twice(msgspec.Struct, frozen=True, array_like=True, tag="twice"):
    """Two payloads of ``peer``, in ascending order, and its signatures under them."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    one: Payload
    one_signature: Signature
    other: Payload
    other_signature: Signature

    def encode(self) -> bytes:
        """As it is kept and handed on."""
        return msgspec.msgpack.encode(self)


def twice(peer: PeerId, first: tuple[bytes, bytes], second: tuple[bytes, bytes]) -> Twice:
    """Of two (payload, signature)."""
    low, high = sorted((first, second))
    return Twice(peer, *low, *high)

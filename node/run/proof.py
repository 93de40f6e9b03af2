"""What a member keeps and hands on of a lie that it met: values, encoded. `evidence` checks them,
and says what each kind proves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from ...collectives.foreign import PLAIN
from ...collectives.group import MAX_PEER_ID, MAX_STAR, Entry
from ...collectives.identifiers import PeerId
from ...collectives.messages import Account, Inputs, PartDigests

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


class Relabelled(msgspec.Struct, frozen=True, array_like=True, tag="relabelled"):
    """What ``peer`` has signed as its proposal, the entry of which that has the hash, and the
    Merkle root and meaning under the digest of the part ``index``."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    payload: Payload
    signature: Signature
    entry: Entry
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    root: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    meaning: Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]


class Voice(msgspec.Struct, frozen=True, array_like=True):
    """What a member has stated of parts: their digests, and of its account the inputs, the digest
    of its receipts (`byzantine.signed.receipts_digest`), and its signature."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    parts: PartDigests
    inputs: Inputs
    receipts: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Signature


class Missummed(msgspec.Struct, frozen=True, array_like=True, tag="missummed"):
    """What ``wrong`` has stated of the part ``index``, which is of what ``meaning`` stands for, and
    what ``others`` have, who are one more than may lie."""

    meaning: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    wrong: Voice
    others: Annotated[tuple[Voice, ...], msgspec.Meta(min_length=1, max_length=MAX_STAR)]


class Unfounded(msgspec.Struct, frozen=True, array_like=True, tag="unfounded"):
    """What ``peer`` has stated of ``parts``, and how it came to it, of which the part ``index``
    has an input that its contributor has not signed; ``preimage``: what the meaning of all that is
    the digest of (`digest.meaning_preimage`)."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    parts: PartDigests
    account: Account
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    preimage: Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]


def twice(peer: PeerId, first: tuple[bytes, bytes], second: tuple[bytes, bytes]) -> Twice:
    """Of two (payload, signature)."""
    low, high = sorted((first, second))
    return Twice(peer, *low, *high)


def relabelled(
    peer: PeerId,
    proposal: tuple[bytes, bytes],
    entry: Entry,
    index: int,
    root: bytes,
    meaning: bytes,
) -> bytes:
    """Of what a convener has proposed (payload, signature), as it is kept and handed on; b"" where
    that is longer than evidence may be.
    """
    found = Relabelled(peer, *proposal, entry, index, root, meaning)
    data = msgspec.msgpack.encode(found)
    return data if len(data) <= MAX_EVIDENCE else b""


def missummed(
    meaning: bytes, part: int, voices: Iterable[tuple[PeerId, PartDigests, Inputs, bytes, bytes]]
) -> bytes:
    """Of what members have stated of a part, first the one who is wrong, as it is kept and handed
    on; b"" where that is longer than evidence may be.
    """
    wrong, *others = (Voice(*each) for each in voices)
    data = msgspec.msgpack.encode(Missummed(meaning, part, wrong, tuple(others)))
    return data if len(data) <= MAX_EVIDENCE else b""


def unfounded(
    peer: PeerId, parts: PartDigests, account: Account, preimage: bytes, index: int
) -> bytes:
    """Of what a member has stated, as it is kept and handed on; b"" where that is longer than
    evidence may be.
    """
    found = Unfounded(peer, parts, account, index, preimage)
    data = msgspec.msgpack.encode(found)
    return data if len(data) <= MAX_EVIDENCE else b""

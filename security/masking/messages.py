"""What members of a masking say to each other. Members are named by their number in the binding's
roster; all is signed.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from ...collectives.errors import BadSignatureError
from ...collectives.identifiers import PeerId
from ..identity import Identity, verify
from .binding import MOST_MEMBERS, Binding
from .shamir import SHARE_BYTES

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Key = Hash
Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=MOST_MEMBERS)]
Share = Annotated[bytes, msgspec.Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Box = Annotated[
    bytes, msgspec.Meta(min_length=2 * SHARE_BYTES + 16, max_length=2 * SHARE_BYTES + 16)
]


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="mask-keys"):
    """``channel`` seals shares, ``pair`` makes masks with others; ``seed``: hash of the seed of the
    sender's own mask.
    """

    channel: Key
    pair: Key
    seed: Hash
    signature: Signature = b""


class Dealt(msgspec.Struct, frozen=True, array_like=True):
    """One member's shares: hashes of those of the seed and of the pair key, by which it is known
    who lied; and both, sealed for it.
    """

    to: Number
    seed: Hash
    pair: Hash
    box: Box


class Deal(msgspec.Struct, frozen=True, array_like=True, tag="mask-deal"):
    """The shares of the sender's two secrets, for itself and every member whose keys it has."""

    shares: Annotated[tuple[Dealt, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
    signature: Signature = b""


class MaskConsent(msgspec.Struct, frozen=True, array_like=True, tag="mask-consent"):
    """The survivors, ascending: the sender unmasks these and never others."""

    survivors: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
    signature: Signature = b""


class MaskReveal(msgspec.Struct, frozen=True, array_like=True, tag="mask-reveal"):
    """The sender's shares: of the seeds of survivors, of the pair keys of who dropped out;
    ascending by number.
    """

    seeds: Annotated[tuple[tuple[Number, Share], ...], msgspec.Meta(max_length=MOST_MEMBERS)]
    pairs: Annotated[tuple[tuple[Number, Share], ...], msgspec.Meta(max_length=MOST_MEMBERS)]
    signature: Signature = b""


Message = Keys | Deal | MaskConsent | MaskReveal


def share_hash(share: bytes) -> bytes:
    """What a dealer publishes of a share, or a member of its seed."""
    return hashlib.sha256(b"atoll/masking/share\0" + share).digest()


def _signed_bytes(binding: Binding, message: Message) -> bytes:
    return binding.digest + msgspec.msgpack.encode(msgspec.structs.replace(message, signature=b""))


M = TypeVar("M", Keys, Deal, MaskConsent, MaskReveal)


def signed(message: M, binding: Binding, identity: Identity) -> M:
    """The message with its sender's signature, which holds for this binding only."""
    return msgspec.structs.replace(
        message, signature=identity.sign("masking", _signed_bytes(binding, message))
    )


def check(message: Message, binding: Binding, peer: PeerId) -> None:
    """Raises BadSignatureError where ``peer`` did not sign this for this binding,
    RemoteProtocolError where it is no member.
    """
    binding.number(peer)
    if not verify(peer, "masking", _signed_bytes(binding, message), message.signature):
        raise BadSignatureError(
            f"secure aggregation: a message of {peer} is not signed by it for this round", peer=peer
        )

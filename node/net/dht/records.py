"""Signed, expiring values under keys that only their owner can write. Checked when stored and when
read.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from ....collectives.identifiers import PeerId, RunId
from ....security.identity import SIGNATURE_BYTES, Identity, verify

DOMAIN = "atoll/dht/1"
MAX_VALUE_BYTES = 16_384
MAX_KEY_BYTES = 160
MAX_LIFE_S = 48 * 3600
MAX_SKEW_S = 300


class SignedValue(msgspec.Struct, frozen=True, array_like=True):
    """What is stored under an owner's key. ``expires_s``: seconds since 1970; the larger
    ``sequence`` wins.
    """

    sequence: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    expires_s: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES - 256)]
    signature: Annotated[
        bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)
    ]


_decoder = msgspec.msgpack.Decoder(SignedValue)


def owner_key(owner: PeerId, name: str) -> bytes:
    """The key ``name`` of ``owner``; nobody else can write it."""
    key = f"/atoll/{owner}/{name}".encode()
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes, limit {MAX_KEY_BYTES}")
    return key


def owner_of(key: bytes) -> PeerId:
    """The only peer that may write ``key``. Raises ValueError when it is no owner-bound key."""
    fields = key.decode("utf-8", "strict").split("/", 3)
    if len(key) > MAX_KEY_BYTES or len(fields) != 4 or fields[0] or fields[1] != "atoll":
        raise ValueError("not an owner-bound key")
    return PeerId(fields[2])


def run_key(run: RunId) -> bytes:
    """The provider key "members of this run": a sha-256 multihash."""
    return b"\x12\x20" + hashlib.sha256(b"atoll/run/" + run.encode()).digest()


def _signed_bytes(key: bytes, sequence: int, expires_s: int, payload: bytes) -> bytes:
    return msgspec.msgpack.encode((key, sequence, expires_s, payload))


def sign(
    identity: Identity, name: str, payload: bytes, sequence: int, expires_s: int
) -> tuple[bytes, bytes]:
    """Key and bytes of a value of ours."""
    key = owner_key(identity.peer, name)
    signature = identity.sign(DOMAIN, _signed_bytes(key, sequence, expires_s, payload))
    return key, msgspec.msgpack.encode(SignedValue(sequence, expires_s, payload, signature))


def check(key: bytes, data: bytes, unix_s: float) -> SignedValue:
    """The valid value in ``data``. Raises ValueError saying what is wrong: size, shape, owner,
    expiry or signature.
    """
    if len(data) > MAX_VALUE_BYTES:
        raise ValueError(f"value of {len(data)} bytes, limit {MAX_VALUE_BYTES}")
    owner = owner_of(key)
    value = _decoder.decode(data)  # msgspec's errors are ValueErrors
    if value.expires_s < unix_s:
        raise ValueError("expired")
    if value.expires_s > unix_s + MAX_LIFE_S + MAX_SKEW_S:
        raise ValueError("expires too late")
    if not verify(
        owner,
        DOMAIN,
        _signed_bytes(key, value.sequence, value.expires_s, value.payload),
        value.signature,
    ):
        raise ValueError("not signed by the owner of the key")
    return value

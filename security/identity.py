"""A peer's Ed25519 identity: made once, kept in a file only its owner can read, equal to its libp2p
peer id.

The peer id embeds the public key, so that a signature can be checked with nothing but the id of the
signer.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..collectives.identifiers import PeerId

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {char: value for value, char in enumerate(_ALPHABET)}
# identity multihash (0x00) of 36 bytes; libp2p PublicKey protobuf: type Ed25519, data of 32 bytes
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_PEER_ID_BYTES = len(_PEER_ID_PREFIX) + 32
_FILE_HEADER = "atoll-identity-1"
_MAX_FILE_BYTES = 4096
SEED_BYTES = 32
SIGNATURE_BYTES = 64


def encode_base58(data: bytes) -> str:
    """Base58 text (the Bitcoin alphabet, as libp2p uses it) of ``data``."""
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + text


def decode_base58(text: str, most: int = 128) -> bytes:
    """Bytes of base58 ``text`` of at most ``most`` characters. Raises ValueError otherwise."""
    if len(text) > most:
        raise ValueError("base58 text too long")
    number = 0
    for char in text:
        if char not in _DIGITS:
            raise ValueError(f"not a base58 character: {char!r}")
        number = number * 58 + _DIGITS[char]
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_of(public_key: bytes) -> PeerId:
    """The libp2p peer id (base58) of a raw Ed25519 public key of 32 bytes."""
    return PeerId(encode_base58(_PEER_ID_PREFIX + public_key))


@lru_cache(maxsize=4096)
def public_key_of(peer: PeerId) -> bytes:
    """The raw Ed25519 public key (32 bytes) inside a peer id. Raises ValueError when ``peer`` is
    not the id of such a key.
    """
    data = decode_base58(peer)
    if len(data) != _PEER_ID_BYTES or not data.startswith(_PEER_ID_PREFIX):
        raise ValueError(f"not the peer id of an Ed25519 key: {peer!r}")
    return data[len(_PEER_ID_PREFIX) :]


def is_peer_id(text: str) -> bool:
    """Whether ``text`` is the canonical peer id of an Ed25519 key."""
    try:
        return peer_id_of(public_key_of(PeerId(text))) == text
    except ValueError:
        return False


def _message(domain: str, data: bytes) -> bytes:
    """What is really signed: a signature made for one purpose says nothing in another."""
    name = domain.encode()
    if not 0 < len(name) < 256:
        raise ValueError("a signing domain has 1 to 255 bytes")
    return b"atoll/sign/1\0" + bytes([len(name)]) + name + data


@lru_cache(maxsize=4096)
def _verifier(peer: PeerId) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer))


def verify(peer: PeerId, domain: str, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` (64 bytes) over ``data`` was made by ``peer`` for ``domain``. Never
    raises on hostile input.
    """
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        _verifier(peer).verify(signature, _message(domain, data))
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A private key and the peer id that goes with it. The key never leaves the object except
    through ``seed``.
    """

    def __init__(self, seed: bytes) -> None:
        """``seed``: the 32 bytes of an Ed25519 private key."""
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an Ed25519 seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer: PeerId = peer_id_of(self._key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> Identity:
        """A fresh random identity that is in no file."""
        return cls(secrets.token_bytes(SEED_BYTES))

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes, for the transport that needs the key itself."""
        return self._seed

    def sign(self, domain: str, data: bytes) -> bytes:
        """Signature (64 bytes) over ``data`` for the purpose ``domain``."""
        return self._key.sign(_message(domain, data))

    def __repr__(self) -> str:
        return f"Identity({self.peer})"

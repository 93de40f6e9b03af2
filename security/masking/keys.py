"""Keys between two members, shares sealed for one of them, and streams of mask elements.

X25519, HKDF-SHA256, ChaCha20-Poly1305 for shares, AES-256 in counter mode for masks. Every key is
used for one thing once, so nonces are constant.
"""

from __future__ import annotations

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from ...collectives.errors import RemoteProtocolError
from ...collectives.identifiers import PeerId

Words = NDArray[np.uint32] | NDArray[np.uint64]
"""A vector on the ring: (numel,), of a binding's bits; numpy's sums of them wrap."""

_BLOCK = 16  # bytes of AES
_PIECE = 1 << 18  # bytes of a stream at once: they stay in the cache until they are added
_NO_NONCE = bytes(12)


def public_of(secret: bytes) -> bytes:
    """The X25519 public key of 32 secret bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes, peer: PeerId, binding: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes that only the two have. Raises RemoteProtocolError for a public key (of
    ``peer``) that gives everybody the same.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError:
        raise RemoteProtocolError(
            f"{peer} sent a public key that agrees on nothing secret", peer=peer
        ) from None
    return HKDF(SHA256(), 32, salt=binding, info=b"atoll/masking/1\0" + purpose).derive(shared)


def way(first: int, second: int) -> bytes:
    """Two members' numbers, in this order, as part of a purpose."""
    return first.to_bytes(4, "big") + second.to_bytes(4, "big")


def seal(key: bytes, data: bytes) -> bytes:
    """``data`` for the holder of ``key``, which seals nothing else; 16 bytes longer."""
    return ChaCha20Poly1305(key).encrypt(_NO_NONCE, data, None)


def unseal(key: bytes, box: bytes, peer: PeerId) -> bytes:
    """What was sealed. Raises RemoteProtocolError, naming who sent it, where it was not sealed with
    this key.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NO_NONCE, box, None)
    except InvalidTag:
        raise RemoteProtocolError(f"{peer} sent a share that does not open", peer=peer) from None


def apply_mask(words: Words, key: bytes, first: int, add: bool) -> None:
    """Add to ``words`` (or take off) the stream of ``key`` from ``first`` on, in place."""
    width = words.dtype.itemsize
    block, skip = divmod(first * width, _BLOCK)
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(block.to_bytes(_BLOCK, "big"))).encryptor()
    encryptor.update(bytes(skip))
    zeros, stream = bytes(_PIECE), bytearray(_PIECE + _BLOCK)
    operation = np.add if add else np.subtract
    for start in range(0, len(words), _PIECE // width):
        piece = words[start : start + _PIECE // width]
        size = len(piece) * width
        encryptor.update_into(memoryview(zeros)[:size], stream)
        operation(piece, np.frombuffer(stream, words.dtype, len(piece)), out=piece)

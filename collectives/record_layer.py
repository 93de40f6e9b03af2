"""Authenticated encryption of the records on a lane.

A record is a clear header (associated data) and a sealed payload, 16 bytes longer than the plain
one. The two ends of a lane exchange one fresh 32-byte secret each over an authenticated channel;
HKDF-SHA256 turns them and a transcript (whatever both ends agreed on: peer ids, lane number,
cipher) into one key per direction.

**Why a nonce never repeats under a key.** A key belongs to one direction of one lane, and `Sealer`
is the only thing that encrypts under it. The nonce is the number of the record in that direction;
it only counts up, and the record is the unit of sending, so records are opened in the order they
were sealed (TCP keeps it). A lane that loses a byte is closed, never resumed: the next one has new
secrets. (What a lane encrypts in segments under one header is as many records here.) A record that
was cut, flipped, replayed, reordered, or spliced in from another lane or direction is opened under
a number, a key or a header other than its own, and fails. (Numbers chosen by content would be
needed if records were opened in another order than sealed.)

Before AES-GCM's limits come near, both ends step to the next key at the same record number.

A plain lane encrypts headers only: a record is encrypted with nothing in it, and its payload
follows as it is. Nobody without the keys can open such a lane, or add, drop, repeat or reorder its
records; but whoever is on the path can read what they carry, and alter it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from .errors import LocalProtocolError, RemoteProtocolError
from .identifiers import PeerId

SECRET_BYTES = 32
TAG_BYTES = 16
REKEY_RECORDS = 1 << 20
"""Records under one key: 2^34 blocks of 256 KiB records, far inside what RFC 8446 §5.5 allows for
AES-GCM.
"""

DEFAULT_CIPHER = "aes-128-gcm"
PLAIN = "plain"
"""Headers are authenticated, payloads are neither that nor encrypted."""
KEY_BYTES = {DEFAULT_CIPHER: 16, "aes-256-gcm": 32, "chacha20-poly1305": 32, PLAIN: 16}


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """Keys of one lane, as one end sees them."""

    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)
    cipher: str = DEFAULT_CIPHER


def derive_lane_keys(
    my_secret: bytes,
    peer_secret: bytes,
    transcript: bytes,
    *,
    initiator: bool,
    cipher: str = DEFAULT_CIPHER,
) -> LaneKeys:
    """Keys from both ends' secrets (32 random bytes each, used for one lane only) and the agreed
    transcript.

    Exactly one end is the initiator. Raises LocalProtocolError for secrets of another length or an
    unknown cipher.
    """
    if (
        len(my_secret) != SECRET_BYTES
        or len(peer_secret) != SECRET_BYTES
        or cipher not in KEY_BYTES
    ):
        raise LocalProtocolError(
            f"lane keys need two secrets of {SECRET_BYTES} bytes and a cipher of "
            f"{', '.join(KEY_BYTES)}"
        )
    first, second = (my_secret, peer_secret) if initiator else (peer_secret, my_secret)
    length = KEY_BYTES[cipher]
    info = b"atoll/lane/1|" + cipher.encode() + b"|" + transcript
    keys = HKDF(SHA256(), 2 * length, salt=None, info=info).derive(first + second)
    forth, back = keys[:length], keys[length:]
    return LaneKeys(forth, back, cipher) if initiator else LaneKeys(back, forth, cipher)


class _Direction:
    def __init__(self, key: bytes, cipher: str) -> None:
        if len(key) != KEY_BYTES.get(cipher):
            raise LocalProtocolError(f"a key of {len(key)} bytes does not fit {cipher!r}")
        self._key = key
        self._cipher = cipher
        self._aead = self._make()
        self.records = 0

    def _make(self) -> AESGCM | ChaCha20Poly1305:
        return (
            ChaCha20Poly1305(self._key) if self._cipher.startswith("chacha") else AESGCM(self._key)
        )

    def _nonce(self) -> bytes:
        number = self.records
        self.records = number + 1
        if number and number % REKEY_RECORDS == 0:
            self._key = HKDFExpand(SHA256(), len(self._key), info=b"atoll/lane/1|next key").derive(
                self._key
            )
            self._aead = self._make()
        return number.to_bytes(12, "big")


class Sealer(_Direction):
    """The sending direction of a lane. Records must be sent in the order they are sealed."""

    def encrypt(self, header: bytes, payload: memoryview | bytes, out: memoryview) -> None:
        """Encrypt into ``out``, exactly 16 bytes longer than ``payload``."""
        self._aead.encrypt_into(self._nonce(), payload, header, out)


class Opener(_Direction):
    """The receiving direction of a lane. Records must be opened in the order they arrive."""

    def open(self, header: bytes, sealed: memoryview, out: memoryview, peer: PeerId) -> None:
        """Open into ``out``, exactly 16 bytes shorter (it may be the beginning of ``sealed``
        itself).

        Raises RemoteProtocolError when the record is not the next one the other end sealed; the
        lane must be closed then, and ``out`` holds nothing of use.
        """
        if len(sealed) < TAG_BYTES:
            raise RemoteProtocolError(f"sealed record of {len(sealed)} bytes", peer=peer)
        try:
            self._aead.decrypt_into(self._nonce(), sealed, header, out)
        except InvalidTag:
            raise RemoteProtocolError(
                f"record {self.records - 1} of the lane does not authenticate", peer=peer
            ) from None

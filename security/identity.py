"""A peer's Ed25519 identity: made once, kept in a file only its owner can read, equal to its libp2p
peer id.

The peer id embeds the public key, so that a signature can be checked with nothing but the id of the
signer.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..collectives.errors import SecurityError
from ..collectives.forced import make_folder, sync_folder
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


def load_or_create(path: Path) -> Identity:
    """The identity kept in ``path``, made on first use: file 0600 in a directory 0700, created
    atomically.

    Two processes that start at once end with the same identity. Raises SecurityError E210 when
    others can read or replace the file, when it belongs to somebody else, or when it does not hold
    an identity; OSError when it cannot be read or written.
    """
    make_folder(path.parent)
    _check_directory(path.parent)
    if not path.exists():
        _create(path)
    return load(path)


def load(path: Path) -> Identity:
    """The identity kept in ``path``. Raises SecurityError E210 as `load_or_create`;
    FileNotFoundError when there is none.
    """
    _check_directory(path.parent)
    try:
        # non-blocking: a FIFO in its place must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        raise _refused(
            path, "may not be read by you", f"sudo chown {os.geteuid()} {path}; chmod 600 {path}"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(
            path, "is not a regular file", "move it away; a new identity is made at the next start"
        )
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.geteuid():
            raise _refused(
                path, f"belongs to user {info.st_uid}", f"sudo chown {os.geteuid()} {path}"
            )
        if stat.S_IMODE(info.st_mode) & 0o077:
            mode = stat.S_IMODE(info.st_mode)
            raise _refused(
                path, f"has mode {mode:04o}: other users can get at it", f"chmod 600 {path}"
            )
        text = file.read(_MAX_FILE_BYTES)
    return Identity(_parse(path, text))


def _parse(path: Path, text: bytes) -> bytes:
    hint = f"restore {path} from a backup, or move it away to start with a new identity"
    try:
        header, encoded = text.decode("ascii").split()
        seed = base64.b64decode(encoded, validate=True)
    except (UnicodeDecodeError, ValueError, binascii.Error):
        raise _refused(path, "does not hold an identity", hint) from None
    if header != _FILE_HEADER or len(seed) != SEED_BYTES:
        raise _refused(path, "does not hold an identity", hint)
    return seed


def _check_directory(directory: Path) -> None:
    info = directory.stat()
    if info.st_uid not in (os.geteuid(), 0):  # who owns a folder replaces what is in it
        raise _refused(
            directory,
            f"belongs to user {info.st_uid}, who can replace the key in it",
            f"sudo chown {os.geteuid()} {directory}",
        )
    if stat.S_IMODE(info.st_mode) & 0o022 and not info.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(info.st_mode)
        raise _refused(
            directory,
            f"has mode {mode:04o}: other users can replace the key in it",
            f"chmod 700 {directory}",
        )


def _create(path: Path) -> None:
    """Write a new key beside ``path`` and link it into place, so that the file is complete or
    absent, and never replaced.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(
                (
                    f"{_FILE_HEADER} {base64.b64encode(secrets.token_bytes(SEED_BYTES)).decode()}\n"
                ).encode()
            )
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first; its identity is ours
        except OSError:
            os.rename(draft, path)  # a file system without hard links
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def _refused(path: Path, what: str, hint: str) -> SecurityError:
    why = "whoever holds this key can act as this peer"
    kind = "key folder" if path.is_dir() else "key file"
    return SecurityError(f"{kind} {path} {what}", code="E210", why=why, hint=hint)

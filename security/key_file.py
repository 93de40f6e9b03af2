"""A node's identity on disk: a file that only its owner can read, made once."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
from pathlib import Path

from ..collectives.errors import SecurityError
from ..collectives.forced import make_folder, sync_folder
from .identity import _FILE_HEADER, _MAX_FILE_BYTES, SEED_BYTES, Identity


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

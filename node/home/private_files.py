"""Files and folders of ours that nobody else can read, whatever the user's umask is."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ...collectives.forced import new_file, sync_folder
from .refusals import storage_error


def open_private(path: Path) -> BinaryIO:
    """A file to append to that only its owner can read, new or not. Raises OSError."""
    file = open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
    if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
        os.fchmod(file.fileno(), 0o600)
    return file


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file so that a crash leaves the old or the new one. Raises StorageError (disk full,
    no permission).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with new_file(temporary, mode) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(f"cannot write {path}", error) from None
        raise


def remove_file(path: Path) -> None:
    """Remove a file, if it is there. Raises StorageError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(f"cannot remove {path}", error) from None

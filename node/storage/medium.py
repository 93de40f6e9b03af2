"""The file system as the storage of a run uses it: the seam between journal, votes and checkpoints
and the disk.

`RealMedium` is the operating system's. `kits.rounds.medium` has one that loses, tears and
reorders what was not synced, as a power cut does. A write or a rename is on the medium once `sync`
of the file, or `sync_folder` of its folder, has returned; not before.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Protocol

from ...collectives.errors import StorageError
from ..home.refusals import storage_error as about

PIECE_BYTES = 8 << 20
"""What is written at a time of a large file, and forced before the next: what is small and urgent
never waits for all of it.
"""


class Medium(Protocol):
    """Every method raises OSError. Files are numbers, as of the operating system."""

    def open(self, path: Path) -> int:
        """Open for reading and writing; made, empty and 0600, where it is missing."""
        ...

    def close(self, file: int) -> None:
        """Let go of a file."""

    def size(self, file: int) -> int:
        """In bytes."""
        ...

    def read(self, file: int, nbytes: int, at: int) -> bytes:
        """Fewer where the file ends."""
        ...

    def write(self, file: int, data: bytes | memoryview, at: int) -> None:
        """All of it. ENOSPC, too, where the disk took a part."""

    def truncate(self, file: int, nbytes: int) -> None:
        """Cut a file."""

    def sync(self, file: int) -> None:
        """Everything that was written to the file is on the medium when this returns."""

    def sync_folder(self, folder: Path) -> None:
        """The names in the folder are on the medium when this returns."""

    def make_folder(self, folder: Path) -> None:
        """With its parents, 0700; one that exists is left as it is."""

    def replace(self, old: Path, new: Path) -> None:
        """Rename, in place of what was called so."""

    def remove(self, path: Path) -> None:
        """Remove a file; nothing happens where there is none."""

    def exists(self, path: Path) -> bool:
        """Whether there is such a file or folder."""
        ...


class RealMedium:
    """The operating system's files. Implements `Medium`."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)

    def close(self, file: int) -> None:
        os.close(file)

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def read(self, file: int, nbytes: int, at: int) -> bytes:
        return os.pread(file, nbytes, at)

    def write(self, file: int, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(file, view, at)
            view, at = view[count:], at + count

    def truncate(self, file: int, nbytes: int) -> None:
        os.ftruncate(file, nbytes)

    def sync(self, file: int) -> None:
        getattr(os, "fdatasync", os.fsync)(file)

    def sync_folder(self, folder: Path) -> None:
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def exists(self, path: Path) -> bool:
        return path.exists()


REAL: Medium = RealMedium()


def contents_of(path: Path, medium: Medium = REAL) -> bytes:
    """All of a file. Raises OSError, FileNotFoundError where there is none."""
    if not medium.exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    file = medium.open(path)
    try:
        return medium.read(file, medium.size(file), 0)
    finally:
        medium.close(file)


def write_atomically(
    path: Path, data: bytes, *, forced: bool = True, medium: Medium = REAL
) -> None:
    """Replace a file's content at once. After a power cut there is the old content or the new one,
    and, ``forced``, the new one; without, only a kill is provided for. Raises StorageError."""
    temporary = path.with_name(path.name + ".new")
    try:
        medium.remove(temporary)
        file = medium.open(temporary)
        try:
            medium.write(file, data, 0)
            if forced:
                medium.sync(file)
        finally:
            medium.close(file)
        medium.replace(temporary, path)
        if forced:
            medium.sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            medium.remove(temporary)
        raise storage_error(path, error) from error


def make_folder(folder: Path, medium: Medium = REAL) -> None:
    """A folder whose name is on the medium: what is forced in it could not be found again
    otherwise. Raises OSError.
    """
    made = not medium.exists(folder)
    medium.make_folder(folder)
    if made:
        medium.sync_folder(folder.parent)


def storage_error(path: Path, error: OSError) -> StorageError:
    """A coded error for a failed file operation, with advice that fits."""
    return about(f"cannot use {path}", error)

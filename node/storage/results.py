"""Result bytes in a ring of preallocated files, mapped and shared: what is received into them survives a kill -9.

A mapping costs no copy; preallocation turns a full disk into a StorageError instead of a bus error.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import weakref
from pathlib import Path

from ...collectives.errors import StorageError
from .journal import storage_error, write_at, write_atomically

MAX_FILES = 64


def reserve(fd: int, nbytes: int, path: Path) -> None:
    """Make the file ``nbytes`` long with its blocks allocated. Raises StorageError."""
    before = os.fstat(fd).st_size
    try:
        if before < nbytes:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)
            else:
                zeros, at = bytes(1 << 20), before
                while at < nbytes:
                    at += os.pwrite(fd, zeros[: nbytes - at], at)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, before)  # take no room that others can use
        raise storage_error(path, error) from error


class ResultFiles:
    """Buffers for encoded results. `allocate` is called from any thread; the rest from the control loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise storage_error(folder, error) from error
        self._lock = threading.Lock()
        self._mapped: dict[int, weakref.ref[mmap.mmap]] = {}  # file number -> mapping in use: what is only kept is not mapped
        self._index: dict[str, tuple[int, int, int]] = {}  # entry hash -> round, file number, bytes
        self._load()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:02d}"

    def _load(self) -> None:
        try:
            raw = json.loads((self._folder / "index.json").read_text())
            self._index = {str(name): (int(r), int(n), int(size)) for name, (r, n, size) in raw.items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError):
            self._index = {}  # as if nothing were kept: the entries say what is missing

    @staticmethod
    def _open(path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise storage_error(path, error) from error

    def _map(self, number: int, nbytes: int) -> mmap.mmap:
        path = self._path(number)
        fd = self._open(path)
        try:
            reserve(fd, max(nbytes, 1), path)
            memory = mmap.mmap(fd, max(nbytes, 1))
        finally:
            os.close(fd)
        self._mapped[number] = weakref.ref(memory)
        return memory

    def allocate(self, nbytes: int) -> memoryview:
        """A buffer nobody uses. Raises StorageError."""
        with self._lock:
            return memoryview(self._map(self._free(), nbytes))[:nbytes]

    def _free(self) -> int:
        """A file nobody uses; with the lock held."""
        kept = {number for _, number, _ in self._index.values()}
        for number in range(MAX_FILES):
            reference = self._mapped.get(number)
            if number not in kept and (reference is None or reference() is None):
                return number
        raise StorageError(f"all {MAX_FILES} result buffers are in use")

    def keep(self, name: str, round_: int, data: memoryview) -> None:
        """Name the bytes in a buffer of `allocate`; those of elsewhere are written to a file. Raises StorageError."""
        with self._lock:
            if name in self._index:
                return
            number = next((n for n, ref in self._mapped.items() if ref() is data.obj), None)
            if number is None:
                number = self._write(data)
            self._index[name] = (round_, number, len(data))
            try:
                self._save()
            except StorageError:
                del self._index[name]  # not kept: whoever votes on these bytes must not
                raise

    def _write(self, data: memoryview) -> int:
        """Bytes from elsewhere, into a free file: a third of what it costs to copy them into a mapping, whose every page is a fault."""
        number = self._free()
        path = self._path(number)
        fd = self._open(path)
        try:
            reserve(fd, len(data), path)
            write_at(fd, data, 0)
        except OSError as error:
            raise storage_error(path, error) from error
        finally:
            os.close(fd)
        return number

    def kept(self, name: str) -> memoryview | None:
        """Bytes kept under a name."""
        found = self._index.get(name)
        if found is None:
            return None
        _, number, nbytes = found
        try:
            if self._path(number).stat().st_size < nbytes:
                return None
        except OSError:
            return None
        with self._lock:
            reference = self._mapped.get(number)
            memory = reference() if reference is not None else None
            return memoryview(memory if memory is not None else self._map(number, nbytes))[:nbytes]

    def forget(self, before: int, keep: set[str]) -> None:
        """Names of older rounds are dropped, except ``keep``; their files are used again once nobody reads them."""
        old = [name for name, (round_, _, _) in self._index.items() if round_ < before and name not in keep]
        if old:
            with self._lock:
                for name in old:
                    del self._index[name]
                self._save()

    def drop(self, prefix: str) -> None:
        """All names that begin so are dropped."""
        with self._lock:
            names = [name for name in self._index if name.startswith(prefix)]
            for name in names:
                del self._index[name]
            if names:
                self._save()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._index.clear()
            self._save()

    def close(self) -> None:
        """Let go of all mappings: each ends with its last reader. What is kept on disk stays."""
        with self._lock:
            self._mapped.clear()

    def _save(self) -> None:
        write_atomically(self._folder / "index.json", json.dumps(self._index).encode())

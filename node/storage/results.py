"""Result bytes in a ring of preallocated files, mapped and shared: what is received into them
survives a kill -9.

A mapping costs no copy; preallocation turns a full disk into a StorageError instead of a bus error.
Behind the bytes each file says what they are (a trailer: name, round, length, with a check), so
that one sync of one file puts both on the medium. Its last byte says that this was done: the system
forgets what a failed sync had to write, and the next sync succeeds without it. So what is not known
to be forced is written again before it is: in the same life in another file, in the next in its
own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...collectives.errors import StorageError
from .frames import FRAME, check_of, framed
from .medium import PIECE_BYTES, REAL, storage_error

MAX_FILES, MAX_WARM = 64, 2
WARM_BYTES = 8 << 20  # of a mapping that is kept for the next round: larger ones are memory
TRAILER_BYTES = 512
_FORCED = b"F"


class _Trailer(msgspec.Struct, frozen=True, array_like=True):
    name: str
    round: int
    nbytes: int


_trailer = msgspec.msgpack.Decoder(_Trailer)


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
    """Buffers for encoded results. From any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise storage_error(folder, error) from error
        self._lock = threading.Lock()
        # File number -> array over the mapping in use: what is only kept is not mapped.
        self._mapped: dict[int, weakref.ref[Any]] = {}
        # Small mappings used last: a new one costs a fault for every page that is written.
        self._warm: dict[int, mmap.mmap] = {}
        self._index: dict[str, tuple[int, int, int]] = {}  # name -> round, file number, bytes
        self._named = set[Path]()  # files whose names are on the medium
        self._forced = set[str]()  # names whose bytes are on the medium
        self._lost = set[int]()  # files whose sync has failed
        self._load()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:02d}"

    def _load(self) -> None:
        for number in range(MAX_FILES):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if (found := self._read_trailer(self._path(number))) is not None:
                    trailer, forced = found
                    self._index[trailer.name] = (trailer.round, number, trailer.nbytes)
                    if forced:
                        self._forced.add(trailer.name)
        # What a kill cut short is in the page cache, and looks the same as what is on the medium:
        # this life is about to rely on it. Where the medium refuses, `keep` says so.
        for name, (_, number, _) in self._index.items():
            if name not in self._forced:
                with contextlib.suppress(OSError):
                    self._write_again(self._path(number))
                    self._force(name, self._path(number))

    @staticmethod
    def _read_trailer(path: Path) -> tuple[_Trailer, bool] | None:
        """What a file says it holds, and whether that is forced; None if it says nothing, or was
        cut off before.
        """
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TRAILER_BYTES))
            data = file.read(TRAILER_BYTES)
        if len(data) < TRAILER_BYTES:
            return None
        length, check = FRAME.unpack_from(data)
        body = data[FRAME.size : FRAME.size + length]
        if len(body) != length or check_of(body) != check:
            return None
        found = _trailer.decode(body)
        whole = found.nbytes + TRAILER_BYTES <= size
        return (found, data[-1:] == _FORCED) if whole else None

    @staticmethod
    def _open(path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise storage_error(path, error) from error

    def _map(self, number: int, nbytes: int) -> Any:
        memory = self._warm.pop(number, None)
        if memory is None or len(memory) != max(nbytes, 1):
            path = self._path(number)
            fd = self._open(path)
            try:
                self._make_room(fd, max(nbytes, 1), path)
                memory = mmap.mmap(fd, max(nbytes, 1))
            except OSError as error:  # no more memory, or no more mappings, for this process
                raise storage_error(path, error) from error
            finally:
                os.close(fd)
        if nbytes <= WARM_BYTES:
            self._warm[number] = memory
        while len(self._warm) > MAX_WARM:
            del self._warm[next(iter(self._warm))]
        array = np.frombuffer(memory, dtype=np.uint8)
        self._mapped[number] = weakref.ref(array)
        return array

    @staticmethod
    def _make_room(fd: int, nbytes: int, path: Path) -> None:
        """The file has room for so many bytes and a trailer, that says nothing yet, at its end."""
        reserve(fd, nbytes + TRAILER_BYTES, path)
        try:
            os.ftruncate(fd, nbytes + TRAILER_BYTES)
        except OSError as error:
            raise storage_error(path, error) from error

    def allocate(self, nbytes: int) -> memoryview:
        """A buffer nobody uses. Raises StorageError."""
        with self._lock:
            return memoryview(self._map(self._free(), nbytes).data)[:nbytes]

    def _free(self) -> int:
        """A file nobody uses, its old description gone; the lock is held. Raises StorageError."""
        kept = {number for _, number, _ in self._index.values()}
        for number in range(MAX_FILES):
            reference = self._mapped.get(number)
            if number not in kept and (reference is None or reference() is None):
                self._blank(number)
                self._lost.discard(number)  # every byte of it is about to be written
                return number
        raise StorageError(f"all {MAX_FILES} result buffers are in use")

    def _blank(self, number: int) -> None:
        """Its bytes are about to change: an earlier trailer would be wrong about them."""
        path = self._path(number)
        try:
            size = path.stat().st_size
            if size >= TRAILER_BYTES:
                self._put(path, bytes(FRAME.size), size - TRAILER_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(path, error) from error

    def keep(self, name: str, round_: int, data: memoryview, *, forced: bool) -> None:
        """Name the bytes in a buffer of `allocate`; those of elsewhere are written to a file.

        ``forced``: they are on the medium when this returns, which is heavy; without, they survive
        a kill only. Raises StorageError.
        """
        with self._lock:
            known = self._index.get(name)
            if known is None:
                taken = {number for _, number, _ in self._index.values()} | self._lost
                number = next((n for n, ref in self._mapped.items() if ref() is data.obj), None)
                if number is None or number in taken:  # a file has one name
                    number = self._write(data)
                self._index[name] = (round_, number, len(data))
            else:
                number = known[1]
        if known is not None and (not forced or name in self._forced):
            return
        path = self._path(number)
        trailer = msgspec.msgpack.encode(_Trailer(name, round_, len(data)))
        try:
            if known is not None:  # of an earlier life, which may not have come to force it
                self._put(path, data, 0)
            at = path.stat().st_size - TRAILER_BYTES
            self._put(path, framed(trailer).ljust(TRAILER_BYTES, b"\0"), at)
            if forced:
                self._force(name, path)
        except OSError as error:
            with self._lock:
                if known is None:  # not kept: whoever votes on these bytes must not
                    self._index.pop(name, None)
                self._lost.add(number)
            raise storage_error(path, error) from error

    def _force(self, name: str, path: Path) -> None:
        """What a name stands for is on the medium when this returns. Raises OSError."""
        fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            REAL.sync(fd)
        finally:
            os.close(fd)
        if path not in self._named:
            REAL.sync_folder(self._folder)
            self._named.add(path)
        self._forced.add(name)
        with contextlib.suppress(OSError):  # then the next life writes it again
            self._put(path, _FORCED, path.stat().st_size - 1)

    @staticmethod
    def _write_again(path: Path) -> None:
        """A whole file, as it is read. Raises OSError."""
        fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            for at in range(0, os.fstat(fd).st_size, PIECE_BYTES):
                REAL.write(fd, os.pread(fd, PIECE_BYTES, at), at)
        finally:
            os.close(fd)

    @staticmethod
    def _put(path: Path, data: bytes | memoryview, at: int) -> None:
        """Raises OSError."""
        fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            REAL.write(fd, data, at)
        finally:
            os.close(fd)

    def _write(self, data: memoryview) -> int:
        """Bytes from elsewhere, into a free file: a third of what it costs to copy them into a
        mapping, whose every page is a fault.
        """
        number = self._free()
        path = self._path(number)
        fd = self._open(path)
        try:
            self._make_room(fd, max(len(data), 1), path)
            REAL.write(fd, data, 0)
        except OSError as error:
            raise storage_error(path, error) from error
        finally:
            os.close(fd)
        return number

    def has(self, name: str) -> bool:
        return name in self._index

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
            return memoryview((memory if memory is not None else self._map(number, nbytes)).data)[
                :nbytes
            ]

    def forget(self, before: int) -> None:
        """Names of older rounds are dropped; their files are used again once nobody reads them."""
        with self._lock:
            self._drop(name for name, (round_, _, _) in self._index.items() if round_ < before)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._drop(self._index)

    def _drop(self, names: Iterable[str]) -> None:
        for name in list(names):
            _, number, _ = self._index.pop(name)
            self._forced.discard(name)
            # The next life may find it: it is bytes as good as they were.
            with contextlib.suppress(StorageError):
                self._blank(number)

    def close(self) -> None:
        """Let go of all mappings: each ends with its last reader. What is kept on disk stays."""
        with self._lock:
            self._mapped.clear()
            self._warm.clear()

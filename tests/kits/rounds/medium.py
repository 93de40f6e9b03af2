"""A disk that forgets: what was not synced is lost, torn and reordered when power goes, as ALICE
and CrashMonkey found real ones do it.

A file is a list of writes on top of what is on the medium. At a power cut each 512 bytes of each
write that was not synced may or may not have arrived, in any order; the file's length may have
grown without its bytes (zeros). Names are apart from files: making, renaming and removing them is
pending until `sync_folder`, and any of them may or may not have arrived. A kill loses nothing.

A sync that fails forgets, as Linux does: of what was on the way any part has arrived, the rest goes
on being read as if it had, no later sync writes it, and at any time the system may drop it from
memory: then what the medium has is read. So does one of a folder: names that it had to write are
read, and lost when power goes.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SECTOR = 512


@dataclass(slots=True)
class _MediumFile:
    """What everybody reads, what is on the medium, and what is on the way there."""

    now: bytearray = field(default_factory=bytearray)
    medium: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    """(at, bytes), or (length, b"") of a file that was cut."""
    forgot: bool = False
    """A sync of it has failed: it may differ from what is read."""


@dataclass(slots=True)
class _Names:
    """Of one folder."""

    now: dict[str, _MediumFile] = field(default_factory=dict[str, _MediumFile])
    medium: dict[str, _MediumFile] = field(default_factory=dict[str, _MediumFile])
    changes: list[dict[str, _MediumFile | None]] = field(
        default_factory=list[dict[str, "_MediumFile | None"]]
    )
    """Each arrives as a whole or not at all: a rename is one of a name that goes and one that
    comes.
    """


class SimMedium:
    """Implements `atoll.node.storage.medium.Medium`. ``skip``: the names of files, or "folder",
    whose sync does nothing: a planted bug.
    """

    def __init__(self, rng: Random, skip: str = "") -> None:
        self._rng, self._skip = rng, skip
        self._folders: dict[Path, _Names] = {}
        self._open: dict[int, tuple[_MediumFile, str]] = {}
        self._numbers = 0
        self.syncs = 0
        self.boots = 0
        """How often power went: part of the boot's name."""
        self.fail: dict[int, int] = {}
        """The call number at which an error is raised -> its errno. Calls that change something are
        counted.
        """
        self.calls = 0
        self.failed = 0
        self.forgotten = 0
        """How many syncs of a folder have forgotten names."""
        self.whole = False
        """Nothing fails meanwhile."""

    def copy(self) -> dict[Path, dict[str, bytes]]:
        """All files as they can be read now, by folder: what a backup is."""
        return {
            folder: {name: bytes(file.now) for name, file in names.now.items()}
            for folder, names in self._folders.items()
        }

    def fill(self, files: dict[Path, dict[str, bytes]]) -> None:
        """These files are there instead, and on the medium."""
        self._open.clear()
        self._folders = {}
        for folder, contents in files.items():
            found = {name: _MediumFile(bytearray(data), data) for name, data in contents.items()}
            self._folders[folder] = _Names(found, dict(found))

    # ---- power
    def cut(self) -> None:
        """Power goes: all files are closed, and what was not synced is lost, torn and reordered."""
        self.boots += 1
        self._open.clear()
        files = {
            id(file): file
            for names in self._folders.values()
            for file in (*names.now.values(), *names.medium.values())
        }
        for names in self._folders.values():
            self._settle_names(names)
        for file in files.values():
            self._settle(file)

    def _settle_names(self, names: _Names) -> None:
        self._arrive(names, self._rng)
        names.now = dict(names.medium)

    @staticmethod
    def _arrive(names: _Names, rng: Random) -> None:
        """Any of the names on the way are on the medium; the rest never will be."""
        for change in names.changes:
            if rng.random() < 0.5:
                _apply(names.medium, change)
        names.changes.clear()

    def _settle(self, file: _MediumFile) -> None:
        _arrive(file, self._rng)
        file.now, file.forgot = bytearray(file.medium), False

    def _forget(self, file: _MediumFile) -> None:
        _arrive(file, Random(self.calls))  # not drawn of what decides everything else
        file.forgot = True

    def kill(self) -> None:
        """The process is gone, and the system lives on."""
        self._open.clear()
        for file in {id(f): f for n in self._folders.values() for f in n.now.values()}.values():
            if file.forgot and Random(self.calls).random() < 0.5:
                file.now = bytearray(_written(file))

    # ---- Medium
    def _change(self) -> None:
        """Something is about to be changed. Raises OSError where that is to fail."""
        self.calls += 1
        code = self.fail.get(self.calls)
        if code is not None and not self.whole:
            self.failed += 1
            raise OSError(code, os.strerror(code))

    def _names(self, folder: Path) -> _Names:
        names = self._folders.get(folder)
        if names is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return names

    def _file(self, number: int) -> _MediumFile:
        if number not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._open[number][0]

    def open(self, path: Path) -> int:
        """See Medium."""
        names = self._names(path.parent)
        file = names.now.get(path.name)
        if file is None:
            self._change()
            file = names.now[path.name] = _MediumFile()
            names.changes.append({path.name: file})
        self._numbers += 1
        self._open[self._numbers] = (file, path.name)
        return self._numbers

    def close(self, file: int) -> None:
        """See Medium."""
        self._open.pop(file, None)

    def size(self, file: int) -> int:
        """See Medium."""
        return len(self._file(file).now)

    def read(self, file: int, nbytes: int, at: int) -> bytes:
        """See Medium."""
        return bytes(self._file(file).now[at : at + nbytes])

    def write(self, file: int, data: bytes | memoryview, at: int) -> None:
        """See Medium."""
        known, piece = self._file(file), bytes(data)
        self._change()
        if len(known.now) < at:
            known.now.extend(bytes(at - len(known.now)))
        known.now[at : at + len(piece)] = piece
        if piece:
            known.writes.append((at, piece))

    def truncate(self, file: int, nbytes: int) -> None:
        """See Medium."""
        known = self._file(file)
        self._change()
        del known.now[nbytes:]
        known.writes.append((nbytes, b""))

    def sync(self, file: int) -> None:
        """See Medium."""
        known = self._file(file)
        try:
            self._change()
        except OSError:
            self._forget(known)
            raise
        self.syncs += 1
        if self._skip and self._skip in self._open[file][1]:
            return
        known.medium = _written(known)
        known.writes.clear()

    def sync_folder(self, folder: Path) -> None:
        """See Medium."""
        names = self._names(folder)
        try:
            self._change()
        except OSError:
            self.forgotten += bool(names.changes)
            self._arrive(names, Random(self.calls))
            raise
        if self._skip == "folder":
            return
        for change in names.changes:
            _apply(names.medium, change)
        names.changes.clear()

    def make_folder(self, folder: Path) -> None:
        """See Medium. Folders are there for good: what loses one is not simulated."""
        while folder not in self._folders:
            self._folders[folder] = _Names()
            folder = folder.parent

    def replace(self, old: Path, new: Path) -> None:
        """See Medium. Within one folder."""
        names = self._names(old.parent)
        if old.parent != new.parent or old.name not in names.now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        self._change()
        change: dict[str, _MediumFile | None] = {new.name: names.now[old.name], old.name: None}
        _apply(names.now, change)
        names.changes.append(change)

    def remove(self, path: Path) -> None:
        """See Medium."""
        names = self._folders.get(path.parent)
        if names is not None and path.name in names.now:
            self._change()
            change: dict[str, _MediumFile | None] = {path.name: None}
            _apply(names.now, change)
            names.changes.append(change)

    def exists(self, path: Path) -> bool:
        """See Medium."""
        names = self._folders.get(path.parent)
        return path in self._folders or (names is not None and path.name in names.now)


def _written(file: _MediumFile) -> bytes:
    """What is on the medium once all writes have arrived."""
    left = bytearray(file.medium)
    for at, data in file.writes:
        if not data:
            del left[at:]
            continue
        left.extend(bytes(max(0, at - len(left))))
        left[at : at + len(data)] = data
    return bytes(left)


def _arrive(file: _MediumFile, rng: Random) -> None:
    """Of what is on the way any part arrives, in any order, and no more of it is on the way."""
    left = bytearray(file.medium)
    for at, data in file.writes:
        if not data:  # cut
            if rng.random() < 0.5:
                del left[at:]
            continue
        fate = rng.random()
        if fate < 0.3:
            continue
        for first in range(0, len(data), SECTOR):
            if fate < 0.6 and rng.random() < 0.5:
                continue
            piece = data[first : first + SECTOR]
            if len(left) < at + first:
                left.extend(bytes(at + first - len(left)))
            left[at + first : at + first + len(piece)] = piece
        if rng.random() < 0.3 and len(left) < at + len(data):
            left.extend(bytes(at + len(data) - len(left)))
    file.writes.clear()
    file.medium = bytes(left)


def _apply(names: dict[str, _MediumFile], change: dict[str, _MediumFile | None]) -> None:
    for name, file in change.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file

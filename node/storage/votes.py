"""Free-standing operations with durable votes, in one folder: a small file for each, and their
results in a ring of files.

A vote is written to a file of its own, `.new`, which a kill leaves behind and the next life takes
up. `sync`, beside the loop, forces it and puts it in the place of what was there. What a message
says waits for that (`session.barrier`).
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec
from blake3 import blake3

from ...collectives.errors import StorageError
from ..session.kept import KeptVote
from .frames import FRAME, check_of, framed
from .medium import REAL, storage_error, write_atomically
from .results import ResultFiles

_vote = msgspec.msgpack.Decoder(KeptVote)
SUFFIX, NEW = ".vote", ".new"


def _name(log: str) -> str:
    return blake3(log.encode()).hexdigest(12)  # a log's name holds what peers made up


def _read(path: Path) -> KeptVote | None:
    """None where it is not whole. Raises StorageError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise storage_error(path, error) from error
    with contextlib.suppress(msgspec.MsgspecError):
        if len(data) > FRAME.size and FRAME.unpack_from(data)[1] == check_of(data[FRAME.size :]):
            return _vote.decode(data[FRAME.size :])
    return None


def _result(log: str, digests: tuple[bytes, ...]) -> str:
    return f"{_name(log)}-{blake3(b''.join(digests)).hexdigest(12)}"


class VoteFiles:
    """Implements `session.kept.Votes`. Raises StorageError where it cannot write."""

    def __init__(self, folder: Path, *, forced: bool = True) -> None:
        """``forced``: votes and results outlive a power cut, too."""
        self._folder, self._results, self._forced = folder, ResultFiles(folder), forced
        self._abandoned: list[memoryview] = []
        self.written = 0
        """How many votes this life has recorded that wait for `sync`, ever."""
        self._lock = threading.Lock()
        self._queue: list[tuple[Path, Path]] = []  # what is not forced, and its place; in order
        found = [path.stem.rpartition(".")[2] for path in folder.glob(f"*{NEW}")]
        self._number = max((int(each) for each in found if each.isdecimal()), default=0)

    def allocate(self, nbytes: int) -> memoryview:
        """Memory for a result, whose `store` need not write it once more. From any thread. Raises
        StorageError.
        """
        return self._results.allocate(nbytes)

    def file_of(self, data: memoryview) -> Path | None:
        """Where memory of `allocate` lies."""
        return self._results.file_of(data)

    def abandon(self, data: memoryview) -> None:
        """Somebody who cannot be asked may read it for ever: where it is memory of `allocate`, that
        is not given out again.
        """
        if self.file_of(data) is not None:
            self._abandoned.append(data)

    def store(self, log: str, digests: tuple[bytes, ...], data: memoryview) -> None:
        """Onto the medium, where it is not there already. Heavy."""
        self._results.keep(_result(log, digests), 0, data, forced=self._forced)

    def record(self, vote: KeptVote) -> None:
        """No kill undoes it when this returns; it is on the medium once a `sync` that begins
        afterwards has returned.
        """
        data = framed(msgspec.msgpack.encode(vote))
        if not self._forced:
            return write_atomically(self._path(vote.log), data, forced=False)
        self._number += 1
        path = self._folder / f"{_name(vote.log)}.{self._number:012d}{NEW}"
        try:
            path.write_bytes(data)
        except OSError as error:
            self._remove(path)
            raise storage_error(path, error) from error
        with self._lock:
            self._queue.append((path, self._path(vote.log)))
        self.written += 1
        return None

    def sync(self) -> None:
        """All that was recorded so far is on the medium when this returns. From any thread."""
        with self._lock:
            batch, self._queue = self._queue, []
        if not batch:
            return
        newest = {place: path for path, place in batch}
        for path, place in batch:
            if newest[place] is path:
                self._force(path, place)
            else:
                self._remove(path)
        try:
            REAL.sync_folder(self._folder)
        except OSError as error:
            raise storage_error(self._folder, error) from error

    def _force(self, path: Path, place: Path) -> None:
        try:
            with open(path, "r+b") as file:
                REAL.sync(file.fileno())
            REAL.replace(path, place)
        except FileNotFoundError:
            return  # forgotten meanwhile
        except OSError as error:
            raise storage_error(path, error) from error

    def recall(self) -> list[tuple[KeptVote, memoryview | None]]:
        """What an earlier life left. A file that cannot be read is as if it had not been written:
        the operation is only left alone then.
        """
        found = list[tuple[KeptVote, memoryview | None]]()
        self._take_up()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            vote = _read(path)
            if vote is None:
                self._remove(path)
                continue
            found.append(
                (
                    vote,
                    self._results.kept(_result(vote.log, vote.accepted[1].part_digests))
                    if vote.accepted
                    else None,
                )
            )
        self._results.forget(
            1,
            {
                _result(vote.log, vote.accepted[1].part_digests)
                for vote, _ in found
                if vote.accepted
            },
        )
        return found

    def _take_up(self) -> None:
        """What was recorded and not forced when the process was killed. A power cut leaves parts of
        it, that were never said.
        """
        with self._lock:
            known = {path for path, _ in self._queue}
            for path in sorted(self._folder.glob(f"*{NEW}")):
                if path in known:
                    continue
                vote = _read(path)
                if vote is None:
                    self._remove(path)
                else:
                    self._queue.append((path, self._path(vote.log)))
        self.sync()

    def drop(self, log: str) -> None:
        """Its files are the next operation's."""
        with contextlib.suppress(StorageError):  # they are only kept for longer
            self._results.drop(_name(log))

    def forget(self, log: str) -> None:
        """The result, then the vote."""
        self.drop(log)
        self._forget(_name(log))

    def give_back(self) -> None:
        """Files that nothing is kept in."""
        self._results.give_back()

    def clear(self) -> None:
        """A new incarnation has said nothing."""
        self._forget("*")
        self._results.clear()

    def close(self) -> None:
        """Let go of all mappings; what is on disk stays."""
        self._results.close()

    def _path(self, log: str) -> Path:
        return self._folder / (_name(log) + SUFFIX)

    def _forget(self, name: str) -> None:
        """First what a `sync` beside would put in its place."""
        for pattern in (f"{name}.*{NEW}", f"{name}{SUFFIX}"):
            for path in self._folder.glob(pattern):
                self._remove(path)

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):  # the next life forgets it in its time
            path.unlink(missing_ok=True)

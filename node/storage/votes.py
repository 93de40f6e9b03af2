"""Free-standing operations with durable votes, in one folder: a small file for each, and their results in a ring of files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from blake3 import blake3

from ...collectives.errors import StorageError
from ..session.kept import KeptVote
from .medium import storage_error, write_atomically
from .results import ResultFiles

_vote = msgspec.msgpack.Decoder(KeptVote)
SUFFIX = ".vote"


def _name(log: str) -> str:
    return blake3(log.encode()).hexdigest(12)  # a log's name holds what peers made up


def _result(log: str, digests: tuple[bytes, ...]) -> str:
    return f"{_name(log)}-{blake3(b''.join(digests)).hexdigest(12)}"


class VoteFiles:
    """Implements `session.kept.Votes`. Raises StorageError where it cannot write."""

    def __init__(self, folder: Path, *, forced: bool = True) -> None:
        """``forced``: votes and results outlive a power cut, too."""
        self._folder, self._results, self._forced = folder, ResultFiles(folder), forced
        self._abandoned: list[memoryview] = []

    def allocate(self, nbytes: int) -> memoryview:
        """Memory for a result, whose `store` need not write it once more. From any thread. Raises StorageError."""
        return self._results.allocate(nbytes)

    def file_of(self, data: memoryview) -> Path | None:
        """Where memory of `allocate` lies."""
        return self._results.file_of(data)

    def abandon(self, data: memoryview) -> None:
        """Somebody who cannot be asked may read it for ever: where it is memory of `allocate`, that is not given out again."""
        if self.file_of(data) is not None:
            self._abandoned.append(data)

    def store(self, log: str, digests: tuple[bytes, ...], data: memoryview) -> None:
        """Onto the medium, where it is not there already. Heavy."""
        self._results.keep(_result(log, digests), 0, data, forced=self._forced)

    def record(self, vote: KeptVote) -> None:
        """At once, in place of what was there, and on the medium."""
        write_atomically(self._path(vote.log), msgspec.msgpack.encode(vote), forced=self._forced)

    def recall(self) -> list[tuple[KeptVote, memoryview | None]]:
        """What an earlier life left. A file that cannot be read is as if it had not been written: the operation is only left alone then."""
        found = list[tuple[KeptVote, memoryview | None]]()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                vote = _vote.decode(path.read_bytes())
            except msgspec.MsgspecError:
                self._remove(path)
                continue
            except OSError as error:
                raise storage_error(path, error) from error
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

    def drop(self, log: str) -> None:
        """Its files are the next operation's."""
        with contextlib.suppress(StorageError):  # they are only kept for longer
            self._results.drop(_name(log))

    def forget(self, log: str) -> None:
        """The result, then the vote."""
        self.drop(log)
        self._remove(self._path(log))

    def give_back(self) -> None:
        """Files that nothing is kept in."""
        self._results.give_back()

    def clear(self) -> None:
        """A new incarnation has said nothing."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            self._remove(path)
        self._results.clear()

    def close(self) -> None:
        """Let go of all mappings; what is on disk stays."""
        self._results.close()

    def _path(self, log: str) -> Path:
        return self._folder / (_name(log) + SUFFIX)

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):  # the next life forgets it in its time
            path.unlink(missing_ok=True)

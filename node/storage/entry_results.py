"""Encoded results of one log, by entry, and from which round on all of them are here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from ...collectives.errors import StorageError
from ...collectives.group import Entry
from .results import ResultFiles


def result_name(log: str, round_: int, digests: tuple[bytes, ...]) -> str:
    """What result bytes are called before there is an entry that names them."""
    return f"{round_}-{blake3(log.encode() + b''.join(digests)).hexdigest(16)}"


def _name_of(entry: Entry) -> str:
    return result_name(entry.log, entry.round, entry.part_digests)


class EntryResults:
    """Implements `session.ports.Results`. ``older``: the entry of the older checkpoint on disk."""

    forces = True

    def __init__(
        self, folder: Path, older: Callable[[], int], trouble: Callable[[StorageError], None]
    ) -> None:
        self._files, self._older, self._trouble = ResultFiles(folder), older, trouble
        self._from = 0
        self.allocate, self.close = self._files.allocate, self._files.close

    def force(self, log: str, round_: int, digests: tuple[bytes, ...], data: memoryview) -> None:
        self._files.keep(result_name(log, round_, digests), round_, data, forced=True)

    def keep(self, entry: Entry, data: memoryview) -> None:
        """Name result bytes, unless `force` has."""
        if not self._files.has(_name_of(entry)):
            self._files.keep(entry.hash().hex(), entry.round, data, forced=False)

    def kept(self, entry: Entry) -> memoryview | None:
        data = self._files.kept(_name_of(entry))
        return data if data is not None else self._files.kept(entry.hash().hex())

    def first(self) -> int:
        """Oldest round from which on all results are kept."""
        return self._from

    def forget(self, before: int) -> None:
        """Older results may go, but none newer than the older checkpoint: it is as good as the
        newer one only with them.
        """
        limit = min(before, self._older() + 1)
        self._from = max(self._from, limit)
        try:
            self._files.forget(limit)
        except StorageError as error:  # the list on disk still names them: they are kept for longer
            self._trouble(error)

    def begin_at(self, round_: int) -> None:
        """Results before this round are not here; from it on they are, or are to come."""
        self._from = round_

    def has(self, entry: Entry) -> bool:
        """Whether the result of an entry is here, or the entry has none."""
        return (
            not entry.contributors
            or self._files.has(_name_of(entry))
            or self._files.has(entry.hash().hex())
        )

    def clear(self) -> None:
        """All are gone, of a life that is over."""
        self._files.clear()
        self._from = 0

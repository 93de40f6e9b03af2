"""Free-standing operations whose votes outlive the process: what is kept of them, and how they are
taken up again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from ...collectives.group import Config, Entry, Vote
from .volatile import VolatileJournal


class KeptVote(msgspec.Struct, frozen=True, array_like=True):
    """Where a member stands in an operation's ``log``, called under ``config``: what it promised
    last (-1: nothing) and voted for.

    ``served``: the result's bytes are not kept any more: a script that calls it once more is told
    that it was called already.
    """

    log: str
    config: Config
    promised: int
    accepted: tuple[int, Entry] | None
    served: bool = False


class Votes(Protocol):
    """Operations with durable votes, as storage keeps them. A kill -9 undoes nothing of it once a
    method has returned.
    """

    def store(self, log: str, digests: tuple[bytes, ...], data: memoryview) -> None:
        """Result bytes with these part digests. Heavy, called from any thread. Raises
        StorageError.
        """
        ...

    def record(self, vote: KeptVote) -> None:
        """Replace what is known of an operation; it is on the medium after the storage's next
        `sync`. Raises StorageError.
        """
        ...

    def recall(self) -> list[tuple[KeptVote, memoryview | None]]:
        """All operations that were recorded, and the bytes of what was voted for, where they are
        kept. Raises StorageError.
        """
        ...

    def drop(self, log: str) -> None:
        """The bytes of an operation may go: everybody has them."""
        ...

    def forget(self, log: str) -> None:
        """An operation is over."""
        ...

    def give_back(self) -> None:
        """No operation is under way: take no more room than what is kept needs."""
        ...


class KeptJournal(VolatileJournal):
    """Has every promise and vote written down before it is made."""

    def __init__(
        self,
        incarnation: int,
        spend: Callable[[], None],
        write: Callable[[int, tuple[int, Entry] | None, bool], None],
    ) -> None:
        super().__init__(incarnation, spend)
        self._write_down = write
        self._written: tuple[int, tuple[int, Entry] | None] = (-1, None)

    def take_up(self, vote: KeptVote) -> None:
        """What an earlier life of the process said. It may have said more that was ballot 0's."""
        self.promised, self.accepted, self.restarted, self.spent = (
            vote.promised,
            vote.accepted,
            True,
            True,
        )
        self._written = vote.promised, vote.accepted

    def served(self) -> None:
        """The result's bytes may go. Raises StorageError."""
        self._write_down(*self._written, True)

    def promise(self, ballot: int) -> None:
        """Record a promise."""
        self._use()
        self._write(ballot, self.accepted)
        super().promise(ballot)

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        """Record a vote; the result's bytes are stored."""
        self._use()
        self._write(ballot, (ballot, entry))
        super().accept(ballot, entry, proof)

    def _write(self, promised: int, accepted: tuple[int, Entry] | None) -> None:
        self._write_down(promised, accepted, False)
        self._written = promised, accepted

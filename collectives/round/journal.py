"""What a member must not forget: the Journal seam and its in-memory implementation.

A vote means "I hold state r-1 and all bytes of r, and I will not vote for a smaller ballot".
Whoever answers Prepare or votes writes here first. The node's implementation is
`atoll.node.storage`; `MemoryJournal` serves simulations (it survives a simulated crash) and
free-standing operations (whose votes are volatile, and valid for one process lifetime, unless their
callers ask for more).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..group import Certified, Config, Entry, Vote
from .log import Log

_certified = msgspec.msgpack.Decoder(Certified)


class SealRecord(msgspec.Struct, frozen=True, array_like=True):
    """The open round was sealed: (``round``, ``base``), where ``removed`` will never vote again. At
    the organiser: whether it ``asked`` for that and is not done, and what it has ``signed`` for the
    round."""

    round: int
    base: bytes
    removed: Config
    asked: bool = False
    signed: Certified | None = None


class Journal(Protocol):
    """Persistent state of one member in one log. Every method returns only when a kill -9 could not
    undo it.
    """

    incarnation: int
    restarted: bool
    """Whether an earlier life of this incarnation may have sent messages: such a member never uses
    ballot 0 of its open round.
    """
    entries: Log
    """All of them can be read; few are in memory."""
    promised: int
    accepted: tuple[int, Entry] | None
    proof: tuple[Vote, ...]
    """Of what was accepted: the echoes of a quorum, where members may lie."""
    echoed: tuple[int, Entry] | None
    sealed: SealRecord | None

    def promise(self, ballot: int) -> None:
        """Record that ballots below ``ballot`` are ignored."""

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        """Record a vote; the result bytes of ``entry`` are already stored."""

    def echo(self, ballot: int, entry: Entry) -> None:
        """Record an echo, where members may lie; the result bytes of ``entry`` are already stored.
        It promises as a vote does.
        """

    def append(self, certified: Certified) -> None:
        """Record a decided entry that has been applied; clears promise, vote and ``restarted``."""

    def renew(self, incarnation: int) -> None:
        """Record that this peer goes on as another member: what it has voted as this one is not all
        known here.
        """

    def seal(self, record: SealRecord) -> None:
        """Record a seal, in the place of the one before. A power cut must not undo it either: the
        organiser signs an entry once.
        """


class MemoryJournal:
    """A Journal in memory. What is not of the newest is kept as bytes, and read as from a disk."""

    def __init__(self, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self.restarted = False
        self.kept: list[bytes] = []  # stands for the disk
        self.entries = Log(
            lambda first, stop: [_certified.decode(data) for data in self.kept[first:stop]]
        )
        self.promised = -1
        self.accepted: tuple[int, Entry] | None = None
        self.proof: tuple[Vote, ...] = ()
        self.echoed: tuple[int, Entry] | None = None
        self.sealed: SealRecord | None = None

    def promise(self, ballot: int) -> None:
        self.promised = ballot

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        self.promised = ballot
        self.accepted, self.proof = (ballot, entry), proof

    def echo(self, ballot: int, entry: Entry) -> None:
        self.promised = ballot
        self.echoed = (ballot, entry)

    def append(self, certified: Certified) -> None:
        """Record an applied entry."""
        self.kept.append(msgspec.msgpack.encode(certified))
        self.entries.append(certified)
        self.promised = -1
        self.accepted = self.echoed = None
        self.proof = ()
        self.restarted = False

    def renew(self, incarnation: int) -> None:
        self.incarnation = incarnation

    def seal(self, record: SealRecord) -> None:
        self.sealed = record

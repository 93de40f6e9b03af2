"""The decided entries of one log: the newest and the genesis in memory, every other read from where
the journal keeps it.

A run of a year has more entries than memory has room for. The round, those who lag a little and the
user's questions need the newest ones; who joins, audits or recertifies reads the whole chain, a
span at a time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from ..group import Certified, Config, Entry, Member
from ..identifiers import PeerId
from .entering import InviteTally

RECENT = 128
"""Entries held in memory: several times the rounds whose results are kept (`Timing.keep_rounds`).
"""
MOST_SAMPLES = (1 << 63) - 1
"""At which the count of samples stays. Members claim up to 2^48 a contribution, on their own word;
everything that stores or sends the count has 64 bits for it.
"""
SPAN = 64
"""Entries read at a time when the whole chain is, and between two marks of an index."""


def rounds_in(entry: Entry) -> int:
    """How many rounds are in an entry: one, or none where nothing was contributed."""
    return int(bool(entry.contributors))


def samples_in(entry: Entry) -> int:
    """How many samples are in an entry: those of its contributions."""
    return sum(contributor.weight for contributor in entry.contributors)


class Log(Sequence[Certified]):
    """Entries by number, the genesis being 0. ``read(first, stop)`` returns older ones, in order;
    it may raise StorageError.
    """

    def __init__(self, read: Callable[[int, int], Sequence[Certified]]) -> None:
        self._read = read
        self.length = 0
        self.config: Config = ()  # decided by the newest; all three are asked for with each message
        self.members = frozenset[Member]()  # of it
        self._genesis: Certified | None = None
        self._recent = deque[Certified](maxlen=RECENT)
        self._rounds, self._samples = array("Q"), array("Q")  # in all entries before each span
        self._last_rounds = self._last_samples = 0  # in all entries
        self.removed = set[Member]()
        """Whom the organiser has removed in any entry: they never vote again."""
        self.tally = InviteTally()
        """Whom limited invites have let in, after the newest entry."""
        self.came: dict[PeerId, bytes] = {}
        """By which invite each member of the newest configuration entered, of those who needed one.
        """

    def append(self, certified: Certified) -> None:
        """The next entry, which the journal has kept."""
        if self.length == 0:
            self._genesis = certified
        if self.length % SPAN == 0:
            self._rounds.append(self._last_rounds)
            self._samples.append(self._last_samples)
        self._recent.append(certified)
        self.config = certified.entry.next_config
        self.members = frozenset(self.config)
        self.length += 1
        self._last_rounds += rounds_in(certified.entry)
        self._last_samples = min(MOST_SAMPLES, self._last_samples + samples_in(certified.entry))
        self.removed.update(certified.removed)
        self.tally = self.tally.after(certified.entry.admitted) or self.tally
        if self.came or certified.entry.admitted:
            self.came.update({each.peer: each.invite for each in certified.entry.admitted})
            inside = {member.peer for member in self.config}
            self.came = {peer: invite for peer, invite in self.came.items() if peer in inside}

    @property
    def held(self) -> int:
        """How many entries are in memory."""
        return len(self._recent) + (self.length > len(self._recent))

    def rounds(self, entry: int) -> int:
        """How many rounds are in the state after entry number ``entry``: those in it and in all
        before it.
        """
        if entry >= self.length - 1:
            return self._last_rounds
        if entry < 0:
            return 0
        first = entry - entry % SPAN
        return self._rounds[first // SPAN] + sum(
            rounds_in(certified.entry) for certified in self._between(first, entry + 1)
        )

    def samples(self, entry: int) -> int:
        """How many samples were contributed to the state after entry number ``entry``, at most
        `MOST_SAMPLES`.
        """
        if entry >= self.length - 1:
            return self._last_samples
        if entry < 0:
            return 0
        first = entry - entry % SPAN
        since = sum(samples_in(certified.entry) for certified in self._between(first, entry + 1))
        return min(MOST_SAMPLES, self._samples[first // SPAN] + since)

    def since(self, first: int) -> Iterator[Certified]:
        """The entries from number ``first`` on."""
        while first < self.length:
            stop = min(first + SPAN, self.length)
            yield from self._between(first, stop)
            first = stop

    def __iter__(self) -> Iterator[Certified]:
        return self.since(0)

    def __reversed__(self) -> Iterator[Certified]:
        stop = self.length
        while stop:
            first = (stop - 1) // SPAN * SPAN
            yield from reversed(self._between(first, stop))
            stop = first

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Certified: ...
    @overload
    def __getitem__(self, index: slice) -> list[Certified]: ...
    def __getitem__(self, index: int | slice) -> Certified | list[Certified]:
        if isinstance(index, slice):
            first, stop, step = index.indices(self.length)
            return (
                self._between(first, stop)[::step]
                if step > 0
                else [self[at] for at in range(first, stop, step)]
            )
        at = index + self.length if index < 0 else index
        if not 0 <= at < self.length:
            raise IndexError(index)
        if at == 0 and self._genesis is not None:
            return self._genesis
        oldest = self.length - len(self._recent)
        return self._recent[at - oldest] if at >= oldest else self._read(at, at + 1)[0]

    def _between(self, first: int, stop: int) -> list[Certified]:
        oldest = self.length - len(self._recent)
        older = self._read(first, min(stop, oldest)) if first < min(stop, oldest) else ()
        return [*older, *(self._recent[at - oldest] for at in range(max(first, oldest), stop))]

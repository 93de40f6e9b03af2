"""FedCompass in a run: who is in which group and makes how many inner steps, as every member that
has the log's entries knows it alike.

No clock is agreed on. Whoever proposes an entry says how many seconds it is after the one before
(`Entry.elapsed_s`), and each contributor how many an inner step takes it (`group.Reading.lag`). The
sum of the former is the log's time, in which turns begin and groups are expected. What is said is
bounded. An entry takes the log's time at most to when the next other group has been waited for long
enough: a false word makes some late, and nothing is lost by that. A member that says it is faster
or slower than it is gets more or less to do, and is waited for no longer than any. Between entries
each member adds what its own clock has gone since; that only tells it whether a group has been
waited for long enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from ...arrivals import Groups
from ...group import Entry
from ...identifiers import PeerId
from ...round.log import Log
from .compass import Compass, Decision

FASTEST_S, SLOWEST_S = 1e-6, 1e6  # an inner step; what a member says beyond is taken for that
LONGEST_S = 1e9  # between two entries


class Grouping(Compass[None]):
    """The schedule after the newest entry taken in. Contributions are opaque to it, and where they
    are it does not know.
    """

    def __init__(self, groups: Groups, entries: Log) -> None:
        super().__init__(groups.least, groups.most, groups.slack, first=groups.first)
        self._entries, self._taken = entries, 0
        self._time = self._seen_at = 0.0  # the log's, and this member's clock then

    def follow(self, now: float) -> None:
        """Take in what the log has more. May raise StorageError: call it again then."""
        for certified in self._entries.since(self._taken):
            self._take(certified.entry, now)
            self._taken += 1

    def elapsed_s(self, now: float) -> float:
        """Seconds since the newest entry came here, as an entry can say it."""
        return min(max(now - self._seen_at, 0.0), LONGEST_S)

    def steps(self, peer: PeerId) -> int:
        """How many inner steps a member makes from the round that counted it, or until it is first
        counted. 0: its group was made without it, and what it contributes now is late."""
        member = self._members.get(peer)
        return self._first if member is None else member.steps if self._expected(peer) else 0

    def ready(self, there: Set[PeerId], awaited: Collection[PeerId], now: float) -> Set[PeerId]:
        """Whose contributions make a round now: of members that come for the first time, of groups
        that are there or have been waited for long enough, and of those that are late; or nobody's.

        ``there``: who has contributed; ``awaited``: who lives and may still. Who is late does not
        make a round while a group is on its way. A group of which nobody came in time is made with
        the first that comes.
        """
        time = self._time + self.elapsed_s(now)
        found = {
            peer for peer in there if peer not in self._members or self._members[peer].speed is None
        }
        late = {peer for peer in there - found if self.steps(peer) == 0}
        coming = False
        for group in self._groups.values():
            lacking = group.pending.intersection(awaited) - there
            if time > group.latest or not lacking:
                found |= group.pending & there
            else:
                coming = True
        return found | late if found or not coming else set()

    def tick(self, now: float) -> list[Decision[None]]:
        """Nothing: only an entry makes a group, however long that was waited for."""
        return []

    def _expected(self, peer: PeerId) -> bool:
        """Whether a member's turn is its first, or one of a group that was not made yet."""
        member = self._members[peer]
        return member.speed is None or member.group in self._groups

    def _take(self, entry: Entry, now: float) -> None:
        members = {member.peer for member in entry.next_config}
        counted = {
            c.member.peer: c.reading.lag
            for c in entry.contributors
            if c.member.peer in self._members
        }
        self._time, self._seen_at = self._time_of(counted, entry.elapsed_s or 0.0), now
        if counted:
            self._made({peer: self._stated(peer, seconds) for peer, seconds in counted.items()})
        for peer in sorted(self._members.keys() - members):
            self.gone(peer, self._time)
        for peer in sorted(members - self._members.keys()):
            self.join(peer, self._time)

    def _stated(self, peer: PeerId, seconds: float | None) -> float:
        if seconds is None:
            seconds = self._members[peer].speed or 1.0
        return min(max(seconds, FASTEST_S), SLOWEST_S)

    def _made(self, speeds: Mapping[PeerId, float]) -> None:
        """A round of these members was decided."""
        for peer, speed in speeds.items():
            self._groups.pop(self._group_of(peer), None)
            self._measured(peer, speed)
        self.version += 1
        self._orders(speeds, self._time)

    def _group_of(self, peer: PeerId) -> int:
        number = self._members[peer].group
        return -1 if number is None else number

    def _time_of(self, counted: Collection[PeerId], elapsed_s: float) -> float:
        """The log's time after an entry that counts these."""
        made = {self._group_of(peer) for peer in counted}
        ends = [
            group.latest
            for number, group in self._groups.items()
            if number not in made and group.latest > self._time
        ]
        return min([self._time + elapsed_s, *ends])

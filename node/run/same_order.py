"""Which other members read the same data in the same order as this machine's script, by the digests
of each round's first batch that members put into their records. A state machine without a clock.

A small data set has few batches, so that two members with orders of their own meet by chance. Where
a round's first batch was one before, so many equal rounds running are asked for that independent
orders have them one time in a million (`SameOrder.enough`).

Who makes fewer steps in a round reads the same some batches later: its first batches are looked for
among all that this machine's script has read, and have to come later there from round to round.

A member compares others with itself and nobody else, so one that lies can only say that it reads
what this machine reads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...collectives.digest import batch_digest
from ...collectives.identifiers import PeerId, RunId
from ...collectives.swarm import RunSettings

if TYPE_CHECKING:
    from .membership import Membership

RUNNING = 3
"""So many rounds running, of those whose digests are known of both: one that is equal may be chance
where batches or data sets are small."""
RUNNING_BEHIND = 8
"""The same of first batches that were read here earlier: members that draw single samples of one
small data set by lot have read most of them, too, and in an order that fits one time in 8!."""
BY_CHANCE = 1e-6  # how likely independent orders of a small data set may be equal
REMEMBERED = 64  # rounds
MOST_READ = 2048  # batches


class _Behind(NamedTuple):
    """Of a peer: how many of its first batches were found running, and where the last one was."""

    running: int
    place: int


class SameOrder:
    """Of one run at one node."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._read: dict[bytes, int] = {}  # contents, and which batch each was
        self._behind: dict[PeerId, _Behind] = {}
        self._own: dict[int, bytes] = {}  # by round, oldest first
        self._running: dict[PeerId, tuple[int, int]] = {}  # the last round compared, equal ones
        self._firsts = set[bytes]()  # contents that were a round's first batch
        self._repeats = self._comes = False  # one was so again; the next one read is a first one

    def begun(self, round_: int, digest: bytes) -> None:
        """This machine's script has read the first batch after ``round_`` committed rounds. Its
        content comes by `read`, before or after that; of gradients it never does.
        """
        content = next(
            (each for each in self._read if batch_digest(self._run, round_, each) == digest), None
        )
        self._repeats |= content in self._firsts
        self._comes = content is None
        if content is not None:
            self._firsts.add(content)
        self._own.pop(round_, None)  # of an earlier script
        self._own[round_] = digest
        while len(self._own) > REMEMBERED:
            del self._own[next(iter(self._own))]

    def read(self, content: bytes) -> None:
        """This machine's script has read a batch of this content, a hash."""
        if self._comes:
            self._comes = False
            self._firsts.add(content)
        if len(self._read) < MOST_READ:
            self._read.setdefault(content, len(self._read))

    def look(self, said: Mapping[PeerId, tuple[int, bytes]]) -> None:
        """Compare what the others say of themselves, by peer; whoever says nothing is forgotten."""
        before, self._running = self._running, {}
        places = dict[int, dict[bytes, int]]()  # by round: digests of what was read here
        self._behind = {peer: found for peer, found in self._behind.items() if peer in said}
        for peer, (round_, digest) in said.items():
            last, equal = before.get(peer, (-1, 0))
            if round_ > last and (own := self._own.get(round_)) is not None:
                last, equal = round_, equal + 1 if own == digest else 0
                if round_ not in places:
                    places[round_] = {
                        batch_digest(self._run, round_, content): place
                        for content, place in self._read.items()
                    }
                running, place = self._behind.get(peer, _Behind(0, -1))
                at = places[round_].get(digest, -1)
                self._behind[peer] = _Behind(running + 1 if at > place else 0, at)
            self._running[peer] = last, equal

    @property
    def equal(self) -> Mapping[PeerId, int]:
        """In how many rounds running the first batches were equal, of each member of whom there are
        enough.
        """
        behind = {
            peer: running
            for peer, (running, _) in self._behind.items()
            if running >= RUNNING_BEHIND
        }
        same = {peer: equal for peer, (_, equal) in self._running.items() if equal >= self.enough}
        return behind | same

    @property
    def enough(self) -> int:
        """How many equal rounds running are no chance: `RUNNING`, and more of a small data set."""
        if not self._repeats:
            return RUNNING
        few = max(2, len(self._firsts))
        return max(RUNNING, math.ceil(math.log(BY_CHANCE) / -math.log(few)))

    def forget(self) -> None:
        """The script has ended."""
        self._own.clear()
        self._running.clear()
        self._read.clear()
        self._behind.clear()
        self._firsts.clear()
        self._repeats = self._comes = False


def shows_order(settings: RunSettings) -> bool:
    """Whether members of the run compare what they read: not where their data are private."""
    return settings.secure is None and settings.privacy is None and settings.site is None


def said_by(
    membership: Membership, members: Collection[PeerId]
) -> Mapping[PeerId, tuple[int, bytes]]:
    """What the records of the other ``members`` say."""
    found = {peer: membership.record(peer) for peer in members if peer != membership.me}
    return {
        peer: record.first_batch
        for peer, record in found.items()
        if record is not None and record.first_batch is not None
    }

"""How many of the segments to each peer are lost, and for how long a living one may be silent for
it: a state machine without I/O.

TCP sends what was lost again after a pause, and if that is lost, too, after a longer one; all that
was sent later waits in the receiver's kernel meanwhile. Where a fifth of the packets is lost, a
connection is so silent for a second every few seconds, and nobody has died. So who is to be called
dead is given as long as all but one in RARE losses take to be repaired. A share that is lost is
what the kernel has sent again of what it sent last, about `MEMORY` segments: of the way to the
peer. The way back is taken to be alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log

from ..identifiers import PeerId
from .meter import LaneCounters
from .settings import RTO_MOST_MS

MEMORY = 300.0  # segments
CERTAIN = 4.0  # so many have to be sent again before anything is made of it
RARE = 1e-4
RTO_S = 0.2  # the kernel's least pause, besides a round trip
MOST_S = 5.0  # of silence: who loses more has no link worth waiting for
MANY = 0.04, 0.01
"""More lanes are of use above the first share: one that waits does not hold up what others carry.
No more so below the second.
"""
LANES = 8


def silence_s(share: float, rtt_s: float) -> float:
    """How long the same bytes are lost again and again, but once in 1 / RARE."""
    if share <= 0.0:
        return 0.0
    tries, pause_s, silence = log(RARE) / log(min(0.9, share)), RTO_S + rtt_s, 0.0
    while tries > 0 and silence < MOST_S:
        silence += min(1.0, tries) * pause_s
        tries, pause_s = tries - 1, min(2 * pause_s, max(RTO_MOST_MS / 1000, RTO_S + rtt_s))
    return min(MOST_S, silence)


class Losses:
    """Of one node's lanes."""

    def __init__(self) -> None:
        self.silences: Mapping[PeerId, float] = {}
        """Seconds that a living peer may be silent, for those from whose lanes something was lost;
        a new mapping with each change.
        """
        self._before: dict[int, LaneCounters] = {}
        self._counts: dict[PeerId, tuple[float, float]] = {}
        self._rtts: dict[PeerId, float] = {}
        self._many: set[PeerId] = set()

    def read(self, lanes: Iterable[tuple[PeerId, int, LaneCounters]]) -> None:
        """Counters of the present lanes: (peer, lane number, counters)."""
        lanes = list(lanes)
        for peer in {peer for peer, _, _ in lanes}:
            self._rtts[peer] = 0.0
        for peer, number, reading in lanes:
            before = self._before.get(number, LaneCounters(0, 0, 0.0, 0.0))
            sent, again = self._counts.get(peer, (0.0, 0.0))
            sent += max(0, reading.segments - before.segments)
            again += max(0, reading.again - before.again)
            kept = min(1.0, MEMORY / sent) if sent else 1.0
            self._counts[peer] = sent * kept, again * kept
            self._rtts[peer] = max(self._rtts[peer], reading.least_rtt_s)
        self._before = {number: reading for _, number, reading in lanes}
        self.silences = {
            peer: silence
            for peer, rtt_s in self._rtts.items()
            if (silence := silence_s(self.share(peer), rtt_s))
        }

    def share(self, peer: PeerId) -> float:
        """Of the segments sent to ``peer`` lately, how many were sent again."""
        sent, again = self._counts.get(peer, (0.0, 0.0))
        return again / sent if again >= CERTAIN else 0.0

    def many(self, peer: PeerId) -> bool:
        """Whether several lanes to ``peer`` carry more than one."""
        share = self.share(peer)
        if share > MANY[0]:
            self._many.add(peer)
        elif share < MANY[1]:
            self._many.discard(peer)
        return peer in self._many

    def forget(self, peer: PeerId) -> None:
        """No lane to ``peer`` is wanted any more."""
        self._counts.pop(peer, None)
        self._rtts.pop(peer, None)
        self._many.discard(peer)

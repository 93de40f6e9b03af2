"""Dynamic local updates (DyLU, arXiv 2401.09135): each member makes as many inner steps a turn as
its speed allows, so that all arrive about equally often. A function of the log.

Each contribution says how many seconds an inner step takes its member (`group.Reading.lag`); the
newest word of each member counts. A member that nobody has counted yet makes as many as the
fastest. A false word is bounded by the others': the fastest counts as `FASTER` times as fast as the
median member at most, so that fewer than half, and one of two, halve the turns of members at the
median's speed at most. Who says it is slower gets less to do itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...arrivals import DynamicSteps
from ...identifiers import PeerId
from ...round.log import Log
from .grouping import FASTEST_S, SLOWEST_S

FASTER = 2.0


def dynamic_steps(settings: DynamicSteps, step_s: Mapping[PeerId, float], peer: PeerId) -> int:
    """Inner steps of a member's turn, ``least`` to ``most``: ``most`` times its speed over that of
    the fastest, as far as others' words bear that out. ``step_s``: seconds a step, of those that
    have said it.
    """
    if peer not in step_s:
        return settings.most
    said = sorted(step_s.values())
    # The lower median of more than two, of two the slower: never the fastest's own word.
    median = said[min(len(said) - 1, max(1, (len(said) - 1) // 2))]
    share = max(said[0], median / FASTER) / step_s[peer]
    return min(settings.most, max(settings.least, math.floor(settings.most * share + 1e-9)))


class OwnSteps:
    """Every member's number of steps after the newest entry taken in."""

    def __init__(self, settings: DynamicSteps, entries: Log) -> None:
        self._settings, self._entries, self._taken = settings, entries, 0
        self._step_s = dict[PeerId, float]()

    def follow(self) -> None:
        """Take in what the log has more. May raise StorageError: call it again then."""
        for certified in self._entries.since(self._taken):
            entry = certified.entry
            for contributor in entry.contributors:
                if (said := contributor.reading.lag) is not None:
                    self._step_s[contributor.member.peer] = min(max(said, FASTEST_S), SLOWEST_S)
            members = {member.peer for member in entry.next_config}
            for peer in self._step_s.keys() - members:
                del self._step_s[peer]
            self._taken += 1

    def steps(self, peer: PeerId) -> int:
        """How many inner steps a member makes from the newest anchor."""
        return dynamic_steps(self._settings, self._step_s, peer)

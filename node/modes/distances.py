"""How far contributions lay from the results of past rounds, where the run's rule goes by it
(centred clipping with the running median as its radius).

Who weighs a round's contributions knows their median distance from its result. Each member keeps
that of the rounds it weighed, in memory, and states the median with its next contribution
(`group.Reading.norm`). The plan carries what all state, so everybody who carries it out has the
same radius, whichever rounds each of them was in (`security.rules.centre.common_radius`).
"""

from __future__ import annotations

import msgspec

from ...collectives.group import Entry, Reading
from ...optim.outer.readings import LARGEST
from ...security.rules.centre import Radius
from ...security.rules.reducers import ByGram, find_reducer
from ..session.measures import Measures


class Distances(Measures):
    """Of one log at one member; nothing in runs whose rule does not ask for it."""

    def __init__(self, reducer: str) -> None:
        rule = find_reducer(reducer)
        self._asked = isinstance(rule, ByGram) and rule.running
        self._radius = Radius()
        # In the open round, by the digests of the result's parts.
        self._weighed: dict[tuple[bytes, ...], float] = {}

    def weighed(self, digests: tuple[bytes, ...], spread: float | None) -> None:
        """A plan of the open round is done: the contributions' median distance from its result."""
        if self._asked and spread is not None:
            self._weighed[digests] = spread

    def decided(self, entry: Entry) -> None:
        """Remember that of what was decided, if it was weighed here."""
        if (spread := self._weighed.get(entry.part_digests)) is not None:
            self._radius.add(spread)
        self._weighed.clear()

    def with_radius(self, reading: Reading) -> Reading:
        """What goes with a contribution."""
        radius = self._radius() if self._asked else None
        return (
            reading
            if radius is None or radius > LARGEST
            else msgspec.structs.replace(reading, norm=radius)
        )

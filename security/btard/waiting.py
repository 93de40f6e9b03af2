"""What a peer lacks: asked for after a while, testified to be missing after twice that while.

The order matters. Who has everything waits for one that does not; that one asks first, is given what others have, and speaks before their
patience ends. So nobody who does as it should is testified to be missing, whatever the others withhold from whom. A message for which all would wait
long, since it is computed, may be here already for others: who sees that somebody is further than itself asks for it soon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from .messages import SLOTTED, Item, Kind
from .settings import Settings


class _Wait(msgspec.Struct):
    since: float
    asked: bool = False
    testified: bool = False


class Waiting:
    """Times of one attempt."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waits: dict[Item, _Wait] = {}
        self._appeals: dict[Item, tuple[int, _Wait]] = {}

    def appealed(self, now: float, item: Item, by: int) -> None:
        """Peer number ``by`` has asked everybody for a part that its maker owes it: it is owed to all now."""
        self._appeals.setdefault(item, (by, _Wait(now, asked=True)))

    def is_appealed(self, item: Item) -> bool:
        """Whether all are owed this part."""
        return item in self._appeals

    def settled(self, item: Item) -> int | None:
        """What was appealed for is here; who wanted it."""
        found = self._appeals.pop(item, None)
        return None if found is None else found[0]

    def look(
        self, now: float, lacking: Iterable[Item], since: float, further: float
    ) -> tuple[list[Item], list[Item]]:
        """What to ask for now, and what to testify. ``lacking``: what keeps this peer from going on, from ``since`` on; ``further``: since when
        somebody is known to have all the messages."""
        excused = {by for by, _ in self._appeals.values()}
        self._waits = {item: self._waits.get(item) or _Wait(since) for item in lacking}
        asks: list[Item] = []
        testimonies: list[Item] = []
        for item, wait in self._waits.items():
            if item[1] in excused:
                wait.since = now  # it cannot go on either
            limit = self._limit(item)
            soon = item[0] in SLOTTED and now - further >= self._settings.timeout_s / 3
            if not wait.asked and (soon or now - wait.since >= limit):
                wait.asked = True
                asks.append(item)
            elif wait.asked and not wait.testified and now - wait.since >= 2 * limit:
                wait.testified = True
                testimonies.append(item)
        for item, (_, wait) in self._appeals.items():
            if not wait.testified and now - wait.since >= self._settings.timeout_s:
                wait.testified = True
                if item not in testimonies:
                    testimonies.append(item)
        return asks, testimonies

    def _limit(self, item: Item) -> float:
        computed: Collection[int] = (Kind.COMMIT, Kind.CHECKS, Kind.JUDGEMENT)
        return self._settings.compute_s if item[0] in computed else self._settings.timeout_s

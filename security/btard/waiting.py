"""What a peer lacks: asked for after a while, testified to be missing after twice that while.

The order matters. Who has everything waits for one that does not; that one asks first, is given
what others have, and speaks before their patience ends. So nobody who does as it should is
testified to be missing, whatever the others withhold from whom. A message for which all would wait
long, since it is computed, may be here already for others: who sees that somebody is further than
itself asks for it soon.

Whose parts keep coming only after everybody was asked for them is asked at once for a while
(`Late`). Nobody is removed for that: which end of the line is at fault cannot be shown, so a peer
could take an honest one with it. So a grudge costs some waits, then a part that goes to all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from ...collectives.identifiers import PeerId
from .messages import SLOTTED, Item, Kind
from .settings import AttemptSettings

FORGIVEN = 16  # parts in time, after which one that was late is forgotten
SHORTEST, LONGEST = 16, 512  # steps for which parts are asked for at once


class Late:
    """Whose parts came to this peer only after it had waited and asked everybody, over the steps of
    a run.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        # FORGIVEN for each late part, less one for each in time.
        self._marks: dict[PeerId, int] = {}
        self._until: dict[PeerId, int] = {}

    def came(self, step: int, maker: PeerId, *, late: bool) -> None:
        """A part of ``maker`` is here. It is not told of parts that were asked for at once."""
        if not late:
            self._marks[maker] = max(0, self._marks.get(maker, 0) - 1)
            return
        self._marks[maker] = self._marks.get(maker, 0) + FORGIVEN
        over = self._marks[maker] // FORGIVEN - self._patience
        if over > 0:
            term = min(SHORTEST << (over - 1), LONGEST)
            self._until[maker] = step + 1 + term
            if term == LONGEST:
                self._marks[maker] -= FORGIVEN

    def asks_at_once(self, step: int, maker: PeerId) -> bool:
        """Whether the part that ``maker`` owes this peer in a step is asked for without a wait."""
        return step < self._until.get(maker, 0)


class _Wait(msgspec.Struct):
    since: float
    asked: bool = False
    testified: bool = False


class AttemptTimes:
    """Times of one attempt."""

    def __init__(self, settings: AttemptSettings, at_once: Collection[int] = ()) -> None:
        """``at_once``: makers whose parts are asked for without a wait."""
        self._settings, self._at_once = settings, at_once
        self.asked: set[Item] = set()
        self._waits: dict[Item, _Wait] = {}
        self._appeals: dict[Item, tuple[int, _Wait]] = {}

    def appealed(self, now: float, item: Item, by: int) -> None:
        """Peer number ``by`` has asked everybody for a part that its maker owes it: it is owed to
        all now.
        """
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
        """What to ask for now, and what to testify. ``lacking``: what keeps this peer from going
        on, from ``since`` on; ``further``: since when somebody is known to have all the messages.
        """
        excused = {by for by, _ in self._appeals.values()}
        self._waits = {item: self._waits.get(item) or _Wait(since) for item in lacking}
        asks: list[Item] = []
        testimonies: list[Item] = []
        for item, wait in self._waits.items():
            if item[1] in excused:
                wait.since = now  # it cannot go on either
            limit = self._limit(item)
            soon = item[0] in SLOTTED and now - further >= self._settings.timeout_s / 3
            soon |= item[0] == Kind.PART and item[1] in self._at_once
            if not wait.asked and (soon or now - wait.since >= limit):
                wait.asked = True
                self.asked.add(item)
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

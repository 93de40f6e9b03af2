"""How many examples this process' site has, as its data set says: what it counts in rounds of a
federated run (`collectives.swarm.WorkSettings`), where the script says nothing else.
"""

from __future__ import annotations

_newest: list[int] = []


def declare(examples: int) -> None:
    """The site's data set was read: it has so many."""
    _newest[:] = [examples]


def declared() -> int | None:
    """What the newest data set has; None: none was read."""
    return _newest[0] if _newest else None

"""The door at which a mode changes whom a round waits for, and how many inner steps a turn has.
The other implementation is `atoll.collectives.modes.arrivals`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from ..identifiers import PeerId
from .log import Log


@dataclass(frozen=True, slots=True)
class RoundArrivals:
    """What one member knows of the open round. ``born``: when it opened; ``first_at``: when its
    first contribution came; ``enough_at``, ``ripe_at``: of the answer before. ``there``: who has
    contributed; ``awaited``: who lives and may still. ``lags``: seconds that an inner step takes
    those that are there, by their own words.
    """

    born: float
    first_at: float | None
    enough_at: float | None
    ripe_at: float | None
    there: Set[PeerId]
    awaited: Sequence[PeerId]
    lags: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Ripeness:
    """``ripe_at``: since when the contributions are there that the round waits for; ``enough_at``:
    since when there are so many, where it waits for some more; ``due``: whose those are, where
    members come in groups.
    """

    ripe_at: float | None = None
    enough_at: float | None = None
    due: Set[PeerId] = frozenset()


class ArrivalPolicy:
    """A round waits for all that can contribute, once one has. One object serves one log."""

    waits_for_some = False
    """True if a round does not wait for all: contributions may be on an older anchor."""
    in_groups = False
    """True if only contributions of members that are due make a round, and the log needs time."""

    def follow(self, now: float) -> None:
        """Take in what the log has more. May raise StorageError: call it again then."""

    def steps(self, peer: PeerId) -> int:
        """How many inner steps a member makes now, where each has its number; 0 where none has, or
        where it is late for its group.
        """
        return 0

    def elapsed_s(self, now: float) -> float | None:
        """Seconds since the newest entry came here, for the next one; None if the log needs no
        time.
        """
        return None

    def look(self, now: float, gathered: RoundArrivals) -> Ripeness:
        """Whether the round has what it waits for. Not asked where it waits for all."""
        return Ripeness()


ArrivalPolicyMaker = Callable[[Log], ArrivalPolicy]
"""What a log is given: makes the policy of a log of these entries."""


def wait_for_all(entries: Log) -> ArrivalPolicy:
    """Make the policy of a run that names no arrivals."""
    return ArrivalPolicy()

"""What modes tell a session's script and its observers. As of `events`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...collectives.identifiers import PeerId


@dataclass(frozen=True, slots=True)
class Unmasked:
    """What hid them is off a sum of ``members``' vectors; fewer than ``threshold`` would not have
    been unmasked. ``round`` is an entry's number.

    ``weight``: of all of them together; ``metrics``: the mean of each, by weight; ``bound``: on the
    norms of the next vectors, if it moves; ``sums``: whose vectors were in each, one or several."""

    round: int
    attempt: int
    members: tuple[PeerId, ...]
    threshold: int
    weight: int
    metrics: Mapping[str, float]
    bound: float | None = None
    sums: tuple[tuple[PeerId, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """A contribution with noise is handed over: so much is spent now, and ``left`` more
    contributions stay within the limit.
    """

    epsilon: float
    steps: int
    left: int


@dataclass(frozen=True, slots=True)
class MaskingFailed:
    """An attempt at a secure round came to nothing; the next one has fresh keys. ``round`` is an
    entry's number.
    """

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkAsked:
    """The script is to compute a vector: what follows from the anchor of ``round`` and ``seed``;
    ``interval``: see `collectives.seeded.SeededTask`.
    """

    number: int
    round: int
    seed: bytes
    interval: int = -1

"""The stages of an attempt, which message each waits for, and what an attempt asks of its peer."""

from __future__ import annotations

from enum import IntEnum
from random import Random
from typing import TYPE_CHECKING, Protocol

from ...collectives.identifiers import PeerId
from .finished import Finished
from .history import ResidualNorms
from .messages import Bundle, CommittedVector, Frame, Kind, Signer, Vector, Verify
from .settings import AttemptSettings
from .waiting import Late

if TYPE_CHECKING:
    from .attempt import Attempt


class AttemptStage(IntEnum):
    """What a peer waits for."""

    COMMITS = 1
    PARTS = 2
    RESULTS = 3
    REVEALS = 4
    RESIDUALS = 5
    CHECKS = 6
    EXHIBITS = 7
    JUDGEMENTS = 8


HEARD = {
    AttemptStage.COMMITS: Kind.COMMIT,
    AttemptStage.RESULTS: Kind.RESULT,
    AttemptStage.REVEALS: Kind.REVEAL,
    AttemptStage.RESIDUALS: Kind.RESIDUALS,
    AttemptStage.CHECKS: Kind.CHECKS,
    AttemptStage.JUDGEMENTS: Kind.JUDGEMENT,
}
BEFORE = {
    Kind.RESULT: Kind.COMMIT,
    Kind.REVEAL: Kind.RESULT,
    Kind.RESIDUALS: Kind.REVEAL,
    Kind.CHECKS: Kind.RESIDUALS,
    Kind.JUDGEMENT: Kind.CHECKS,
}


class Surroundings(Protocol):
    """What an attempt asks of its peer."""

    settings: AttemptSettings
    signer: Signer
    verify: Verify
    rng: Random
    distances: ResidualNorms
    previous: Finished | None
    gradient: Vector
    trail: bytes
    start: Vector
    late: Late

    def tell(self, to: PeerId | None, frame: Frame) -> None:
        """Send a frame to one peer, or to all others."""
        ...

    def examine(self, target: PeerId) -> float | None:
        """How far the last gradient of ``target`` is from the right one; None: still computing."""
        ...

    def shown(self) -> CommittedVector | None:
        """Both ends of the interval of one's own last trail that is looked at; None where there is
        none.
        """
        ...

    def convict(self, now: float, bundles: list[Bundle]) -> None:
        """Remove whom these prove to be at fault; the attempt is over."""
        ...

    def finished(self, now: float, attempt: Attempt) -> None:
        """The step is over."""
        ...

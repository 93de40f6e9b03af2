"""What the parts of an attempt see of it, and what an attempt sees of its peer.

`judging`, `questions` and the peer import these protocols, never the attempt that they are parts
of.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol

import msgspec

from ...collectives.identifiers import PeerId
from .finished import Finished
from .history import ResidualNorms
from .messages import Bundle, CommittedVector, Frame, Signer, Vector, Verify
from .settings import AttemptSettings
from .waiting import Late

if TYPE_CHECKING:
    from .attempt import Attempt


class Cases(msgspec.Struct):
    """By numbers in the roster. ``residuals``, ``gradients``: (accuser, accused); ``columns``:
    owners whose aggregate is looked into; ``impossible``: who said what no vector has; ``void``:
    who accused where it had no say."""

    residuals: set[tuple[int, int]] = msgspec.field(default_factory=set)
    gradients: set[tuple[int, int]] = msgspec.field(default_factory=set)
    columns: set[int] = msgspec.field(default_factory=set)
    impossible: set[int] = msgspec.field(default_factory=set)
    void: set[int] = msgspec.field(default_factory=set)
    exhibits: set[tuple[int, int]] = msgspec.field(default_factory=set)

    def any(self) -> bool:
        """Whether something is open."""
        return bool(
            self.residuals or self.gradients or self.columns or self.impossible or self.void
        )

    @property
    def targets(self) -> set[int]:
        """Whose last gradient is recomputed."""
        return {whom for _, whom in self.gradients}


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

"""What the parts of an attempt see of it, and what an attempt sees of its peer.

`judging`, `questions` and the peer import these protocols, never the attempt that they are parts
of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

import msgspec

from ...collectives.identifiers import PeerId
from .finished import Finished
from .history import ResidualNorms
from .messages import Bundle, CommittedVector, Context, Frame, Item, Signed, Signer, Vector, Verify
from .residuals import Residual
from .settings import AttemptSettings
from .stages import AttemptStage
from .table import AttemptVectors, Table
from .waiting import Late


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


class AttemptView(Protocol):
    """One attempt at a step. Its table and vectors are changed by the attempt alone."""

    muted: bool

    @property
    def context(self) -> Context:
        """Which attempt it is."""
        ...

    @property
    def around(self) -> Surroundings:
        """The peer."""
        ...

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """Who is in it; numbers are places in here."""
        ...

    @property
    def me(self) -> int:
        """This peer's number."""
        ...

    @property
    def stage(self) -> AttemptStage:
        """What it waits for."""
        ...

    @property
    def targets(self) -> Mapping[PeerId, PeerId]:
        """Whose last gradient each validator computes again."""
        ...

    @property
    def contributors(self) -> Sequence[int]:
        """Who has a vector: all but validators."""
        ...

    @property
    def bounds(self) -> Sequence[int]:
        """Where parts begin and end."""
        ...

    @property
    def radii(self) -> Sequence[float]:
        """Of clipping, by part."""
        ...

    @property
    def draw(self) -> bytes:
        """What was drawn; empty before."""
        ...

    @property
    def cases(self) -> Cases:
        """What is open after the checks."""
        ...

    @property
    def table(self) -> Table:
        """Messages that are here."""
        ...

    @property
    def vectors(self) -> AttemptVectors:
        """Vectors that are here."""
        ...

    def reported_residuals(self, number: int) -> list[Residual]:
        """What a contributor said of its residuals, by part."""
        ...

    def centre(self, part: int) -> Vector:
        """The aggregate of a part."""
        ...

    def residual_of(self, row: Vector, part: int) -> Residual:
        """Of a contribution to a part."""
        ...

    def knows(self, signed: Signed) -> bool:
        """Whether this message is in its slot already."""
        ...

    def outcome(self) -> Finished:
        """What there is to remember of the step."""
        ...

    def own_states(self) -> CommittedVector | None:
        """What the last step's validator of this peer is to see."""
        ...

    def hurry(self, now: float) -> None:
        """Others wait for this peer, which lacks something itself: it asks at once."""
        ...

    def appealed(self, now: float, item: Item, by: int) -> None:
        """Everybody is owed a part that its owner asks for."""
        ...

    def hand(self, to: int, signed: Signed) -> None:
        """Pass on somebody's message."""
        ...

    def send(self, item: Item, to: int) -> None:
        """Give somebody a vector that is here."""
        ...

    def publish(self, item: Item) -> None:
        """Give everybody a vector that is here."""
        ...


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

    def finished(self, now: float, attempt: AttemptView) -> None:
        """The step is over."""
        ...

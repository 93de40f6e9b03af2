"""A step that is over, as all its peers remember it: what the next one's validators look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...collectives.identifiers import PeerId
from .draw import direction, seed_of, validators
from .messages import Context, Vector
from .residuals import Residual, residual, sketch_error
from .trail import interval_error, interval_of, opens


class Finished(NamedTuple):
    """``draw``: of this step; ``seeds``: of the one before, from which its gradients' seeds came.
    ``residuals``: what each contributor said; ``trails``: to which states it committed; ``start``:
    what they begin with (the last two where there are local steps: ``intervals``)."""

    context: Context
    seeds: bytes
    draw: bytes
    centres: Sequence[Vector]
    radii: Sequence[float]
    residuals: Mapping[PeerId, Sequence[Residual]]
    trails: Mapping[PeerId, bytes]
    start: Vector
    intervals: int

    @property
    def vector(self) -> Vector:
        """The aggregate of all parts."""
        return np.concatenate(self.centres)

    def validators(self, count: int) -> dict[PeerId, PeerId]:
        """Who checks whose gradient of this step in the next one, whoever is removed in between:
        all know this step's peers alike.
        """
        return validators(self.draw, self.context.roster, self.residuals.keys(), count)

    def seed(self, peer: PeerId) -> bytes:
        """Of a contributor's gradient."""
        return seed_of(self.seeds, self.context.step, peer)

    def interval(self, peer: PeerId) -> int:
        """Which interval of a contributor's trail is looked at."""
        return interval_of(self.draw, peer, self.intervals)

    def shows(self, peer: PeerId, values: Vector, path: tuple[bytes, ...]) -> bool:
        """Whether these are both ends of that interval."""
        return opens(
            self.trails[peer], self.start, self.interval(peer), self.intervals, values, path
        )

    def interval_error(self, peer: PeerId, values: Vector, end: Vector) -> float:
        """How far the interval that ``peer`` has shown is from the right one, which ends at
        ``end``; the last must also end where its gradient says.
        """
        found = interval_error(values, end)
        if self.interval(peer) < self.intervals - 1:
            return found
        return max(found, self.error(peer, self.start - values[len(end) :]))

    def error(self, peer: PeerId, gradient: Vector) -> float:
        """How far the gradient that ``peer`` committed to is from the right one, relative to its
        norm; from what it had to say after the draw.

        No vector is asked for: the owners of the parts have seen that what it said is so for the
        committed bytes, or have accused it.
        """
        found: list[Residual] = []
        start = 0
        for part, (centre, radius) in enumerate(zip(self.centres, self.radii, strict=True)):
            row = gradient[start : start + len(centre)]
            found.append(residual(row, centre, direction(self.draw, part, len(centre)), radius))
            start += len(centre)
        return sketch_error(
            self.residuals[peer], found, float(np.linalg.norm(gradient.astype(np.float64)))
        )

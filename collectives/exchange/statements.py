"""What owners say of their parts, under a plan whose reducer weighs whole vectors, and what that
comes to.

An owner adds up the statistics of its chunks, in order, once all are measured, and sends them to
everybody. Whoever has those of all parts adds them up in the order of the plan and weighs; so all
members that hold the same statements come to the same.
"""

from __future__ import annotations

import numpy as np

from ..group import Plan
from ..identifiers import PeerId
from ..reduce import Statistics, TwoPhaseReducer, Weighing

NUMBER = np.dtype("<f8")


class PlanStatements:
    """Of one plan at one member."""

    def __init__(self, plan: Plan, me: PeerId, reducer: TwoPhaseReducer) -> None:
        self.reducer = reducer
        self.weighing: Weighing | None = None
        self.under_way = False  # somebody weighs
        self._plan, self._me = plan, me
        self._count = len(plan.contributors)
        self._index = next(
            (index for index, c in enumerate(plan.contributors) if c.member.peer == me), None
        )
        self._length = reducer.length(self._count)
        self._stated: list[bytes | None] = [None] * len(plan.parts)
        # By chunk: of all contributions where the part is mine, else of my own.
        self._chunks: dict[int, Statistics] = {}
        self._left = [part.stop - part.first for part in plan.parts]

    @property
    def nbytes(self) -> int:
        """Length of what is said of a part."""
        return NUMBER.itemsize * self._length

    def mine(self, part: int) -> bool:
        """Whether this member owns a part."""
        return self._plan.parts[part].owner == self._me

    def wants(self, chunk: int, part: int) -> bool:
        """Whether to measure a chunk here: all contributions, or the own one to compare."""
        return chunk not in self._chunks and (self.mine(part) or self._index is not None)

    def measured(self, chunk: int, part: int, statistics: Statistics) -> bool:
        """A chunk is measured here; whether that was the last one of its part."""
        self._chunks[chunk] = statistics
        self._left[part] -= 1
        return not self._left[part]

    def sum_of(self, part: int) -> Statistics:
        """What this member has measured of a part."""
        bounds = self._plan.parts[part]
        total = np.zeros(self._length if self.mine(part) else self.own_length)
        for chunk in range(bounds.first, bounds.stop):
            total += self._chunks[chunk]
        return total

    @property
    def own_length(self) -> int:
        """Of the statistics of one contribution alone."""
        return self.reducer.length(1)

    def state(self, part: int, data: bytes) -> str | None:
        """What the owner of a part says of it: None where it may be, else why it cannot."""
        stated = np.frombuffer(data, NUMBER).astype(np.float64)
        why = self.reducer.impossible(stated, self._count)
        if why is None:
            self._stated[part] = data
        return why

    def view(self, part: int) -> memoryview:
        """What was said of a part."""
        data = self._stated[part]
        assert data is not None
        return memoryview(data)

    def complete(self, *, own: bool) -> bool:
        """Whether all parts are stated, and all measured here that is to be, if the ``own``
        contribution is at hand: this member can weigh.
        """
        return None not in self._stated and not (own and any(self._left))

    def liar(self) -> PeerId | None:
        """An owner that says something else of the own contribution than this member knows, as far
        as it does.
        """
        if self._index is None or any(self._left):
            return None
        for index, part in enumerate(self._plan.parts):
            if part.owner != self._me:
                stated = self.reducer.alone(
                    np.frombuffer(self.view(index), NUMBER), self._count, self._index
                )
                if not np.array_equal(stated, self.sum_of(index)):
                    return part.owner
        return None

    def weigh(self) -> Weighing:
        """May take a while, and touches nothing that changes: it may run in another thread."""
        total = np.zeros(self._length)
        for index in range(len(self._stated)):
            total += np.frombuffer(self.view(index), NUMBER)
        contributors = self._plan.contributors
        return self.reducer.weigh(
            total, [c.cid for c in contributors], [c.reading.norm for c in contributors]
        )

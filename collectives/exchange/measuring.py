"""The first phase of plans whose reducer weighs whole vectors: chunks are measured, owners state
what that comes to, and everybody weighs.

A statement that cannot be, or that contradicts what this member knows of its own contribution, is
its sender's fault: the round is planned again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..digest import chunk_hash
from ..identifiers import PeerId
from .reduction import NOT_FINITE, ChunkReducer
from .slot import FrozenVector, PlanState
from .statements import PlanStatements

Beside = Callable[[Callable[[], Callable[[], None]]], None]
"""Runs what may take a while in another thread, then what it returned in the driver's."""
BlameCallback = Callable[[PlanState, PeerId, bytes | None, str], None]
"""(state, peer, cid, why): nothing can be reduced under a plan any more. ``peer`` is at fault, by
its contribution ``cid`` if that is not None.
"""


class FirstPhase:
    """Of all plans of one exchange; what it learns of others it does through the functions that it
    is given.
    """

    def __init__(
        self,
        me: PeerId,
        reducer: ChunkReducer,
        *,
        usable: Callable[[PlanState], FrozenVector | None],
        blame: BlameCallback,
        spread: Callable[[PlanState, Iterable[PeerId], Sequence[int]], None],
        weighed: Callable[[PlanState], None],
        beside: Beside,
    ) -> None:
        self._me, self._reducer = me, reducer
        self._usable, self._blame = usable, blame
        self._spread, self._weighed, self._beside = spread, weighed, beside

    def measure(self, state: PlanState, measuring: PlanStatements, chunk: int, ready: bool) -> bool:
        """Measure a chunk: all contributions to one of mine that is ``ready``, the own one to
        another's. Whether there was something to do.
        """
        part, own = state.part_of[chunk], self._usable(state)
        mine = measuring.mine(part)
        if not measuring.wants(chunk, part) or (not ready if mine else own is None):
            return False
        found = (
            self._reducer.measure(state, chunk, own)
            if mine
            else self._reducer.measure_own(state, chunk, own)
        )
        if isinstance(found, tuple):
            self._blame(state, *found, NOT_FINITE)
        elif measuring.measured(chunk, part, found):
            if mine:
                self.on_statement(state, self._me, part, measuring.sum_of(part).tobytes())
            else:
                self._weigh(state, measuring)
        return True

    def on_statement(self, state: PlanState, peer: PeerId, part: int, data: bytes) -> None:
        """What the owner of a part says of it is here."""
        chunk, measuring = state.slot.chunks + part, state.measuring
        if (
            measuring is None
            or part >= len(state.plan.parts)
            or len(data) != measuring.nbytes
            or state.slot.plan is not state
        ):
            return
        if state.givers[chunk] != peer or state.hashes[chunk] is not None:
            return
        why = measuring.state(part, data)
        if why is not None:
            return self._disbelieve(state, peer, f"what it says of part {part} cannot be: {why}")
        state.progress += 1
        state.accept(chunk, chunk_hash(data))
        self._spread(state, state.below[part], (chunk,))
        return self._weigh(state, measuring)

    def take_early(self, state: PlanState) -> None:
        """What came before the plan did."""
        for peer, (plan_id, part, data) in list(state.slot.early_statements.items()):
            if plan_id == state.plan_id:
                del state.slot.early_statements[peer]
                self.on_statement(state, peer, part, data)

    def _weigh(self, state: PlanState, measuring: PlanStatements) -> None:
        if (
            measuring.under_way
            or state.blocked
            or not measuring.complete(own=self._usable(state) is not None)
        ):
            return
        liar = measuring.liar()
        if liar is not None:
            return self._disbelieve(
                state, liar, "what it says of its part is not so for my contribution"
            )
        measuring.under_way = True

        def work() -> Callable[[], None]:
            weighing = measuring.weigh()

            def done() -> None:
                measuring.weighing = weighing
                self._weighed(state)

            return done

        return self._beside(work)

    def _disbelieve(self, state: PlanState, peer: PeerId, why: str) -> None:
        self._blame(
            state,
            peer,
            next((c.cid for c in state.plan.contributors if c.member.peer == peer), None),
            why,
        )

"""How far each reduction is at this node: what `atoll` shows, plots and scripts that follow a run
subscribe to.

A reduction has three phases here. "reduce": a plan has come, contributions travel to the owners of
parts. "gather": the part that this node owns is reduced, results travel to everybody (an owner
sends chunk by chunk, so that the two overlap; a node that owns nothing has no such moment).
"decide": all result bytes are here, the members vote. Then the round, or the operation, is
committed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ...collectives import exchange as x
from ...collectives.identifiers import RunId
from ..run.events import RoundPhaseEvent, RunEvent
from ..session import events as ev

KEPT = 128
"""Plans remembered: as many operations as may be under way, twice."""


class Phases:
    """Of one run. Publishes ``round.phase`` events."""

    def __init__(self, run_id: RunId, publish: Callable[[RunEvent], None]) -> None:
        self._run_id, self._publish = run_id, publish
        self._plans: OrderedDict[bytes, tuple[ev.PlanTaken, float]] = OrderedDict()

    def planned(self, now: float, event: ev.PlanTaken) -> None:
        """A plan is carried out."""
        plan_id = event.plan.plan_id
        self._plans[plan_id] = event, now
        while len(self._plans) > KEPT:
            self._plans.popitem(last=False)
        self._tell("reduce", plan_id, now)

    def on_exchange(self, now: float, event: object) -> None:
        """An event of the data plane, of any run."""
        if isinstance(event, x.PartReduced):
            self._tell("gather", event.plan_id, now)
        elif isinstance(event, x.ResultComplete):
            self._tell("decide", event.plan_id, now)

    def _tell(self, phase: str, plan_id: bytes, now: float) -> None:
        known = self._plans.get(plan_id)
        if known is None:
            return
        taken, since = known
        plan = taken.plan
        self._publish(
            RoundPhaseEvent(
                run=self._run_id,
                log=plan.log,
                op_id=taken.op_id,
                round=plan.round,
                phase=phase,
                ballot=plan.ballot,
                revision=plan.revision,
                convener=taken.convener,
                owners=tuple(part.owner for part in plan.parts),
                contributors=tuple(c.member.peer for c in plan.contributors),
                elapsed_s=round(now - since, 4),
            )
        )

"""Where the time of a reduction goes: when each member was ready, gave its part, sent its result
and voted, as seen from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Literal

from ...collectives import messages as m
from ...collectives.group import Plan
from ...collectives.identifiers import PeerId
from ...collectives.telemetry import PHASES, ReductionTimed
from .watches import RoundTimes


class Timeline(RoundTimes):
    """Of one decision of one log. Times are the session's; `finish` gives them relative to the
    first contribution offered.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.asked_again = 0
        self._planned_at = self._reduced_at = 0.0
        self._seen: dict[str, dict[PeerId, float]] = {phase: {} for phase in PHASES}

    def heard(self, now: float, peer: PeerId, body: m.Body) -> None:
        """A control message, of one's own too."""
        if isinstance(body, m.Ready) and body.cid is not None:
            self._seen["ready"].setdefault(peer, now)
        elif isinstance(body, m.Accepted):
            self._seen["vote"].setdefault(peer, now)

    def sent(self, now: float, me: PeerId, body: m.Body) -> None:
        """A control message of ours."""
        if isinstance(body, m.Ready):
            self.heard(now, me, body)
        self.asked_again += isinstance(body, m.Need) or (
            isinstance(body, m.Missing) and any(spans for _, spans in body.lacking)
        )

    def planned(self, now: float, plan: Plan) -> None:
        """A plan is carried out; one that was before it has come to nothing."""
        self.plan, self._planned_at = plan, now
        self._seen["part"], self._seen["result"] = {}, {}

    def reduced(
        self, now: float, since: Iterable[tuple[Literal["part", "result"], PeerId, float]]
    ) -> None:
        """All result bytes are here."""
        self._reduced_at = now
        for phase, peer, ago in since:
            self._seen[phase][peer] = now - ago

    def finish(
        self, now: float, me: PeerId, decided_at: float, op_id: str = ""
    ) -> tuple[float, ReductionTimed] | None:
        """(when it began, where the time went), or None if this member took no part."""
        plan = self.plan
        if plan is None or not self._reduced_at:
            return None
        began = min([*self._seen["ready"].values(), self._planned_at])
        phases = {
            phase: {peer: at - began for peer, at in seen.items()}
            for phase, seen in self._seen.items()
        }
        return began, ReductionTimed(
            me,
            plan.log,
            plan.round,
            op_id,
            plan.reducer,
            plan.codec,
            plan.numel,
            tuple(c.member.peer for c in plan.contributors),
            plan.ballot,
            plan.revision,
            self.asked_again,
            self._planned_at - began,
            self._reduced_at - began,
            decided_at - began,
            now - began,
            phases,
            _slowest(phases),
        )


def _slowest(phases: dict[str, dict[PeerId, float]]) -> tuple[PeerId, str, float] | None:
    """Who was furthest behind the median of the others in a phase, and by how much."""
    behind = [
        (at - median(other for name, other in seen.items() if name != peer), peer, phase)
        for phase, seen in phases.items()
        if len(seen) > 1
        for peer, at in seen.items()
    ]
    if not behind:
        return None
    seconds, peer, phase = max(behind)
    return peer, phase, seconds

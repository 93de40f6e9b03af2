"""Where the time of each reduction went, for subscribers (`scripts/bench/plot_round.py` draws it),
and of all of them together, for the run's status.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from ...collectives.identifiers import PeerId, RunId
from ...collectives.telemetry import ReductionTimed
from ..run.events import RunEvent, Traffic
from ..run.gain import NEWEST, training_share
from ..session import documents
from ..session import events as ev

KEPT = 128
"""Reductions remembered: as many operations as may be under way, twice."""

Lanes = Mapping[PeerId, tuple[int, int]]
"""Bytes (sent, received) on the present lanes."""


class Timings:
    """Of one run. Publishes ``reduction.timed`` events."""

    def __init__(
        self, run_id: RunId, publish: Callable[[RunEvent], None], lanes: Callable[[], Lanes]
    ) -> None:
        self._run_id, self._publish, self._lanes = run_id, publish, lanes
        self._before: OrderedDict[tuple[str, int], Lanes] = OrderedDict()
        self._count, self._transfer_s, self._decision_s = 0, 0.0, 0.0
        self._over_at = dict[str, float]()  # by log, when its newest reduction was over
        self._waits: deque[tuple[float, float]] = deque(maxlen=NEWEST)  # (waited, whole round)

    def planned(self, event: ev.PlanTaken) -> None:
        """A plan is carried out."""
        self._before.setdefault((event.plan.log, event.plan.round), self._lanes())
        while len(self._before) > KEPT:
            self._before.popitem(last=False)

    def timed(self, now: float, event: ev.Timed) -> None:
        """A reduction is over. ``lanes``: bytes on each lane meanwhile, encryption and other
        reductions at the same time included.
        """
        timing = event.timing
        if not timing.op_id:  # an operation of the script is no round
            self._add(now, timing)
        before = self._before.pop((timing.log, timing.round), {})
        lanes = dict[str, Traffic]()
        for peer, (sent, received) in self._lanes().items():
            was = before.get(peer, (0, 0))
            if was[0] <= sent and was[1] <= received:  # else it is a new lane
                sent, received = sent - was[0], received - was[1]
            lanes[peer] = Traffic(sent, received)
        at = time.time() - (now - event.began)
        self._publish(documents.timed(timing, at, lanes, self._run_id))

    def _add(self, now: float, timing: ReductionTimed) -> None:
        self._count += 1
        self._transfer_s += max(0.0, timing.reduced_s - timing.planned_s)
        self._decision_s += max(0.0, timing.decided_s - timing.reduced_s)
        before, self._over_at[timing.log] = self._over_at.get(timing.log), now
        if before is not None and now > before:
            waited_s = timing.elapsed_s - timing.phases.get("ready", {}).get(timing.peer, 0.0)
            self._waits.append((waited_s, now - before))

    def view(self, overlap: str = "none") -> dict[str, Any]:
        """Seconds of all rounds since the run was entered: ``transfer_s`` from a plan to the last
        byte of its result, ``decision_s`` from there to the decision. ``training_share``: see
        `gain.training_share`; None before the second round.
        """
        return documents.rounded(
            {
                "reductions": self._count,
                "transfer_s": self._transfer_s,
                "decision_s": self._decision_s,
                "training_share": training_share(self._waits, overlap),
            }
        )

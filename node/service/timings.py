"""Where the time of each reduction went, for subscribers: `scripts/plot_round.py` draws it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ...collectives.identifiers import PeerId, RunId
from ..session import events as ev

KEPT = 128
"""Reductions remembered: as many operations as may be under way, twice."""

Lanes = Mapping[PeerId, tuple[int, int]]
"""Bytes (sent, received) on the present lanes."""


class Timings:
    """Of one run. Publishes ``reduction.timed`` events."""

    def __init__(
        self, run_id: RunId, publish: Callable[[dict[str, Any]], None], lanes: Callable[[], Lanes]
    ) -> None:
        self._run_id, self._publish, self._lanes = run_id, publish, lanes
        self._before: OrderedDict[tuple[str, int], Lanes] = OrderedDict()

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
        before = self._before.pop((timing.log, timing.round), {})
        lanes = dict[PeerId, dict[str, int]]()
        for peer, (sent, received) in self._lanes().items():
            was = before.get(peer, (0, 0))
            if was[0] <= sent and was[1] <= received:  # else it is a new lane
                sent, received = sent - was[0], received - was[1]
            lanes[peer] = {"sent": sent, "received": received}
        told = {field.name: _rounded(getattr(timing, field.name)) for field in fields(timing)}
        slowest = told.pop("slowest")
        self._publish(
            {
                "event": "reduction.timed",
                "run": self._run_id,
                "at": time.time() - (now - event.began),
                **told,
                "lanes": lanes,
                "slowest": dict(zip(("peer", "phase", "behind_s"), slowest, strict=True))
                if slowest
                else None,
            }
        )


def _rounded(value: Any) -> Any:
    """Microseconds are enough for people."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value

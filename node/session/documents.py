"""A session's rounds and reductions as events of the run: what subscribers, event files and pages
get of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...collectives.group import Part
from ...collectives.identifiers import PeerId
from ...collectives.outcomes import Share
from ...collectives.reach import Reach
from ...collectives.telemetry import ReductionTimed
from ...optim.outer.worth import worth_of
from ..run.events import (
    EntryCommittedEvent,
    ReductionTimedEvent,
    RoundCommittedEvent,
    Slowest,
    Traffic,
    WorthReading,
    weights_of,
)
from .events import RoundCommitted


def committed(
    event: RoundCommitted,
    at: float,
    traffic: tuple[int, int],
    *,
    run: str,
    fragment: int,
    reach: Reach | None = None,
) -> EntryCommittedEvent:
    """The event of a round, or of an entry where nobody contributed. ``at``: seconds since 1970;
    ``traffic``: bytes (sent, received) by this node so far; ``reach``: of the next round.
    """
    worth = worth_of(event.readings, event.lying)
    kind = RoundCommittedEvent if event.contributors else EntryCommittedEvent
    return kind(
        at=at,
        run=run,
        fragment=fragment,
        round=event.round,
        entry=event.entry,
        contributors={share.peer: share.samples for share in event.contributors},
        weights=weights_of(event.contributors),
        parts=parts_of(event.contributors, event.parts),
        losses=dict(event.losses),
        worth=WorthReading(*worth, rounds=event.against) if worth is not None else None,
        plain_since=event.plain_since,
        members=event.config,
        lost=event.lost,
        left=event.left,
        counted=event.counted,
        elapsed_s=round(event.elapsed_s, 4),
        bytes_sent=traffic[0],
        bytes_received=traffic[1],
        reach=reach,
    )


def timed(
    timing: ReductionTimed, at: float, lanes: Mapping[str, Traffic], run: str
) -> ReductionTimedEvent:
    """The event of a reduction. ``at``: when it began; ``lanes``: bytes on each lane meanwhile."""
    told = {field.name: rounded(getattr(timing, field.name)) for field in fields(timing)}
    told |= {
        "slowest": Slowest(*timing.slowest[:2], round(timing.slowest[2], 6))
        if timing.slowest
        else None,
        "contributors": timing.contributors,
    }
    return ReductionTimedEvent(
        at=at, run=run, fragment=_fragment_of(timing.log), lanes={**lanes}, **told
    )


def _fragment_of(log: str) -> int:
    """Of the model; 0 where it is whole."""
    name = log.split("/")
    return int(name[1]) if len(name) > 2 and name[1].isdigit() else 0


def parts_of(contributors: Sequence[Share], parts: Sequence[Part]) -> dict[str, float]:
    """Which share of a round each contributor added up for all: 0 where its link can carry none.
    Without those for whom there was no chunk.
    """
    chunks = parts[-1].stop if parts else 0
    added = Counter[PeerId]()
    for part in parts:
        added[part.owner] += part.stop - part.first
    return {
        share.peer: round(added[share.peer] / chunks, 4)
        for share in contributors
        if added[share.peer] or chunks >= len(contributors) > 0
    }


def rounded(value: Any) -> Any:
    """Microseconds are enough for people."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value

"""A session's events as documents: what subscribers, event files and pages get of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...collectives.group import Part
from ...collectives.identifiers import PeerId
from ...collectives.swarm import Share
from ...collectives.telemetry import ReductionTimed
from .events import RoundCommitted


def committed(event: RoundCommitted, at: float, traffic: tuple[int, int]) -> dict[str, Any]:
    """``round.committed``, or ``entry.committed`` where nobody contributed. ``at``: seconds since
    1970; ``traffic``: bytes (sent, received) by this node so far.
    """
    return {
        "event": "round.committed" if event.contributors else "entry.committed",
        "round": event.round,
        "entry": event.entry,
        "contributors": {share.peer: share.samples for share in event.contributors},
        **({"weights": weights} if (weights := weights_of(event.contributors)) else {}),
        "parts": parts_of(event.contributors, event.parts),
        **({"losses": dict(event.losses)} if event.losses else {}),
        **worth_of(event),
        "members": list(event.config),
        "lost": list(event.lost),
        **({"left": list(event.left)} if event.left else {}),
        "counted": event.counted,
        "elapsed_s": round(event.elapsed_s, 4),
        "at": at,
        "bytes_sent": traffic[0],
        "bytes_received": traffic[1],
    }


def worth_of(event: RoundCommitted) -> dict[str, Any]:
    """What members' evaluations found, and since when the governor takes the plain mean;
    empty in runs without.
    """
    found = dict[str, Any]()
    if event.worth is not None:
        found["worth"] = {**event.worth._asdict(), "rounds": event.against}
    return found | ({"plain_since": event.plain_since} if event.plain_since else {})


def timed(
    timing: ReductionTimed, at: float, lanes: Mapping[PeerId, Mapping[str, int]]
) -> dict[str, Any]:
    """``reduction.timed``. ``at``: when it began; ``lanes``: bytes on each lane meanwhile."""
    document = {field.name: rounded(getattr(timing, field.name)) for field in fields(timing)}
    slowest = document.pop("slowest")
    return {
        "event": "reduction.timed",
        "at": at,
        **document,
        "lanes": lanes,
        "slowest": dict(zip(("peer", "phase", "behind_s"), slowest, strict=True))
        if slowest
        else None,
    }


def weights_of(shares: Sequence[Share]) -> dict[PeerId, float]:
    """What a robust rule of whole vectors gave to each contributor; empty with others."""
    return {share.peer: share.weight for share in shares if share.weight is not None}


def parts_of(contributors: Sequence[Share], parts: Sequence[Part]) -> dict[PeerId, float]:
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

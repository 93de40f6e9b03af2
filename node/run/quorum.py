"""What documents for people and tools say of the quorum of a run's open round: ``reachable``,
``members``, ``needed``, ``held``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...collectives.identifiers import PeerId
from ...collectives.reach import Reach, reach


def quorum_of(peers: Sequence[Mapping[str, Any]], least: int = 0) -> dict[str, Any] | None:
    """From the rows of a run's peers, which say how many may be lying; ``least``: how many
    contributors its rounds need. None when a member may or may not be there, as just after a start,
    or when there is none."""
    members = {
        PeerId(str(row.get("peer", ""))): row.get("live") for row in peers if row.get("member")
    }
    if not members or None in members.values():
        return None
    organiser = next(
        (PeerId(str(row.get("peer", ""))) for row in peers if row.get("organiser")), None
    )
    byzantine = max(int(row.get("lying", 0)) for row in peers)
    there = reach({peer: bool(live) for peer, live in members.items()}, organiser, least, byzantine)
    return {**msgspec.to_builtins(there), "held": there.quorum}


def no_quorum(quorum: Any) -> str:
    """Why the open round cannot be decided, in words; nothing when it can be, or when the document
    does not tell.
    """
    try:
        there = msgspec.convert(quorum, Reach)
    except msgspec.ValidationError:
        return ""
    return "" if there.quorum else str(there)

"""What the data plane reports. Frozen values, delivered by the `emit` callback of the exchange, in
its driver's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..identifiers import PeerId
from ..messages import Disputed

Spans = tuple[tuple[int, int], ...]
"""Chunks [first, stop), ascending, not touching."""


@dataclass(frozen=True, slots=True)
class PartReduced:
    """My part (index ``part``) of the plan is reduced, or one of which I am a witness; ``digest``
    binds its bytes. ``inputs``: where parts have witnesses, by contributor the Merkle root of what
    came of it for this part."""

    plan_id: bytes
    part: int
    digest: bytes
    inputs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PartGiven:
    """What I contribute to the part ``part`` of the plan, which has witnesses, is encoded; ``root``
    is the Merkle root of its chunks."""

    plan_id: bytes
    part: int
    root: bytes


@dataclass(frozen=True, slots=True)
class ResultComplete:
    """All encoded result bytes of a plan are here. ``digests`` were computed here, one a part.

    ``data`` belongs to the receiver of this event from now on; it must keep its content until the
    next round of the same log is closed, because slower peers are still served from it. The byte
    counts are payload of this round so far, both kinds of records.
    """

    plan_id: bytes
    digests: tuple[bytes, ...]
    data: memoryview
    bytes_sent: int = 0
    bytes_received: int = 0
    since: tuple[tuple[Literal["part", "result"], PeerId, float], ...] = ()
    """How many seconds ago the last chunk of each peer's contribution to my part, and of each
    owner's result, had come.
    """
    weights: tuple[float, ...] = ()
    """What a rule of whole vectors gave to each contributor, in the plan's order; empty with
    others.
    """
    spread: float | None = None
    """The contributions' median distance from the result, where the rule goes by that of rounds
    before.
    """
    overflowed: bool = False
    """Whether finite contributions gave a result that is not (`Exchange.open_round`)."""


@dataclass(frozen=True, slots=True)
class ReductionReport:
    """Answer to `Exchange.report`. ``missing``: chunks of my part that lack a contribution, by its
    cid. ``lacking``: result chunks that have not come, by the owner of their part. ``progress``
    counts the useful records received for the plan: when it has not moved since the last report,
    asking again is in order. ``resumed``: peers whose lane came up since the last report; what was
    under way on the one before is lost. ``disputed``: why nothing is added up any more under the
    plan that it names."""

    plan_id: bytes
    missing: dict[bytes, Spans]
    lacking: dict[PeerId, Spans]
    progress: int = 0
    resumed: frozenset[PeerId] = frozenset()
    disputed: Disputed | None = None


@dataclass(frozen=True, slots=True)
class BlobProgress:
    """``have`` of ``total`` chunks of a wanted blob are here; ``missing``: (some of) those that are
    not; ``source``: who brought the newest.
    """

    name: bytes
    have: int
    total: int
    missing: Spans = ()
    source: PeerId | None = None


@dataclass(frozen=True, slots=True)
class BlobComplete:
    """A wanted blob is complete. ``hashes`` are those of its chunks, computed here."""

    name: bytes
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk from ``peer`` has another hash than it must have. It stays wanted; the peer is not
    listened to for this blob any more.
    """

    peer: PeerId
    name: bytes
    chunk: int


@dataclass(frozen=True, slots=True)
class NonFinite:
    """My own contribution holds a NaN or an infinity (or a value its codec cannot hold). Nothing
    more of it is sent.
    """

    cid: bytes


@dataclass(frozen=True, slots=True)
class PeerFault:
    """A peer broke a rule of the data plane."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class LaneUp:
    """A lane to ``peer`` is authenticated in both directions."""

    peer: PeerId
    path: str


@dataclass(frozen=True, slots=True)
class LaneDown:
    """The lane to ``peer`` with this ``number`` (of `EngineThread.add_lane`) is gone; others may be
    there, or have taken its place.
    """

    peer: PeerId
    reason: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class LanesWanted:
    """The number of lanes to ``peer`` that would carry the most (`engine.width`)."""

    peer: PeerId
    count: int


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """A command handed to an engine thread was refused: a defect on our side (or, for ``command``
    "engine", the thread's own end).
    """

    command: str
    reason: str
    error: Exception | None = field(default=None, compare=False)


ExchangeEvent = (
    PartReduced
    | PartGiven
    | ResultComplete
    | ReductionReport
    | BlobProgress
    | BlobComplete
    | BadChunk
    | NonFinite
    | PeerFault
    | LaneUp
    | LaneDown
    | LanesWanted
    | CommandFailed
)

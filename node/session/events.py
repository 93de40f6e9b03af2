"""What a session tells its script and its observers. Frozen values, no messages: sinks make words
of them.

``round`` counts entries with contributors, which is what scripts and people call a round; ``entry``
is a number in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from ...collectives.group import Admitted, Part, Plan, Reading
from ...collectives.identifiers import PeerId
from ...collectives.outcomes import Share
from ...collectives.telemetry import ReductionTimed

WaitState = Literal[
    "training",
    "waiting for peers",
    "no quorum",
    "doubled",
    "lacking state",
    "recertifying",
    "round under way",
    "finished",
    "left",
    "banned",
    "removed",
]


class Waiting(msgspec.Struct, frozen=True):
    """``what`` is waited for, ``of`` whom, and what ``ends`` it; ``since``: seconds of the
    session's clock, when this began.

    ``round_open_s``: for how long no entry was decided. ``missing``: those of a run of sites
    without whom its round does not go on, or not soon: they are not heard, or no members any more.
    """

    state: WaitState
    what: str
    of: tuple[PeerId, ...]
    ends: str
    since: float
    round_open_s: float = 0.0
    missing: tuple[PeerId, ...] = ()

    @property
    def of_missing(self) -> str:
        """Who is missing and what ends it, in words; "" where nobody is."""
        return f"{self.what}; it ends when {self.ends}" if self.missing else ""


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """An entry is decided and applied: the anchor of ``round`` is current. Without contributors it
    is no round of its own.

    ``cid``: the own contribution that was frozen for it, if any; it is free again, ``counted`` or
    not. ``parts``: who added up what. ``losses``: what contributors say of theirs, in a run that
    records it. In a run whose members evaluate: ``readings``, what each of them found
    (`optim.outer.worth`), ``against``: how many of those in a row have to speak against averaging,
    while ``lying`` members may say anything, and ``plain_since``: the entry from which on the
    governor takes the plain mean, 0 for none. ``left``: who is no member any more, as
    it had announced to this one; ``lost``: who is none, and had announced nothing.
    """

    round: int
    entry: int
    contributors: tuple[Share, ...]
    config: tuple[PeerId, ...]
    lost: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    cid: bytes | None
    counted: bool
    entry_hash: bytes
    elapsed_s: float
    parts: tuple[Part, ...] = ()
    losses: tuple[tuple[PeerId, float], ...] = ()
    readings: tuple[Reading, ...] = ()
    plain_since: int = 0
    against: int = 0
    lying: int = 0


@dataclass(frozen=True, slots=True)
class Recertified:
    """Entry ``entry`` is certified by the organiser's word instead of votes: the ``removed`` never
    vote again.
    """

    entry: int
    removed: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """The organiser removed this member's present life: it takes no more part."""

    entry: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The log holds votes of this member that its journal does not know, or others heard it say
    more: its home is an old copy. It goes on as a new member, which never voted, of this
    incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Doubled:
    """Another process lives under this node's key: neither takes part any more."""


@dataclass(frozen=True, slots=True)
class InFragment:
    """What the session of one fragment tells, of a run that is cut into fragments."""

    fragment: int
    event: object


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """No entry was decided for several times as long as usual: what this member waits for. Told
    again when that changes.
    """

    waiting: Waiting


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """An entry is applied, after `StillWaiting` was told."""


@dataclass(frozen=True, slots=True)
class StateReady:
    """The session holds the run's state: the anchor of ``round`` is current."""

    round: int


@dataclass(frozen=True, slots=True)
class StateProgress:
    """The state is being fetched."""

    have: int
    total: int
    sources: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class StateRoot:
    """The Merkle root of the state after ``entry``: equal at all members."""

    entry: int
    root: bytes


@dataclass(frozen=True, slots=True)
class StateDiverged:
    """A decided entry names another root for the state before it than this member holds: it must
    never happen.

    The state is fetched anew.
    """

    entry: int
    mine: bytes
    theirs: bytes


@dataclass(frozen=True, slots=True)
class PeerMisbehaved:
    """A peer broke a rule of the protocol."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class SumDisputed:
    """The owner of a part says that these stated another sum of their site than its members'
    contributions make: its word only.
    """

    owner: PeerId
    wrong: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class SumsDiffer:
    """These members state different sums of one part, and others state it anew. One of them lies,
    or one that sent them different things.
    """

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class LetIn:
    """Decided entries have let these in, by certificates that every acceptor has checked: one that
    is decided now; at the start those of the journal that are in memory."""

    admitted: tuple[Admitted, ...]


@dataclass(frozen=True, slots=True)
class WorkJudged:
    """A newcomer's work for an entry was looked into: ``fault`` says what is wrong with it, "" for
    nothing; ``good``: rounds in a row.
    """

    peer: PeerId
    entry: int
    good: int
    fault: str


@dataclass(frozen=True, slots=True)
class Equivocated:
    """A member has signed two values for one slot: ``evidence`` proves it to anybody
    (`node/run/evidence.py`).
    """

    peer: PeerId
    evidence: bytes


@dataclass(frozen=True, slots=True)
class HistorySplit:
    """Where two certified logs of one run part: the first entry that differs, its hash in ours and
    in theirs, and the newest entry of each as far as they were known when it was found.
    """

    round: int
    mine: bytes
    theirs: bytes
    my_newest: int
    their_newest: int


@dataclass(frozen=True, slots=True)
class AnotherHistory:
    """A peer's log is another certified one. It begins with another genesis that the organiser
    signed, so the run was founded twice, or parts from ours at ``split``. Told once a peer.
    """

    peer: PeerId
    split: HistorySplit | None = None


@dataclass(frozen=True, slots=True)
class OperationDone:
    """A free-standing all-reduce is decided: ``result`` are its encoded bytes."""

    op_id: str
    contributors: tuple[Share, ...]
    cid: bytes | None
    codec: str
    chunk_elements: int
    result: memoryview
    reduce_s: float = 0.0
    """From when the plan came here to the last byte of the result."""
    decision_s: float = 0.0
    """From the last byte of the result to its being decided."""
    config: str = ""
    members: int = 0
    """Name and size of the whole configuration, also where only a group of it took part."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A reduction is over; it began at ``began``, in the session's time."""

    began: float
    timing: ReductionTimed


@dataclass(frozen=True, slots=True)
class PlanTaken:
    """A plan of ``convener`` is being carried out here, for a training round or for the operation
    ``op_id`` (if our script called it).
    """

    plan: Plan
    convener: PeerId
    op_id: str = ""


@dataclass(frozen=True, slots=True)
class OperationRefused:
    """A free-standing operation of the script has no result. ``differs``: others have called
    something else under its id; ``overflows``: it is decided, and its codec cannot hold it.
    """

    op_id: str
    reason: str
    differs: bool = False
    overflows: bool = False


@dataclass(frozen=True, slots=True)
class RoundClosing:
    """Another member has offered its contribution to round ``round``: whoever has something
    contributes it now.
    """

    round: int


@dataclass(frozen=True, slots=True)
class EarlierSettled:
    """What became of a contribution that an earlier life of this node had offered, when the entry
    that tells was decided.
    """

    cid: bytes
    round: int
    contributors: tuple[Share, ...]
    counted: bool


@dataclass(frozen=True, slots=True)
class ContributionRefused:
    """The own contribution was not offered: it holds NaN, infinity or a value too large for its
    codec (the reason names the tensor), or it was made on an older anchor. ``over``: why this
    member contributes nothing more to the run; "" where it may."""

    cid: bytes
    reason: str
    unfit: bool = False  # for what it holds
    over: str = ""

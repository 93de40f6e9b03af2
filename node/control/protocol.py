"""Messages and frames of the control socket. Both sides use this file; it does no I/O and loads
neither trio nor torch.

A frame is a big-endian u32 length and that many bytes of msgpack, at most 1 MiB: one tagged struct
below. The client speaks first (`Hello`); every request but `Release`, `Preparing`, `Report`,
`ShowAnswer`, `ShowEvaluation` and `Farewell` is answered once, by its ``id``, with a reply or a
`Failure`. The node handles one connection's
requests in order, and sends pushes (`Progress`, `Decided`, `Asked`, `ReductionOutcome`,
`EventPush`, `Ending`) at any time. Tensors never cross: descriptors of shared memory travel beside
the first byte of the frame that announces them (SCM_RIGHTS), and the frame names the files that
they are of.

Script:  Hello → Welcome · JoinRun | FindRun → Joined
         · (Preparing…) Open → (Progress…) Opened + descriptors · Found | Lease → Leased
         then any of Start, Rest, Release, Contribute, Computed, Resume, Lease, Members, Tallies,
         NextNumber, Report, Show…, Reduce…, Depart; at last Farewell.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...collectives.errors import LocalProtocolError
from ...collectives.group import MAX_MEMBERS, NO_READING, Cid, Peer, Reading
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import MAX_FRAGMENTS, Layout
from ...collectives.series import LARGEST_NUMBER
from ...collectives.swarm import Call, Outcome, PeerView, RunSettings, Spent, Tally
from ..home.failures import Failure, Id
from .frames import LENGTH, MAX_FRAME_BYTES, Frames
from .shared_memory import SLOTS

OLDEST, VERSION = 1, 6
"""What this side speaks. Where the other side is older, both speak its version. A new request
raises VERSION and has a row in SINCE; a new field has a default."""
REDUCE_FDS = 1
MOST_READ = 2048  # batches in a report
FirstBatch = tuple[
    Annotated[int, msgspec.Meta(ge=0, le=1 << 48)], Annotated[bytes, msgspec.Meta(max_length=16)]
]
"""Committed rounds before a round, and the digest of the first batch that the script read in it."""


def opened_fds(fragments: int) -> int:
    """Descriptors that come with Opened: the contribution, the anchor slots of each fragment."""
    return 1 + SLOTS * fragments


MAX_FDS = opened_fds(MAX_FRAGMENTS)

MAX_TEXT, MAX_NAME = 4096, 256
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Rounds = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Fragment = Annotated[int, msgspec.Meta(ge=0, lt=MAX_FRAGMENTS)]
Files = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_FDS)]
"""Which files the descriptors beside an answer are of (`descriptors.files_of`); () from an earlier
node."""


class JoinRequest(msgspec.Struct, frozen=True):
    """How to get into a run: an invite, or the canonical bytes of a signed manifest (one's own
    run). One of the two.

    ``name`` is what other members see; ``contribute`` False means: hold and serve the state, take
    no part in rounds.
    """

    invite: Annotated[str, msgspec.Meta(max_length=16_384)] = ""
    manifest: Annotated[bytes, msgspec.Meta(max_length=1 << 17)] = b""
    name: Name = ""
    contribute: bool = True


class RunInfo(msgspec.Struct, frozen=True):
    """A run this node is in. ``round``: committed rounds, as far as the node knows."""

    run_id: RunId
    name: str
    peer: PeerId
    settings: RunSettings
    round: int = 0


# ── requests
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message. ``versions``: protocol versions the client speaks; ``pid``: its process."""

    id: Id
    versions: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=16)]
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """→ Document: the whole state of the node, `schema` 1."""

    id: Id


class Runs(msgspec.Struct, frozen=True, tag="runs"):
    """→ Document: ``{"runs": [...]}``."""

    id: Id


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """→ Document: ``{"peers": [...]}`` of a run named by id, unique prefix of it, or name ("" = the
    only one).
    """

    id: Id
    run: Name


class Ping(Status, frozen=True, tag="ping"):
    """→ Document: how ``peer`` (a whole id) is reached now, and its round-trip time. See
    `NodeService.ping`.
    """

    peer: Name


class Check(Status, frozen=True, tag="check"):
    """→ Document: what peers say of our clock, and how fast bytes go to the peer ``bandwidth`` (a
    whole id; "" = none). See `NodeService.check`.
    """

    bandwidth: Name = ""


class JoinRun(msgspec.Struct, frozen=True, tag="join"):
    """→ Joined, after Progress pushes. ``script``: whoever asks is to attach a model next."""

    id: Id
    request: JoinRequest
    script: bool = False


class FindRun(msgspec.Struct, frozen=True, tag="find_run"):
    """→ Joined, for a run the node is in: by id, unique prefix of it, or name ("" = the only one).
    ``script``: as in Join.
    """

    id: Id
    run: Name
    script: bool = False


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """→ Done. The node leaves the run; ``now`` does not wait for the open round."""

    id: Id
    run: Name
    now: bool = False


class Recertify(msgspec.Struct, frozen=True, tag="recertify"):
    """→ Document: ``{"removed": [...], "awaited": [...]}``. The organiser's user says that these
    members never vote again.
    """

    id: Id
    run: Name
    without: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class BeginRun(FindRun, frozen=True, tag="begin_run"):
    """→ Document, see `NodeService.begin`: a run begins with the members that are there."""


class Pause(FindRun, frozen=True, tag="pause"):
    """→ Document, see `NodeService.pause`: a run's script rests, or trains again."""

    paused: bool = True


class ReadBans(msgspec.Struct, frozen=True, tag="read_bans"):
    """→ Document: ``{"banned": {peer: why}}``. The lists of who is banned from a run have changed
    on this machine's disk.
    """

    id: Id
    run: Name


class Down(msgspec.Struct, frozen=True, tag="down"):
    """→ Done, then the node ends; ``now`` hands nothing over."""

    id: Id
    now: bool = False


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """→ Done, then Event pushes until the connection closes."""

    id: Id


class Open(msgspec.Struct, frozen=True, tag="open"):
    """→ Opened with descriptors, after Progress pushes while the state is fetched. One session a
    connection.
    """

    id: Id
    run_id: RunId
    layout: Layout


class Found(msgspec.Struct, frozen=True, tag="found"):
    """→ Leased. The initial parameters are in the contribution buffer; only after
    Opened(founding=True).
    """

    id: Id


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """→ Leased: the newest anchor of a fragment, kept from being overwritten."""

    id: Id
    fragment: Fragment = 0


class Release(msgspec.Struct, frozen=True, tag="release"):
    """No answer. One lease of ``slot`` ends."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=SLOTS)]
    fragment: Fragment = 0


class Contribute(msgspec.Struct, frozen=True, tag="contribute"):
    """→ Done; later one Decided push. The fragment's part of the contribution buffer is written and
    frozen until that push.

    The client makes the cid, so that its outcome can be asked for even when the node died before it
    answered.
    """

    id: Id
    cid: Cid
    # 0: it waits for the end of a round that it was not drawn for.
    samples: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
    # The round of the anchor it was made on; refused when that is no longer the newest.
    base: int | None = None
    fragment: Fragment = 0
    reading: Reading = NO_READING
    # Above 0: offered once another member has ended the round, or after so many seconds.
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """→ Done. The contribution buffer holds the vector that Asked ``number`` was for, or its state
    after interval ``part``; it is free again with the answer."""

    id: Id
    number: Positive
    part: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class BeginInterval(msgspec.Struct, frozen=True, tag="begin"):
    """→ Begun. The contribution buffer is to hold the state that the interval of Asked ``number``
    begins at, until the next request.
    """

    id: Id
    number: Positive


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """→ Done; later one Decided push, for a contribution made before the connection, or the node,
    was lost.
    """

    id: Id
    cid: Cid
    fragment: Fragment = 0


class Reclaim(msgspec.Struct, frozen=True, tag="reclaim"):
    """The script needs its last contribution to a fragment no more and would give the memory back
    to the system: is it read here?
    """

    id: Id
    fragment: Fragment = 0


class Members(msgspec.Struct, frozen=True, tag="members"):
    """→ MemberList."""

    id: Id


class Tallies(msgspec.Struct, frozen=True, tag="tallies"):
    """→ TallyList: what the log says of the data, from entry ``first`` on."""

    id: Id
    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class NextNumber(msgspec.Struct, frozen=True, tag="next_number"):
    """→ Numbered: which operation of series ``name`` to call next, ``least`` or a later one."""

    id: Id
    name: Name
    least: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]


class Start(msgspec.Struct, frozen=True, tag="start"):
    """→ Starting. May the script make its first step? ``now``: with the members that are here."""

    id: Id
    now: bool = False


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """→ Resting. Is the script to train now?"""

    id: Id


class Preparing(msgspec.Struct, frozen=True, tag="preparing"):
    """No answer. What a script that has joined does before it attaches, such as "loads the model":
    it is not taken for one that attaches nothing.
    """

    what: Name


class Report(msgspec.Struct, frozen=True, tag="report"):
    """No answer. What the script says of its training."""

    metrics: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=64)], float], msgspec.Meta(max_length=64)
    ]
    first_batch: FirstBatch | None = None  # what it has read first in its newest round
    # hashes of the batches that it has read since it last said so
    read: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=32)], ...],
        msgspec.Meta(max_length=MOST_READ),
    ] = ()


class ShowAnswer(msgspec.Struct, frozen=True, tag="show_answer"):
    """No answer. What the model after ``round`` rounds makes of a prompt of the manifest."""

    round: Rounds
    prompt: Text
    text: Text


class ShowEvaluation(msgspec.Struct, frozen=True, tag="show_evaluation"):
    """No answer. The loss of the model after ``round`` rounds, in nats a token, on so many held-out
    tokens.
    """

    round: Rounds
    tokens: Rounds
    held_out: float


class Depart(msgspec.Struct, frozen=True, tag="depart"):
    """→ Done, when the open round is finished or handed over: the script contributes no more, the
    node seeds.
    """

    id: Id


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """No answer; nothing follows. The script closes its swarm. ``error``: the exception that ended
    it, "" where none did.
    """

    error: Name = ""


class BufferOpen(msgspec.Struct, frozen=True, tag="buffer_open"):
    """→ BufferOpened with a descriptor: memory, float32 (numel,), that operations read in place."""

    id: Id
    numel: Positive


class BufferClose(msgspec.Struct, frozen=True, tag="buffer_close"):
    """→ Done. The script writes no more to a buffer and calls nothing with it; what is under way
    with it goes on.
    """

    id: Id
    number: Positive


class ReduceOpen(msgspec.Struct, frozen=True, tag="reduce_open"):
    """→ ReduceOpened with a descriptor: memory for what this script gives to a free-standing
    operation, float32 (numel,).

    With a ``buffer`` of this length, what it gives lies there already, and there is no descriptor.
    """

    id: Id
    call: Call
    numel: Positive
    buffer: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)] = 0


class ReduceStart(msgspec.Struct, frozen=True, tag="reduce_start"):
    """→ Done; later one Reduced push. The contribution is encoded and frozen until then."""

    id: Id
    op_id: Name


class ReduceCancel(msgspec.Struct, frozen=True, tag="reduce_cancel"):
    """→ Done. The script waits no longer: unless it is decided, the Reduced push comes now, and
    says "open".
    """

    id: Id
    op_id: Name


class ReduceClose(msgspec.Struct, frozen=True, tag="reduce_close"):
    """→ Done. The memory of contribution and result is given back."""

    id: Id
    op_id: Name


Request = (
    Hello
    | Status
    | Runs
    | Peers
    | Ping
    | Check
    | JoinRun
    | FindRun
    | Leave
    | Recertify
    | BeginRun
    | Pause
    | ReadBans
    | Down
    | Subscribe
    | Open
    | Found
    | Lease
    | Release
    | Contribute
    | Computed
    | BeginInterval
    | Resume
    | Reclaim
    | Members
    | Tallies
    | NextNumber
    | Start
    | Rest
    | Preparing
    | Report
    | ShowAnswer
    | ShowEvaluation
    | Depart
    | Farewell
    | BufferOpen
    | BufferClose
    | ReduceOpen
    | ReduceStart
    | ReduceCancel
    | ReduceClose
)
SINCE: dict[type, int] = {
    BeginRun: 2,
    Pause: 2,
    Start: 2,
    Rest: 2,
    Reclaim: 3,
    Farewell: 4,
    NextNumber: 5,
    Preparing: 6,
    ShowAnswer: 6,
    ShowEvaluation: 6,
}
"""The first version that has a request, where that is not the oldest."""

# ── replies
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The node and the protocol version both will speak. ``private`` nodes end with the process
    ``parent_pid``.
    """

    id: Id
    version: int
    pid: int
    peer: PeerId
    private: bool = False
    parent_pid: int = 0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""

    id: Id


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """``wanted``: whether the buffer holds it; else nobody wants this work any more."""

    id: Id
    wanted: bool


class Unread(msgspec.Struct, frozen=True, tag="unread"):
    """``unread``: whether the node reads nothing of the fragment's range any more."""

    id: Id
    unread: bool


class Document(msgspec.Struct, frozen=True, tag="document"):
    """A JSON-able object for people and tools."""

    id: Id
    value: dict[str, Any]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The run."""

    id: Id
    run: RunInfo


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The shared memory of the run comes beside this: contribution of the whole model (read-write),
    anchor slots of each fragment (read-only).
    """

    id: Id
    numel: int
    founding: bool
    fds: int
    files: Files = ()


class Leased(msgspec.Struct, frozen=True, tag="leased"):
    """Slot ``slot`` holds the anchor after ``round`` committed rounds of ``samples`` in all, the
    newest with this ``lag``, and is not written until released. ``steps``: this member's from it,
    where it has a number of its own."""

    id: Id
    slot: int
    round: int
    digest: str
    samples: int = 0
    lag: float = 0.0
    steps: int = 0


class MemberList(msgspec.Struct, frozen=True, tag="members"):
    """The current configuration's members; with noise, also what this one has ``spent``.
    ``averaging``: what their evaluations have against averaging; ``missing``: which sites the open
    round of a federated run lacks, and what it needs, in words.
    """

    id: Id
    members: tuple[PeerView, ...]
    spent: Spent | None = None
    averaging: str = ""
    missing: str = ""


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """``there`` of ``wanted`` members are there; both 0: the run has begun."""

    id: Id
    there: int
    wanted: int


class Resting(msgspec.Struct, frozen=True, tag="resting"):
    """``why`` the script is not to train now; "": it may."""

    id: Id
    why: str


class TallyList(msgspec.Struct, frozen=True, tag="tally_list"):
    """Some of the entries asked for, oldest first; none when there are no newer ones."""

    id: Id
    tallies: tuple[Tally, ...]


class Numbered(msgspec.Struct, frozen=True, tag="numbered"):
    """The number asked for."""

    id: Id
    number: int


class BufferOpened(msgspec.Struct, frozen=True, tag="buffer_opened"):
    """The memory comes beside this (read-write)."""

    id: Id
    number: int
    fds: int = REDUCE_FDS
    files: Files = ()


class ReduceOpened(msgspec.Struct, frozen=True, tag="reduce_opened"):
    """The contribution's memory comes beside this (read-write), unless it is a buffer: encode it
    there, chunk after chunk. The same memory whenever ``number`` is the same. ``numel``: length of
    the whole vector; of a gather, a slot for each of ``members``, who have been asked."""

    id: Id
    number: int
    codec: str
    chunk_elements: int
    numel: int
    members: tuple[PeerId, ...]
    fds: int = REDUCE_FDS
    files: Files = ()


# ── pushes
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the request ``id`` is: ``stage`` ("finding members", "fetching state"…), ``done`` of
    ``total`` (0: unknown).
    """

    id: Id
    stage: str
    done: int = 0
    total: int = 0


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """What became of a contribution; its buffer is free again. Exactly once for each Contribute or
    Resume.
    """

    cid: Cid
    outcome: Outcome


class Closing(msgspec.Struct, frozen=True, tag="closing"):
    """Another member has finished ``round``: contribute what there is."""

    round: int
    fragment: Fragment = 0


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """Compute what follows from the anchor of ``round`` and this seed, and say Computed
    (`collectives.seeded`).
    """

    number: Positive
    round: int
    seed: bytes
    interval: int = -1


class ReductionOutcome(msgspec.Struct, frozen=True, tag="reduced"):
    """What became of a free-standing reduction. When committed, the memory of the result comes
    beside this (read-only): the encoded mean, in chunks like the contribution. The same memory
    whenever ``number`` is the same."""

    op_id: str
    outcome: Outcome
    number: int = 0
    fds: int = 0
    files: Files = ()


class EventPush(msgspec.Struct, frozen=True, tag="event"):
    """A telemetry event, for subscribers."""

    event: dict[str, Any]


class Ending(msgspec.Struct, frozen=True, tag="ending"):
    """The node is shutting down."""

    reason: str


Reply = (
    Welcome
    | Done
    | Begun
    | Unread
    | Document
    | Joined
    | Opened
    | Leased
    | MemberList
    | Starting
    | Resting
    | TallyList
    | Numbered
    | BufferOpened
    | ReduceOpened
    | Failure
)
Push = Progress | Decided | Closing | Asked | ReductionOutcome | EventPush | Ending
Answer = Reply | Push

# ── frames
# ──────────────────────────────────────────────────────────────────────────────────────────────────

_encoder = msgspec.msgpack.Encoder()


def frame(message: Request | Answer) -> bytes:
    """Wire bytes of a message. Raises LocalProtocolError when it is larger than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} of {len(body)} bytes; a control frame "
            f"holds {MAX_FRAME_BYTES}"
        )
    return LENGTH.pack(len(body)) + body


def request_frames() -> Frames[Request]:
    """What the node reads."""
    return Frames(msgspec.msgpack.Decoder(Request))


def answer_frames() -> Frames[Answer]:
    """What a client reads."""
    return Frames(msgspec.msgpack.Decoder(Answer))

"""Messages and frames of the control socket. Both sides use this file; it does no I/O and loads
neither trio nor torch.

A frame is a big-endian u32 length and that many bytes of msgpack, at most 1 MiB: one tagged struct
below. The client speaks first (`Hello`). What asks, an `Ask`, is answered once, by its ``id``, with
the reply that its class names or a `Failure`; what only says something, a `Say`, is not. The node
handles one connection's requests in order, and sends a `Push` at any time. Tensors never cross:
descriptors of shared memory travel beside the first byte of the frame that announces them
(SCM_RIGHTS), and the frame names the files that they are of.

Script:  Hello → Welcome · JoinRun | FindRun → Joined
         · (Preparing…) Open → (Progress…) Opened + descriptors · Found | Lease → Leased
         then any of Start, Rest, Release, Contribute, Computed, Resume, Lease, Members, Tallies,
         NextNumber, Report, Show…, Reduce…, Depart; at last Farewell.

A call is declared here, by one class: its fields, what it means, its reply, and since which version
it exists. Whoever serves it has a row for it (`calls`), and whoever asks passes it to
`client.link.Link.ask`, whose type then is the reply's.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast

import msgspec

from ...collectives.errors import LocalProtocolError
from ...collectives.group import MAX_MEMBERS, NO_READING, Cid, Peer, Reading
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import MAX_FRAGMENTS, Layout
from ...collectives.op_names import LARGEST_NUMBER
from ...collectives.outcomes import Outcome, Spent, Tally
from ...collectives.script_swarm import Call, PeerView
from ...collectives.swarm import RunSettings
from ..home.failures import Failure, Id
from .frames import LENGTH, MAX_FRAME_BYTES, Frames
from .shared_memory import SLOTS

OLDEST, VERSION = 1, 6
"""What this side speaks. Where the other side is older, both speak its version. A new request
raises VERSION and says ``since`` it; a new field has a default."""
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


# ── replies
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Reply(msgspec.Struct, frozen=True):
    """What answers the request of this ``id``."""

    id: Id


R = TypeVar("R", bound=Reply)


class Welcome(Reply, frozen=True, tag="welcome"):
    """The node and the protocol version both will speak. ``private`` nodes end with the process
    ``parent_pid``.
    """

    version: int
    pid: int
    peer: PeerId
    private: bool = False
    parent_pid: int = 0


class Done(Reply, frozen=True, tag="done"):
    """It is done."""


class Begun(Reply, frozen=True, tag="begun"):
    """``wanted``: whether the buffer holds it; else nobody wants this work any more."""

    wanted: bool


class Unread(Reply, frozen=True, tag="unread"):
    """``unread``: whether the node reads nothing of the fragment's range any more."""

    unread: bool


class Document(Reply, frozen=True, tag="document"):
    """A JSON-able object for people and tools."""

    value: dict[str, Any]


class Joined(Reply, frozen=True, tag="joined"):
    """The run."""

    run: RunInfo


class Opened(Reply, frozen=True, tag="opened"):
    """The shared memory of the run comes beside this: contribution of the whole model (read-write),
    anchor slots of each fragment (read-only).
    """

    numel: int
    founding: bool
    fds: int
    files: Files = ()


class Leased(Reply, frozen=True, tag="leased"):
    """Slot ``slot`` holds the anchor after ``round`` committed rounds of ``samples`` in all, the
    newest with this ``lag``, and is not written until released. ``steps``: this member's from it,
    where it has a number of its own."""

    slot: int
    round: int
    digest: str
    samples: int = 0
    lag: float = 0.0
    steps: int = 0


class MemberList(Reply, frozen=True, tag="members"):
    """The current configuration's members; with noise, also what this one has ``spent``.
    ``averaging``: what their evaluations have against averaging; ``missing``: which sites the open
    round of a federated run lacks, and what it needs, in words.
    """

    members: tuple[PeerView, ...]
    spent: Spent | None = None
    averaging: str = ""
    missing: str = ""


class Starting(Reply, frozen=True, tag="starting"):
    """``there`` of ``wanted`` members are there; both 0: the run has begun."""

    there: int
    wanted: int


class Resting(Reply, frozen=True, tag="resting"):
    """``why`` the script is not to train now; "": it may."""

    why: str


class TallyList(Reply, frozen=True, tag="tally_list"):
    """Some of the entries asked for, oldest first; none when there are no newer ones."""

    tallies: tuple[Tally, ...]


class Numbered(Reply, frozen=True, tag="numbered"):
    """The number asked for."""

    number: int


class BufferOpened(Reply, frozen=True, tag="buffer_opened"):
    """The memory comes beside this (read-write)."""

    number: int
    fds: int = REDUCE_FDS
    files: Files = ()


class ReduceOpened(Reply, frozen=True, tag="reduce_opened"):
    """The contribution's memory comes beside this (read-write), unless it is a buffer: encode it
    there, chunk after chunk. The same memory whenever ``number`` is the same. ``numel``: length of
    the whole vector; of a gather, a slot for each of ``members``, who have been asked."""

    number: int
    codec: str
    chunk_elements: int
    numel: int
    members: tuple[PeerId, ...]
    fds: int = REDUCE_FDS
    files: Files = ()


# ── requests
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Request(msgspec.Struct, frozen=True):
    """What a client sends. ``since``: the first version of the protocol that has it."""

    since: ClassVar[int] = 1


class Ask(Request, Generic[R], frozen=True):
    """A request that a reply R answers."""

    id: Id


class Say(Request, frozen=True):
    """A request that nothing answers."""


class Hello(Ask[Welcome], frozen=True, tag="hello"):
    """First message. ``versions``: protocol versions the client speaks; ``pid``: its process."""

    versions: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=16)]
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


# of the node. ``run``: id, unique prefix of it, or name; "": the only one. ConfigError when that is
# not one run


class Status(Ask[Document], frozen=True, tag="status"):
    """The whole state of the node, ``schema`` 1."""


class Runs(Ask[Document], frozen=True, tag="runs"):
    """``{"runs": [...]}``, one object a run."""


class Peers(Ask[Document], frozen=True, tag="peers"):
    """``{"peers": [...]}``, one object a member of the run."""

    run: Name


class Ping(Ask[Document], frozen=True, tag="ping"):
    """How ``peer`` (a whole id) is reached now, and its round-trip time: ``{"peer", "path",
    "rtt_ms", "address"}``. Raises NetworkError, ConfigError for a wrong id.
    """

    peer: Name


class Check(Ask[Document], frozen=True, tag="check"):
    """``clock``: what peers say of our clock, one row a peer that answered (``ahead_s``: ours minus
    its, right ``within_s``); and of the peer ``bandwidth`` (a whole id; "" = none), path and bytes
    a second both ways, which takes about ten seconds. Raises NetworkError, ConfigError for a wrong
    id.
    """

    bandwidth: Name = ""


class JoinRun(Ask[Joined], frozen=True, tag="join"):
    """Enter a run; idempotent for a run the node is in. Answered, after Progress pushes, when its
    manifest is known and verified: its state is waited for in Open. ``script``: whoever asks is to
    attach a model next. Raises ConfigError, NotAdmittedError, NetworkError.
    """

    request: JoinRequest
    script: bool = False


class FindRun(Ask[Joined], frozen=True, tag="find_run"):
    """A run the node is in. ``script``: as in JoinRun."""

    run: Name
    script: bool = False


class Leave(Ask[Done], frozen=True, tag="leave"):
    """Leave the run: hand over the open round, say goodbye, stop seeding; ``now`` skips what takes
    time.
    """

    run: Name
    now: bool = False


class Recertify(Ask[Document], frozen=True, tag="recertify"):
    """The organiser's user says that these members of the run never vote again: go on without them.
    ``{"removed": [...], "awaited": [...]}``: who is removed, whose answer is awaited. Raises
    RecertifyError where that cannot be right, StorageError.
    """

    run: Name
    without: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class BeginRun(Ask[Document], frozen=True, tag="begin_run"):
    """Let a run that waits for `[train] start_with` members begin with those who are there:
    ``run_id``, ``begun`` (False: it had begun already), ``missing`` (members), ``lacking`` (how
    many more a masked sum waits for all the same).
    """

    since: ClassVar[int] = 2
    run: Name


class Pause(Ask[Document], frozen=True, tag="pause"):
    """Let a run's script rest between two rounds, or train again; the node goes on serving:
    ``run_id``, ``paused`` (why it does not train, or ""), ``changed``. Raises StorageError.
    """

    since: ClassVar[int] = 2
    run: Name
    paused: bool = True


class FetchBase(Ask[Document], frozen=True, tag="fetch_base"):
    """Have members send the files of the run's pretrained model which this machine lacks. Answered,
    after Progress pushes (bytes): ``folder``, ``bytes``, ``fetched``, ``from`` (by whom). Raises
    ConfigError E415 where no member may, NetworkError E415 where none does, StorageError.
    """

    since: ClassVar[int] = 6
    run: Name


class ReadBans(Ask[Document], frozen=True, tag="read_bans"):
    """Take the lists of who is banned from a run as they are on this machine's disk now, and
    enforce them: ``{"banned": {peer: why}}``.
    """

    run: Name


class Down(Ask[Done], frozen=True, tag="down"):
    """Begin to shut down; ``now`` hands nothing over."""

    now: bool = False


class Subscribe(Ask[Done], frozen=True, tag="subscribe"):
    """EventPush pushes from now on, until the connection closes."""


# of a script


class Open(Ask[Opened], frozen=True, tag="open"):
    """Attach the script to the run, after Progress pushes while the state is fetched, or when it is
    clear that this member founds the run. One session a connection.

    Raises ModelMismatchError (naming the tensors) when the run has another layout, ConfigError when
    another live script is attached to the run or the run is unknown.
    """

    run_id: RunId
    layout: Layout


class Found(Ask[Leased], frozen=True, tag="found"):
    """The initial parameters are in the contribution buffer; only after Opened(founding=True). When
    another member founded the run meanwhile, that state is the answer.
    """


class Lease(Ask[Leased], frozen=True, tag="lease"):
    """The newest anchor of a fragment, kept from being overwritten."""

    fragment: Fragment = 0


class Release(Say, frozen=True, tag="release"):
    """One lease of ``slot`` ends."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=SLOTS)]
    fragment: Fragment = 0


class Contribute(Ask[Done], frozen=True, tag="contribute"):
    """The fragment's part of the contribution buffer is written and stays frozen until one Decided
    push: it is offered to the open round, or to the next one where an earlier script's contribution
    is frozen in it. Raises LocalProtocolError when the script has an undecided one of this
    fragment.

    The client makes the cid (16 random bytes), so that its outcome can be asked for even when the
    node died before it answered.
    """

    cid: Cid
    # 0: it waits for the end of a round that it was not drawn for.
    samples: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
    # The round of the anchor it was made on; refused when that is no longer the newest.
    base: int | None = None
    fragment: Fragment = 0
    reading: Reading = NO_READING
    # Above 0: offered once another member has ended the round, or after so many seconds.
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class Computed(Ask[Done], frozen=True, tag="computed"):
    """The contribution buffer holds the vector that Asked ``number`` was for, or its state after
    interval ``part``; it is free again with the answer. An unknown number is none."""

    number: Positive
    part: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class BeginInterval(Ask[Begun], frozen=True, tag="begin"):
    """The contribution buffer is to hold the state that the interval of Asked ``number`` begins at,
    until the next request.
    """

    number: Positive


class Resume(Ask[Done], frozen=True, tag="resume"):
    """One Decided push says what became of a contribution to a fragment, made before the
    connection, or the node, was lost.

    * Known and undecided: when it is decided.
    * In an entry of the log: committed, counted, that entry's round.
    * Neither: an earlier node may have offered it to no later round than the one open when *this*
      node started. When that round is decided without it, it never will be counted: "lost". (A cid
      that no node has ever seen gets this answer too.)
    """

    cid: Cid
    fragment: Fragment = 0


class Reclaim(Ask[Unread], frozen=True, tag="reclaim"):
    """The script needs its last contribution to a fragment no more and would give the memory back
    to the system: is it read here?
    """

    since: ClassVar[int] = 3
    fragment: Fragment = 0


class Members(Ask[MemberList], frozen=True, tag="members"):
    """Who is in the run, and what the script is told of it."""


class Tallies(Ask[TallyList], frozen=True, tag="tallies"):
    """What the log says of the data, from entry ``first`` on (`Swarm.tallies`). Raises
    StorageError.
    """

    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class NextNumber(Ask[Numbered], frozen=True, tag="next_number"):
    """Which operation of series ``name`` to call next, ``least`` or a later one."""

    since: ClassVar[int] = 5
    name: Name
    least: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]


class Start(Ask[Starting], frozen=True, tag="start"):
    """May the script make its first step? ``now``: with the members that are here."""

    since: ClassVar[int] = 2
    now: bool = False


class Rest(Ask[Resting], frozen=True, tag="rest"):
    """Is the script to train now? Asked between two rounds, and by a script that rests every
    second.
    """

    since: ClassVar[int] = 2


class Preparing(Say, frozen=True, tag="preparing"):
    """What a script that has joined does before it attaches, such as "loads the model": it is not
    taken for one that attaches nothing.
    """

    since: ClassVar[int] = 6
    what: Name


class Report(Say, frozen=True, tag="report"):
    """What the script says of its training, for status and telemetry."""

    metrics: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=64)], float], msgspec.Meta(max_length=64)
    ]
    # Committed rounds, and the digest of the first batch that it has read after them.
    first_batch: FirstBatch | None = None
    # hashes of the batches that it has read since it last said so
    read: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=32)], ...],
        msgspec.Meta(max_length=MOST_READ),
    ] = ()


class ShowAnswer(Say, frozen=True, tag="show_answer"):
    """What the model after ``round`` rounds makes of a prompt of the manifest."""

    since: ClassVar[int] = 6
    round: Rounds
    prompt: Text
    text: Text


class ShowEvaluation(Say, frozen=True, tag="show_evaluation"):
    """The loss of the model after ``round`` rounds, in nats a token, on so many held-out tokens."""

    since: ClassVar[int] = 6
    round: Rounds
    tokens: Rounds
    held_out: float


class Depart(Ask[Done], frozen=True, tag="depart"):
    """Answered when the open round is finished or handed over: the script contributes no more, the
    node seeds. Idempotent.
    """


class Farewell(Say, frozen=True, tag="farewell"):
    """Nothing follows: the script closes its swarm. ``error``: the exception that ended it, ""
    where none did.
    """

    since: ClassVar[int] = 4
    error: Name = ""


class BufferOpen(Ask[BufferOpened], frozen=True, tag="buffer_open"):
    """Memory, float32 (numel,), that operations read as it lies. Raises StorageError, and
    LocalProtocolError for too many.
    """

    numel: Positive


class BufferClose(Ask[Done], frozen=True, tag="buffer_close"):
    """The script writes no more to a buffer and calls nothing with it; what is under way with it
    goes on. Idempotent.
    """

    number: Positive


class ReduceOpen(Ask[ReduceOpened], frozen=True, tag="reduce_open"):
    """Memory for what this script gives to a free-standing operation, float32 (numel,). With a
    ``buffer`` of this length, what it gives lies there already, and there is no descriptor.

    Raises StorageError, what `Swarm.operate` raises, and LocalProtocolError for a buffer that is
    unknown, of another length, or in use.
    """

    call: Call
    numel: Positive
    buffer: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)] = 0


class ReduceStart(Ask[Done], frozen=True, tag="reduce_start"):
    """The contribution is encoded and frozen until one ReductionOutcome push."""

    op_id: Name


class ReduceCancel(Ask[Done], frozen=True, tag="reduce_cancel"):
    """The script waits no longer: unless it is decided, the ReductionOutcome push comes now, and
    says "open". Idempotent.
    """

    op_id: Name


class ReduceClose(Ask[Done], frozen=True, tag="reduce_close"):
    """The memory of contribution and result is given back; a running reduction keeps it.
    Idempotent.
    """

    op_id: Name


# ── pushes
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Push(msgspec.Struct, frozen=True):
    """What the node sends unasked."""


class Progress(Push, frozen=True, tag="progress"):
    """How far the request ``id`` is: ``stage`` ("finding members", "fetching state"…), ``done`` of
    ``total`` (0: unknown).
    """

    id: Id
    stage: str
    done: int = 0
    total: int = 0


class Decided(Push, frozen=True, tag="decided"):
    """What became of a contribution; its buffer is free again. Exactly once for each Contribute or
    Resume.
    """

    cid: Cid
    outcome: Outcome


class Closing(Push, frozen=True, tag="closing"):
    """Another member has finished ``round``: contribute what there is."""

    round: int
    fragment: Fragment = 0


class Asked(Push, frozen=True, tag="asked"):
    """Compute what follows from the anchor of ``round`` and this seed, and say Computed
    (`collectives.seeded`).
    """

    number: Positive
    round: int
    seed: bytes
    interval: int = -1


class ReductionOutcome(Push, frozen=True, tag="reduced"):
    """What became of a free-standing reduction. When committed, the memory of the result comes
    beside this (read-only): the encoded mean, in chunks like the contribution. The same memory
    whenever ``number`` is the same."""

    op_id: str
    outcome: Outcome
    number: int = 0
    fds: int = 0
    files: Files = ()


class EventPush(Push, frozen=True, tag="event"):
    """A telemetry event, for subscribers."""

    event: dict[str, Any]


class Ending(Push, frozen=True, tag="ending"):
    """The node is shutting down."""

    reason: str


# ── frames
# ──────────────────────────────────────────────────────────────────────────────────────────────────

Answer = Reply | Failure | Push

REQUESTS: tuple[type[Request], ...] = (*Ask.__subclasses__(), *Say.__subclasses__())
"""All that are declared above."""
_ANSWERS: tuple[type[msgspec.Struct], ...] = (
    *Reply.__subclasses__(),
    *Push.__subclasses__(),
    Failure,
)
_encoder = msgspec.msgpack.Encoder()


def _one_of(kinds: tuple[type[Any], ...]) -> Any:
    return functools.reduce(operator.or_, kinds)


def reply_of(request: Ask[R]) -> type[R]:
    """The R that the class of a request, ``class Ping(Ask[Document])``, names."""
    (base,) = cast("Any", type(request)).__orig_bases__
    return base.__args__[0]


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
    return Frames(msgspec.msgpack.Decoder(_one_of(REQUESTS)))


def answer_frames() -> Frames[Answer]:
    """What a client reads."""
    return Frames(msgspec.msgpack.Decoder(_one_of(_ANSWERS)))

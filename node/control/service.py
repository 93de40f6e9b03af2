"""What the node implements for its control socket. The server (`server`) calls it; everything runs
in the node's trio thread.

Errors: any method may raise an AtollError; it reaches the client with its class, code, why and
hint, and the connection lives on. Any other exception is a defect of the node: the client gets E142
and the node goes on.

Cancellation: an ``async`` method is cancelled when its client is gone. It must leave the node as if
it had not been called, or as if it had finished; `ScriptSession.detached` follows in any case.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...collectives.group import NO_READING, Reading
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import Layout
from ...collectives.swarm import Call, PeerView, Spent, Tally
from .protocol import JoinRequest, RunInfo, ShowAnswer, ShowEvaluation
from .shared_memory import AnchorSlots, PooledBuffer, SharedBuffer

if TYPE_CHECKING:
    from .requests import ConnectionRequests

ProgressSink = Callable[[str, int, int], None]
"""(stage, done, total): told to the waiting client; never blocks. total 0 = unknown."""


class ReduceMemory(NamedTuple):
    """Memory for the contribution to one free-standing reduction: the script encodes it there,
    chunk after chunk.
    """

    source: PooledBuffer
    chunking: tuple[str, int, int]
    """Codec, chunk_elements and numel of the whole vector."""
    members: tuple[PeerId, ...]
    """The configuration it is called under."""


class ExpectedScript(Protocol):
    """A script that has joined a run and attached nothing yet."""

    def prepares(self, what: str) -> None:
        """It says what it does before it attaches, such as "loads the model"."""
        ...

    def gone(self) -> None:
        """It attaches, or its connection ends. Called once."""
        ...


class ScriptSession(Protocol):
    """One script, attached to one run; `NodeService.open_script` makes it with a known state."""

    founding: bool
    """The run has no state and this member may found it: the script writes the initial parameters,
    then calls `found`.
    """

    contribution: SharedBuffer
    """float32 (numel,) of the whole model, written by this script alone. A fresh one a session:
    what an earlier script froze stays frozen in its own buffer until it is decided."""

    anchors: Sequence[AnchorSlots]
    """The anchor slots of each fragment (a model that is not cut is one); the server calls `renew`,
    `reader_fds`, `lease`, `release` and `abandon` on them, for this script. They outlive the
    session: one AnchorSlots a fragment of a run."""

    def rounds(self, entry: int, fragment: int = 0) -> int:
        """How many rounds are in the anchor after log entry ``entry``, as `anchors` number them:
        what the script is told.
        """
        ...

    def samples(self, entry: int, fragment: int = 0) -> int:
        """How many samples were contributed to it."""
        ...

    def lag(self, entry: int, fragment: int = 0) -> float:
        """How many inner steps its newest round took to be decided (`AnchorView.lag`)."""
        ...

    def steps(self) -> int:
        """How many inner steps the script makes now, where members have each their number
        (`AnchorView.steps`).
        """
        ...

    async def found(self) -> None:
        """``contribution`` holds the initial parameters (copy them before returning). Afterwards
        ``current`` of all anchors is set.

        Raises LocalProtocolError when the session is not founding. When another member founded the
        run meanwhile, adopt that state and return normally.
        """
        ...

    def contribute(
        self,
        cid: bytes,
        samples: int,
        base: int | None = None,
        fragment: int = 0,
        reading: Reading = NO_READING,
        hold_s: float = 0.0,
    ) -> None:
        """The fragment's part of ``contribution`` is written and stays frozen until
        `ConnectionRequests.decided`; offer it under ``cid`` (16 random bytes, made by the client)
        to the open round, or to the next one where an earlier script's contribution is frozen in
        it. ``hold_s``: as of `Swarm.contribute`.

        Raises LocalProtocolError when this session has an undecided one of this fragment.
        """
        ...

    def computed(self, number: int, part: int = 0) -> None:
        """``contribution`` holds the vector that `ConnectionRequests.asked` was for, or its state
        after interval ``part``: copy it before returning. An unknown number is none."""
        ...

    def begin(self, number: int) -> bool:
        """Write the state that an interval begins at to ``contribution``. False: nobody wants it
        any more.
        """
        ...

    def unread(self, fragment: int = 0) -> bool:
        """Whether nothing here still reads a fragment's range of the script's contribution."""
        ...

    def resume(self, cid: bytes, fragment: int = 0) -> None:
        """Say (`ConnectionRequests.decided`) what became of a contribution to a fragment, of an
        earlier session, perhaps of an earlier node.

        * Known and undecided: when it is decided.
        * In an entry of the log: committed, counted, that entry's round.
        * Neither: an earlier node may have offered it to no later round than the one open when
          *this* node started. When that round is decided without it, it never will be counted:
          "lost". (A cid that no node has ever seen gets this answer too.)
        """
        ...

    def members(self) -> Sequence[PeerView]:
        """The members of the current configuration."""
        ...

    def averaging(self) -> str:
        """What members' evaluations have against averaging, in words; "" where nothing."""
        ...

    def missing(self) -> str:
        """Which sites the open round lacks, and what it needs, in words; "" where none."""
        ...

    def spent(self) -> Spent | None:
        """What this member has spent of its privacy; None in a run without noise."""
        ...

    def tallies(self, first: int) -> Sequence[Tally]:
        """See `Swarm.tallies`. Raises StorageError."""
        ...

    def next_number(self, name: str, least: int) -> int:
        """As `Series.next_number` of the script's side."""
        ...

    def report(
        self,
        metrics: Mapping[str, float],
        first_batch: tuple[int, bytes] | None = None,
        read: Sequence[bytes] = (),
    ) -> None:
        """Training metrics of the script, for status and telemetry. ``first_batch``: the digest of
        the first batch that it has read after so many committed rounds; ``read``: hashes of those
        that it has read since the last report.
        """
        ...

    def show(self, told: ShowAnswer | ShowEvaluation) -> None:
        """What the script found of what the model has learned, for status and pages."""
        ...

    def starts(self, now: bool) -> tuple[int, int]:
        """Whether the script may make its first step: (0, 0), or how many members are there of how
        many the run is to begin with. ``now``: it begins with those who are there."""
        ...

    def rests(self) -> str:
        """Why the script is not to train now, as the owner of this machine says; "": it may. Asked
        between two rounds, and by a script that rests every second.
        """
        ...

    async def leave(self) -> None:
        """Finish or hand over the open round, contribute no more, keep seeding. Idempotent."""
        ...

    def buffer_open(self, numel: int) -> PooledBuffer:
        """Memory for float32 (numel,) that operations read as it lies. Raises StorageError, and
        LocalProtocolError for too many.
        """
        ...

    def buffer_close(self, number: int) -> None:
        """The script no longer uses a buffer; an operation under way still does. Idempotent."""
        ...

    def reduce_open(self, call: Call, numel: int, buffer: int = 0) -> ReduceMemory:
        """Memory for a contribution, or the number of the buffer that holds it. Raises
        StorageError, what `Swarm.operate` raises, and LocalProtocolError for a buffer that is
        unknown, of another length, or in use."""
        ...

    def reduce_cancel(self, op_id: str) -> None:
        """The script waits no longer: `ConnectionRequests.reduced` says "open" now, unless it has
        said something. Idempotent.
        """
        ...

    def reduce_start(self, op_id: str) -> None:
        """``source`` is written and stays frozen until `ConnectionRequests.reduced`."""
        ...

    def reduce_close(self, op_id: str) -> None:
        """The script no longer needs the memory; a running reduction does. Idempotent."""
        ...

    def detached(self, farewell: str | None) -> None:
        """The script is gone, or closed its connection. Called exactly once, also after a cancelled
        request. ``farewell``: what it said at last, "" or the exception that ended it; None where
        it said nothing.

        Its leases have ended (`AnchorSlots.abandon`). The node keeps seeding; a frozen contribution
        stays until it is decided.
        """
        ...


class NodeService(Protocol):
    """The node, as the command line and scripts see it. Runs are named by id, unique prefix of it,
    or name; "" = the only one (ConfigError when that is not one run)."""

    peer: PeerId
    private: bool
    parent_pid: int
    """The script that a private node belongs to; 0 for a daemon."""

    async def status(self) -> dict[str, Any]:
        """JSON-able, with ``schema`` 1."""
        ...

    async def runs(self) -> list[dict[str, Any]]:
        """One JSON-able object a run."""
        ...

    async def peers(self, run: str) -> list[dict[str, Any]]:
        """One JSON-able object a member of the run."""
        ...

    async def ping(self, peer: str) -> dict[str, Any]:
        """JSON-able: how ``peer`` is reached (see `Host.path`) and its round-trip time. Raises
        NetworkError, ConfigError for a wrong id.
        """
        ...

    async def check(self, bandwidth: str) -> dict[str, Any]:
        """JSON-able: ``clock``, one row a peer that answered (``ahead_s``: ours minus its, right
        ``within_s``); and of the peer ``bandwidth``, unless it is "", path and bytes a second both
        ways, which takes about ten seconds. Raises NetworkError, ConfigError for a wrong id."""
        ...

    async def join(self, request: JoinRequest, progress: ProgressSink) -> RunInfo:
        """Enter a run; idempotent for a run the node is in. Returns when its manifest is known and
        verified: its state is waited for in `open_script`. Raises ConfigError, NotAdmittedError,
        NetworkError."""
        ...

    async def find_run(self, run: str) -> RunInfo:
        """A run that the node is in."""
        ...

    async def pause(self, run: str, paused: bool) -> dict[str, Any]:
        """Let a run's script rest between two rounds, or train again; the node goes on serving.
        JSON-able: ``run_id``, ``paused`` (why it does not train, or ""), ``changed``. Raises
        StorageError."""
        ...

    def expect_script(self, run_id: RunId, pid: int) -> ExpectedScript:
        """A script has joined this run and is to attach next."""
        ...

    async def leave(self, run: str, now: bool) -> None:
        """Leave the run: hand over the open round, say goodbye, stop seeding; ``now`` skips what
        takes time.
        """
        ...

    async def recertify(self, run: str, without: Sequence[PeerId]) -> dict[str, Any]:
        """These members of the run never vote again: go on without them. JSON-able: who is removed,
        whose answer is awaited.

        Raises RecertifyError where that cannot be right, StorageError.
        """
        ...

    async def begin(self, run: str) -> dict[str, Any]:
        """Let a run that waits for `[train] start_with` members begin with those who are there.
        JSON-able: ``run_id``, ``begun`` (False: it had begun already), ``missing`` (members)."""
        ...

    async def read_bans(self, run: str) -> dict[str, Any]:
        """Take the lists of who is banned from a run as they are on disk now, and enforce them.
        JSON-able: ``banned``, why by peer.
        """
        ...

    def down(self, now: bool) -> None:
        """Begin to shut down and return; the control server is cancelled last, so that the answer
        gets out.
        """
        ...

    def subscribe(self) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """JSON-able telemetry events from now on. The service bounds its queue and counts what did
        not fit (an event carries that as the key ``missed``)."""
        ...

    async def open_script(
        self,
        run_id: str,
        layout: Layout,
        pid: int,
        events: ConnectionRequests,
        progress: ProgressSink,
    ) -> ScriptSession:
        """Attach a script: wait until the run's state is here (telling progress), or until it is
        clear that this member founds it.

        Raises ModelMismatchError (naming the tensors, `collectives.layout.differences`) when the
        run has another layout, ConfigError when another live script is attached to the run or the
        run is unknown. ``layout`` has passed `Layout.check`. On cancellation nothing stays attached
        and `detached` is not called.
        """
        ...

"""What the node implements for its control socket, beside the rows of what it answers (`calls`).
The server (`server`) calls it; everything runs in the node's trio thread.

Errors: any method may raise an AtollError; it reaches the client with its class, code, why and
hint, and the connection lives on. Any other exception is a defect of the node: the client gets E142
and the node goes on.

Cancellation: an ``async`` method is cancelled when its client is gone. It must leave the node as if
it had not been called, or as if it had finished; `ScriptSession.detached` follows in any case.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import Layout
from . import protocol as p
from .calls import CallTable, WithMemory
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
    held: bool = False
    """``source`` is a buffer that the script holds already."""


def reduce_opened(id_: int, memory: ReduceMemory) -> WithMemory[p.ReduceOpened]:
    """The answer to ReduceOpen."""
    fds = [] if memory.held else [memory.source.fd]
    codec, chunk_elements, numel = memory.chunking
    return WithMemory(
        p.ReduceOpened(
            id_, memory.source.number, codec, chunk_elements, numel, memory.members, len(fds)
        ),
        fds,
    )


def buffer_opened(id_: int, buffer: PooledBuffer) -> WithMemory[p.BufferOpened]:
    """The answer to BufferOpen."""
    return WithMemory(p.BufferOpened(id_, buffer.number), [buffer.fd])


class AnchorFacts(NamedTuple):
    """What the script is told of the anchor after a log entry."""

    rounds: int
    """How many rounds are in it, as `ScriptSession.anchors` number them."""
    samples: int
    """How many samples were contributed to it."""
    lag: float = 0.0
    """How many inner steps its newest round took to be decided (`AnchorView.lag`)."""
    steps: int = 0
    """How many inner steps the script makes now, where members have each their number
    (`AnchorView.steps`)."""


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

    calls: CallTable
    """What only an attached script may ask. A request that names a fragment names one of
    ``anchors``."""

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

    def facts(self, entry: int, fragment: int = 0) -> AnchorFacts:
        """Of the anchor of a fragment after log entry ``entry``."""
        ...

    async def found(self) -> None:
        """``contribution`` holds the initial parameters (copy them before returning). Afterwards
        ``current`` of all anchors is set.

        Raises LocalProtocolError when the session is not founding. When another member founded the
        run meanwhile, adopt that state and return normally.
        """
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

    calls: CallTable
    """What anybody may ask, beside what follows. Where it ends the node, the control server is
    cancelled last, so that the answer gets out."""

    async def join(self, request: p.JoinRequest, progress: ProgressSink) -> p.RunInfo:
        """`protocol.JoinRun`."""
        ...

    async def find_run(self, run: str) -> p.RunInfo:
        """A run that the node is in."""
        ...

    async def fetch_base(self, run: str, progress: ProgressSink) -> dict[str, Any]:
        """`protocol.FetchBase`."""
        ...

    def expect_script(self, run_id: RunId, pid: int) -> ExpectedScript:
        """A script has joined this run and is to attach next."""
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
        """`protocol.Open`: wait until the run's state is here (telling progress), or until it is
        clear that this member founds it.

        ``layout`` has passed `Layout.check`. On cancellation nothing stays attached and `detached`
        is not called.
        """
        ...

"""What a session needs from its driver: the seams between the sans-I/O session and the node (or the
simulator).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from ...collectives.codecs.encoded import EncodedVector
from ...collectives.exchange import Bounds
from ...collectives.group import MAX_STAR, Certified, Entry, Plan
from ...collectives.identifiers import PeerId
from ...collectives.layout import Layout
from ...collectives.messages import Spans
from ...collectives.pace import Pace
from ...collectives.round import Journal
from .record import Statement
from .replica import ModelReplica

T = TypeVar("T")


class DataPlane(Protocol):
    """Commands to the exchange (`atoll.collectives.exchange.Exchange`, or the engine thread's proxy
    of it) about rounds. All idempotent.
    """

    def open_round(
        self,
        log: str,
        round_: int,
        members: Sequence[PeerId],
        numel: int,
        chunk_elements: int,
        codec: str,
        early: int | None = None,
        most: int = MAX_STAR,
        overflows: bool = False,
        witnesses: int = 0,
    ) -> None:
        """Accept parts of (log, round) from these members from now on, ``most`` at most; ``early``:
        no more bytes of them before my own contribution or a plan. ``overflows``: a result that
        is not finite is one, and `ResultComplete` says so. ``witnesses``: so many members add up
        each part beside its owner.
        """

    def freeze(self, log: str, round_: int, cid: bytes, vector: Tensor | EncodedVector) -> None:
        """My contribution: float32 (numel,), or encoded; untouched until `release`."""

    def release(self, cid: bytes) -> None:
        """The contribution is no longer needed."""

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        """Carry out a plan."""

    def close_round(self, log: str, round_: int) -> None:
        """Forget parts and plans of a decided round."""

    def resend_parts(self, peer: PeerId, plan_id: bytes, cid: bytes, spans: Spans) -> None:
        """Send parts of my contribution again."""

    def resend_results(self, peer: PeerId, plan_id: bytes, spans: Spans) -> None:
        """Send chunks of my reduced part again."""

    def report(self, plan_id: bytes) -> None:
        """Answered by a ReductionReport event."""


class ContentPlane(Protocol):
    """Commands to the exchange about content of any kind, by name: results, states, files. All
    idempotent.
    """

    def provide(self, name: bytes, data: memoryview, bounds: Bounds) -> None:
        """Serve content: `send_blob` sends from it."""

    def withdraw(self, name: bytes) -> None:
        """Serve it no longer."""

    def send_blob(self, peer: PeerId, name: bytes, spans: Spans) -> None:
        """Send chunks of provided content over the lane."""

    def want(
        self,
        name: bytes,
        destination: memoryview,
        bounds: Bounds,
        hashes: Sequence[bytes],
        sources: Sequence[PeerId],
    ) -> None:
        """Receive content: every chunk is checked against its hash as it comes."""

    def unwant(self, name: bytes) -> None:
        """Receive it no longer."""

    def report_blob(self, name: bytes) -> None:
        """Answered by a BlobProgress event while it is wanted."""


class Contributions(Protocol):
    """Contributions that are kept so that rounds can be recomputed."""

    def keep(self, statement: Statement, data: memoryview | None = None) -> bool:
        """Keep what somebody has signed; ``data``: the own one's values. Whether it is kept."""
        ...

    def forget(self, entry: int, but: Iterable[PeerId]) -> None:
        """The entry is decided and counts these: others' signatures and the oldest entries go."""


class Results(Protocol):
    """Encoded results of a log. Raises StorageError."""

    @property
    def forces(self) -> bool:
        """Whether there is a medium: the bytes of a result are on it (`force`) before they
        are voted on.
        """
        ...

    def force(self, log: str, round_: int, digests: tuple[bytes, ...], data: memoryview) -> None:
        """These bytes (from `allocate`) may become the result of this round: they are kept, and on
        the medium when this returns.

        Heavy; from any thread. Raises StorageError.
        """

    def allocate(self, nbytes: int) -> memoryview:
        """Where an encoded result is to be received: bytes written there survive a kill -9. Called
        from any thread.
        """
        ...

    def keep(self, entry: Entry, data: memoryview) -> None:
        """These bytes (from `allocate`) are the result of this entry, voted on or decided; keep
        them until `forget`.
        """

    def kept(self, entry: Entry) -> memoryview | None:
        """Kept result bytes of an entry."""
        ...

    def first(self) -> int:
        """The oldest round from which on all results are kept."""
        ...

    def forget(self, before: int) -> None:
        """Results of older rounds may go (never those newer than the last complete checkpoint that
        a later entry certifies).
        """


class States(Protocol):
    """The layout of a log's model, and its newest states. Raises StorageError."""

    def layout(self) -> Layout | None:
        """The run's layout, if known."""
        ...

    def state_bytes(self, layout: Layout) -> int:
        """Length of a state, anchor and outer state, of this model."""
        ...

    def save_layout(self, layout: Layout) -> None:
        """Keep the layout."""

    def replica(self, layout: Layout, *, restore: bool) -> ModelReplica:
        """Memory for a replica of this layout; with ``restore`` filled from the newest checkpoint
        that the journal reaches, if there is one.
        """
        ...

    def checkpoint(self, replica: ModelReplica, entry: Certified, rounds: int) -> None:
        """Write the current state, after ``entry`` and ``rounds`` rounds, to disk. Heavy.

        Told, not raised, when it fails: the last checkpoint and all later results stay.
        """

    def checkpointed(self) -> int:
        """The entry of the older of the two checkpoints that are kept (of the only one, where there
        is one; -1 where there is none): results since then are kept.
        """
        ...

    def saved(self, before: int) -> tuple[int, memoryview] | None:
        """The newest checkpoint of an entry older than ``before``: its entry and the state's bytes.
        Heavy; also while one is written.

        None where there is none, or results since are missing. Until an entry follows the newest
        checkpoint, and so certifies it, the one before it and all results since are kept.
        """
        ...


class UsedUp(Protocol):
    """What this member has used up in all of its lives. Raises StorageError."""

    def operations(self) -> list[str]:
        """What `spend` was told, in this life and earlier ones; the oldest may be gone."""
        ...

    def spend(self, key: str) -> None:
        """This member promises or votes in the free-standing operation ``key``, whose votes are not
        kept: never again in a later life.
        """

    def noisy(self) -> int:
        """How often `spend_noisy` was called, in all lives."""
        ...

    def noisy_entry(self) -> int:
        """For which entry of the log the newest noisy contribution was; -1: for none."""
        ...

    def spend_noisy(self, entry: int) -> None:
        """A noisy contribution is about to be handed over, for this entry of the log: it counts
        against the privacy budget."""

    def raise_noisy(self, steps: int) -> None:
        """Earlier lives of the site, whose disk is lost, may have handed over so many."""


class Storage(Protocol):
    """What one log keeps over the life of a process. Raises StorageError."""

    @property
    def results(self) -> Results: ...

    @property
    def states(self) -> States: ...

    @property
    def spent(self) -> UsedUp: ...

    @property
    def contributions(self) -> Contributions | None:
        """Where contributions are kept for an audit; None: they are not."""
        ...

    def journal(self) -> Journal:
        """The journal of the run's log, as left by the last life."""
        ...

    @property
    def was_founded(self) -> bool:
        """Whether this member ever held the state of the run."""
        ...

    @property
    def written(self) -> int:
        """How many records were written that others may come to depend on: promises, votes,
        entries, operations. It only grows.
        """
        ...

    def sync(self) -> None:
        """All records written before are on the medium when this returns. Heavy; from any thread.
        Raises StorageError: then nobody knows what is there, and nothing more may be said."""

    def installed(self, round_: int) -> None:
        """A fetched state replaced all up to this round: older rounds' results are not here."""

    def found(self, replica: ModelReplica, genesis: Certified) -> None:
        """Keep layout, initial state and genesis of a run that is founded here, all on the medium,
        or nothing at all (StorageError).
        """

    def lacks_results(self) -> None:
        """Results that followed the checkpoint are missing or changed. Raises StorageError E303
        where nobody else can have them.
        """

    def reset(self) -> None:
        """Begin a new incarnation with an empty log: the old journal cannot be trusted."""


class SessionPorts(Protocol):
    """The driver of a session."""

    exchange: DataPlane
    content: ContentPlane
    storage: Storage

    def send(self, peer: PeerId, data: bytes) -> None:
        """Send a control message, once all records that storage has written before are on the
        medium; may be lost; never blocks.
        """

    def after_sync(self, act: Callable[[float], None]) -> bool:
        """Call ``act(now)`` once all records that storage has written before are on the medium, in
        order with `send`. False: they are, and ``act`` is not called."""
        ...

    def persist(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Run ``work``, which waits for the disk, beside the control loop and beside `offload`, and
        call ``done(now, result)`` in it. In order.
        """

    def offload(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Run ``work`` beside the control loop and call ``done(now, result)`` in it. One session's
        jobs run one at a time, in order.
        """

    def serve(self, work: Callable[[], T], done: Callable[[float, T], None]) -> bool:
        """As `offload`, for what another peer asks for: in a bounded queue of its own, that no
        round waits for. False where it is full.
        """
        ...

    def emit(self, event: object) -> None:
        """Tell script and observers."""

    def unread(self, peer: PeerId) -> bool:
        """Whether what was sent to the peer waits there, or on the way, unread for now. False: it
        does not, or nobody knows.
        """
        ...

    def pace(self) -> Pace:
        """How fast this node's links are, as far as it is known."""
        ...

    def sign(self, payload: bytes) -> bytes:
        """Sign as this peer."""
        ...

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        """Check a peer's signature."""
        ...

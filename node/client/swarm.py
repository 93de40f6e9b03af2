"""RunClient: a run, as the script of one member sees it through its node (`node.joining.RunSwarm`).

**When the node is lost** (killed, shut down, or silent for longer than ANSWER_S) the script trains
on:

* `contribute`, `all_reduce`, `anchor` and `open` raise SwarmClosedError (E160) at once, until there
  is a node again. `members` gives the last known ones, `report` drops, `leave` returns.
* A contribution that was frozen when the node went stays undecided: its `wait` returns "open" at
  once, with the reason. Its cid is made here, so the next node finds out from the run's log whether
  it was counted, and the Pending then resolves by itself: committed, or lost. Until then
  `contribute` takes no other, so that no work is counted twice.
* Views of the anchor stay readable until they are released.
* A thread looks for a node, with a growing delay: the home's daemon, else (after a while) a private
  one; it enters the run again with the same layout. Then ``reattached`` has grown by one,
  ``connected`` is True, and everything works as before, on the run's newest anchor; `open` returns
  it.

A node that has left the run (`atoll leave`) is lost in the same way, with E162 as the reason, until
somebody joins the run again.

`join` and the first `open` wait for the node, and raise when there is none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar
from weakref import ReferenceType, WeakSet, finalize, ref

from ...collectives.cutting import cut
from ...collectives.errors import (
    AtollError,
    DeadlineExceededError,
    LocalProtocolError,
    SwarmClosedError,
    VersionMismatchError,
)
from ...collectives.group import Evaluated
from ...collectives.layout import Layout
from ...collectives.op_names import OWN_NAME
from ...collectives.outcomes import Outcome, Tally
from ...collectives.plain import DEVICES, flat_of, placed
from ...collectives.round_settings import MAX_SAMPLES
from ...collectives.script_swarm import Call, PeerView
from ...collectives.swarm import sample_count
from ..control import protocol as p
from ..control.descriptors import Descriptor, close_all, received
from ..control.shared_memory import AnchorSlot
from .eager import eager
from .farewell import cause_of, uncaught
from .link import Link, closed
from .memory import Attached, SlotView, VectorEncoding, WholeView
from .pending import Hooks, ReduceTicket, Ticket
from .reattach import Reattach, RunEntry, open_session
from .seeded import SeededTask, SeededWork
from .shared import Buffers, SharedFloats
from .shelf import FileShelf
from .starting import await_start

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.outcomes import Spent

# A node that does not answer for so long is taken for lost; a busy one may need seconds.
ANSWER_S = 15.0
LEAVE_S = 120.0
REPORT_S = 0.1  # reports between are merged
MAX_METRICS = 64
P = ParamSpec("P")
R = TypeVar("R", bound=p.Reply)


def _resume(cid: bytes, fragment: int, id_: int) -> p.Resume:
    return p.Resume(id_, cid, fragment)


@dataclass(frozen=True, eq=False, slots=True)
class _Leasing:
    """A thread that leases an anchor or gives it back: where it has ended, an exception did it."""

    link: Link
    thread: threading.Thread


def _as_closed(error: AtollError) -> SwarmClosedError:
    """Why there is no node, as the error that calls raise meanwhile."""
    return error if isinstance(error, SwarmClosedError) else closed(error.message)


class RunClient(SeededWork):
    """This script's place in one run, through this machine's node; the methods are those of
    `collectives.script_swarm.Swarm`, of which `RunSwarm` has the rest.

    The connection ends with ``close``, with the ``with`` block, or with the process. If the node
    goes away, training goes on alone until a node is back. Several threads may call the methods. In
    a forked child (a DataLoader's worker, say) every call raises SwarmClosedError.

    Attributes: ``peer``, ``run_id``, ``settings`` as in Swarm; ``reattached``: how many times a new
    connection replaced a lost one; ``spent``: of this member's privacy, as `members` last heard,
    None in a run without noise.
    """

    spent: Spent | None = None
    averaging = missing = ""

    def __init__(
        self,
        entry: RunEntry,
        link: Link,
        info: p.RunInfo,
        progress: Callable[[str, int, int], None] | None = None,
        *,
        begin: bool = False,
    ) -> None:
        """``begin``: the first `open` does not wait for the members that the run starts with."""
        SeededWork.__init__(self)
        self._begin = begin
        self.peer = info.peer
        self.run_id = info.run_id
        self.settings = info.settings
        self.reattached = 0
        self._gone: SwarmClosedError | None = None  # why there is no node, while there is none
        self._entry = entry
        self._link: Link | None = link  # before `open`
        self._at: Attached | None = None  # after it, while there is a node
        self._layout: Layout | None = None  # of the first `open` that succeeded
        self._round = max(0, info.round)
        self._closing: dict[int, int] = {}  # by fragment
        self._progress = progress
        self._tickets: dict[int, Ticket] = {}  # the newest of each fragment
        self._buffers = Buffers()
        self._views = WeakSet[SlotView]()  # of this node or an earlier one
        self._dropped = deque[tuple[Link, p.Release]]()  # leases of views that are no more
        self._leasing: set[_Leasing] = set()  # who leases an anchor, or gives it back, just now
        self._members: tuple[PeerView, ...] = ()
        self._metrics: dict[str, float] = {}
        self._first_batch: tuple[int, bytes] | None = None
        self._read = deque[bytes](maxlen=p.MOST_READ)
        self._reported_s = 0.0
        self._reattach: Reattach | None = None
        self._paused = ""  # why this script is not to train, as last heard
        self._writing = False  # whether a contribution is being written
        self._closed = False
        self._shut = False  # closed, and all of it done
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._error = ""  # the exception that ends this script

    # ── entering ──

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> SlotView | WholeView:
        """The first time it waits for the run's state as long as that takes, for another node where
        this one goes away, and for the members that the run is to begin with; Ctrl-C may interrupt
        it. Raises ModelMismatchError, and what `join` raises. Later it is `anchor`:
        SwarmClosedError at once while there is no node.
        """
        self._check_open()
        if self._layout is not None:
            if layout != self._layout:
                raise LocalProtocolError(
                    "this swarm is open with another model", hint="close() it and join() again"
                )
            return self.anchor()
        self._entry.outlive(lambda: self._open(layout, initial), self._progress)
        atexit.register(self._at_exit)  # which holds it: from now on it is for somebody to close
        await_start(self._starts, self.run_id, begin=self._begin, progress=self._progress)
        return self.anchor()

    def _open(self, layout: Layout, initial: Callable[[Tensor], None]) -> None:
        self._check_open()
        if self._link is None or self._link.lost is not None:
            self._link, _ = self._entry.enter(self._progress)
        try:
            self._enter(
                self._link, layout, self._entry.beginning(layout, initial), self._progress, None
            )
        finally:
            self._link = None  # in use by the session, or closed

    def _starts(self, begin: bool) -> p.Starting | str:
        """What the node says of the run's beginning, or why there is no node."""
        self._check_open()
        self.take_in()
        if self._at is not None:
            try:
                return self._ask(self._at, p.Start, begin)
            except SwarmClosedError as error:
                return error.message
        return self.trouble

    def _enter(
        self,
        link: Link,
        layout: Layout,
        initial: Callable[[Tensor], None],
        progress: Callable[[str, int, int], None] | None,
        give_up: Callable[[], bool] | None,
    ) -> None:
        """Open the run on ``link`` and take it into use; on failure the link is closed."""
        link.on_push = self._pushed
        try:
            memory, founding = open_session(
                link, self.run_id, layout, self.fragments, progress, give_up
            )
            if founding:
                initial(memory.contribution.tensor())
                leased = link.finish(link.submit(p.Found), timeout_s=None, give_up=give_up)
                link.post(p.Release(leased.slot), may_drop=False)
            with self._lock:
                self._check_open()
                again = self._layout is not None
                for fragment, ticket in self._tickets.items():
                    if not ticket.resolved():
                        ticket.call = link.submit(partial(_resume, ticket.cid, fragment))
                self._at, self._layout = Attached(link, memory), layout
                self.reattached += again
                self._gone = None
        except BaseException:
            self._entry.leave(link)
            raise

    def shelf(self) -> FileShelf:
        """A file in the run's folder."""
        return FileShelf(self.folder)

    # ── rounds ──

    @property
    def paused(self) -> str:
        """Without a node: as last heard."""
        self._check_open()
        self.take_in()
        if self._at is not None:
            # lost just now, or an older one came in its place, which pauses nobody
            with contextlib.suppress(SwarmClosedError, VersionMismatchError):
                self._paused = self._ask(self._at, p.Rest).why
        return self._paused

    @property
    def folder(self) -> Path:
        """Of this run, among the files of the node's home."""
        return self._entry.dial.run_dir(self.run_id)

    @property
    def trouble(self) -> str:
        """Why there is no node now, or nothing."""
        return self._gone.message if self._gone is not None else ""

    @property
    def round(self) -> int:
        """Committed rounds of the run, as last heard: when it was joined, or its anchor taken."""
        return self._round

    @property
    def connected(self) -> bool:
        """Whether there is a node now, as far as the last call saw."""
        return self._at is not None

    def anchor(self) -> SlotView | WholeView:
        """Raises SwarmClosedError without a node, LocalProtocolError before `open` or with too many
        leases.
        """
        if self.fragments == 1:
            return self.fragment_anchor(0)
        views = list[SlotView]()
        try:
            for fragment in range(self.fragments):
                views.append(self.fragment_anchor(fragment))
        except BaseException:
            for view in views:
                view.release()
            raise
        return WholeView(views)

    @property
    def fragments(self) -> int:
        return self.settings.fragments

    def fragment_anchor(self, fragment: int) -> SlotView:
        """Raises as `anchor` does."""
        at = self._ready(fragment)
        self._check_leases(at)
        leasing = _Leasing(at.link, threading.current_thread())
        self._leasing.add(leasing)
        try:
            leased = self._ask(at, p.Lease, fragment)
        except AtollError:  # which the node refused, or will not remember
            self._leasing.discard(leasing)
            raise
        self._round = max(self._round, leased.round)

        link = at.link  # alone: what it leased from may be closed before the view is dropped

        def give_back() -> None:
            ending = _Leasing(link, threading.current_thread())
            self._leasing.add(ending)
            if dropped.detach() is not None:  # once
                link.post(p.Release(leased.slot, fragment), may_drop=False)
            self._leasing.discard(ending)

        slot = AnchorSlot(
            leased.slot, leased.round, leased.digest, leased.samples, leased.lag, leased.steps
        )
        view = SlotView(at.memory, slot, give_back, fragment)
        # A collection may come anywhere, under any lock: what it finds waits for the next lease.
        dropped = finalize(view, self._dropped.append, (at.link, p.Release(leased.slot, fragment)))
        dropped.atexit = False
        self._views.add(view)
        self._leasing.discard(leasing)
        return view

    def _check_leases(self, at: Attached) -> None:
        """Views that nobody holds any more are given back. An exception that ended a lease, or its
        end, leaves a slot of which nothing is known: the connection is made anew. Raises
        SwarmClosedError.
        """
        while self._dropped:
            its, release = self._dropped[0]
            its.post(release, may_drop=False)
            self._dropped.popleft()
        me = threading.current_thread()
        for leasing in list(self._leasing):
            if leasing.thread is me or not leasing.thread.is_alive():
                self._leasing.discard(leasing)
                if leasing.link is at.link:
                    raise self._lose(at, closed("an exception ended a lease of an anchor"))

    def _ask(
        self,
        at: Attached,
        kind: Callable[Concatenate[int, P], p.Ask[R]],
        *fields: P.args,
        **named: P.kwargs,
    ) -> R:
        """The answer to a request of this class and these fields, in ANSWER_S, or the node is
        lost.
        """
        try:
            return at.link.ask(lambda id_: kind(id_, *fields, **named), timeout_s=ANSWER_S)
        except DeadlineExceededError as error:
            raise self._lose(at, closed(error.message)) from None
        except SwarmClosedError as error:
            raise self._lose(at, error) from None

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> Ticket:
        """Does not wait for the node; an exception in ``write`` leaves nothing frozen. Raises
        SwarmClosedError without a node (``write`` is then not called), LocalProtocolError while
        another contribution is undecided.
        """
        if self.fragments > 1:
            raise LocalProtocolError(
                f"this run is cut into {self.fragments} fragments",
                hint="contribute_fragment() offers one of them",
            )
        return self.contribute_fragment(
            0, samples=samples, write=write, base=base, loss=loss, lag=lag, hold_s=hold_s
        )

    def contribute_fragment(
        self,
        fragment: int,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> Ticket:
        """Waits and raises as `contribute` does."""
        if (
            not (1 if self.settings.sample is None else 0)
            <= (samples := sample_count(samples))
            < MAX_SAMPLES
        ):
            raise LocalProtocolError(f"a contribution of {samples} samples")
        from ...optim.outer.readings import reading_of  # loads torch, which the caller has

        at = self._ready(fragment)
        with self._lock, eager():
            earlier = self._tickets.get(fragment)
            if earlier is not None and not earlier.resolved():
                if earlier.call is None:  # the next node looks into the run's log
                    raise self._lose(at, closed("an exception ended the sending of a contribution"))
                raise LocalProtocolError(
                    "a contribution is still undecided",
                    hint="wait() for it, or try again when it is done()",
                )
            self._flush_report(at)
            vector = at.reclaiming.lend(fragment)
            self._writing = True
            try:
                write(vector)
            finally:
                self._writing = False
            assert self._layout is not None
            reading = reading_of(
                vector,
                cut(self._layout, self.fragments)[fragment],
                self.settings.effective_outer,
                loss,
                lag,
            )
            ticket = self._tickets[fragment] = Ticket(self, os.urandom(16))
            try:
                ticket.call = at.link.submit(
                    lambda id_: p.Contribute(
                        id_, ticket.cid, samples, base, fragment, reading, hold_s
                    )
                )
            except SwarmClosedError as error:  # perhaps sent, perhaps not: the next node will know
                self._lose(at, error)
            return ticket

    @property
    def holds(self) -> bool:
        """A contribution can wait for others to end the round (``hold_s``)."""
        return True

    @property
    def closing(self) -> int:
        """Looks at what has come from the node; never waits."""
        return self.fragment_closing(0)

    def fragment_closing(self, fragment: int) -> int:
        self.take_in()
        return self._closing.get(fragment, 0)

    def buffer(self, numel: int) -> Tensor:
        """On other systems than Linux an ordinary tensor."""
        self._check_open()
        return self._buffers.make(numel)

    def operate(self, call: Call, source: Tensor) -> ReduceTicket:
        """Raises SwarmClosedError without a node."""
        import torch  # the caller has it

        with eager():
            return self._operate(
                self._ready(), call, flat_of(source, torch.float32, devices=DEVICES)
            )

    def _operate(self, at: Attached, call: Call, values: Tensor) -> ReduceTicket:
        try:
            for op_id, dropped in at.operations.copy().items():
                if dropped() is None:
                    self._end_reduction(at, op_id, dropped)
            shared = self._shared(at, call, values)
            number = shared.number if shared is not None else 0
            hooks = Hooks(
                lambda: at.link.lost is not None,
                lambda: self._end_reduction(at, call.op_id, mine),
                lambda: self._tell(at, lambda id_: p.ReduceCancel(id_, call.op_id)),
                lambda committed: self._settled(at, shared, committed),
            )
            ticket = ReduceTicket(self, at.reductions, hooks, call.op_id)
            mine = ref(ticket)
            try:
                if at.operations.setdefault(call.op_id, mine) is not mine:
                    raise LocalProtocolError(f"{call.name} is open already", hint=OWN_NAME)
                asked = at.link.submit(lambda id_: p.ReduceOpen(id_, call, values.numel(), number))
                opened = at.link.finish(asked, timeout_s=ANSWER_S)
                chunking = VectorEncoding(opened.codec, opened.numel, opened.chunk_elements)
                ticket.opened(chunking, opened.members)
            except BaseException:
                del ticket  # the next call closes it: the node may have opened it meanwhile
                raise
            try:
                if shared is not None:
                    shared.ticket = ticket
                else:
                    memory = at.reductions.contribution(
                        opened.number, received(asked.fds, p.REDUCE_FDS)[0], chunking
                    )
                    if call.weight:
                        memory.encode(placed(values, opened.numel, opened.members, self.peer))
                ticket.call = at.link.submit(lambda id_: p.ReduceStart(id_, call.op_id))
            except BaseException:
                ticket.release()
                raise
        except DeadlineExceededError as error:
            raise self._lose(at, closed(error.message)) from None
        return ticket

    def _shared(self, at: Attached, call: Call, values: Tensor) -> SharedFloats | None:
        """The buffer that a call's values are all of, in memory of the present node. Raises
        LocalProtocolError when it is in use.
        """
        for home, number in self._buffers.ended():
            self._close_buffer(home, number)
        shared = self._buffers.of(call, values)
        if shared is not None and shared.home is not at:
            asked = at.link.submit(lambda id_: p.BufferOpen(id_, values.numel()))
            opened = at.link.finish(asked, timeout_s=ANSWER_S)
            shared.move_to(at, opened.number, received(asked.fds, p.REDUCE_FDS)[0])
        return shared

    def _settled(self, at: Attached, shared: SharedFloats | None, committed: bool) -> None:
        """An operation is over, as far as the script is concerned. One that is open may still read
        what it was given.
        """
        if shared is not None:
            if not committed:
                self._buffers.retire(shared)
            shared.ticket = None
            for home, number in self._buffers.ended():
                self._close_buffer(home, number)

    def _close_buffer(self, home: object, number: int) -> None:
        at = self._at
        if at is not None and home is at:
            self._tell(at, lambda id_: p.BufferClose(id_, number))

    def _tell(self, at: Attached, make: Callable[[int], p.Ask[p.Done]]) -> None:
        """A request whose answer nobody waits for."""
        if at.link.lost is None:
            with contextlib.suppress(
                SwarmClosedError
            ):  # and with the connection goes what it was about
                at.link.submit(make).abandoned = True

    def _end_reduction(self, at: Attached, op_id: str, mine: ReferenceType[ReduceTicket]) -> None:
        if at.link.lost is None:  # else the node has closed it
            with at.closing:
                if at.operations.get(op_id) is mine:
                    self._tell(at, lambda id_: p.ReduceClose(id_, op_id))
                    del at.operations[op_id]  # last: until then nobody else can open the id

    # ── the rest of Swarm ──

    def members(self) -> Sequence[PeerView]:
        """Without a node: as last known."""
        self._check_open()
        self.take_in()
        if self._at is not None:
            try:
                answer = self._ask(self._at, p.Members)
                self._members, self.spent = answer.members, answer.spent
                self.averaging, self.missing = answer.averaging, answer.missing
            except SwarmClosedError:
                pass  # lost just now
        return self._members

    def tallies(self, first: int) -> Sequence[Tally]:
        return self._ask(self._ready(), p.Tallies, first).tallies

    def next_number(self, name: str, least: int = 0) -> int:
        return self._ask(self._ready(), p.NextNumber, name, least).number

    def report(self, metrics: Mapping[str, float]) -> None:
        """At most MAX_METRICS names are kept."""
        for name, value in metrics.items():
            if name in self._metrics or len(self._metrics) < MAX_METRICS:
                self._metrics[name] = value
        at = self._at
        if at is not None and time.monotonic() - self._reported_s >= REPORT_S:
            self._flush_report(at)

    def prepares(self, what: str) -> None:
        """Say what this script does before it attaches, such as "loads the model": `atoll status`
        shows it, and does not name the script as one that attaches nothing.
        """
        if self._link is not None:
            self._link.post(p.Preparing(what[: p.MAX_NAME]), may_drop=True)

    def show_answer(self, round_: int, prompt: str, text: str) -> None:
        """What the model after ``round_`` rounds makes of a prompt of the manifest: shown by
        `atoll status`, `atoll top` and the page, the first 4,096 characters of it. Never blocks.
        """
        self._show(p.ShowAnswer(round_, prompt[: p.MAX_TEXT], text[: p.MAX_TEXT]))

    def show_evaluation(self, round_: int, tokens: int, held_out: float) -> None:
        """The loss of the model after ``round_`` rounds on so many held-out tokens, in nats a
        token; shown likewise.
        """
        self._show(p.ShowEvaluation(round_, tokens, held_out))

    def _show(self, told: p.ShowAnswer | p.ShowEvaluation) -> None:
        if self._at is not None:
            self._at.link.post(told, may_drop=True)

    def first_batch(self, round_: int, digest: bytes) -> None:
        """The script has read its first batch after ``round_`` committed rounds: its ``digest``, of
        16 bytes, goes with the next report.
        """
        self._first_batch = round_, digest

    def read_batch(self, content: bytes) -> None:
        """The script has read a batch of this content, a hash, which goes with the next report."""
        self._read.append(content)

    def _flush_report(self, at: Attached) -> None:
        if self._metrics:
            metrics, self._metrics = self._metrics, {}
            first_batch, self._first_batch = self._first_batch, None
            read, self._read = tuple(self._read), deque[bytes](maxlen=p.MOST_READ)
            self._reported_s = time.monotonic()
            at.link.post(p.Report(metrics, first_batch, read), may_drop=True)

    def leave(self) -> None:
        """Returns when the round is finished or handed over, at most LEAVE_S later; at once without
        a node.
        """
        at = self._at
        if at is None or self._closed:
            return
        self._flush_report(at)
        try:
            at.link.ask(p.Depart, timeout_s=LEAVE_S)
        except (SwarmClosedError, DeadlineExceededError) as error:
            self._lose(at, _as_closed(error))

    def close(self) -> None:
        """Waits for a private node's end (it hands over what is open); Ctrl-C then kills it. Called
        again it goes on where an exception has ended it.
        """
        if self._shut or self._owner != os.getpid():
            return
        atexit.unregister(self._at_exit)  # first: who drops it after an exception is rid of it
        with self._lock:  # a loss that was seen before has its thread, one seen later starts none
            self._closed = True
        self._stop_reattach()
        if (at := self._at) is not None:
            self._flush_report(at)
            at.link.say_farewell(self._error)
            at.link.close()
        if self._link is not None:
            self._link.close()
        self._at, self._gone = None, SwarmClosedError("closed")
        self._entry.dial.close()
        self._shut = True

    def _at_exit(self) -> None:
        """The script ends without having closed this swarm."""
        self._error = cause_of(uncaught())
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the run if all went well, and close."""
        try:
            if kind is None:
                self.leave()
            else:
                self._error = cause_of(error)
        finally:
            self.close()

    # ── the node comes and goes ──

    def take_in(self) -> None:
        """Process what has come from the node, without waiting; notice when it is lost."""
        at = self._at
        if at is None:
            self._seek()  # an exception may have come before it was begun
        else:
            at.link.poll()
            if at.link.lost is not None:
                self._lose(at, at.link.lost)
            elif self.settings.method != "gradient_averaging":  # it contributes at every step
                self._reclaim(at)

    def _reclaim(self, at: Attached) -> None:
        """Give memory of decided contributions back, unless another thread writes one now, which
        may take long.
        """
        if not self._writing:
            # lost just now: the memory goes with the connection
            with self._lock, contextlib.suppress(SwarmClosedError):
                at.reclaiming.step(time.monotonic(), at.link, self._has_outcome)

    def _has_outcome(self, fragment: int) -> bool:
        ticket = self._tickets.get(fragment)
        return ticket is None or ticket.resolved()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for ``ready()``, for the time to pass, or for the node to be lost."""
        at = self._at
        if at is not None and not ready():
            at.link.wait_for(ready, timeout_s)
        if at is None or at.link.lost is not None or not ready():
            self.take_in()

    def still_open(self) -> Outcome:
        """An "open" outcome that says why."""
        return Outcome("open", self._round + 1, reason=self.trouble or "not decided yet")

    def _pushed(self, push: p.Push, fds: Sequence[Descriptor]) -> None:
        if isinstance(push, p.Decided):
            for ticket in self._tickets.values():
                if ticket.cid == push.cid:
                    ticket.outcome = push.outcome
        elif isinstance(push, p.Closing):
            self._closing[push.fragment] = max(self._closing.get(push.fragment, 0), push.round)
        elif isinstance(push, p.Asked):
            self._asked.append(SeededTask(push.number, push.round, push.seed, push.interval))
        elif isinstance(push, p.ReductionOutcome) and (at := self._at) is not None:
            held = at.operations.get(push.op_id)
            if held is not None and (reduction := held()) is not None:
                reduction.resolve(push.outcome, push.number, fds)
                return
        close_all(fds)

    def _check_open(self) -> None:
        if self._closed:
            raise SwarmClosedError("this swarm was closed")
        if self._owner != os.getpid():
            raise SwarmClosedError(
                (
                    f"this swarm belongs to process {self._owner}, not to its "
                    f"forked child {os.getpid()}"
                ),
                hint="Use it in the process that joined; data loader workers need no swarm.",
            )

    def _ready(self, fragment: int = 0) -> Attached:
        """The session. Raises SwarmClosedError while the node is lost, LocalProtocolError before
        `open` or for a fragment that is none.
        """
        self._check_open()
        if not 0 <= fragment < self.fragments:
            raise LocalProtocolError(f"fragment {fragment} of {self.fragments}")
        self.take_in()
        if self._at is None:
            if self._layout is None:
                raise LocalProtocolError(
                    "open() the run first",
                    hint="attach() does; without a model: atoll.collectives.enter(swarm)",
                )
            assert self._gone is not None
            raise self._gone.with_traceback(None)
        return self._at

    def _lose(self, at: Attached, error: SwarmClosedError) -> SwarmClosedError:
        """The connection is of no use, for the reason returned: enter the run again."""
        at.link.close(error.message)
        with self._lock:
            if self._at is at and not self._closed:
                self._at, self._gone = None, error
                self._entry.dial.lost()
                self._seek()
        return error

    def _seek(self) -> None:
        """Have a thread look for a node, if there is none and no such thread."""
        with self._lock:
            if (
                self._at is None
                and self._gone is not None
                and not self._closed
                and (self._reattach is None or not self._reattach.running)
            ):
                self._reattach = Reattach(self._try_again, self._failed_again)
                self._reattach.start()

    def _try_again(self, give_up: Callable[[], bool]) -> None:
        """One attempt of the reattaching thread."""
        layout = self._layout
        assert layout is not None
        link, _ = self._entry.enter(None, give_up)
        self._enter(link, layout, self._copy_newest_view, None, give_up)

    def _copy_newest_view(self, destination: Tensor) -> None:
        """The whole run has lost its state: found it again from what this script still holds."""
        held = [view for view in self._views if view.held]
        newest = {view.fragment: view for view in sorted(held, key=lambda view: view.round)}
        if len(newest) < self.fragments:
            raise closed("the run has lost its state and this script holds no anchor")
        for view in newest.values():
            view.copy_into(destination[view.start : view.start + view.numel])

    def _failed_again(self, error: AtollError) -> None:
        self._gone = _as_closed(error)

    def _stop_reattach(self) -> None:
        if (reattach := self._reattach) is not None:
            reattach.stop()
            self._reattach = None

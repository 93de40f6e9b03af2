"""What each request does: calls into the NodeService and the connection's ScriptSession, and the
answers to give.

No I/O: the connection (`connection`) brings requests in order and carries the answers away.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...collectives.errors import AtollError, ConfigError, LocalProtocolError, VersionMismatchError
from ...collectives.swarm import Outcome
from ..home.failures import failure
from . import protocol as p
from .service import ExpectedScript, NodeService, ScriptSession
from .shared_memory import PooledBuffer

Post = Callable[[p.Answer, Sequence[int]], None]
"""Send an answer, with descriptors beside it (duplicated, if they are to outlive the call). Never
blocks.
"""


class ConnectionRequests:
    """The requests of one connection. ``handle`` them one after the other; then ``close``.

    The script's session calls `decided` to `failed` at any time until it is `detached`; they never
    block, and do nothing after `close`.
    """

    def __init__(self, service: NodeService, post: Post, end: Callable[[AtollError], None]) -> None:
        """``end`` tells the client an error and closes the connection."""
        self._service = service
        self._post = post
        self._end = end
        self._pid = 0
        self._session: ScriptSession | None = None
        self._expected: ExpectedScript | None = None  # that has joined and not attached
        self._farewell: str | None = None
        self._closed = False
        self._handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            p.Status: self._status,
            p.Runs: self._runs,
            p.Peers: self._peers,
            p.Ping: self._ping,
            p.Check: self._check,
            p.JoinRun: self._join,
            p.FindRun: self._find_run,
            p.Leave: self._leave,
            p.Recertify: self._recertify,
            p.BeginRun: self._begin_run,
            p.Pause: self._pause,
            p.ReadBans: self._read_bans,
            p.Down: self._down,
            p.Open: self._open,
            p.Found: self._found,
            p.Lease: self._lease,
            p.Release: self._release,
            p.Contribute: self._contribute,
            p.Computed: self._computed,
            p.BeginInterval: self._begin,
            p.Resume: self._resume,
            p.Reclaim: self._reclaim,
            p.Members: self._members,
            p.Tallies: self._tallies,
            p.NextNumber: self._next_number,
            p.Start: self._start,
            p.Rest: self._rest,
            p.Preparing: self._prepare,
            p.Report: self._report,
            p.ShowAnswer: self._show,
            p.ShowEvaluation: self._show,
            p.Depart: self._depart,
            p.BufferOpen: self._buffer_open,
            p.BufferClose: self._buffer_close,
            p.ReduceOpen: self._reduce_open,
            p.ReduceStart: self._reduce_start,
            p.ReduceCancel: self._reduce_cancel,
            p.ReduceClose: self._reduce_close,
        }

    def hello(self, message: p.Request, pid: int | None) -> p.Welcome:
        """The answer to the first message. ``pid``: of the client by the kernel's word, which goes
        before its own; None where that says nothing.

        Raises VersionMismatchError, or LocalProtocolError when it is not a Hello.
        """
        if not isinstance(message, p.Hello):
            raise LocalProtocolError(
                f"the first message must be hello, not {type(message).__name__}"
            )
        spoken = set(message.versions).intersection(range(p.OLDEST, p.VERSION + 1))
        if not spoken:
            raise VersionMismatchError(
                (
                    f"the node speaks control protocol {p.OLDEST} to {p.VERSION}, the client "
                    f"speaks {', '.join(map(str, message.versions))}"
                ),
                why="The node and the script or command come from different versions of atoll.",
                hint="Restart the node: atoll down, then atoll up"
                if max(message.versions) > p.VERSION
                else "Start the script or command again, with the atoll of the node",
            )
        # The number that a client in a container has there is another process's here, which `atoll
        # down --scripts` would end.
        self._pid = message.pid if pid is None else pid
        if max(spoken) < p.SINCE[p.Farewell]:
            self._farewell = ""  # it has no way to say it
        service = self._service
        return p.Welcome(
            message.id, max(spoken), os.getpid(), service.peer, service.private, service.parent_pid
        )

    async def handle(self, request: p.Request) -> None:
        """Do it and post the answer; an AtollError is an answer too. Other exceptions pass."""
        id_ = getattr(request, "id", 0)
        try:
            handler = self._handlers.get(type(request))
            if handler is None:
                raise LocalProtocolError(f"{type(request).__name__} is out of place here")
            await handler(request)
        except AtollError as error:
            if id_:  # what has no number has no answer
                self._post(failure(id_, error), ())

    def close(self) -> None:
        """The connection is over: end its leases, tell the session. Idempotent."""
        self._closed = True
        self._no_longer_expected()
        session, self._session = self._session, None
        if session is not None:
            for anchors in session.anchors:
                anchors.abandon()
            session.detached(self._farewell)

    def farewell(self, said: p.Farewell) -> None:
        """The client closes the connection on purpose, or since its script ends."""
        self._farewell = said.error

    def decided(self, cid: bytes, outcome: Outcome) -> None:
        """Exactly once for every `ScriptSession.contribute` and `resume`: the round is decided and
        applied (the anchor is published first), and the node no longer reads the contribution
        buffer, whether ``outcome.counted`` or not. The script may write the next contribution as
        soon as it sees this. There is no push for "open": the client tells the time itself.
        """
        self._push(p.Decided(cid, outcome))

    def closing(self, round_: int, fragment: int = 0) -> None:
        """Another member has finished ``round_`` of a fragment, to which this script has
        contributed nothing yet.
        """
        self._push(p.Closing(round_, fragment))

    def asked(self, number: int, round_: int, seed: bytes, interval: int = -1) -> None:
        """The script is to compute a vector, or one interval (`ScriptSession.computed`)."""
        self._push(p.Asked(number, round_, seed, interval))

    def reduced(self, op_id: str, outcome: Outcome, result: PooledBuffer | None = None) -> None:
        """Exactly once for every `ScriptSession.reduce_start`; "open" when the deadline passed. If
        committed, ``result`` holds the encoded mean, in the chunks of the contribution, and is not
        written until `reduce_close`.
        """
        if result is None:
            self._push(p.ReductionOutcome(op_id, outcome))
        else:
            self._push(
                p.ReductionOutcome(op_id, outcome, result.number, p.REDUCE_FDS), [result.reader_fd]
            )

    def failed(self, error: AtollError) -> None:
        """The run does not go on at this node: the script is told why and its connection ends. It
        may enter the run again.
        """
        if not self._closed:
            self._end(error)

    def _push(self, push: p.Push, fds: Sequence[int] = ()) -> None:
        if not self._closed:
            self._post(push, fds)

    def _progress(self, id_: int) -> Callable[[str, int, int], None]:
        return lambda stage, done, total: self._push(p.Progress(id_, stage, done, total))

    def _done(self, id_: int) -> None:
        self._post(p.Done(id_), ())

    def _attached(self) -> ScriptSession:
        if self._session is None:
            raise LocalProtocolError("no run is open on this connection")
        return self._session

    def _of(self, fragment: int) -> ScriptSession:
        session = self._attached()
        if fragment >= len(session.anchors):
            raise LocalProtocolError(f"fragment {fragment} of {len(session.anchors)}")
        return session

    # ── the node ──

    async def _status(self, request: p.Status) -> None:
        self._post(p.Document(request.id, await self._service.status()), ())

    async def _runs(self, request: p.Runs) -> None:
        self._post(p.Document(request.id, {"runs": await self._service.runs()}), ())

    async def _peers(self, request: p.Peers) -> None:
        self._post(p.Document(request.id, {"peers": await self._service.peers(request.run)}), ())

    async def _ping(self, request: p.Ping) -> None:
        self._post(p.Document(request.id, await self._service.ping(request.peer)), ())

    async def _check(self, request: p.Check) -> None:
        self._post(p.Document(request.id, await self._service.check(request.bandwidth)), ())

    async def _join(self, request: p.JoinRun) -> None:
        if bool(request.request.invite) == bool(request.request.manifest):
            raise ConfigError("join needs an invite or a manifest, and not both")
        run = await self._service.join(request.request, self._progress(request.id))
        self._joined(request, run)

    async def _find_run(self, request: p.FindRun) -> None:
        self._joined(request, await self._service.find_run(request.run))

    def _joined(self, request: p.JoinRun | p.FindRun, run: p.RunInfo) -> None:
        if request.script and not self._closed:
            self._no_longer_expected()
            self._expected = self._service.expect_script(run.run_id, self._pid)
        self._post(p.Joined(request.id, run), ())

    def _no_longer_expected(self) -> None:
        expected, self._expected = self._expected, None
        if expected is not None:
            expected.gone()

    async def _prepare(self, request: p.Preparing) -> None:
        if self._expected is not None:
            self._expected.prepares(request.what)

    async def _leave(self, request: p.Leave) -> None:
        await self._service.leave(request.run, request.now)
        self._done(request.id)

    async def _recertify(self, request: p.Recertify) -> None:
        self._post(
            p.Document(request.id, await self._service.recertify(request.run, request.without)), ()
        )

    async def _begin_run(self, request: p.BeginRun) -> None:
        self._post(p.Document(request.id, await self._service.begin(request.run)), ())

    async def _pause(self, request: p.Pause) -> None:
        answer = await self._service.pause(request.run, request.paused)
        self._post(p.Document(request.id, answer), ())

    async def _read_bans(self, request: p.ReadBans) -> None:
        self._post(p.Document(request.id, await self._service.read_bans(request.run)), ())

    async def _down(self, request: p.Down) -> None:
        self._service.down(request.now)
        self._done(request.id)

    # ── the script ──

    async def _open(self, request: p.Open) -> None:
        if self._session is not None:
            raise LocalProtocolError("a run is open on this connection already")
        fault = request.layout.check()
        if fault is not None:
            raise LocalProtocolError(f"layout: {fault}")
        self._no_longer_expected()
        session = await self._service.open_script(
            request.run_id, request.layout, self._pid, self, self._progress(request.id)
        )
        self._session = session
        fds = [session.contribution.fd]
        for anchors in session.anchors:
            anchors.renew()
            fds += anchors.reader_fds()
        self._post(p.Opened(request.id, request.layout.numel, session.founding, len(fds)), fds)

    async def _found(self, request: p.Found) -> None:
        session = self._attached()
        await session.found()
        self._leased(request.id, session, 0)

    async def _lease(self, request: p.Lease) -> None:
        self._leased(request.id, self._of(request.fragment), request.fragment)

    def _leased(self, id_: int, session: ScriptSession, fragment: int) -> None:
        slot = session.anchors[fragment].lease()
        rounds, samples = (
            session.rounds(slot.round, fragment),
            session.samples(slot.round, fragment),
        )
        self._post(
            p.Leased(
                id_,
                slot.slot,
                rounds,
                slot.digest,
                samples,
                session.lag(slot.round, fragment),
                session.steps(),
            ),
            (),
        )

    async def _release(self, request: p.Release) -> None:
        self._of(request.fragment).anchors[request.fragment].release(request.slot)

    async def _contribute(self, request: p.Contribute) -> None:
        self._of(request.fragment).contribute(
            request.cid,
            request.samples,
            request.base,
            request.fragment,
            request.reading,
            request.hold_s,
        )
        self._done(request.id)

    async def _computed(self, request: p.Computed) -> None:
        self._attached().computed(request.number, request.part)
        self._done(request.id)

    async def _begin(self, request: p.BeginInterval) -> None:
        self._post(p.Begun(request.id, self._attached().begin(request.number)), ())

    async def _resume(self, request: p.Resume) -> None:
        self._of(request.fragment).resume(request.cid, request.fragment)
        self._done(request.id)

    async def _reclaim(self, request: p.Reclaim) -> None:
        unread = self._of(request.fragment).unread(request.fragment)
        self._post(p.Unread(request.id, unread), ())

    async def _members(self, request: p.Members) -> None:
        script = self._attached()
        found = p.MemberList(
            request.id,
            tuple(script.members()),
            script.spent(),
            script.averaging(),
            script.missing(),
        )
        self._post(found, ())

    async def _tallies(self, request: p.Tallies) -> None:
        self._post(p.TallyList(request.id, tuple(self._attached().tallies(request.first))), ())

    async def _next_number(self, request: p.NextNumber) -> None:
        number = self._attached().next_number(request.name, request.least)
        self._post(p.Numbered(request.id, number), ())

    async def _start(self, request: p.Start) -> None:
        self._post(p.Starting(request.id, *self._attached().starts(request.now)), ())

    async def _rest(self, request: p.Rest) -> None:
        self._post(p.Resting(request.id, self._attached().rests()), ())

    async def _report(self, request: p.Report) -> None:
        self._attached().report(request.metrics, request.first_batch, request.read)

    async def _show(self, request: p.ShowAnswer | p.ShowEvaluation) -> None:
        self._attached().show(request)

    async def _depart(self, request: p.Depart) -> None:
        await self._attached().leave()
        self._done(request.id)

    async def _buffer_open(self, request: p.BufferOpen) -> None:
        buffer = self._attached().buffer_open(request.numel)
        self._post(p.BufferOpened(request.id, buffer.number), [buffer.fd])

    async def _buffer_close(self, request: p.BufferClose) -> None:
        self._attached().buffer_close(request.number)
        self._done(request.id)

    async def _reduce_open(self, request: p.ReduceOpen) -> None:
        memory = self._attached().reduce_open(request.call, request.numel, request.buffer)
        number, chunking = memory.source.number, memory.chunking
        fds = [] if request.buffer else [memory.source.fd]
        self._post(
            p.ReduceOpened(request.id, number, *chunking, members=memory.members, fds=len(fds)), fds
        )

    async def _reduce_start(self, request: p.ReduceStart) -> None:
        self._attached().reduce_start(request.op_id)
        self._done(request.id)

    async def _reduce_cancel(self, request: p.ReduceCancel) -> None:
        self._attached().reduce_cancel(request.op_id)
        self._done(request.id)

    async def _reduce_close(self, request: p.ReduceClose) -> None:
        self._attached().reduce_close(request.op_id)
        self._done(request.id)

"""The requests of one connection: who answers each, and the answers to give.

No I/O: the connection (`connection`) brings requests in order and carries the answers away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ...collectives.errors import AtollError, ConfigError, LocalProtocolError, VersionMismatchError
from ...collectives.identifiers import RunId
from ...collectives.layout import Layout
from ...collectives.outcomes import Outcome
from ..home.failures import failure
from . import protocol as p
from .calls import CallTable, WithMemory, answers, hears
from .service import ExpectedScript, NodeService, ScriptSession
from .shared_memory import PooledBuffer

FLOAT_BYTES = 4

Post = Callable[[p.Answer, Sequence[int]], None]
"""Send an answer, with descriptors beside it (duplicated, if they are to outlive the call). Never
blocks.
"""


class ConnectionRequests:
    """The requests of one connection. ``handle`` them one after the other; then ``close``.

    A request is answered here where it concerns the connection itself (entering a run, and the
    script's memory), else by the node, or by the session of its script.

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
        self._under_way = 0  # the request that is being answered
        self._calls = CallTable(
            answers(p.JoinRun, self._join, p.Joined),
            answers(p.FindRun, self._find_run, p.Joined),
            answers(p.FetchBase, self._fetch_base, p.Document),
            answers(p.Open, self._open, self._opened),
            answers(p.Found, self._found, lambda id_, told: p.Leased(id_, *told)),
            answers(p.Lease, self._lease, lambda id_, told: p.Leased(id_, *told)),
            hears(p.Release, self._release),
            hears(p.Preparing, self._prepare),
        )

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
        if max(spoken) < p.Farewell.since:
            self._farewell = ""  # it has no way to say it
        service = self._service
        return p.Welcome(
            message.id, max(spoken), os.getpid(), service.peer, service.private, service.parent_pid
        )

    async def handle(self, request: p.Request) -> None:
        """Do it and post the answer; an AtollError is an answer too. Other exceptions pass."""
        id_ = self._under_way = request.id if isinstance(request, p.Ask) else 0
        try:
            answer = await self._answerer(request).answer(request)
        except AtollError as error:
            if id_:  # what has no number has no answer
                self._post(failure(id_, error), ())
        else:
            if isinstance(answer, WithMemory):
                self._post(*answer)
            elif answer is not None:
                self._post(answer, ())

    def _answerer(self, request: p.Request) -> CallTable:
        """Who answers it: this connection, the node, or the script's session."""
        for calls in (self._calls, self._service.calls):
            if request in calls:
                return calls
        return self._of(getattr(request, "fragment", 0)).calls

    def close(self) -> None:
        """The connection is over: end its leases, tell the session. Idempotent."""
        self._closed = True
        self._no_longer_expected()
        session, self._session = self._session, None
        if session is not None:
            for anchors in session.anchors:
                anchors.abandon()
            session.detached(self._farewell)
        self._calls = CallTable()  # its rows name this object

    def farewell(self, said: p.Farewell) -> None:
        """The client closes the connection on purpose, or since its script ends."""
        self._farewell = said.error

    def decided(self, cid: bytes, outcome: Outcome) -> None:
        """Exactly once for every Contribute and Resume: the round is decided and
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
        """The script is to compute a vector, or one interval (`protocol.Computed`)."""
        self._push(p.Asked(number, round_, seed, interval))

    def reduced(self, op_id: str, outcome: Outcome, result: PooledBuffer | None = None) -> None:
        """Exactly once for every ReduceStart; "open" when the deadline passed. If
        committed, ``result`` holds the encoded mean, in the chunks of the contribution, and is not
        written until ReduceClose.
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

    def _progress(self) -> Callable[[str, int, int], None]:
        id_ = self._under_way
        return lambda stage, done, total: self._push(p.Progress(id_, stage, done, total))

    def _of(self, fragment: int) -> ScriptSession:
        if self._session is None:
            raise LocalProtocolError("no run is open on this connection")
        if fragment >= len(self._session.anchors):
            raise LocalProtocolError(f"fragment {fragment} of {len(self._session.anchors)}")
        return self._session

    # ── entering a run ──

    async def _join(self, request: p.JoinRequest, script: bool = False) -> p.RunInfo:
        if bool(request.invite) == bool(request.manifest):
            raise ConfigError("join needs an invite or a manifest, and not both")
        run = await self._service.join(request, self._progress())
        self._expect(run, script)
        return run

    async def _find_run(self, run: str, script: bool = False) -> p.RunInfo:
        found = await self._service.find_run(run)
        self._expect(found, script)
        return found

    async def _fetch_base(self, run: str) -> dict[str, Any]:
        return await self._service.fetch_base(run, self._progress())

    def _expect(self, run: p.RunInfo, script: bool) -> None:
        if script and not self._closed:
            self._no_longer_expected()
            self._expected = self._service.expect_script(run.run_id, self._pid)

    def _no_longer_expected(self) -> None:
        expected, self._expected = self._expected, None
        if expected is not None:
            expected.gone()

    def _prepare(self, what: str) -> None:
        if self._expected is not None:
            self._expected.prepares(what)

    # ── a script's memory ──

    async def _open(self, run_id: RunId, layout: Layout) -> ScriptSession:
        if self._session is not None:
            raise LocalProtocolError("a run is open on this connection already")
        fault = layout.check()
        if fault is not None:
            raise LocalProtocolError(f"layout: {fault}")
        self._no_longer_expected()
        self._session = await self._service.open_script(
            run_id, layout, self._pid, self, self._progress()
        )
        return self._session

    def _opened(self, id_: int, session: ScriptSession) -> WithMemory[p.Opened]:
        fds = [session.contribution.fd]
        for anchors in session.anchors:
            anchors.renew()
            fds += anchors.reader_fds()
        numel = session.contribution.nbytes // FLOAT_BYTES
        return WithMemory(p.Opened(id_, numel, session.founding, len(fds)), fds)

    async def _found(self) -> tuple[int, int, str, int, float, int]:
        await self._of(0).found()
        return self._lease()

    def _lease(self, fragment: int = 0) -> tuple[int, int, str, int, float, int]:
        """The fields of a Leased."""
        session = self._of(fragment)
        slot = session.anchors[fragment].lease()
        told = session.facts(slot.round, fragment)
        return slot.slot, told.rounds, slot.digest, told.samples, told.lag, told.steps

    def _release(self, slot: int, fragment: int = 0) -> None:
        self._of(fragment).anchors[fragment].release(slot)

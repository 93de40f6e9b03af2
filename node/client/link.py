"""One connection to the node, blocking, for use by any number of threads of one process.

There is no reader thread. Whoever waits reads for all: one thread at a time waits on the socket,
dispatches what came and wakes the others. Pushes that nobody waits for stay in the socket until the
next call of anything here.

**An exception may come between any two lines**: Ctrl-C, a signal handler that raises, an exception
that another thread sets. None of them bends the connection:

* What `recvmsg` returns is stored in the same step of the interpreter, bytes and descriptors as one
  record (`_arrived`). Whoever reads next goes on with it.
* ``_torn`` is set while a record is taken apart, and while bytes are sent and struck off. Whoever
  finds it set knows that an exception ended that in the middle: the connection is lost, with that
  as its reason, and is made anew like any other that is lost.
* Descriptors are owned by objects (`Descriptor`) that close them with their last reference: an
  answer that nobody takes leaves none open. An answer names the files that its descriptors are of;
  others than those end the connection.
* Locks are entered with ``with``, which no exception can come into. Nobody depends on another
  thread to go on reading: it says every _SLICE_S that it does, or another reads in its place.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...collectives.errors import (
    AtollError,
    DeadlineExceededError,
    LocalProtocolError,
    NetworkError,
    SwarmClosedError,
    VersionMismatchError,
)
from ..control import protocol as p
from ..control.address import check_folder, check_peer
from ..control.descriptors import Descriptor, close_all, files_of, numbers, own
from ..home.failures import error_of
from ..home.forks import close_in_children
from ..home.sockets import why_silent
from .eager import eager

VERSIONS = tuple(range(p.OLDEST, p.VERSION + 1))
HELLO_S = 10.0
NOT_RUNNING = "E003"
SEND_S = 30.0  # a node that does not read for so long is taken for dead
MAX_UNSENT_BYTES = 64 << 10  # what `post` may leave behind before it drops
_READ_BYTES = 65_536
_FULL_S = 0.02  # between two attempts to get into a full backlog: nothing tells when there is room
_SLICE_S = 0.25  # how often a wait looks at its ``give_up``, and says that it reads
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# the arguments of recvmsg, each as what `map` takes it from
_READ = (_READ_BYTES,), (socket.CMSG_SPACE(p.MAX_FDS * 4),), (_CLOEXEC,)
INTERRUPTED = (
    "an exception (Ctrl-C, say) came while a message of the node was being taken in or one was "
    "being sent: the connection is made anew"
)

R = TypeVar("R", bound=p.Reply)


class PendingAnswer(Generic[R]):
    """A request that was sent and its answer of class ``kind``, once it came."""

    def __init__(
        self, kind: type[R], progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        self.kind = kind
        self.answer: p.Answer | None = None
        self.error: AtollError | None = None
        self.fds: list[Descriptor] = []
        self.progress = progress
        # ``error`` came from the node, and not from the loss of the connection.
        self.refused = False
        self.abandoned = False  # nobody waits any more: descriptors of a late answer are closed

    @property
    def done(self) -> bool:
        """Whether the answer, or an error, is here."""
        return self.answer is not None or self.error is not None

    def result(self) -> R:
        """The answer. Raises the error that came instead, LocalProtocolError when it is of another
        class.
        """
        if self.error is not None:
            raise self.error
        if not isinstance(self.answer, self.kind):
            raise LocalProtocolError(
                f"the node answered {type(self.answer).__name__}, not {self.kind.__name__}"
            )
        return self.answer


class Link:
    """A connection after its handshake. ``lost`` is the reason once it is no more; calls then raise
    it.

    ``on_push`` gets a push and the descriptors beside it, which are its own. It is called with the
    lock held, from whichever thread reads: it must be quick and not wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.lost: SwarmClosedError | None = None
        self.on_push: Callable[[p.Push, list[Descriptor]], None] = lambda push, fds: None
        self.welcome: p.Welcome | None = None
        self._socket = sock
        self._owner = os.getpid()
        self._lock = threading.RLock()  # of all that follows
        self._reader = 0  # the thread that waits on the socket for all, if one does,
        self._reader_until = 0.0  # until then, unless it says so again
        self._waiters: dict[int, Any] = {}  # a lock by thread, which is released to wake it
        self._torn = False
        self._unsent = bytearray()
        self._frames = p.answer_frames()
        self._arrived: list[tuple[bytes, list[tuple[int, int, bytes]], int, Any]] = []
        self._fds: list[Descriptor] = []  # those whose answer is not complete
        self._calls: dict[int, PendingAnswer[Any]] = {}
        self._next_id = 1
        self._ending = ""
        self._ended = False  # all that the loss ends has been ended
        close_in_children(self)

    @classmethod
    def connect(
        cls, path: Path, *, timeout_s: float = HELLO_S, give_up: Callable[[], bool] | None = None
    ) -> Link:
        """Connect and shake hands.

        Raises NetworkError (E003) when nobody listens at ``path``, NotAdmittedError when somebody
        else does, VersionMismatchError, DeadlineExceededError when the node does not answer.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(sock, path, timeout_s, give_up)
            check_peer(sock)
            link = cls(sock)
            call = link.submit(lambda id_: p.Hello(id_, VERSIONS, os.getpid()))
            link.welcome = link.finish(call, timeout_s=timeout_s, give_up=give_up)
        except BaseException:
            sock.close()
            raise
        return link

    # ── requests ──

    def submit(
        self,
        make: Callable[[int], p.Ask[R]],
        progress: Callable[[str, int, int], None] | None = None,
    ) -> PendingAnswer[R]:
        """Send the request that ``make`` makes of an id; its answer comes to what is returned.
        Raises SwarmClosedError when the link is lost, VersionMismatchError where the node is too
        old for it.
        """
        with eager(), self._lock:
            id_, self._next_id = self._next_id, self._next_id + 1
            request = make(id_)
            if self.welcome is not None and self.welcome.version < request.since:
                raise _too_old()
            call = PendingAnswer(p.reply_of(request), progress)
            data = p.frame(request)
            self._check()
            self._calls[id_] = call
            self._unsent += data
            self._flush()
            until = time.monotonic() + SEND_S
            while self._unsent and self.lost is None:
                if not _wait(self._socket, select.POLLOUT, until - time.monotonic()):
                    self._lose("the node does not read")
                self._flush()
        return call

    @property
    def process(self) -> int:
        """The node's process as this one sees it; 0 where it does not see it: what the node says of
        itself is then the number of some other process here.
        """
        pid = _peer_process(self._socket)
        said = self.welcome.pid if self.welcome is not None else 0
        return said if pid is None else pid

    def finish(
        self,
        call: PendingAnswer[R],
        *,
        timeout_s: float | None,
        give_up: Callable[[], bool] | None = None,
    ) -> R:
        """Wait for the answer. Raises what came instead; DeadlineExceededError when nothing came
        (the call is then abandoned).
        """
        if not self.wait_for(lambda: call.done, timeout_s, give_up):
            with self._lock:
                if not call.done:
                    self._check()
                    call.abandoned = True
                    raise _silent(self._socket, timeout_s or 0)
        return call.result()

    def ask(self, make: Callable[[int], p.Ask[R]], *, timeout_s: float | None) -> R:
        """submit and finish."""
        return self.finish(self.submit(make), timeout_s=timeout_s)

    def say_farewell(self, error: str) -> None:
        """Tell the node that this connection is closed on purpose, or why the script ends."""
        if self.welcome is not None:
            self.post(p.Farewell(error), may_drop=False)

    def post(self, message: p.Say, *, may_drop: bool) -> bool:
        """Send something that has no answer, without waiting. False when it was dropped: the node
        reads too slowly, is lost, or is too old for it.
        """
        with eager(), self._lock:
            self._mend()
            if self.lost is not None or (may_drop and len(self._unsent) > MAX_UNSENT_BYTES):
                return False
            if self.welcome is not None and self.welcome.version < message.since:
                return False
            self._unsent += p.frame(message)
            self._flush()
            return self.lost is None

    # ── reading ──

    def poll(self) -> None:
        """Take in what has come, without waiting. Never raises: look at ``lost``."""
        with eager(), self._lock:
            self._mend()
            if self.lost is None and not self._others_read(threading.get_ident(), time.monotonic()):
                self._flush()
                self._read()

    def wait_for(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None,
        give_up: Callable[[], bool] | None = None,
    ) -> bool:
        """Wait until ``ready()`` (True), or the link is lost, time is up or ``give_up()`` (then
        ``ready()`` as it is).
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        me = threading.get_ident()
        with eager():
            while True:
                with self._lock:
                    self._mend()
                    if self._arrived and self.lost is None:  # left by one who was interrupted
                        self._read(once=True)
                    if ready() or self.lost is not None or (give_up and give_up()):
                        return ready()
                    now = time.monotonic()
                    left = _SLICE_S if until is None else min(_SLICE_S, until - now)
                    if left <= 0:
                        self.poll()  # a timeout of 0 still takes what is there
                        return ready()
                    waiter = self._take_turn(me, now)
                if waiter is None:
                    self._read_for_all(left)
                else:
                    waiter.acquire(timeout=left)

    def _others_read(self, me: int, now: float) -> bool:
        """Whether another thread waits on the socket and was not ended there by an exception."""
        return self._reader not in (0, me) and now < self._reader_until

    def _take_turn(self, me: int, now: float) -> Any:
        """None: this thread reads for all. Else a lock that is released when there may be news."""
        if self._others_read(me, now):
            waiter = threading.Lock()
            waiter.acquire()  # before anybody can release it
            self._waiters[me] = waiter
            return waiter
        self._reader, self._reader_until = me, now + 2 * _SLICE_S
        return None

    def _read_for_all(self, timeout_s: float) -> None:
        """Wait for bytes, then read them for everybody."""
        readable = False
        try:
            readable = _wait(self._socket, select.POLLIN, timeout_s)
        finally:
            with self._lock:
                self._reader = 0
                self._wake()  # also when Ctrl-C ends this wait: another thread reads on
                self._mend()
                if readable and self.lost is None:
                    self._flush()
                    self._read(once=True)

    def _wake(self) -> None:
        """Have all that wait look whether it has come, and one of them read on."""
        while self._waiters:
            _, waiter = self._waiters.popitem()
            waiter.release()

    def _read(self, *, once: bool = False) -> None:
        """Take in what is there; ``once``: what one look brings, when more is looked for soon:
        every look gives up the interpreter's lock.
        """
        while self.lost is None:
            if not self._arrived:
                try:
                    # one step for an exception of another thread or a signal: what is read is kept
                    self._arrived.extend(map(self._socket.recvmsg, *_READ))
                except (BlockingIOError, InterruptedError):
                    return
                except OSError as error:
                    self._lose(f"{error.strerror or error}")
                    return
            self._torn = True
            strange = self._take_apart()
            self._torn = False
            if strange:
                self._lose(strange)
            self._wake()
            if once:
                return

    def _take_apart(self) -> str:
        """Dispatch what the oldest record completes. Why the connection is of no more use, or
        nothing.
        """
        data, ancillary, flags, _ = self._arrived[0]
        self._fds.extend(map(own, numbers(ancillary)))  # one step, as above
        self._arrived.clear()
        if not _CLOEXEC:
            for fd in self._fds:
                os.set_inheritable(fd.fileno(), False)
        if not data or flags & socket.MSG_CTRUNC:
            return self._ending or "the node ended"
        try:
            for answer in self._frames.feed(data):
                self._dispatch(answer)
        except AtollError as error:
            return f"the node said something strange: {error.message}"
        return ""

    def _fds_of(self, answer: p.Answer) -> list[Descriptor]:
        """The descriptors that came with it. Raises LocalProtocolError where they are others."""
        count = getattr(answer, "fds", 0)
        if not count:
            return []
        fds, self._fds = self._fds[:count], self._fds[count:]
        files: tuple[int, ...] = getattr(answer, "files", ())
        if len(fds) != count or (files and files_of(fds) != files):
            raise LocalProtocolError(
                f"{type(answer).__name__} came with descriptors that are not its own"
            )
        return fds

    def _dispatch(self, answer: p.Answer) -> None:
        fds = self._fds_of(answer)
        if isinstance(answer, p.Progress):
            call = self._calls.get(answer.id)
            if call is not None and call.progress is not None:
                call.progress(answer.stage, answer.done, answer.total)
        elif isinstance(answer, p.Ending):
            self._ending = f"the node shuts down: {answer.reason}"
        elif isinstance(answer, p.Push):
            self.on_push(answer, fds)
        elif isinstance(answer, p.Failure) and answer.id == 0:
            self._lose(f"the node closed the connection: {answer.message}", error_of(answer))
        else:
            self._answered(answer, fds)

    def _answered(self, answer: p.Reply | p.Failure, fds: list[Descriptor]) -> None:
        call = self._calls.pop(answer.id, None)
        if call is None or call.abandoned:
            close_all(fds)
        elif isinstance(answer, p.Failure):
            call.error, call.refused = error_of(answer), True
        else:
            call.answer, call.fds = answer, fds

    def _flush(self) -> None:
        try:
            while self._unsent and self.lost is None:
                self._torn = True
                del self._unsent[: self._socket.send(self._unsent)]
                self._torn = False
        except (BlockingIOError, InterruptedError):
            self._torn = False
        except OSError:
            self._torn = False
            self._read()  # its last words may lie there
            self._lose(self._ending or "the node ended")

    # ── the end ──

    def _mend(self) -> None:
        """Before anything else with the lock held: end the connection that an exception has left
        in the middle of something. So does a signal handler that calls this while its own thread
        is in there.
        """
        if self._torn and self.lost is None:
            self._lose(INTERRUPTED)
        elif self.lost is not None and not self._ended:
            self._end(self.lost)

    def _check(self) -> None:
        self._mend()
        if self.lost is not None:
            raise self.lost

    def _lose(self, reason: str, error: AtollError | None = None) -> None:
        if self.lost is None:
            self.lost = error if isinstance(error, SwarmClosedError) else closed(reason)
        if not self._ended:
            self._end(error or self.lost)

    def _end(self, error: AtollError) -> None:
        """What follows from the loss. May be done again where an exception ended it."""
        for call in list(self._calls.values()):
            call.error = call.error or error
        self._calls.clear()
        with contextlib.suppress(OSError):
            # closing alone would not wake a thread that waits on it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        arrived, self._arrived = self._arrived, []  # never twice: rather one is left open
        owned = {fd.fileno() for fd in self._fds}
        for _, ancillary, *_ in arrived:
            close_all(fd for fd in numbers(ancillary) if fd not in owned)
        close_all(self._fds)
        self._fds.clear()
        self._wake()
        self._ended = True

    def close(self, reason: str = "closed") -> None:
        """Close the connection; waiting threads get SwarmClosedError. Idempotent."""
        if self._owner == os.getpid():
            with self._lock:
                self._mend()
                self._lose(reason)

    def in_child(self) -> None:
        """The parent's connection is not the child's."""
        self.lost = SwarmClosedError(
            f"this swarm belongs to process {self._owner}, not to its forked child {os.getpid()}",
            hint="Use the swarm in the process that joined; data loader workers need no swarm.",
        )
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.close()
        close_all(self._fds)
        self._fds.clear()


def _connect(
    sock: socket.socket, path: Path, timeout_s: float, give_up: Callable[[], bool] | None
) -> None:
    """Connect and make it non-blocking; a full backlog (a busy or frozen node) is waited for."""
    until, pause = time.monotonic() + timeout_s, threading.Event()
    sock.setblocking(False)
    while True:
        try:
            check_folder(path)
            sock.connect(os.fsencode(path))
            return
        except BlockingIOError:
            if time.monotonic() >= until or (give_up is not None and give_up()):
                raise _silent(sock, timeout_s) from None
            pause.wait(_FULL_S)
        except OSError as error:
            raise no_node(path, error) from None


def _peer_process(sock: socket.socket) -> int | None:
    """The process at the other end, 0 for one of another PID namespace (a container); None where
    the system does not tell.
    """
    peer = getattr(socket, "SO_PEERCRED", None)
    with contextlib.suppress(OSError):
        if peer is not None:
            pid: int = struct.unpack_from("i", sock.getsockopt(socket.SOL_SOCKET, peer, 12))[0]
            return pid
    return None


def process_behind(path: Path) -> int:
    """The process that listens at ``path``, whether it answers or not; 0 where that is not known,
    or in another container. Raises NotAdmittedError where it is another user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        check_folder(path)
        sock.connect(os.fsencode(path))
        check_peer(sock)
        return _peer_process(sock) or 0
    return 0


def _silent(sock: socket.socket, waited_s: float) -> DeadlineExceededError:
    """E112: the node exists and does not answer."""
    why, hint = why_silent(_peer_process(sock) or 0)
    return DeadlineExceededError(
        f"the node did not answer within {waited_s:g} s", why=why, hint=hint, retryable=True
    )


def _wait(sock: socket.socket, event: int, timeout_s: float | None) -> bool:
    """Whether the socket became ready. select.poll: it knows no limit of descriptor numbers."""
    if sock.fileno() < 0:
        return True  # closed meanwhile: the next operation says so
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def closed(reason: str) -> SwarmClosedError:
    """E160."""
    return SwarmClosedError(
        reason,
        hint="atoll status tells whether a node runs; its log tells why it ended.",
    )


def _too_old() -> VersionMismatchError:
    return VersionMismatchError(
        "this machine's node is of an earlier version of atoll, which cannot do that",
        hint="Restart the node: atoll down, then atoll up",
    )


def no_node(path: Path, error: OSError) -> NetworkError:
    """E003: nobody listens there; E100 when even that cannot be found out."""
    absent = isinstance(error, FileNotFoundError | ConnectionRefusedError)
    if not absent:
        return NetworkError(f"cannot reach the node at {path}: {error.strerror or error}")
    return NetworkError(
        "no node of yours is running",
        code=NOT_RUNNING,
        exit_code=3,
        why=f"Nothing listens at {path}",
        hint="Start one: atoll up --background",
    )

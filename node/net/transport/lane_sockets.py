"""The TCP side of lanes: a listener on its own port, a dial, and the hello that proves both ends
know the secrets.

The hello: the dialler sends MAGIC, the token (16 bytes) and HMAC-SHA256(secrets, "dial" + token);
the listener, if it expects that token, answers HMAC-SHA256(secrets, "take" + token). Both leave the
socket without a byte unread. Whatever else arrives on the port is closed in silence.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from ....collectives.engine.settings import LOSSY, option_number
from ....collectives.identifiers import PeerId
from .addresses import (
    Place,
    check_port_free,
    host_and_port,
    is_direct,
    is_private,
    is_scoped,
    listening_at,
    places,
    usable,
)
from .door import machine_of
from .strangers import FRAME_S, StrangersShare, timed

MAGIC = b"atoll/1\n"
TOKEN_BYTES = 16
PROOF_BYTES = 32
HELLO_S = 2.0
DIAL_S = 3.0
STAGGER_S = 0.15
KNOCK_S, KNOCKS = 0.25, 3
# who keeps a connection for so long is there; below LATE_S, so that many who knock keep nobody out
STAYS_S = 0.4
MAX_PENDING = 128
"""Connections that have not said hello yet. Where there are more, the machine that has the most
gives up its oldest to another; of its own, whoever has been silent for `LATE_S` makes room, and
nobody comes in else.
"""
LATE_S = 0.5
USER_TIMEOUT_MS = 20_000
"""Longer than the longest legitimate pause of a reader: it only catches what the heartbeats miss.
"""


MayDial = Callable[[PeerId, str], bool]
"""(peer, an address that it named): whether it is dialled."""


@dataclass
class Expected:
    """A lane we wait for on our listener."""

    peer: PeerId
    secrets: bytes
    arrived: trio.Event = field(default_factory=trio.Event)
    socket: socket.socket | None = None

    def close(self) -> None:
        """Drop a socket that nobody took."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


@dataclass(eq=False)
class _Pending:
    """A connection that has not said hello. ``since``: monotonic seconds."""

    machine: str
    since: float
    patience: trio.CancelScope


def proof(secrets: bytes, role: bytes, token: bytes) -> bytes:
    """32 bytes that only somebody who knows both secrets can make."""
    return hmac.digest(secrets, b"atoll/lane/1/" + role + token, "sha256")


def set_options(sock: trio.socket.SocketType) -> None:
    """What a lane needs, as far as this system has it. Before connect, and on the listener for
    accepted sockets.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        *LOSSY,
    ):
        option = option_number(name)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    congestion = getattr(socket, "TCP_CONGESTION", None)
    if congestion is not None:
        with contextlib.suppress(OSError):  # the engine goes over to bbr where a path needs it
            sock.setsockopt(socket.IPPROTO_TCP, congestion, b"cubic")


def detach(sock: trio.socket.SocketType) -> socket.socket:
    """The same connection as an ordinary non-blocking socket that trio no longer knows."""
    plain = socket.socket(fileno=sock.detach())
    plain.setblocking(False)
    return plain


def path_of(sock: socket.socket, way: str = "direct") -> str:
    """ "lan" when the other end has a private address, else ``way``: also of a connection that has
    ended already, which whoever reads it finds out.
    """
    try:
        return "lan" if is_private(sock.getpeername()[0]) else way
    except OSError:
        return way


class LaneListener:
    """Accepts lanes that were agreed on before."""

    def __init__(
        self, hosts: Sequence[str], port: int, strangers: StrangersShare | None = None
    ) -> None:
        """``hosts``: numeric; at all but the first it listens at the same port if that is free.
        ``port`` 0 takes any. ``strangers``: who dials is one until its hello, and what that takes
        is of their share.
        """
        self._host, self._port, self._also = hosts[0], port, {*hosts[1:]} - {hosts[0]}
        self._bound: list[tuple[str, int]] = []
        self._expected: dict[bytes, Expected] = {}
        self._services: dict[bytes, Callable[[trio.socket.SocketType], Awaitable[None]]] = {}
        self._strangers = strangers or StrangersShare(lambda _: False, trio.current_time)
        self._pending: dict[_Pending, None] = {}  # oldest first
        self._announce: list[str] = []
        self.hidden = False
        self.outside: Callable[[], list[str]] = list
        """Addresses of the internet that lead here through a router."""

    @property
    def host(self) -> str:
        """Where it listens: a numeric address, perhaps the wildcard."""
        return self._host

    def serve(
        self, magic: bytes, service: Callable[[trio.socket.SocketType], Awaitable[None]]
    ) -> None:
        """Connections that begin with ``magic`` (as long as MAGIC) go to ``service``, which bounds
        their number and time; they are closed when it returns or raises OSError, unless it has
        detached them."""
        self._services[magic] = service

    def addresses(self, far: str = "") -> list[str]:
        """Where the listener can be dialled; empty before `run` and if nobody may know. fe80
        addresses only for who is connected from ``far``, a private host: they are of use on our own
        links alone, and may say which machine this is.
        """
        if self.hidden:
            return []
        near = bool(far) and is_private(far)
        told = [each for each in self._announce if near or not is_scoped(host_and_port(each)[0])]
        return [*self.outside(), *told]

    def look_again(self) -> None:
        """This machine's addresses are others."""
        self._announce = listening_at(self._bound)

    def expect(self, token: bytes, peer: PeerId, secrets: bytes) -> Expected:
        """From now on a hello with this token is accepted, once."""
        self._expected[token] = Expected(peer, secrets)
        return self._expected[token]

    def forget(self, token: bytes) -> None:
        """No longer; a socket that arrived and was not taken is closed."""
        expected = self._expected.pop(token, None)
        if expected is not None:
            expected.close()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept until cancelled. Raises ConfigError E101 when the port is taken."""
        check_port_free(self._host, self._port)
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(await self._listen(self._host, self._port))]
            for host in self._also:
                with contextlib.suppress(OSError):
                    listeners.append(
                        stack.enter_context(await self._listen(host, self._bound[0][1]))
                    )
            self.look_again()
            try:
                async with trio.open_nursery() as nursery:
                    for listener in listeners:
                        nursery.start_soon(self._accept, listener, nursery)
                    task_status.started()
            finally:
                for token in list(self._expected):
                    self.forget(token)

    async def _listen(self, host: str, port: int) -> trio.socket.SocketType:
        """Raises OSError."""
        listener = trio.socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
        )
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            set_options(listener)
            await listener.bind((host, port))
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        self._bound.append((host, listener.getsockname()[1]))
        return listener

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            await self._accept_one(listener, nursery)

    async def _accept_one(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        try:
            sock, (host, *_) = await listener.accept()
        except OSError:  # out of descriptors, or the connection is gone again
            await trio.sleep(0.05)
            return
        now, machine = trio.current_time(), machine_of(host)
        self._strangers.take(machine, seconds=FRAME_S)
        if len(self._pending) >= MAX_PENDING and not self._made_room(machine, now):
            sock.close()
            return
        pending = _Pending(machine, now, trio.CancelScope(deadline=now + HELLO_S))
        self._pending[pending] = None
        nursery.start_soon(self._greet, sock, pending)

    def _made_room(self, machine: str, now: float) -> bool:
        """Whether somebody has made room for who comes from ``machine``."""
        counts = Counter(each.machine for each in self._pending)
        busiest, count = counts.most_common(1)[0]
        if counts[machine] + 1 < count:
            oldest = next(each for each in self._pending if each.machine == busiest)
        else:
            oldest = next(iter(self._pending))
            if now - oldest.since < LATE_S:
                return False
        oldest.patience.cancel()
        del self._pending[oldest]
        return True

    async def _greet(self, sock: trio.socket.SocketType, pending: _Pending) -> None:
        service, share = None, self._strangers
        try:
            with sock:
                try:
                    with pending.patience:
                        await trio.sleep(share.rest_s(pending.machine))
                        spent = partial(share.take, pending.machine, 0)
                        service = await timed(self._heard(sock), spent)
                finally:
                    self._pending.pop(pending, None)
                if service is not None:
                    await service(sock)
        except OSError:
            pass

    async def _heard(
        self, sock: trio.socket.SocketType
    ) -> Callable[[trio.socket.SocketType], Awaitable[None]] | None:
        """Hear what the connection is for, and whether it proves that. Raises OSError."""
        magic = await receive_exactly(sock, len(MAGIC))
        if magic == MAGIC:
            await self._check_hello(sock)
        return self._services.get(magic)

    async def _check_hello(self, sock: trio.socket.SocketType) -> None:
        hello = await receive_exactly(sock, TOKEN_BYTES + PROOF_BYTES)
        token, shown = hello[:TOKEN_BYTES], hello[TOKEN_BYTES:]
        expected = self._expected.get(token)
        if expected is None or expected.socket is not None:
            return
        if not hmac.compare_digest(shown, proof(expected.secrets, b"dial", token)):
            return
        await send_all(sock, proof(expected.secrets, b"take", token))
        if self._expected.get(token) is expected and expected.socket is None:
            expected.socket = detach(sock)
            expected.arrived.set()


async def dial(addresses: Sequence[str], token: bytes, secrets: bytes) -> socket.socket | None:
    """A lane to whichever of the addresses answers first and proves that it knows the secrets; None
    after 3 s.

    Cancelled, it leaves no socket behind.
    """
    winner: list[socket.socket] = []
    named = [host_and_port(address) for address in usable(addresses) if is_direct(address)]
    targets = [place for host, port in named if _is_numeric(host) for place in places(host, port)]

    async def attempt(place: Place, failed: trio.Event) -> None:
        sock = await _dial_one(place, token, secrets)
        if sock is None:
            failed.set()
        else:
            winner.append(sock)
            nursery.cancel_scope.cancel()

    try:
        with trio.move_on_after(DIAL_S):
            async with trio.open_nursery() as nursery:
                for place in targets:
                    failed = trio.Event()
                    nursery.start_soon(attempt, place, failed)
                    with trio.move_on_after(STAGGER_S):
                        await failed.wait()
    except BaseException:
        for sock in winner:
            sock.close()
        raise
    for loser in winner[1:]:
        loser.close()
    return winner[0] if winner else None


async def refuses(host: str, port: int) -> bool:
    """Whether nobody listens there any more: the machine answers, and refuses the connection. A
    process that is killed closes its doors one after the other, so what it still took is waited
    for: when that ends, the answer is another. False where nothing answers for KNOCK_S, or somebody
    stays."""
    for _ in range(KNOCKS):
        try:
            if await _stays(host, port):
                return False
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False


async def _stays(host: str, port: int) -> bool:
    """Whether somebody there keeps a connection, or nobody answers at all. Raises OSError where it
    cannot be made.
    """
    with trio.socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
    ) as sock:
        with trio.move_on_after(KNOCK_S) as patience:
            await sock.connect((host, port))
        if patience.cancelled_caught:
            return True
        with trio.move_on_after(STAYS_S):
            try:
                return bool(await sock.recv(1))
            except OSError:
                return False
    return True


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _dial_one(place: Place, token: bytes, secrets: bytes) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    try:
        with trio.socket.socket(family, socket.SOCK_STREAM) as sock:
            set_options(sock)
            await sock.connect(place)
            return detach(sock) if await hello(sock, token, secrets) else None
    except OSError:
        return None


async def hello(sock: trio.socket.SocketType, token: bytes, secrets: bytes) -> bool:
    """Prove ourselves on a socket we dialled; whether the other end did, too. Raises OSError."""
    await send_all(sock, MAGIC + token + proof(secrets, b"dial", token))
    return hmac.compare_digest(
        await receive_exactly(sock, PROOF_BYTES), proof(secrets, b"take", token)
    )


async def be_greeted(sock: trio.socket.SocketType, token: bytes, secrets: bytes) -> bool:
    """The same from the other end. Raises OSError."""
    received = await receive_exactly(sock, len(MAGIC) + TOKEN_BYTES + PROOF_BYTES)
    if not hmac.compare_digest(received, MAGIC + token + proof(secrets, b"dial", token)):
        return False
    await send_all(sock, proof(secrets, b"take", token))
    return True


async def send_all(sock: trio.socket.SocketType, data: bytes) -> None:
    """Send everything. Raises OSError."""
    while data:
        data = data[await sock.send(data) :]


async def receive_exactly(sock: trio.socket.SocketType, count: int) -> bytes:
    """So many bytes. Raises OSError, also where the connection ends before."""
    data = b""
    while len(data) < count:
        piece = await sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("ended early")
        data += piece
    return data

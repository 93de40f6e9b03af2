"""What a router does to the ports of the hosts behind it, found out with plain sockets.

A mapping is the address under which a host's port is seen outside; a router filters what comes to
it from outside.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from netns.lab import PATIENCE_S, Host
from netns.nat import Inner

Address = tuple[str, int]
Verdict = Literal["open", "refused", "silent"]
SILENT_S = 0.5
"""What has not come by then does not come: there is no delay in these laboratories beyond 80 ms."""


def bound(kind: socket.SocketKind, address: str, port: int) -> socket.socket:
    """A socket on a port that others may use, too."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((address, port))
    return sock


class Server:
    """A public host's port, UDP and TCP."""

    def __init__(self, host: Host, port: int) -> None:
        self.host, self.address = host, (host.address, port)
        self.udp = host.inside(lambda: bound(socket.SOCK_DGRAM, host.address, port))
        self.tcp = host.inside(lambda: bound(socket.SOCK_STREAM, host.address, port))
        self.tcp.listen(16)
        for sock in (self.udp, self.tcp):
            sock.settimeout(PATIENCE_S)

    def close(self) -> None:
        """Both."""
        self.udp.close()
        self.tcp.close()


def udp_mappings(
    inner: Inner, port: int, servers: Sequence[Server], patience_s: float = PATIENCE_S
) -> list[Address | None]:
    """How each server sees the host's UDP port; None where nothing arrives."""
    found: list[Address | None] = []
    with inner.inside(lambda: bound(socket.SOCK_DGRAM, inner.address, port)) as sock:
        for server in servers:
            sock.sendto(b"x", server.address)
            server.udp.settimeout(patience_s)
            try:
                found.append(server.udp.recvfrom(16)[1])
            except TimeoutError:
                found.append(None)
    return found


def answers_udp(inner: Inner, port: int, asked: Server, answering: Server) -> bool:
    """Whether what ``answering`` sends to the mapping that ``asked`` sees gets in."""
    with inner.inside(lambda: bound(socket.SOCK_DGRAM, inner.address, port)) as sock:
        sock.sendto(b"x", asked.address)
        _, mapped = asked.udp.recvfrom(16)
        answering.udp.sendto(b"y", mapped)
        sock.settimeout(SILENT_S)
        try:
            return sock.recv(16) == b"y"
        except TimeoutError:
            return False


@contextmanager
def tcp_mappings(inner: Inner, port: int, servers: Sequence[Server]) -> Iterator[list[Address]]:
    """How each server sees the host's TCP port, while the connections last."""
    with ExitStack() as stack:
        found: list[Address] = []
        for server in servers:
            sock = stack.enter_context(
                inner.inside(lambda: bound(socket.SOCK_STREAM, inner.address, port))
            )
            sock.settimeout(PATIENCE_S)
            sock.connect(server.address)
            accepted, seen = server.tcp.accept()
            stack.enter_context(accepted)
            found.append(seen)
        yield found


def knock(host: Host | Inner, target: Address, port: int = 0) -> Verdict:
    """What a TCP connection from this host's port to there meets."""
    with host.inside(lambda: bound(socket.SOCK_STREAM, host.address, port)) as sock:
        sock.settimeout(SILENT_S)
        try:
            sock.connect(target)
        except TimeoutError:
            return "silent"
        except ConnectionRefusedError:
            return "refused"
        return "open"


def simultaneous_open(
    a: Inner,
    a_port: int,
    b: Inner,
    b_port: int,
    a_seen: Address,
    b_seen: Address,
    limit_s: float = 4.0,
) -> bool:
    """Whether two hosts that dial each other's mappings at once are connected."""
    ends: list[tuple[socket.socket, Address]] = []
    with ExitStack() as stack:
        for inner, port, target in ((a, a_port, b_seen), (b, b_port, a_seen)):
            sock = stack.enter_context(
                inner.inside(
                    lambda inner=inner, port=port: bound(socket.SOCK_STREAM, inner.address, port)
                )
            )
            sock.setblocking(False)
            ends.append((sock, target))
        for sock, target in ends:
            assert sock.connect_ex(target) in (0, errno.EINPROGRESS)
        until = time.monotonic() + limit_s
        for sock, _ in ends:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000) or sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            ):
                return False
        ends[0][0].send(b"hello")
        ends[1][0].settimeout(PATIENCE_S)
        return ends[1][0].recv(5) == b"hello"

"""How libp2p connections are made besides the library's own way: from the listen port, over a
stream, as the answering end, and as a probe.

A TCP connection that leaves from the port on which we listen shows the other side the very address
at which a NAT lets answers to that port in. So what a public peer observes of such a connection is
our address, if we have one, on NATs that keep ports and on those that do not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import trio
from libp2p.connection_types import ConnectionType
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from multiaddr import Multiaddr

from ....collectives.errors import PeerLostError, PeerUnreachableError
from .addresses import Place, host_and_port, is_public, is_scoped, places
from .peer_stream import PeerStream

PROBE_S = 3.0


class _Pipe(ReadWriteCloser):
    """A stream through a relay in the role of a socket."""

    def __init__(self, stream: PeerStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        return await self._stream.receive_some(65_536 if n is None else n) if n != 0 else b""

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except PeerLostError as error:
            raise ConnectionClosedError(str(error), transport="circuit") from None

    async def close(self) -> None:
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class Dialler:
    """Makes connections and remembers how. Used from the trio thread only."""

    def __init__(self, swarm: Swarm) -> None:
        """Made before `workarounds.apply`, whose accepted connections have another life."""
        self._swarm, self._upgrade_inbound = swarm, swarm.upgrade_inbound_raw_conn
        self.from_listen: Callable[[str], bool] = lambda host: True
        """Whether dials to a host of the internet leave from the listen port. Who is behind no NAT
        learns nothing by it, and two who dial each other at the same moment from their listen ports
        get one connection with two beginnings."""
        self._sources: dict[int, tuple[str, int]] = {}
        # Noted before anybody can hear of the connection.
        self._paths: WeakKeyDictionary[RawConnection, str] = WeakKeyDictionary()

    def listens(self, host: str, port: int) -> None:
        """A socket of ours listens there (``host`` may be a wildcard): dials may leave from it."""
        self._sources.setdefault(_family(host), (host, port))

    async def dial(self, address: str, target: ID) -> None:
        """A connection to ``target`` at ``address``, from our listen port if it is one of the
        internet's. Raises what libp2p raises, or OSError.
        """
        host, port = host_and_port(address)
        if is_scoped(host):  # libp2p's transport has no word for our interface
            await self._upgrade(await _connect_by_a_link(host, port), target, "")
            return
        source = (
            self._sources.get(_family(host))
            if _numeric(host) and is_public(host) and self.from_listen(host)
            else None
        )
        stream = await _connect(host, port, source) if source else None
        if stream is None:
            await self._swarm.dial_addr(Multiaddr(address), target)
            return
        await self._upgrade(stream, target, "listen")

    async def _upgrade(self, stream: trio.SocketStream, target: ID, way: str) -> None:
        raw = RawConnection(TrioTCPStream(stream), True)
        self._paths[raw] = way
        try:
            await self._swarm.upgrade_outbound_raw_conn(raw, target)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise

    async def punch(
        self,
        address: str,
        target: ID,
        *,
        initiator: bool,
        dial: trio.CancelScope,
        pause_s: Callable[[], float],
    ) -> None:
        """Open a connection at the same moment as ``target`` does, from our listen port. Raises
        PeerUnreachableError.

        ``dial``: what ends the dialling, not the handshake; ``pause_s()``: how long to wait after a
        router has refused. ``initiator``: which part we play in the handshake, since TCP gives both
        ends the same. As the other one it returns when the connection ends.
        """
        host, port = host_and_port(address)
        source = self._sources.get(_family(host)) if _numeric(host) else None
        stream: trio.SocketStream | None = None
        with dial:
            while stream is None and source is not None:
                with contextlib.suppress(OSError):
                    stream = await _connect(host, port, source)
                if stream is None:
                    await trio.sleep(pause_s())
        if stream is None:
            raise PeerUnreachableError(f"no way through to {address}")
        if initiator:
            await self._upgrade(stream, target, "punched")
            return
        raw = RawConnection(TrioTCPStream(stream), False)
        self._paths[raw] = "punched"
        await self._accept(raw, address, target)

    async def over(self, stream: PeerStream, address: str, target: ID, *, initiator: bool) -> None:
        """A connection to ``target`` over a stream through a relay. As the answering end it returns
        when the connection ends.
        """
        raw = RawConnection(_Pipe(stream), initiator, ConnectionType.RELAYED, [Multiaddr(address)])
        self._paths[raw] = "relay"
        if initiator:
            try:
                await self._swarm.upgrade_outbound_raw_conn(raw, target)
            except BaseException:
                await stream.aclose()
                raise
        else:
            await self._accept(raw, address, target)

    async def _accept(self, raw: RawConnection, address: str, target: ID) -> None:
        try:
            muxed: Any = await self._upgrade_inbound(raw, Multiaddr(address))
            if muxed.peer_id != target:
                await muxed.close()
                raise PeerUnreachableError(f"{muxed.peer_id} answered in place of {target}")
            await muxed.event_closed.wait()
        finally:
            with trio.move_on_after(1.0, shield=True):
                await raw.close()

    async def probe(self, host: str, port: int, target: ID) -> bool:
        """Whether ``target`` answers there, on a connection of its own from a fresh port, which is
        closed at once.
        """
        with trio.move_on_after(PROBE_S):
            try:
                stream = await _connect(host, port, None)
            except OSError:
                return False
            if stream is None:
                return False
            try:
                await self._swarm.upgrader.upgrade_security(
                    RawConnection(TrioTCPStream(stream), True), True, target
                )
                return True
            except Exception:
                return False
            finally:
                await trio.aclose_forcefully(stream)
        return False

    def way(self, connection: Any) -> str:
        """How a connection was made: "relay", "punched", "listen" (from our listen port) or "" (any
        other way).
        """
        raw = _raw(connection)
        return self._paths.get(raw, "") if raw is not None else ""

    def accepted(self, connection: Any) -> bool:
        """Whether the other end has the opening part in a connection."""
        raw = _raw(connection)
        return raw is not None and not raw.is_initiator

    def ends(self, connection: Any) -> tuple[str, str] | None:
        """Our host and the other's, of a connection that is no relayed one; None where they cannot
        be told.
        """
        try:
            sock = _raw(connection).stream.stream.socket  # a relayed one has none
            return _plain(sock.getsockname()[0]), _plain(sock.getpeername()[0])
        except (AttributeError, OSError):
            return None


def why(error: BaseException) -> str:
    """Why a dial failed, in few words: the system's where it said something, else who answered in
    place of the peer.
    """
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    if any(isinstance(cause, PeerIDMismatchesPubkey) for cause in causes):
        return "another peer answers there"
    if any(isinstance(cause, MultiselectClientError) for cause in causes):
        return "what answers there is no node, or one that is full"
    return str(error.__cause__ or error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all that led to it."""
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop(0)
        if id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            waiting += [
                found for found in (cause.__cause__, cause.__context__) if found is not None
            ]
            waiting += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()


def _raw(connection: Any) -> Any:
    """The `RawConnection` under a connection of the swarm's; None where there is none."""
    try:
        return connection.muxed_conn.secured_conn.conn.read_writer.read_write_closer
    except AttributeError:
        return None


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:")


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _numeric(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


async def _connect_by_a_link(host: str, port: int) -> trio.SocketStream:
    """Connect to an fe80 host by whichever of our links leads there. Raises OSError. Cancelled, it
    leaves no socket behind.
    """
    found = list[trio.SocketStream]()
    failed = OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    async def attempt(place: Place) -> None:
        nonlocal failed
        try:
            stream = await _connect(*place[:2], None, place)
        except OSError as error:
            failed = error
        else:
            if stream is not None:
                found.append(stream)
                nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            for place in places(host, port):
                nursery.start_soon(attempt, place)
    except BaseException:
        for stream in found:
            stream.socket.close()
        raise
    for stream in found[1:]:
        stream.socket.close()
    if not found:
        raise failed
    return found[0]


async def _connect(
    host: str, port: int, source: tuple[str, int] | None, place: Place | None = None
) -> trio.SocketStream | None:
    """Connect, from ``source`` if it is given, to ``place`` of a host that has several; None when
    the source cannot be used (now). Raises OSError. Cancelled, it leaves no socket behind.
    """
    sock = trio.socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        if source is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            if source is not None:
                await sock.bind(source)
            await sock.connect(place or (host, port))
        except OSError as error:
            if source is not None and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                sock.close()
                return None
            raise
        return trio.SocketStream(sock)
    except BaseException:
        sock.close()
        raise

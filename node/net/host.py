"""The libp2p host (TCP, Noise, Yamux) behind a small surface: dial, streams, link events. Errors of libp2p end here.

This file, `workarounds` and `dht.wire` are all that name libp2p.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from ...collectives.errors import AtollError, ConfigError, PeerLostError, PeerUnreachableError
from ...collectives.identifiers import PeerId
from ...security.identity import Identity
from . import workarounds
from .addresses import check_port_free, expand, host_and_port, usable

DIAL_S = 10.0
"""A whole dial of one peer, all addresses, handshakes included. Generous: on a busy machine a handshake waits for its CPU, and one
that is cut off has cost as much as one that succeeds."""
STAGGER_S = 0.2
"""Pause before the next address of a peer is tried beside the first (RFC 8305 says 250 ms)."""
CLOSE_S = 3.0
DIALS_AT_ONCE = 4
"""A handshake costs both ends milliseconds of CPU: a node that meets a crowd greets it a few at a time, or all would time out."""

log = logging.getLogger("atoll.net")


class PeerStream:
    """An ordered, authenticated, encrypted byte stream to one peer."""

    def __init__(self, peer: PeerId, stream: Any) -> None:
        self.peer = peer
        self._stream = stream

    async def send_all(self, data: bytes) -> None:
        """Send everything. Raises PeerLostError. Cancelled in the middle it leaves the stream unusable: close it then."""
        try:
            await self._stream.write(data)
        except Exception as error:
            raise PeerLostError(f"the stream to {self.peer} broke: {error}", peer=self.peer) from None

    async def receive_some(self, max_bytes: int = 65_536) -> bytes:
        """Up to ``max_bytes``; b"" when the stream has ended, in whatever way. Cancellation loses nothing."""
        try:
            return await self._stream.read(max_bytes)
        except Exception:
            return b""

    async def finish(self) -> None:
        """Say that nothing more will be sent; the other side can still read what was sent."""
        try:
            await self._stream.close()
        except Exception as error:
            raise PeerLostError(f"the stream to {self.peer} broke: {error}", peer=self.peer) from None

    async def aclose(self) -> None:
        """End the stream in both directions, at once. Never raises and never waits for the peer."""
        with trio.move_on_after(0.5, shield=True):
            try:
                await self._stream.reset()
            except Exception as error:
                log.debug("reset failed: %r", error)


Handler = Callable[[PeerStream], Awaitable[None]]


class Host:
    """Our end of all connections."""

    def __init__(self, identity: Identity, listen: Sequence[str], *, announce: Sequence[str] = (), max_connections: int = 300) -> None:
        """``listen``: addresses such as ``/ip4/0.0.0.0/tcp/0``; ``announce``: what to tell others in their place."""
        self.peer = identity.peer
        self._listen = list(listen)
        self._announce = usable(announce)
        workarounds.quiet_logs()
        self._host: Any = new_host(
            key_pair=create_new_key_pair(identity.seed),
            muxer_opt={TProtocol(YAMUX_ID): Yamux},
            listen_addrs=[Multiaddr(address) for address in listen],
            connection_config=workarounds.connection_config(max_connections),
            disable_identify_address_discovery=True,  # one observer is no evidence; our own address logic decides what to announce
        )
        self._swarm: Swarm = self._host.get_network()
        workarounds.apply(self._swarm)
        self._dials: dict[PeerId, trio.Event] = {}
        self._dial_limit = trio.CapacityLimiter(DIALS_AT_ONCE)
        self._links: deque[tuple[PeerId, bool]] = deque()
        self._links_changed = trio.Event()
        self._up: set[PeerId] = set()
        self._arrival = trio.Event()
        self._addresses: list[str] = []

    async def run(self, on_link: Callable[[PeerId, bool], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; then every socket is closed and no task is left. ``on_link(peer, up)`` is called in this task.

        Raises ConfigError E101 when a port is taken.
        """
        for address in self._listen:
            check_port_free(*host_and_port(address))
        stop, ready = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, ready, stop)
            try:
                await ready.wait()
                task_status.started()
                while True:
                    await self._links_changed.wait()
                    self._links_changed = trio.Event()
                    while self._links:
                        on_link(*self._links.popleft())
            finally:
                stop.set()

    async def _serve(self, ready: trio.Event, stop: trio.Event) -> None:
        """The life of the libp2p host. Shielded: its closing needs checkpoints, and cancellation must not leave sockets behind."""
        with trio.CancelScope(shield=True):
            async with self._host.run(listen_addrs=[Multiaddr(address) for address in self._listen]):
                self._addresses = self._listening()
                self._swarm.register_notifee(_LinkNotifee(self._link_changed))
                ready.set()
                await stop.wait()
                with trio.move_on_after(CLOSE_S):
                    await self._close_connections()
                    await self._host.close()

    async def _close_connections(self) -> None:
        """All at once: one by one each takes 0.1 s (`SwarmConn._cleanup` sleeps)."""
        async with trio.open_nursery() as nursery:
            for connections in list(self._swarm.connections.values()):
                for connection in list(connections):
                    nursery.start_soon(connection.close)

    def _listening(self) -> list[str]:
        found: list[str] = []
        for address in self._host.get_transport_addrs():
            host, port = host_and_port(str(address))
            found += expand(host, port)
        if not found:
            raise ConfigError(f"cannot listen on {', '.join(self._listen)}", key="listen", code="E101", exit_code=73)
        return found

    def addresses(self) -> list[str]:
        """Where others can dial us, without the peer id; empty before `run` has started."""
        return list(self._announce) or list(usable(self._addresses))

    def handle(self, protocol: str, handler: Handler) -> None:
        """Call ``handler`` for each stream a peer opens with ``protocol``. The stream is closed when it returns or raises."""

        async def serve(stream: Any) -> None:
            wrapped = PeerStream(PeerId(str(stream.muxed_conn.peer_id)), stream)
            try:
                await handler(wrapped)
            except AtollError as error:
                log.debug("%s from %s: %s", protocol, wrapped.peer, error)
            except Exception:  # a defect of ours, set off by a peer: it costs this stream and nothing else
                log.exception("handler of %s failed for %s", protocol, wrapped.peer)
            finally:
                await wrapped.aclose()

        self._host.set_stream_handler(TProtocol(protocol), serve)

    async def wait_connected(self, peer: PeerId, patience_s: float) -> bool:
        """Whether ``peer`` connects to us within ``patience_s``, or is connected already."""
        with trio.move_on_after(patience_s):
            while not self.connected(peer):
                await self._arrival.wait()
        return self.connected(peer)

    def connected(self, peer: PeerId) -> bool:
        """Whether there is an open connection."""
        return peer in self._up

    def remote_host(self, peer: PeerId) -> str:
        """The numeric host at the other end of a connection to ``peer``; "" where there is none, or none is known."""
        for connection in self._swarm.get_connections(ID.from_base58(peer)):
            with contextlib.suppress(Exception):  # a connection through a relay has none
                muxed: Any = connection.muxed_conn
                remote = muxed.get_remote_address()
                if remote is not None:
                    return str(remote[0])
        return ""

    def peers(self) -> list[PeerId]:
        """The connected peers."""
        return sorted(self._up)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make sure there is a connection; several addresses are tried side by side, 0.2 s apart.

        Raises PeerUnreachableError when none answers within 10 s. Cancelled, it leaves nothing behind.
        """
        while peer in self._dials:
            await self._dials[peer].wait()
        if self._has_connection(peer):
            return
        candidates = usable(addresses)
        if not candidates or peer == self.peer:
            raise PeerUnreachableError(f"no address of {peer} is known", peer=peer)
        self._dials[peer] = trio.Event()
        try:
            async with self._dial_limit:
                if not self._has_connection(peer):  # it may have dialled us meanwhile
                    await self._dial(peer, candidates)
        finally:
            self._dials.pop(peer).set()

    async def _dial(self, peer: PeerId, candidates: Sequence[str]) -> None:
        failures: list[str] = []
        target = ID.from_base58(peer)

        async def attempt(address: str, failed: trio.Event) -> None:
            try:
                await self._swarm.dial_addr(Multiaddr(address), target)
            except Exception as error:
                failures.append(f"{address}: {error.__cause__ or error}")
                failed.set()
            else:
                nursery.cancel_scope.cancel()

        with trio.move_on_after(DIAL_S):
            async with trio.open_nursery() as nursery:
                for address in candidates:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed)
                    with trio.move_on_after(STAGGER_S):
                        await failed.wait()
        if not self._has_connection(peer):
            tried = "; ".join(failures) or f"no answer in {DIAL_S:g} s from {', '.join(candidates)}"
            raise PeerUnreachableError(f"cannot reach {peer}: {tried}", peer=peer)

    def _has_connection(self, peer: PeerId) -> bool:
        return any(not connection.is_closed for connection in self._swarm.get_connections(ID.from_base58(peer)))

    async def open_stream(self, peer: PeerId, protocol: str, timeout_s: float = 10.0) -> PeerStream:
        """A new stream over the existing connection.

        Raises PeerUnreachableError when there is no connection, when the peer does not speak ``protocol``, or after ``timeout_s``.
        """
        if not self._has_connection(peer):
            raise PeerUnreachableError(f"not connected to {peer}", peer=peer)
        try:
            with trio.fail_after(timeout_s):
                stream = await self._host.new_stream(ID.from_base58(peer), [TProtocol(protocol)])
        except Exception as error:
            raise PeerUnreachableError(f"{peer} opened no {protocol} stream: {error}", peer=peer) from None
        return PeerStream(peer, stream)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer. Never raises; waits at most a second."""
        with trio.move_on_after(1.0, shield=True):
            try:
                await self._host.disconnect(ID.from_base58(peer))
            except Exception as error:
                log.debug("disconnect failed: %r", error)

    def _link_changed(self, peer: PeerId) -> None:
        up = self._has_connection(peer)
        if up != (peer in self._up):
            (self._up.add if up else self._up.discard)(peer)
            self._links.append((peer, up))
            self._links_changed.set()
            self._arrival.set()
            self._arrival = trio.Event()


class _LinkNotifee(INotifee):
    """Tells the host that connections of a peer came or went."""

    def __init__(self, changed: Callable[[PeerId], None]) -> None:
        self._changed = changed

    async def connected(self, network: Any, conn: Any) -> None:
        self._changed(PeerId(str(conn.muxed_conn.peer_id)))

    async def disconnected(self, network: Any, conn: Any) -> None:
        self._changed(PeerId(str(conn.muxed_conn.peer_id)))

    async def opened_stream(self, network: Any, stream: Any) -> None:
        pass

    async def closed_stream(self, network: Any, stream: Any) -> None:
        pass

    async def listen(self, network: Any, multiaddr: Any) -> None:
        pass

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        pass

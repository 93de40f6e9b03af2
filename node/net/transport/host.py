"""The libp2p host (TCP, Noise, Yamux) behind a small surface: dial, streams, link events. Errors of
libp2p end here.

This file, `dialling`, `peer_stream`, `workarounds` and `dht.wire` are all that knows libp2p.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from ....collectives.errors import AtollError, ConfigError, PeerLostError, PeerUnreachableError
from ....collectives.foreign import escaped
from ....collectives.identifiers import PeerId
from ....security.identity import Identity
from . import workarounds
from .addresses import (
    check_port_free,
    host_and_port,
    is_private,
    listening_at,
    split_circuit,
    usable,
)
from .dialling import Dialler, why
from .peer_stream import PeerStream
from .strangers import StrangersShare, timed

DIAL_S = 10.0
"""A whole dial of one peer, all addresses, handshakes included. Generous: on a busy machine a
handshake waits for its CPU, and one that is cut off has cost as much as one that succeeds."""
STAGGER_S = 0.2
"""Pause before the next address of a peer is tried beside the first (RFC 8305 says 250 ms)."""
CLOSE_S = 3.0
PING = "/ipfs/ping/1.0.0"
DIALS_AT_ONCE = 4
"""A handshake costs both ends milliseconds of CPU: a node that meets a crowd greets it a few at a
time, or all would time out.
"""
TURN_S = 1.0
"""A dial that takes longer waits for the network, and no more keeps others from their turn: a few
addresses at which nobody answers, of dead bootstrap nodes or of the peers of an earlier life, would
shut out for 10 s each the one that does."""

log = logging.getLogger("atoll.net")

Handler = Callable[[PeerStream], Awaitable[None]]
Through = Callable[[PeerId, str, PeerId], Awaitable[None]]
"""(relay, its address, peer): make a connection to a peer through a relay. Raises NetworkError."""


class NotSpokenError(PeerUnreachableError):
    """The peer is there and says that it does not speak the protocol: it is no node of ours."""


class Host:
    """Our end of all connections."""

    def __init__(
        self,
        identity: Identity,
        listen: Sequence[str],
        *,
        announce: Sequence[str] = (),
        max_connections: int = 300,
        rng: random.Random | None = None,
    ) -> None:
        """``listen``: addresses such as ``/ip4/0.0.0.0/tcp/0``; ``announce``: what to tell others
        in their place.

        Set before `run`, if at all: ``advertised()``, what to tell others; ``through``, which makes
        connections through relays; ``known(peer)``, whether it is no stranger (`strangers`).
        """
        self.peer = identity.peer
        self._listen = list(listen)
        self._announce = usable(announce)
        workarounds.quiet_logs()
        key_pair = create_new_key_pair(identity.seed)
        self._host: Any = new_host(
            key_pair=key_pair,
            # Named one by one, for both directions: whatever is left out the library fills with all
            # that it can do, plaintext included, in which a stranger says whose key it has.
            transports=[TCP()],
            sec_opt={NOISE_ID: Noise(key_pair, create_noise_key_pair().private_key)},
            muxer_opt={TProtocol(YAMUX_ID): Yamux},
            listen_addrs=[Multiaddr(address) for address in listen],
            connection_config=workarounds.connection_config(max_connections),
            # one observer is no evidence; our own address logic decides what to announce
            disable_identify_address_discovery=True,
        )
        # Keeps what a stranger says about itself, which nothing here reads.
        self._host.remove_stream_handler(ID_PUSH)
        self._swarm: Swarm = self._host.get_network()
        self.strangers = StrangersShare(lambda peer: self.known(PeerId(peer)), trio.current_time)
        self._serve_one: Any = self._swarm.common_stream_handler
        self._swarm.set_stream_handler(self._serve_fairly)
        self.dialler = Dialler(self._swarm)
        workarounds.apply(
            self._swarm,
            rng or random.Random(),
            max_connections,
            self._connection_ended,
            self.strangers,
        )
        self.advertised: Callable[[], Sequence[str]] = lambda: (
            self._announce or usable(self._addresses)
        )
        self.through: Through | None = None
        self.known: Callable[[PeerId], bool] = lambda peer: False
        self._ends: deque[PeerId] = deque()
        self._dials: dict[PeerId, trio.Event] = {}
        self._dial_limit = trio.CapacityLimiter(DIALS_AT_ONCE)
        self._links: deque[tuple[PeerId, bool | None]] = deque()
        self._links_changed = trio.Event()
        self._up: set[PeerId] = set()
        self._arrival = trio.Event()
        self._addresses: list[str] = []

    async def run(
        self,
        on_link: Callable[[PeerId, bool], None],
        on_path: Callable[[PeerId], None] = lambda peer: None,
        on_end: Callable[[PeerId], None] = lambda peer: None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen until cancelled; then every socket is closed and no task is left.

        ``on_link(peer, up)`` is called when the first connection of a peer is there or the last one
        gone, ``on_path(peer)`` when one came or went beside others, whoever made or closed it, and
        ``on_end(peer)`` as soon as one ends, 0.2 s before libp2p and the others say so; all in this
        task.

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
                    while self._ends:
                        on_end(self._ends.popleft())
                    while self._links:
                        peer, up = self._links.popleft()
                        on_path(peer) if up is None else on_link(peer, up)
            finally:
                stop.set()

    async def _serve(self, ready: trio.Event, stop: trio.Event) -> None:
        """The life of the libp2p host. Shielded: its closing needs checkpoints, and cancellation
        must not leave sockets behind.
        """
        with trio.CancelScope(shield=True):
            async with self._host.run(
                listen_addrs=[Multiaddr(address) for address in self._listen]
            ):
                self._addresses = self._listening()
                for address in self._host.get_transport_addrs():
                    self.dialler.listens(*host_and_port(str(address)))
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
        found = listening_at(
            host_and_port(str(address)) for address in self._host.get_transport_addrs()
        )
        if not found:
            raise ConfigError(
                f"cannot listen on {', '.join(self._listen)}",
                key="listen",
                code="E101",
                exit_code=73,
            )
        return found

    def addresses(self) -> list[str]:
        """Where others can get to us, without the peer id; empty before `run` has started."""
        return list(self.advertised())

    def listening(self) -> list[str]:
        """Where this machine's interfaces are now, with our port. Looks anew: they may have
        changed. Raises ConfigError E101.
        """
        self._addresses = self._listening()
        return self._addresses

    async def _serve_fairly(self, stream: Any) -> None:
        """Every stream that a peer opens, whatever it is for, the library's own protocols and the
        agreement on one included: a stranger's draws on what there is for strangers.
        """
        wrapped = PeerStream(PeerId(str(stream.muxed_conn.peer_id)), stream)
        if self.known(wrapped.peer):
            return await self._serve_one(stream)
        share, machine = self.strangers, wrapped.machine

        def spent(seconds: float) -> None:
            if not self.known(wrapped.peer):
                share.take(machine, seconds=seconds)

        served = _Served(wrapped.peer)
        shown_out = share.streams.enter(served, machine)
        if isinstance(shown_out, _Served) and not self.known(shown_out.peer):
            shown_out.scope.cancel()  # maybe our own
        try:
            with served.scope:
                return await timed(self._serve_one(stream), spent)
            await wrapped.aclose()
        finally:
            share.streams.leave(served)

    def handle(self, protocol: str, handler: Handler) -> None:
        """Call ``handler`` for each stream a peer opens with ``protocol``. The stream is closed
        when it returns or raises.
        """

        async def serve(stream: Any) -> None:
            wrapped = PeerStream(PeerId(str(stream.muxed_conn.peer_id)), stream)
            try:
                await handler(wrapped)
            except AtollError as error:
                log.debug("%s from %s: %s", protocol, wrapped.peer, error)
            except OSError as error:  # the system refuses: no defect, and no traceback
                log.warning("%s from %s: %s", protocol, wrapped.peer, error)
            except (
                Exception
            ):  # a defect of ours, set off by a peer: it costs this stream and nothing else
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

    async def wait_path(
        self, peer: PeerId, holds: Callable[[str], bool], patience_s: float
    ) -> bool:
        """Whether that ``holds`` of the `path` to ``peer`` within ``patience_s``."""
        with trio.move_on_after(patience_s):
            while not holds(self.path(peer)):
                await self._arrival.wait()
        return holds(self.path(peer))

    async def wait_direct(self, peer: PeerId, patience_s: float) -> bool:
        """Whether there is a connection to ``peer`` without a relay, within ``patience_s``."""
        return await self.wait_path(peer, lambda path: path not in ("", "relay"), patience_s)

    def path(self, peer: PeerId) -> str:
        """How ``peer`` is connected: "lan", "direct", "punched" or "relay", the best there is; ""
        when it is not.
        """
        found = ""
        for connection in self._open_connections(peer):
            way, ends = self.dialler.way(connection), self.dialler.ends(connection)
            if way != "relay":
                return (
                    "punched"
                    if way == "punched"
                    else "lan"
                    if ends and is_private(ends[1])
                    else "direct"
                )
            found = "relay"
        return found

    def relayed(self, peer: PeerId) -> bool:
        """Whether there is a connection to ``peer`` through a relay, maybe beside others."""
        return any(
            self.dialler.way(connection) == "relay" for connection in self._open_connections(peer)
        )

    def called(self, peer: PeerId) -> bool:
        """Whether ``peer`` called us through a relay, on a connection that is there."""
        found = self._open_connections(peer)
        return any(
            self.dialler.way(connection) == "relay" and self.dialler.accepted(connection)
            for connection in found
        )

    def ends(self, peer: PeerId, *, from_listen: bool = False) -> tuple[str, str] | None:
        """Our host and the peer's, of a connection without a relay; ``from_listen``: of one that
        left from our listen port.
        """
        for connection in self._open_connections(peer):
            ends = self.dialler.ends(connection)
            if ends and (not from_listen or self.dialler.way(connection) in ("listen", "punched")):
                return ends
        return None

    def heard_at(self, peer: PeerId) -> float:
        """When something came from ``peer`` over a connection without a relay; trio's time, -inf
        without such a connection.
        """
        direct = [
            connection
            for connection in self._open_connections(peer)
            if self.dialler.way(connection) != "relay"
        ]
        return max(
            (connection.muxed_conn.liveness.heard_at for connection in direct), default=-math.inf
        )

    async def close_relayed(self, peer: PeerId) -> None:
        """Close connections to ``peer`` that go through a relay. Never raises."""
        for connection in self._open_connections(peer):
            if self.dialler.way(connection) == "relay":
                await self._close(connection)

    async def close_strays(self, stray: Callable[[str, str], bool]) -> None:
        """Close connections of which that holds: (our host, the peer's), of connections without a
        relay. Never raises.
        """
        async with trio.open_nursery() as nursery:
            for peer in self.peers():
                for connection in self._open_connections(peer):
                    ends = self.dialler.ends(connection)
                    if ends and stray(*ends):
                        nursery.start_soon(self._close, connection)

    async def _close(self, connection: Any) -> None:
        with trio.move_on_after(1.0):
            try:
                await connection.close()
            except Exception as error:
                log.debug("close failed: %r", error)

    def connected(self, peer: PeerId) -> bool:
        return peer in self._up

    def remote_host(self, peer: PeerId) -> str:
        """The numeric host at the other end of a connection to ``peer``; "" where there is none, or
        none is known.
        """
        for connection in self._swarm.get_connections(ID.from_base58(peer)):
            with contextlib.suppress(Exception):  # a connection through a relay has none
                muxed: Any = connection.muxed_conn
                remote = muxed.get_remote_address()
                if remote is not None:
                    return str(remote[0])
        return ""

    def peers(self) -> list[PeerId]:
        return sorted(self._up)

    async def connect(
        self, peer: PeerId, addresses: Sequence[str], *, nested: bool = False
    ) -> None:
        """Make sure there is a connection; several addresses are tried side by side, 0.2 s apart,
        those through relays last.

        ``nested``: inside another connect (to its relay), whose turn it shares. Raises
        PeerUnreachableError when none answers within 10 s. Cancelled, it leaves nothing behind.
        """
        while peer in self._dials:
            await self._dials[peer].wait()
        if self.has_connection(peer):
            return
        candidates = sorted(
            usable(addresses), key=lambda address: split_circuit(address) is not None
        )
        if not candidates or peer == self.peer:
            raise PeerUnreachableError(f"no address of {peer} is known", peer=peer)
        dialled = self._dials[peer] = trio.Event()
        try:
            if not nested:
                await self._dial_limit.acquire_on_behalf_of(dialled)
            try:
                if not self.has_connection(peer):  # it may have dialled us meanwhile
                    await self._dial(peer, candidates, lambda: self._give_turn_back(dialled))
            finally:
                self._give_turn_back(dialled)
        finally:
            self._dials.pop(peer).set()

    def _give_turn_back(self, dialled: trio.Event) -> None:
        if dialled in self._dial_limit.statistics().borrowers:
            self._dial_limit.release_on_behalf_of(dialled)

    async def _dial(
        self, peer: PeerId, candidates: Sequence[str], slow: Callable[[], None]
    ) -> None:
        """``slow`` is called when it takes long."""
        failures: list[str] = []
        target = ID.from_base58(peer)

        async def attempt(address: str, failed: trio.Event) -> None:
            try:
                hop = split_circuit(address)
                if hop is None:
                    await self.dialler.dial(address, target)
                elif self.through is None:
                    raise PeerUnreachableError("no relays here", peer=peer)
                else:
                    await self.through(*hop, peer)
            except Exception as error:
                failures.append(f"{address}: {why(error)}")
                failed.set()
                if len(failures) < len(candidates):
                    return
            nursery.cancel_scope.cancel()

        async def hurry() -> None:
            await trio.sleep(TURN_S)
            slow()

        with trio.move_on_after(DIAL_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hurry)
                for address in candidates:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed)
                    with trio.move_on_after(STAGGER_S):
                        await failed.wait()
        if not self.has_connection(peer):
            tried = "; ".join(failures) or f"no answer in {DIAL_S:g} s from {', '.join(candidates)}"
            raise PeerUnreachableError(f"cannot reach {peer}: {tried}", peer=peer)

    async def dial_direct(self, peer: PeerId, addresses: Sequence[str], patience_s: float) -> bool:
        """Try for a connection without a relay beside one that has one."""
        with trio.move_on_after(patience_s):
            async with trio.open_nursery() as nursery:

                async def attempt(address: str) -> None:
                    try:
                        await self.dialler.dial(address, ID.from_base58(peer))
                    except Exception as error:
                        log.debug("%s: %r", address, error)
                    else:
                        nursery.cancel_scope.cancel()

                for address in addresses:
                    nursery.start_soon(attempt, address)
        return self.path(peer) not in ("", "relay")

    async def punch(
        self,
        peer: PeerId,
        address: str,
        *,
        initiator: bool,
        dial: trio.CancelScope,
        pause_s: Callable[[], float],
    ) -> None:
        """Whether it worked, `wait_direct` tells."""
        try:
            await self.dialler.punch(
                address, ID.from_base58(peer), initiator=initiator, dial=dial, pause_s=pause_s
            )
        except Exception as error:
            log.debug("punching %s: %r", address, error)

    async def join(
        self, stream: PeerStream, address: str, peer: PeerId, *, initiator: bool
    ) -> None:
        """A connection to ``peer`` over a stream through a relay. As the answering end it returns
        when the connection ends.

        Raises PeerUnreachableError.
        """
        try:
            await self.dialler.over(stream, address, ID.from_base58(peer), initiator=initiator)
        except Exception as error:
            raise PeerUnreachableError(
                f"no connection to {peer} through {stream.peer}: {escaped(error)}", peer=peer
            ) from None

    async def answers(self, peer: PeerId, host: str, port: int) -> bool:
        """Whether ``peer`` can be reached there anew, from a fresh port."""
        return await self.dialler.probe(host, port, ID.from_base58(peer))

    def _open_connections(self, peer: PeerId) -> list[Any]:
        return [
            connection
            for connection in self._swarm.get_connections(ID.from_base58(peer))
            if not connection.is_closed
        ]

    def has_connection(self, peer: PeerId) -> bool:
        """Whether there is an open connection now: `connected` follows libp2p's notices."""
        return bool(self._open_connections(peer))

    async def open_stream(self, peer: PeerId, protocol: str, timeout_s: float = 10.0) -> PeerStream:
        """A new stream over the existing connection.

        Raises NotSpokenError when the peer does not speak ``protocol``, PeerUnreachableError when
        there is no connection, or after ``timeout_s``.
        """
        if not self.has_connection(peer):
            raise PeerUnreachableError(f"not connected to {peer}", peer=peer)
        try:
            with trio.fail_after(timeout_s):
                stream = await self._host.new_stream(ID.from_base58(peer), [TProtocol(protocol)])
        except Exception as error:
            kind = (
                NotSpokenError
                if str(error.__cause__).startswith("protocols not supported")
                else PeerUnreachableError
            )
            raise kind(f"{peer} opened no {protocol} stream: {escaped(error)}", peer=peer) from None
        return PeerStream(peer, stream)

    async def ping(self, peer: PeerId) -> float:
        """The round-trip time over the connection there is, in seconds. Raises
        PeerUnreachableError, PeerLostError after 10 s.
        """
        stream, sent = await self.open_stream(peer, PING), secrets.token_bytes(32)
        try:
            began, back = trio.current_time(), b""
            await stream.send_all(sent)
            with trio.move_on_after(DIAL_S):
                while len(back) < len(sent) and (
                    piece := await stream.receive_some(len(sent) - len(back))
                ):
                    back += piece
            if back != sent:
                raise PeerLostError(f"{peer} did not answer a ping", peer=peer)
            return trio.current_time() - began
        finally:
            await stream.aclose()

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer. Never raises; waits at most a second."""
        with trio.move_on_after(1.0, shield=True):
            try:
                await self._host.disconnect(ID.from_base58(peer))
            except Exception as error:
                log.debug("disconnect failed: %r", error)

    def lost(self, peer: PeerId) -> bool:
        """Count a peer as not connected, before libp2p says so: then its next connection is news.
        False where there is an open one.
        """
        if self.has_connection(peer):
            return False
        self._up.discard(peer)
        return True

    def _connection_ended(self, peer: str) -> None:
        self._ends.append(PeerId(peer))
        self._links_changed.set()

    def _link_changed(self, peer: PeerId) -> None:
        up = self.has_connection(peer)
        turned = up != (peer in self._up)
        (self._up.add if up else self._up.discard)(peer)
        self._links.append((peer, up if turned else None))
        self._links_changed.set()
        self._arrival.set()
        self._arrival = trio.Event()


class _Served:
    """A stream of a stranger that is being served."""

    def __init__(self, peer: PeerId) -> None:
        self.peer, self.scope = peer, trio.CancelScope()


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

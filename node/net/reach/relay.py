"""A relay: peers that nobody can dial keep a place here, and others are connected to them through
it. It sees ciphertext only.

Each circuit ends by itself when an end closes, when it has carried its bytes, or when its time is
over, and closes its own two streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from ....collectives.errors import NetworkError, PeerLostError, RemoteProtocolError
from ....collectives.identifiers import PeerId
from ..transport.addresses import is_direct, join_peer
from ..transport.faults import Faults
from ..transport.host import Host
from ..transport.peer_stream import PeerStream
from . import circuit, protobuf
from .ledger import RelayLedger, RelayLimits

STALLED_S = 20.0
"""A circuit whose receiving end takes nothing for so long is over."""


class CircuitRelay:
    """Serves HOP. Used from the trio thread only."""

    def __init__(
        self,
        host: Host,
        faults: Faults,
        limits: RelayLimits,
        *,
        serves: Callable[[], bool],
        knows: Callable[[PeerId], bool],
        related: Callable[[PeerId, PeerId], bool],
    ) -> None:
        """``serves()``: whether we can be dialled at all; ``knows(peer)``: is in a run we know;
        ``related(a, b)``: are in the same one.
        """
        self._host, self._faults, self._serves, self._knows, self._related = (
            host,
            faults,
            serves,
            knows,
            related,
        )
        self.ledger = RelayLedger(limits)
        host.handle(circuit.HOP, self._serve)

    def link_changed(self, peer: PeerId, up: bool) -> None:
        """Whoever is not connected is not reachable through us."""
        if not up:
            self.ledger.drop(peer)

    async def _serve(self, stream: PeerStream) -> None:
        peer = stream.peer
        if self._faults.shut_out(peer, trio.current_time()):
            return
        try:
            with trio.fail_after(circuit.ANSWER_S):
                request = await protobuf.receive(stream)
                kind = circuit.kind_of(request, peer)
                if kind == circuit.HOP_RESERVE:
                    await self._reserve(stream)
                    return
                if kind != circuit.HOP_CONNECT or stream.remote is None:
                    await self._refuse(stream, circuit.UNEXPECTED)
                    return
            await self._connect(stream, circuit.peer_in(request, peer))
        except RemoteProtocolError:
            self._faults.count(peer, trio.current_time())
        except (NetworkError, trio.TooSlowError):
            pass

    async def _refuse(self, stream: PeerStream, status: int) -> None:
        await circuit.answer(stream, status, hop=True)
        await stream.finish()
        with trio.move_on_after(2.0):  # let it be read before the stream is reset
            await stream.receive_some()

    async def _reserve(self, stream: PeerStream) -> None:
        peer, remote = stream.peer, stream.remote
        addresses = [
            join_peer(self._host.peer, address)
            for address in self._host.addresses()
            if is_direct(address)
        ]
        if (
            remote is None
            or not addresses
            or not self._serves()
            or not (self.ledger.limits.open_to_all or self._knows(peer))
        ):
            await self._refuse(stream, circuit.PERMISSION_DENIED)
        elif not self.ledger.reserve(peer, remote[0], trio.current_time()):
            await self._refuse(stream, circuit.LIMIT_EXCEEDED)
        else:
            limits = self.ledger.limits
            reservation = circuit.reservation_fields(
                int(time.time() + limits.reservation_s), addresses
            )
            limit = protobuf.encode({1: int(limits.circuit_s), 2: limits.circuit_bytes})
            await circuit.answer(stream, circuit.OK, hop=True, more={3: reservation, 4: limit})
            await stream.finish()

    async def _connect(self, stream: PeerStream, target: PeerId) -> None:
        now, ledger = trio.current_time(), self.ledger
        if not ledger.holds(target, now) or not self._host.connected(target):
            await self._refuse(stream, circuit.NO_RESERVATION)
        elif target == stream.peer or not (
            ledger.limits.open_to_all or self._related(stream.peer, target)
        ):
            ledger.refused["strangers"] += 1
            await self._refuse(stream, circuit.PERMISSION_DENIED)
        elif not ledger.begin(stream.peer, target):
            await self._refuse(stream, circuit.LIMIT_EXCEEDED)
        else:
            try:
                await self._join(stream, target)
            finally:
                ledger.end(stream.peer, target)

    async def _join(self, stream: PeerStream, target: PeerId) -> None:
        limits = self.ledger.limits
        try:
            other = await self._host.open_stream(target, circuit.STOP)
        except NetworkError:
            await self._refuse(stream, circuit.CONNECTION_FAILED)
            return
        try:
            with trio.fail_after(circuit.ANSWER_S):
                limit = protobuf.encode({1: int(limits.circuit_s), 2: limits.circuit_bytes})
                await protobuf.send(
                    other, {1: circuit.STOP_CONNECT, 2: circuit.peer_field(stream.peer), 3: limit}
                )
                if circuit.status_in(await protobuf.receive(other), 4) != circuit.OK:
                    await self._refuse(stream, circuit.CONNECTION_FAILED)
                    return
                await circuit.answer(stream, circuit.OK, hop=True, more={4: limit})
            await self._carry(stream, other)
        finally:
            await other.aclose()

    async def _carry(self, one: PeerStream, other: PeerStream) -> None:
        """Both ways, until it is over, whatever ends it."""
        left = self.ledger.limits.circuit_bytes

        async def pump(source: PeerStream, sink: PeerStream, scope: trio.CancelScope) -> None:
            nonlocal left
            try:
                while data := await source.receive_some():
                    left -= len(data)
                    if left < 0:
                        break
                    with trio.fail_after(STALLED_S):
                        await sink.send_all(data)
                    self.ledger.carried += len(data)
            except (PeerLostError, trio.TooSlowError):
                pass
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + self.ledger.limits.circuit_s
            nursery.start_soon(pump, one, other, nursery.cancel_scope)
            nursery.start_soon(pump, other, one, nursery.cancel_scope)

"""A relay for lanes: bulk bytes between two peers that cannot reach each other, over a third that
both can (protocol ``/atoll/public/1``).

Every node says to whoever asks where its lane listener is and whether it relays; the connected
peers with public addresses are our helpers: observers of our ports, and relays. A peer asks a
relay, over libp2p, for a circuit to another peer of a run; the relay gives it two vouchers
(`vouchers`), one for each end. Both ends dial the relay's lane listener, say MAGIC and show theirs;
when both are there, each is told READY, and from then on the relay moves bytes (`splice`). The
lane's hello and its encryption go end to end; a plain lane does not go over a relay.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import trio

from ....collectives.errors import NetworkError, PeerUnreachableError, RemoteProtocolError
from ....collectives.foreign import PLAIN, quoted
from ....collectives.identifiers import PeerId
from ..transport.addresses import (
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES,
    has_public,
    host_and_port,
    usable,
)
from ..transport.framing import FrameReader, decode, frame
from ..transport.host import Host, PeerStream
from ..transport.lane_sockets import LaneListener, detach, receive_exactly, send_all, set_options
from .observing import MAGIC as OBSERVE
from .observing import Observing
from .splice import Splice
from .vouchers import CIRCUIT_BYTES, VOUCHER_BYTES, Limits, NoVoucherError, VoucherGrant, Vouchers

PROTOCOL = "/atoll/public/1"
MAGIC = b"atoll/r\n"
READY = b"r"
ANSWER_S = 3.0
DIAL_S = 3.0
MAX_READING = 256
"""Connections that have not shown a voucher yet; more are closed at once, and whoever is shown out
comes again: holding one costs less.
"""
_MAX_MESSAGE_BYTES = 4096

Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS, pattern=PLAIN)], ...],
    msgspec.Meta(max_length=MAX_ADDRESSES),
]
Voucher = Annotated[bytes, msgspec.Meta(min_length=VOUCHER_BYTES, max_length=VOUCHER_BYTES)]


class _Which(msgspec.Struct, frozen=True, array_like=True, tag="which"):
    """Where is your lane listener, and do you relay?"""


class _Serving(msgspec.Struct, frozen=True, array_like=True, tag="serving"):
    addresses: Addresses
    relays: bool


class _CircuitRequest(msgspec.Struct, frozen=True, array_like=True, tag="circuit"):
    """Please relay between me and ``peer``, of this run."""

    run: Annotated[str, msgspec.Meta(max_length=128, pattern=PLAIN)]
    peer: Annotated[str, msgspec.Meta(max_length=128, pattern=PLAIN)]


class _Granted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    mine: Voucher
    theirs: Voucher
    addresses: Addresses


class _Denied(msgspec.Struct, frozen=True, array_like=True, tag="denied"):
    reason: Annotated[str, msgspec.Meta(max_length=512)]


_Question = _Which | _CircuitRequest
_Answer = _Serving | _Granted | _Denied
_questions, _answers = msgspec.msgpack.Decoder(_Question), msgspec.msgpack.Decoder(_Answer)


class LaneRelay:
    """What this node does for others. Used from the trio thread only; `close` ends its thread."""

    def __init__(
        self,
        host: Host,
        listener: LaneListener,
        knows: Callable[[str, PeerId], bool],
        limits: Limits | None = None,
    ) -> None:
        """``knows(run, peer)``: whether this peer is known to take part in the run. Others are not
        served.
        """
        self._listener, self._knows = listener, knows
        self._vouchers = Vouchers(secrets.token_bytes(32), limits or Limits())
        self._waiting: dict[bytes, tuple[trio.socket.SocketType, trio.Event]] = {}
        self._reading = 0
        self._over: list[bytes] = []  # by the splice's thread
        self._splice: Splice | None = None
        host.handle(PROTOCOL, self._serve)
        listener.serve(OBSERVE, Observing().answer)
        listener.serve(MAGIC, self._arrived)

    @property
    def circuits(self) -> int:
        self._tidy()
        return self._vouchers.circuits

    @property
    def nbytes(self) -> int:
        """Bytes moved for others since the start."""
        return self._splice.nbytes if self._splice else 0

    def close(self) -> None:
        if self._splice is not None:
            self._splice.stop()
            self._splice = None

    def _tidy(self) -> None:
        while self._over:
            self._vouchers.ended(self._over.pop())

    async def _serve(self, stream: PeerStream) -> None:
        with trio.move_on_after(ANSWER_S):
            payload = await FrameReader(stream.receive_some, stream.peer).next(_MAX_MESSAGE_BYTES)
            if payload is None:
                return
            question = decode(_questions, payload, stream.peer)
            where = tuple(usable(self._listener.addresses()))
            if isinstance(question, _Which):
                answer: _Answer = _Serving(where, has_public(where))
            else:
                answer = self._grant(stream.peer, question, where)
            await stream.send_all(frame(msgspec.msgpack.encode(answer)))
            await stream.finish()
            await stream.receive_some()

    def _grant(
        self, asker: PeerId, question: _CircuitRequest, where: tuple[str, ...]
    ) -> _Granted | _Denied:
        peer = PeerId(question.peer)
        if asker == peer or not (
            self._knows(question.run, asker) and self._knows(question.run, peer)
        ):
            return _Denied("both ends must be known members of a run that this relay knows")
        self._tidy()
        try:
            mine, theirs = self._vouchers.issue(
                trio.current_time(), secrets.token_bytes(CIRCUIT_BYTES), question.run, (asker, peer)
            )
        except NoVoucherError as error:
            return _Denied(str(error))
        return _Granted(mine, theirs, where)

    async def _arrived(self, sock: trio.socket.SocketType) -> None:
        """One end of a circuit, on the lane listener."""
        claim: VoucherGrant | None = None
        if self._reading >= MAX_READING:
            return
        self._reading += 1
        try:
            with trio.move_on_after(ANSWER_S):
                voucher = await receive_exactly(sock, VOUCHER_BYTES)
                self._tidy()
                claim = self._vouchers.show(trio.current_time(), voucher)
        finally:
            self._reading -= 1
        if claim is None:
            return
        if claim.circuit in self._waiting:
            with trio.move_on_after(ANSWER_S):
                await self._join(claim, sock)
            return
        with trio.move_on_after(self._vouchers.limits.show_s):
            self._waiting[claim.circuit] = sock, trio.Event()
            try:
                await self._waiting[claim.circuit][1].wait()
            finally:
                self._waiting.pop(claim.circuit, None)

    async def _join(self, claim: VoucherGrant, sock: trio.socket.SocketType) -> None:
        """The second end is there."""
        first, came = self._waiting.pop(claim.circuit)
        for end in (first, sock):
            await send_all(end, READY)
        now = trio.current_time()
        self._vouchers.begun(now, claim.circuit)
        if self._splice is None:
            self._splice = Splice(self._vouchers.limits.idle_s)
        self._splice.add(
            detach(first),
            detach(sock),
            claim.bytes_left,
            claim.until - now,
            lambda: self._over.append(claim.circuit),
        )
        came.set()


class Helpers:
    """Connected peers with public addresses, and what they do for us. Trio thread only."""

    def __init__(self, host: Host, addresses: Callable[[PeerId], Sequence[str]]) -> None:
        """``addresses``: where a peer is reached."""
        self._host, self._addresses = host, addresses
        self._serving: dict[PeerId, _Serving] = {}

    async def met(self, peer: PeerId) -> None:
        """There is a connection: if the peer has a public address, ask what it does. Raises nothing
        that a peer can cause.
        """
        if has_public(self._addresses(peer)):
            try:
                answer = await self._ask(peer, _Which())
            except (NetworkError, RemoteProtocolError):
                return
            if (
                isinstance(answer, _Serving)
                and has_public(answer.addresses)
                and self._host.connected(peer)
            ):
                self._serving[peer] = answer

    def lost(self, peer: PeerId) -> None:
        self._serving.pop(peer, None)

    def observers(self, but: PeerId) -> list[tuple[str, int]]:
        """Where to ask how we are seen: one IPv4 address a machine, without this peer."""
        found: dict[str, tuple[str, int]] = {}
        for peer, serving in self._serving.items():
            for host, port in (
                host_and_port(address) for address in serving.addresses if has_public((address,))
            ):
                if peer != but and ":" not in host:
                    found.setdefault(host, (host, port))
        return list(found.values())

    def relays(self, but: PeerId) -> list[PeerId]:
        return [peer for peer, serving in self._serving.items() if serving.relays and peer != but]

    async def circuit(
        self, relay: PeerId, run: str, peer: PeerId
    ) -> tuple[bytes, bytes, tuple[str, ...]]:
        """Vouchers for us and for ``peer``, and where to show them. Raises PeerUnreachableError,
        RemoteProtocolError.
        """
        answer = await self._ask(relay, _CircuitRequest(run, peer))
        if isinstance(answer, _Denied):
            raise PeerUnreachableError(
                f"the relay {relay} refuses: {quoted(answer.reason)}", peer=relay
            )
        if not isinstance(answer, _Granted):
            raise RemoteProtocolError("a circuit is granted or denied", peer=relay)
        return (
            answer.mine,
            answer.theirs,
            tuple(address for address in answer.addresses if has_public((address,))),
        )

    async def _ask(self, peer: PeerId, question: _Question) -> _Answer:
        stream = await self._host.open_stream(peer, PROTOCOL)
        try:
            with trio.move_on_after(ANSWER_S):
                await stream.send_all(frame(msgspec.msgpack.encode(question)))
                payload = await FrameReader(stream.receive_some, peer).next(_MAX_MESSAGE_BYTES)
                if payload is not None:
                    return decode(_answers, payload, peer)
            raise PeerUnreachableError(f"{peer} did not answer", peer=peer)
        finally:
            await stream.aclose()


async def show(addresses: Sequence[str], voucher: bytes) -> trio.socket.SocketType:
    """Our end of a circuit, once the other one is there, too. Raises OSError."""
    for address in addresses:
        host, port = host_and_port(address)
        sock = trio.socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
        )
        try:
            set_options(sock)
            with trio.move_on_after(DIAL_S):
                await sock.connect((host, port))
                await send_all(sock, MAGIC + voucher)
                if await receive_exactly(sock, len(READY)) == READY:
                    return sock
        except OSError:
            pass
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise ConnectionError(f"no relay answers at {', '.join(addresses) or 'any address'}")

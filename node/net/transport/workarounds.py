"""Everything we do against faults of py-libp2p 0.8.1, and nothing else. Each function names the
fault it works around.

When libp2p is upgraded, read this file first: whatever was mended upstream goes.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from libp2p.abc import IMuxedStream
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_SYN,
    GO_AWAY_NORMAL,
    HEADER_SIZE,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
    Yamux,
)
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from ....collectives.engine.settings import LOSSY, option_number
from .door import Door, machine_of
from .liveness import Liveness
from .strangers import FRAME_S, MOST_REST_S, StrangersShare, timed
from .unread import UnreadShare

_read, _init = TrioTCPStream.read, TrioTCPStream.__init__  # the library's, however often replaced

REPEATED_S = 60.0
"""Between two records of a library that say the same."""
WRITE_S = 5.0
"""A frame that cannot be handed to TCP for so long means that the peer is frozen or gone."""
CREDIT_BYTES = 65_536
"""A quarter of the window that every stream begins with: so much may be held back without anybody
having to wait.
"""


MAX_STREAMS = 256
"""That a peer may have open at us on one connection. Ours has some forty."""
MAX_NAME_BYTES = 1024
"""Of a message in which a protocol is agreed on: a name, mostly."""
SLACK_BYTES = 65_536
OUTGOING = 100
"""Connections that we may always make, however many others come."""
CALL_REST_S = 5.0
"""Who calls from a machine that rests is greeted after so long at most: it may be no stranger."""
OF_ONE_PEER = 6
"""Connections that a peer needs at most: both dial at once, over a relay, punched, and those of
before that nobody knows to be dead.
"""
READ_BYTES = 65_536


class _FloodError(trio.TooSlowError):
    """What `Yamux.handle_incoming` ends a connection for."""


class _Unread(bytearray):
    """What came on a stream and was not read yet. Raises _FloodError where a peer sends more than
    it was given leave to.
    """

    def __init__(self, muxed: OurYamux, stream: int) -> None:
        self._muxed, self._stream = muxed, stream

    def extend(self, data: Any, /) -> None:
        stream: Any = self._muxed.streams[self._stream]
        if stream.closed and stream.reset_received:
            return  # nobody reads it any more
        super().extend(data)
        # the library grants up to twice of it
        beyond = len(self) > 2 * stream.target_recv_window + SLACK_BYTES
        if beyond or self._muxed.share.exceeds(self._muxed, self._muxed.machine):
            raise _FloodError


class _UnreadOfAll(dict[int, bytearray]):
    """The library puts its buffers here."""

    def __init__(self, muxed: OurYamux) -> None:
        super().__init__()
        self._muxed = muxed

    def __setitem__(self, stream: int, buffer: bytearray, /) -> None:
        super().__setitem__(stream, _Unread(self._muxed, stream))


def _unread_of(muxed: OurYamux) -> int:
    return sum(map(len, muxed.stream_buffers.values()))


class OurYamux(Yamux):
    """Six faults of `Yamux`: a cancelled write kills the whole connection, every read tells the
    sender so, nobody minds a ping without answer, a peer may send more than a window and open
    streams without end, and the end of a connection is told late.

    `NoiseTransportReadWriter.write_msg` (security/noise/io.py:59) encrypts, which advances the
    nonce, and only then awaits the socket: when a timeout around any stream operation strikes
    there, the bytes never leave and the other side can decrypt nothing more. Reads are not safe
    either, because they send window updates. Under load this closed healthy connections every few
    seconds. A frame is therefore written whole, whatever is cancelled around it, or the connection
    is given up.

    `YamuxStream.read` (stream_muxer/yamux/yamux.py:474) sends a window update each time, also for
    each byte of the lengths that libp2p reads one by one: they are half of all frames, and a frame
    costs both ends a quarter of a millisecond. Small ones are therefore held back until they are
    worth a frame, as in go-yamux.

    `_measure_rtt_loop` (stream_muxer/yamux/yamux.py:702) sends a ping every half a minute, used or
    not, and goes on when nothing answers: a connection to a machine that froze, or that sleeps, is
    there for ever. `liveness` says when to ask and when to give up.

    `handle_incoming` (stream_muxer/yamux/yamux.py:1528) logs it when a peer sends more than its
    window, and keeps the bytes: whoever connects could fill our memory. Such a connection is ended.
    Nor does it count the streams that a peer opens, each of which costs a task: more than
    `MAX_STREAMS` are reset. What came on a stream that was reset is kept for a minute (:877), and
    more of it: here it goes at once.

    `close` (:823), and after it `SwarmConn._cleanup` (network/connection/swarm_connection.py:218),
    sleep for 0.1 s each before anybody is told that the connection has ended. A round that lost a
    peer takes less than that to be done again. `ended` tells it before.
    """

    credit: dict[int, int]  # by stream: bytes that were read there and not told yet
    liveness: Liveness
    ended: Callable[[], None]
    share: UnreadShare
    strangers: StrangersShare
    peer: str
    machine: str

    async def close(self, error_code: int = GO_AWAY_NORMAL) -> None:
        """End the connection. Whoever holds it counts it as closed by now."""
        self.ended()
        await super().close(error_code)

    def _held_back(self, header: bytes) -> bytes:
        """The window update to send in place of ``header``; b"" for none yet."""
        version, kind, flags, stream, nbytes = struct.unpack(YAMUX_HEADER_FORMAT, header)
        if kind != TYPE_WINDOW_UPDATE or flags:
            return header
        nbytes += self.credit.pop(stream, 0)
        if nbytes >= CREDIT_BYTES:
            return struct.pack(YAMUX_HEADER_FORMAT, version, kind, flags, stream, nbytes)
        if stream in self.streams:
            self.credit[stream] = nbytes
        if len(self.credit) > 2 * len(self.streams):
            self.credit = {
                stream: held for stream, held in self.credit.items() if stream in self.streams
            }
        return b""

    async def _write_frame(self, data: bytes) -> None:
        if len(data) == HEADER_SIZE:
            data = self._held_back(data)
            if not data:
                return
        with trio.move_on_after(WRITE_S, shield=True) as patience:
            await super()._write_frame(data)
        if patience.cancelled_caught:
            await self._cut()
            raise ConnectionClosedError("a frame could not be written", transport="tcp")
        self.charge(len(data))

    def charge(self, nbytes: int) -> None:
        """A frame has come or gone: of a stranger's share."""
        if not self.strangers.known(self.peer):
            self.strangers.take(self.machine, nbytes, FRAME_S)

    async def rest(self) -> None:
        """Before more of a stranger is read."""
        if not self.strangers.known(self.peer):
            rest_s = self.strangers.rest_s(self.machine)
            if rest_s > MOST_REST_S:
                await self._cut()
            elif rest_s:
                await trio.sleep(rest_s)

    async def accept_stream(self) -> IMuxedStream:
        """The next stream that the peer opens and may have."""
        while True:
            stream: Any = await super().accept_stream()
            if (
                sum(not (other.is_initiator or other.closed) for other in self.streams.values())
                <= MAX_STREAMS
            ):
                return stream
            with contextlib.suppress(Exception):
                await stream.reset()

    async def _finalize_stream(self, stream: Any, *, fully_closed: bool) -> None:
        if stream.closed and stream.reset_received:
            self.stream_buffers.get(stream.stream_id, bytearray()).clear()
        await super()._finalize_stream(stream, fully_closed=fully_closed)

    async def _cut(self) -> None:
        """End the connection without a word; whoever reads from it notices."""
        with trio.move_on_after(0, shield=True):
            await self.secured_conn.close()  # trio closes the socket even when it is cancelled

    async def _measure_rtt_loop(self) -> None:
        while not self.event_shutting_down.is_set():
            with trio.move_on_at(self.liveness.at):
                await self.event_shutting_down.wait()
                return
            verdict = self.liveness.due(trio.current_time())
            if verdict == "dead":
                await self._cut()
            elif verdict == "ask":
                self._ping_id += 1
                with contextlib.suppress(Exception):  # then the reader has noticed, too
                    await self._write_frame(
                        struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, self._ping_id)
                    )
                self._ping_sent_time = trio.current_time()


def use_our_yamux(
    swarm: Swarm, rng: random.Random, ended: Callable[[str], None], strangers: StrangersShare
) -> None:
    """`MuxerMultistream.new_conn` (stream_muxer/muxer_multistream.py:135) makes a plain Yamux
    whatever class it was given.
    """
    upgrade, share = swarm.upgrader.upgrade_connection, UnreadShare(_unread_of)

    async def upgrade_and_convert(conn: Any, peer_id: Any) -> Any:
        muxed: Any = await upgrade(conn, peer_id)
        muxed.__class__ = OurYamux
        muxed.credit, muxed.liveness = {}, Liveness(trio.current_time(), rng)
        muxed.ended = lambda: ended(str(muxed.peer_id))
        remote = conn.get_remote_address()
        muxed.share, muxed.machine = share, machine_of(remote[0]) if remote else "by relay"
        muxed.strangers, muxed.peer = strangers, str(muxed.peer_id)
        muxed.stream_buffers = _UnreadOfAll(muxed)
        encrypted = muxed.secured_conn.conn
        read_msg = encrypted.read_msg

        async def read_and_note() -> bytes:
            await muxed.rest()
            message: bytes = await read_msg()
            muxed.liveness.heard(trio.current_time())
            muxed.charge(len(message))
            return message

        encrypted.read_msg = read_and_note
        return muxed

    swarm.upgrader.upgrade_connection = upgrade_and_convert


def connection_config(max_connections: int) -> ConnectionConfig:
    """Limits and timeouts of the swarm.

    * ``max_connections`` counts dials, too: who fills the places of those who come must not keep us
      from dialling (see `share_the_door`).
    * ``max_connections_per_peer=1``: with the stock 3, every dial lasts at least 250 ms, because
      `Swarm.dial_peer` (network/swarm.py:936) waits for a failure even after success and then goes
      on dialling.
    * ``low_watermark=0``: the auto-connector (network/auto_connector.py) otherwise dials every peer
      it has ever heard of.
    """
    return ConnectionConfig(
        max_connections=max_connections + OUTGOING,
        min_connections=0,  # also the share of slots that inbound connections may not use
        low_watermark=0,
        high_watermark=max_connections + OUTGOING,
        max_connections_per_peer=1,
        dial_timeout=10.0,
        inbound_upgrade_timeout=10.0,  # garbage on our port holds a slot no longer than this
        outbound_upgrade_timeout=10.0,
        outbound_stream_protocol_negotiation_timeout=10.0,
        # whoever is shown out opens the next one, which costs more
        inbound_stream_protocol_negotiation_timeout=30.0,
    )


def dial_once(swarm: Swarm) -> None:
    """No retries inside a dial: the stock three add 0.7 s to every dead address
    (network/config.py:59); we have our own back-off.

    `new_host` has no parameter for it.
    """
    swarm.retry_config = RetryConfig(max_retries=0)


def forget_failed_dials(swarm: Swarm) -> None:
    """A failed dial locks the peer out for 60 s (`_NegativePeerCache`, network/swarm.py:109, asked
    at 752).

    Whoever dials the bootstrap a moment before it listens would be alone for a minute. The cache
    must hold nothing.
    """
    swarm._negative_peer_cache._ttl = 0.0  # pyright: ignore[reportPrivateUsage]


def drop_resource_manager(swarm: Swarm) -> None:
    """The default resource manager (rcmgr/manager.py) refuses strangers together with friends.

    Its rate limiter counts all connections whose peer is not known yet as one peer (10 a second,
    `open_connection(None, …)`), its circuit breaker counts failed handshakes, and its memory limit
    looks at the whole machine: garbage on the port, or a busy machine, would shut everybody out.
    The swarm's own ``max_connections`` and the limits of our protocols remain.
    """
    swarm.set_resource_manager(None)


def release_inbound_slots(swarm: Swarm) -> None:
    """An accepted connection keeps its task, its socket and its slot of the inbound limit until the
    swarm itself ends.

    `Swarm._do_handle_inbound_connection` (network/swarm.py:2060) waits for the manager, not for the
    connection: after ``max_connections`` accepted connections in a node's life it accepts no more.
    We wait for the connection and then let the handler take its own error path, which closes the
    socket.
    """
    upgrade = swarm.upgrade_inbound_raw_conn

    async def upgrade_and_wait(self: Swarm, raw_conn: Any, maddr: Any) -> Any:
        muxed: Any = await upgrade(raw_conn, maddr)
        for older in self.get_connections(muxed.peer_id)[:-OF_ONE_PEER]:
            await older.close()
        await muxed.event_closed.wait()
        raise ConnectionError("the connection has ended")

    swarm.upgrade_inbound_raw_conn = types.MethodType(upgrade_and_wait, swarm)


def share_the_door(swarm: Swarm, most: int, strangers: StrangersShare) -> None:
    """`Swarm._handle_inbound_connection` (network/swarm.py:1981) shuts out whoever comes when all
    places are taken, whoever it is that has taken them, and `_trim_connections` leaves a peer as
    many connections as have streams. We keep places for all: see `door`, and
    `release_inbound_slots`."""
    inner: Any = swarm
    handle, door = inner._handle_inbound_connection, Door(most)

    async def handle_fairly(stream: Any, maddr: Any) -> None:
        remote = stream.get_remote_address()
        host = remote[0] if remote else ""
        machine = machine_of(host)
        shown_out: Any = door.enter(stream, host)
        if shown_out is not None:
            with trio.move_on_after(1.0), contextlib.suppress(Exception):
                await shown_out.close()
        if shown_out is not stream:
            try:
                await trio.sleep(min(strangers.rest_s(machine), CALL_REST_S))
                spent = partial(strangers.take, machine, 0)
                await timed(handle(stream, maddr), spent)
            finally:
                door.leave(stream)

    inner._handle_inbound_connection = handle_fairly


def skip_identify(swarm: Swarm) -> None:
    """Every connection starts an identify exchange from both ends (`_IdentifyNotifee`,
    host/basic_host.py), two streams of 3 ms CPU each.

    Nothing of it is used here: our protocols are fixed, and addresses come in signed announcements.
    We still answer when asked.
    """
    for notifee in [
        notifee for notifee in swarm.notifees if type(notifee).__name__ == "_IdentifyNotifee"
    ]:
        swarm.remove_notifee(notifee)


def name_ipv6_remotes() -> None:
    """`TrioTCPStream.get_remote_address` (io/trio.py:104) takes the four fields of an IPv6 socket's
    peer for no address at all.
    """

    def get_remote_address(self: TrioTCPStream) -> tuple[str, int] | None:
        found: tuple[str, int] | None = getattr(self, "_cached_remote_address", None)
        if found is None:
            with contextlib.suppress(OSError):
                host, port = self.stream.socket.getpeername()[:2]
                found = self._cached_remote_address = str(host), int(port)
        return found

    TrioTCPStream.get_remote_address = get_remote_address


def read_in_pieces() -> None:
    """`read_exactly` (io/utils.py) asks a socket for as many bytes as a stranger says that will
    come, and the system for as much memory: 2**64 of a greeting, say."""
    read = _read

    async def read_a_piece(self: TrioTCPStream, n: int | None = None) -> bytes:
        return await read(self, READ_BYTES if n is None else min(n, READ_BYTES))

    TrioTCPStream.read = read_a_piece


def agree_in_few_bytes() -> None:
    """`MultiselectCommunicator.read` (protocol_muxer/multiselect_communicator.py:58) takes in a
    message of any length, of whoever connects and before a key is proved."""

    async def read(self: MultiselectCommunicator) -> str:
        try:
            data = await read_varint_prefixed_bytes_limited(self.read_writer, MAX_NAME_BYTES)
            if data[-1:] != b"\n":
                raise ValueError("no line")
            return data[:-1].decode()
        except Exception as error:
            raise MultiselectCommunicatorError("no protocol can be agreed on") from error

    MultiselectCommunicator.read = read


def repeat_steadily() -> None:
    """The library sets no option of a socket. Over links that lose packets its connections wait
    twice as long with each loss of the same bytes.
    """

    def begin(self: TrioTCPStream, stream: trio.SocketStream) -> None:
        _init(self, stream)
        for name, value in LOSSY:
            option = option_number(name)
            if option is not None:
                with contextlib.suppress(OSError):  # not this kernel, or it has ended already
                    stream.setsockopt(socket.IPPROTO_TCP, option, value)

    TrioTCPStream.__init__ = begin


class _Seldom(logging.Filter):
    """Of a record that comes again and again one in a minute, without its traceback."""

    next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged."""
        record.exc_info = record.exc_text = None
        if record.created < self.next_at:
            return False
        self.next_at = record.created + REPEATED_S
        return True


def quiet_logs() -> None:
    """libp2p logs what peers do to it, at warning and error level, so that a stranger could fill
    our terminal.

    Failed handshakes, refused streams and "Failed to read …" on each ordinary close are not events
    of ours; every failure that concerns us reaches us as an exception. It also calls
    `logging.debug()` of the root logger (network/connection/swarm_connection.py:77), which installs
    a handler that prints to stderr: the root gets a handler that does nothing, unless the
    application has installed one.

    Where the system refuses connections, for want of descriptors, say, trio's listener logs a
    traceback ten times a second.
    """
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    accepting = logging.getLogger("trio.serve_listeners")
    if not any(isinstance(each, _Seldom) for each in accepting.filters):
        accepting.addFilter(_Seldom())
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())


def apply(
    swarm: Swarm,
    rng: random.Random,
    most: int,
    ended: Callable[[str], None],
    strangers: StrangersShare,
) -> None:
    """All workarounds that concern a swarm. ``most``: connections that others may make; ``ended``:
    told at once of a peer whose connection ends; ``strangers``: what is served to such.
    """
    use_our_yamux(swarm, rng, ended, strangers)
    dial_once(swarm)
    forget_failed_dials(swarm)
    drop_resource_manager(swarm)
    release_inbound_slots(swarm)
    share_the_door(swarm, most, strangers)
    skip_identify(swarm)
    name_ipv6_remotes()
    read_in_pieces()
    agree_in_few_bytes()
    repeat_steadily()
    quiet_logs()

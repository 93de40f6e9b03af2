"""What two connected peers can find out by asking each other: whose clock is right, and how fast
bytes go. ``/atoll/measure/1``.

A stream begins with one byte. CLOCK: the other end says its time, 8 bytes, microseconds since 1970.
UP: we send for a while, then end our direction, and are told at how many bytes a second that came.
DOWN: the other end sends for a while. Bytes are measured with members of runs we know only, seldom,
one at a time: a stranger may ask for the time and nothing else.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import trio

from ...collectives.errors import NetworkError, PeerLostError
from ...collectives.identifiers import PeerId
from .transport.allowance import Allowance
from .transport.host import Host
from .transport.peer_stream import PeerStream

PROTOCOL = "/atoll/measure/1"
CLOCK, UP, DOWN = b"c", b"u", b"d"
ASK_S = 5.0
SEND_S = 4.0
MOST_BYTES = 32 << 20
PIECE_BYTES = 1 << 14
_NUMBER = struct.Struct(">Q")


class ByteRate:
    """How fast bytes come. Sans-IO: ``now`` in seconds."""

    def __init__(self) -> None:
        self._came: list[tuple[float, int]] = []
        self.nbytes = 0

    def add(self, now: float, nbytes: int) -> None:
        """So many have come."""
        self.nbytes += nbytes
        self._came.append((now, self.nbytes))

    def rate(self) -> int:
        """Bytes a second over the later half of the time, since a connection begins slowly; 0 where
        nothing can be said.
        """
        if len(self._came) < 4:
            return 0
        (began, _), (ended, total) = self._came[0], self._came[-1]
        since, before = next(row for row in self._came if row[0] >= (began + ended) / 2)
        return round((total - before) / (ended - since)) if ended > since else 0


class Measuring:
    """Both ends. Used from the trio thread only."""

    def __init__(
        self, host: Host, knows: Callable[[PeerId], bool], clock: Callable[[], float] = time.time
    ) -> None:
        """``knows(peer)``: whether it is in a run that we know."""
        self._host, self._knows, self.clock = host, knows, clock
        self._of_each, self._of_all = Allowance(3, 3 / 60), Allowance(6, 6 / 60)
        self._one = trio.CapacityLimiter(1)
        host.handle(PROTOCOL, self._serve)

    async def clock_of(self, peer: PeerId) -> tuple[float, float]:
        """By how many seconds our clock is ahead of that of ``peer``, and by how many that may be
        wrong. Raises NetworkError.
        """
        stream = await self._open(peer, CLOCK)
        try:
            asked = self.clock()
            theirs = await self._number(stream) / 1e6
            answered = self.clock()
        finally:
            await stream.aclose()
        return (asked + answered) / 2 - theirs, (answered - asked) / 2

    async def bandwidth_to(self, peer: PeerId) -> tuple[int, int]:
        """Bytes a second to and from ``peer`` over the connection there is, in about ten seconds.
        Raises NetworkError.
        """
        found: list[int] = []
        for kind in (UP, DOWN):
            stream = await self._open(peer, kind)
            try:
                if kind == UP:
                    await _pour(stream)
                    found.append(await self._number(stream))
                else:
                    found.append((await _drain(stream)).rate())
            except PeerLostError:  # who does not want to closes the stream
                raise _refused(peer) from None
            finally:
                await stream.aclose()
            if not found[-1]:
                raise _refused(peer)
        return found[0], found[1]

    async def _open(self, peer: PeerId, kind: bytes) -> PeerStream:
        stream = await self._host.open_stream(peer, PROTOCOL, ASK_S)
        try:
            await stream.send_all(kind)
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def _number(self, stream: PeerStream) -> int:
        data = b""
        with trio.move_on_after(ASK_S + SEND_S):
            while len(data) < _NUMBER.size and (
                piece := await stream.receive_some(_NUMBER.size - len(data))
            ):
                data += piece
        if len(data) < _NUMBER.size:
            raise _refused(stream.peer)
        return int(_NUMBER.unpack(data)[0])

    async def _serve(self, stream: PeerStream) -> None:
        with trio.move_on_after(2 * (ASK_S + SEND_S)):
            kind = await stream.receive_some(1)
            if kind != CLOCK and not self._measures(kind, stream.peer):
                return
            try:
                if kind == CLOCK:
                    await stream.send_all(_NUMBER.pack(max(0, round(self.clock() * 1e6))))
                else:
                    async with self._one:
                        if kind == UP:
                            await stream.send_all(_NUMBER.pack((await _drain(stream)).rate()))
                        else:
                            await _pour(stream)
                await stream.finish()
                await stream.receive_some(1)  # until the other end has read it
            except NetworkError:
                pass

    def _measures(self, kind: bytes, peer: PeerId) -> bool:
        """Whether bytes are measured with ``peer`` now."""
        now, way = trio.current_time(), {UP: "up", DOWN: "down"}.get(kind)
        return (
            way is not None
            and self._knows(peer)
            and self._of_each.allows(way + peer, now)
            and self._of_all.allows(way, now)
        )


async def _pour(stream: PeerStream) -> None:
    """Send for a while, then end this direction. Raises PeerLostError."""
    piece, began = bytes(PIECE_BYTES), trio.current_time()
    for _ in range(MOST_BYTES // PIECE_BYTES):
        await stream.send_all(piece)
        if trio.current_time() - began > SEND_S:
            break
    await stream.finish()


async def _drain(stream: PeerStream) -> ByteRate:
    """Read until the other end has sent what it wants, or long enough, or nothing for a while."""
    flow = ByteRate()
    with trio.move_on_after(SEND_S + ASK_S):
        while flow.nbytes < MOST_BYTES and (piece := await stream.receive_some()):
            flow.add(trio.current_time(), len(piece))
    return flow


def _refused(peer: PeerId) -> PeerLostError:
    return PeerLostError(
        (
            f"{peer} did not answer: it measures with members of its runs only, "
            "and a few times a minute"
        ),
        peer=peer,
    )

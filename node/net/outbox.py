"""What waits for one peer in one topic, and the stream or wire it goes out on (`streams`)."""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import trio

from ...collectives.errors import AtollError, NetworkError, PeerLostError, RemoteProtocolError
from ...collectives.foreign import escaped
from ...collectives.identifiers import PeerId
from ...collectives.record_layer import SECRET_BYTES
from .echoes import Echoes
from .greeting import (
    HELLO_S,
    MAX_ANSWER_BYTES,
    NO_TOPIC,
    NOT_ACCEPTED,
    PING_S,
    PROTOCOL,
    SILENT_S,
    GreetingAnswer,
    GreetingHello,
    Proof,
    RefusedError,
    Topic,
    answer_decoder,
    transcript,
)
from .transport.backoff import Backoff
from .transport.framing import FrameReader, decode, frame
from .transport.host import Host, PeerStream
from .transport.lane_sockets import dial
from .wires import Wire, WireOffer

if TYPE_CHECKING:
    from .streams import TopicStreams

QUEUE_MESSAGES = 1024
QUEUE_BYTES = 8 << 20
BATCH_BYTES = 65_536
"""Messages that wait are joined into one write of about this size: a write on a stream costs 250 us
whatever it carries.
"""
BURST_S = 0.0003
"""Messages that follow one another so soon are joined."""
STALE_S = 30.0
"""A message that could not be sent for so long is dropped: what it says has been overtaken."""
REFUSED_S = 20.0
"""Pause after a refusal: asking again is useless until somebody changes something."""
YIELD_S = 0.06
"""Two peers that hear of each other want to talk at the same moment: the larger one waits so long
for the smaller one to dial.
"""
WIRE_AFTER = 8
"""Messages on a stream before a wire is dialled: who says little need not pay for another
connection.
"""


class TopicOutbox:
    """What waits for one peer in one topic, and where it goes out."""

    def __init__(self, line: TopicStreams, host: Host, peer: PeerId, topic: str) -> None:
        self.wire: Wire | None = None  # what we speak on, if it is not a stream
        self.dialled: tuple[str, int] | None = None  # where it was dialled
        self.echoes = Echoes()
        self._line, self._host, self._peer, self._topic = line, host, peer, topic
        # When something was written at once: what is said just after it goes out together.
        self._spoke_at = float("-inf")
        self._queue: deque[tuple[float, bytes]] = deque()
        self._queued_bytes = 0
        self._wake = trio.Event()
        self._scope = trio.CancelScope()

    def put(self, data: bytes) -> None:
        """Send a message, or queue it; the oldest make room."""
        wire, now = self.wire, trio.current_time()
        if (
            wire is not None
            and not self._queue
            and not wire.blocked
            and now - self._spoke_at > BURST_S
        ):
            try:
                wire.write(frame(data))
            except PeerLostError:
                wire.close()  # `_listen` learns of it
            else:
                self._line.counters.sent(len(data))
                self._spoke_at = now
                if wire.blocked or self.echoes.due(now):
                    self._wake.set()
                return
        self._queue.append((now, data))
        self._queued_bytes += len(data)
        while len(self._queue) > QUEUE_MESSAGES or self._queued_bytes > QUEUE_BYTES:
            self._drop_oldest()
        self._wake.set()

    def stop(self) -> None:
        self._scope.cancel()

    def _drop_oldest(self) -> None:
        self._queued_bytes -= len(self._queue.popleft()[1])
        self._line.counters.messages_dropped += 1

    def _drop_stale(self) -> None:
        while self._queue and trio.current_time() - self._queue[0][0] > STALE_S:
            self._drop_oldest()

    async def run(self) -> None:
        """Open a stream whenever something waits, keep it, go on with a wire, open it again when it
        is lost.
        """
        backoff = Backoff(0.03, 3.0, self._line.rng)
        with self._scope:
            while True:
                while not self._queue:
                    self._wake = trio.Event()
                    await self._wake.wait()
                try:
                    stream, reader, how = await self._open()
                except RefusedError as refused:
                    await self._was_refused(refused, backoff)
                except NetworkError:
                    await self._pause(backoff)
                else:
                    backoff.reset()
                    wire = await self._use(stream, reader, how)
                    if wire is not None:
                        await self._use(wire, FrameReader(wire.receive_some, self._peer), None)
                self._drop_stale()

    async def _pause(self, backoff: Backoff) -> None:
        """Before the next try. A peer that arrives after long must hear of us at once."""
        if self._host.connected(self._peer):
            await trio.sleep(backoff.next_s())
        elif await self._host.wait_connected(self._peer, backoff.next_s()):
            backoff.reset()

    async def _was_refused(self, refused: RefusedError, backoff: Backoff) -> None:
        if refused.code == NO_TOPIC:
            await trio.sleep(backoff.next_s())
            return
        while self._queue:
            self._drop_oldest()
        if refused.code == NOT_ACCEPTED:  # ours, and no word of the peer's
            self._line.counters.refusals += 1
        else:
            self._line.refused(self._topic, self._peer, refused.code, refused.reason)
        await trio.sleep(self._line.rng.uniform(0.8, 1.2) * REFUSED_S)

    async def _open(self) -> tuple[PeerStream, FrameReader, _Agreed | None]:
        """An admitted stream and the wire it may become. Raises NetworkError or RefusedError."""
        topic = self._line.topics.get(self._topic)
        if topic is None:
            raise RefusedError(NO_TOPIC, "left")
        if self._host.peer < self._peer or not await self._host.wait_connected(self._peer, YIELD_S):
            await self._line.connect(self._peer)
        stream = await self._host.open_stream(self._peer, PROTOCOL)
        try:
            secret = secrets.token_bytes(SECRET_BYTES)
            reader = FrameReader(stream.receive_some, self._peer)
            with trio.move_on_after(HELLO_S):
                hello = GreetingHello(self._line.version, self._topic, secret)
                first = await self._ask(stream, reader, hello)
                if first.recalled:
                    topic.reminded(self._peer, first.recalled)
                self._judge(topic, first.shown)
                answer = await self._ask(stream, reader, Proof(topic.greet(self._peer)))
                return stream, reader, _Agreed(secret, answer.wire) if answer.wire else None
            raise PeerLostError(f"{self._peer} did not answer the greeting", peer=self._peer)
        except RemoteProtocolError as error:
            self._line.faults.count(self._peer, trio.current_time())
            await stream.aclose()
            raise PeerLostError(error.message, peer=self._peer) from None
        except BaseException:
            await stream.aclose()
            raise

    async def _ask(
        self, stream: PeerStream, reader: FrameReader, message: GreetingHello | Proof
    ) -> GreetingAnswer:
        """The other side's yes. Raises RefusedError for its no, PeerLostError where it ends."""
        await stream.send_all(frame(msgspec.msgpack.encode(message)))
        payload = await reader.next(MAX_ANSWER_BYTES)
        if payload is None:
            raise PeerLostError(f"{self._peer} did not answer the greeting", peer=self._peer)
        answer = decode(answer_decoder, payload, self._peer)
        if answer.code:
            raise RefusedError(answer.code, escaped(answer.reason))
        return answer

    def _judge(self, topic: Topic, shown: bytes) -> None:
        """Whether the other side is in the run. Raises RefusedError: it is shown nothing."""
        try:
            accepted = topic.accept(self._peer, shown)
        except RemoteProtocolError:
            raise
        except AtollError as error:
            raise RefusedError(NOT_ACCEPTED, error.message) from None
        if not accepted:
            raise RefusedError(NOT_ACCEPTED, "it does not show that it is one of the run")

    async def _use(
        self, stream: PeerStream | Wire, reader: FrameReader, agreed: _Agreed | None
    ) -> Wire | None:
        """Speak on it until it ends; the wire to go on with, if it ended for that."""
        state = _StreamState(trio.current_time(), self.echoes)
        self.wire = stream if isinstance(stream, Wire) else None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, reader, state)
                if agreed is not None:
                    nursery.start_soon(self._dial, agreed, state)
                try:
                    await self._write(stream, state)
                except PeerLostError:
                    pass
                nursery.cancel_scope.cancel()
            if state.moved:
                wire, state.wire = state.wire, None
                return wire
        finally:
            self.wire = None
            self.echoes.ended(trio.current_time(), lost=not state.moved)
            if state.wire is not None:
                state.wire.close()
            await stream.aclose()
        if state.silent:
            await self._host.disconnect(self._peer)
        return None

    async def _listen(self, reader: FrameReader, state: _StreamState) -> None:
        """Notes signs of life. The end of the stream is only noted too: to cancel a write in
        progress could break the connection.
        """
        try:
            while await reader.next(0) is not None:
                state.heard()
        except RemoteProtocolError:
            self._line.faults.count(self._peer, trio.current_time())
        state.ended = True
        self._wake.set()

    async def _dial(self, agreed: _Agreed, state: _StreamState) -> None:
        """A wire, once the stream has proved to be used."""
        await state.busy.wait()
        where = [
            address
            for address in agreed.offer.addresses
            if self._line.may_dial(self._peer, address)
        ]
        sock = await dial(where, agreed.offer.token, agreed.secret + agreed.offer.secret)
        if sock is not None:
            try:
                self.dialled = sock.getpeername()[:2]
            except OSError:  # it has ended again; the stream goes on
                return sock.close()
            bound = transcript(self._host.peer, self._peer, self._topic)
            state.wire = Wire(
                self._peer, sock, agreed.secret, agreed.offer.secret, bound, opener=True
            )
            self._wake.set()

    async def _write(self, stream: PeerStream | Wire, state: _StreamState) -> None:
        """Send what waits, joined; ask for a sign of life when nothing does. Returns when the
        stream ended, or is to end for a wire.
        """
        while not state.ended:
            now = trio.current_time()
            batch = bytearray()
            if state.wire is None:
                batch = self._batch(state)
            elif (
                not state.moving
            ):  # all that was said here must have been taken in before the wire speaks
                state.moving = True
                batch += state.ask(now)
            elif not state.unanswered:
                state.moved = True
                return
            if now - state.asked_at > PING_S or self.echoes.due(now):
                batch += state.ask(now)
            if state.unanswered and now - state.unanswered_since > SILENT_S:
                state.silent = True
                return
            if batch:
                await stream.send_all(bytes(batch))
                continue
            if isinstance(stream, Wire) and stream.blocked:
                await stream.flush()
                continue
            self._wake = state.wake = trio.Event()
            with trio.move_on_after(PING_S):
                await self._wake.wait()

    def _batch(self, state: _StreamState) -> bytearray:
        batch = bytearray()
        while self._queue and len(batch) < BATCH_BYTES:
            data = self._queue.popleft()[1]
            self._queued_bytes -= len(data)
            batch += frame(data)
            self._line.counters.sent(len(data))
            state.messages_sent += 1
        if state.messages_sent >= WIRE_AFTER:
            state.busy.set()
        return batch


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What a wire needs: our secret, and the other side's offer."""

    secret: bytes
    offer: WireOffer


class _StreamState:
    """Of an outgoing stream or wire. Times are trio's."""

    def __init__(self, now: float, echoes: Echoes) -> None:
        self._echoes = echoes
        self.asked_at = self.unanswered_since = now
        self.unanswered = 0  # signs of life asked for and not given yet
        self.messages_sent = 0
        self.ended = self.silent = False
        self.busy = trio.Event()
        self.wire: Wire | None = None  # dialled, and not spoken on yet
        self.moving = self.moved = False
        self.wake = trio.Event()

    def ask(self, now: float) -> bytes:
        """The question for a sign of life."""
        self.asked_at = now
        self._echoes.asked(now)
        if not self.unanswered:
            self.unanswered_since = now
        self.unanswered += 1
        return frame(b"")

    def heard(self) -> None:
        """An answer; they come in order."""
        self.unanswered = max(0, self.unanswered - 1)
        self.unanswered_since = now = trio.current_time()
        self._echoes.answered(now)
        self.wake.set()

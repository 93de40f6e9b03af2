"""Persistent message streams: one per (peer, topic) and direction, opened on demand, with a greeting that must be admitted.

On the wire (protocol ``/atoll/topic/1``): the opener sends a Hello, the other side an Answer; then the opener sends messages,
one frame each. An empty frame asks for a sign of life and is answered with an empty frame. A lost stream is opened again;
messages in flight are lost with it (the protocols above repair loss by asking again).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import trio

from ...collectives.errors import AtollError, LocalProtocolError, NetworkError, PeerLostError, RemoteProtocolError
from ...collectives.identifiers import PeerId
from .backoff import Backoff
from .faults import Faults
from .framing import MAX_FRAME_BYTES, FrameReader, decode, frame
from .host import Host, PeerStream

PROTOCOL = "/atoll/topic/1"
VERSION = 1
"""Version of what is said inside a topic; two peers of different versions refuse each other with E140."""
MAX_TOPIC_CHARS = 128
MAX_TOKEN_BYTES = 8192
QUEUE_MESSAGES = 1024
QUEUE_BYTES = 8 << 20
BATCH_BYTES = 65_536
"""Messages that wait are joined into one write of about this size: a write costs 250 us whatever it carries."""
STALE_S = 30.0
"""A message that could not be sent for so long is dropped: what it says has been overtaken."""
PING_S = 4.0
SILENT_S = 15.0
"""A stream on which nothing was heard for so long is dead, and the connection under it."""
REFUSED_S = 20.0
"""Pause after a refusal: asking again is useless until somebody changes something."""
STREAMS_PER_PEER = 32
_HELLO_S = 10.0
YIELD_S = 0.06
"""Two peers that hear of each other want to talk at the same moment: the larger one waits so long for the smaller one to dial."""
_HELLO_BYTES = MAX_TOKEN_BYTES + 1024
NO_TOPIC = "topic"
"""Answer code: the other side has not opened this topic (yet). Not an error to show anybody."""


class _Preface(msgspec.Struct, frozen=True, array_like=True):
    version: Annotated[int, msgspec.Meta(ge=0)]


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    version: Annotated[int, msgspec.Meta(ge=0)]
    topic: Annotated[str, msgspec.Meta(max_length=MAX_TOPIC_CHARS)]
    token: Annotated[bytes, msgspec.Meta(max_length=MAX_TOKEN_BYTES)]


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    code: Annotated[str, msgspec.Meta(max_length=16)]  # "" means admitted
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


_preface = msgspec.msgpack.Decoder(_Preface)
_hello = msgspec.msgpack.Decoder(_Hello)
_answer = msgspec.msgpack.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class Topic:
    """What the owner of a topic registered."""

    handler: Callable[[PeerId, bytes], None]
    greet: Callable[[PeerId], bytes]
    admit: Callable[[PeerId, bytes], bool]


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_dropped: int = 0
    refusals: int = 0


class _Refused(Exception):
    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class TopicStreams:
    """All topics of a node. Used from the trio thread only."""

    def __init__(
        self,
        host: Host,
        connect: Callable[[PeerId], Awaitable[None]],
        faults: Faults,
        rng: random.Random,
        version: int = VERSION,
    ) -> None:
        """``connect`` makes sure of a connection or raises NetworkError."""
        self._host, self.connect, self.faults, self.rng, self.version = host, connect, faults, rng, version
        self.counters = Counters()
        self.refused: Callable[[str, PeerId, str, str], None] = lambda topic, peer, code, reason: None
        self.topics: dict[str, Topic] = {}
        self._outboxes: dict[tuple[PeerId, str], _Outbox] = {}
        self._inbound: dict[tuple[PeerId, str], PeerStream] = {}
        self._streams: dict[PeerId, int] = {}
        self._nursery: trio.Nursery | None = None
        host.handle(PROTOCOL, self._serve)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for outbox in self._outboxes.values():
                nursery.start_soon(outbox.run)
            task_status.started()
            await trio.sleep_forever()

    def open(self, name: str, topic: Topic) -> None:
        """Take part in a topic."""
        if not 0 < len(name) <= MAX_TOPIC_CHARS:
            raise LocalProtocolError(f"a topic has 1 to {MAX_TOPIC_CHARS} characters, not {len(name)}")
        self.topics[name] = topic

    async def close(self, name: str) -> None:
        """Leave a topic: its streams end, what waits is dropped."""
        self.topics.pop(name, None)
        for key in [key for key in self._outboxes if key[1] == name]:
            self._outboxes.pop(key).stop()
        for key in [key for key in self._inbound if key[1] == name]:
            stream = self._inbound.pop(key, None)  # it may have ended while another was being closed
            if stream is not None:
                await stream.aclose()

    def send(self, name: str, peer: PeerId, data: bytes) -> None:
        """Queue a message (1 byte to 1 MiB). Never blocks; when the queue is full the oldest message is dropped and counted."""
        if name not in self.topics:
            raise LocalProtocolError(f"topic {name!r} is not open")
        if not 0 < len(data) <= MAX_FRAME_BYTES or peer == self._host.peer:
            raise LocalProtocolError(f"cannot send {len(data)} bytes to {peer}")
        outbox = self._outboxes.get((peer, name))
        if outbox is None:
            outbox = self._outboxes[peer, name] = _Outbox(self, self._host, peer, name)
            if self._nursery is not None:
                self._nursery.start_soon(outbox.run)
        outbox.put(data)

    def admitted(self, peer: PeerId) -> bool:
        """Whether ``peer`` has shown us a greeting we accept (in any topic), on a stream that is open now."""
        return any(key[0] == peer for key in self._inbound)

    def forget(self, peer: PeerId) -> None:
        """Drop what waits for a peer that is gone for good."""
        for key in [key for key in self._outboxes if key[0] == peer]:
            self._outboxes.pop(key).stop()

    # --- the accepting side ---

    async def _serve(self, stream: PeerStream) -> None:
        peer = stream.peer
        if self._streams.get(peer, 0) >= STREAMS_PER_PEER or self.faults.shut_out(peer, trio.current_time()):
            return
        self._streams[peer] = self._streams.get(peer, 0) + 1
        try:
            await self._converse(stream)
        except (RemoteProtocolError, PeerLostError) as error:
            if isinstance(error, RemoteProtocolError):
                self.faults.count(peer, trio.current_time())
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _converse(self, stream: PeerStream) -> None:
        reader = FrameReader(stream.receive_some, stream.peer)
        greeting = None
        with trio.move_on_after(_HELLO_S):
            greeting = await reader.next(_HELLO_BYTES)
        if greeting is None:
            return
        try:
            name, topic = self._check(stream.peer, greeting)
        except _Refused as refused:
            await self._refuse(stream, refused)
            return
        key = (stream.peer, name)
        older = self._inbound.get(key)
        self._inbound[key] = stream
        if older is not None:
            await older.aclose()
        try:
            await stream.send_all(frame(msgspec.msgpack.encode(_Answer("", ""))))
            await self._receive(stream, reader, topic)
        finally:
            if self._inbound.get(key) is stream:
                del self._inbound[key]

    def _check(self, peer: PeerId, greeting: bytes) -> tuple[str, Topic]:
        version = decode(_preface, greeting, peer).version
        if version != self.version:
            raise _Refused("E140", f"you speak version {version} of the atoll protocol, this peer speaks {self.version}")
        hello = decode(_hello, greeting, peer)
        topic = self.topics.get(hello.topic)
        if topic is None:
            raise _Refused(NO_TOPIC, "not open here")
        try:
            admitted = topic.admit(peer, hello.token)
        except RemoteProtocolError:
            raise
        except AtollError as error:
            raise _Refused(error.code, error.message) from None
        if not admitted:
            raise _Refused("E201", "this run does not admit you")
        return hello.topic, topic

    async def _refuse(self, stream: PeerStream, refused: _Refused) -> None:
        self.counters.refusals += 1
        await stream.send_all(frame(msgspec.msgpack.encode(_Answer(refused.code[:16], refused.reason[:1024]))))
        await stream.finish()
        with trio.move_on_after(2.0):  # let it be read before the stream is reset
            while await stream.receive_some():
                pass

    async def _receive(self, stream: PeerStream, reader: FrameReader, topic: Topic) -> None:
        while True:
            with trio.move_on_after(SILENT_S) as silence:
                payload = await reader.next()
                if payload is None:
                    return
                if payload:
                    self.counters.messages_received += 1
                    self.counters.bytes_received += len(payload)
                    topic.handler(stream.peer, payload)
                else:
                    await stream.send_all(frame(b""))
            if silence.cancelled_caught:
                return


class _Outbox:
    """What waits for one peer in one topic, and the stream it goes out on."""

    def __init__(self, owner: TopicStreams, host: Host, peer: PeerId, topic: str) -> None:
        self._owner, self._host, self._peer, self._topic = owner, host, peer, topic
        self._queue: deque[tuple[float, bytes]] = deque()
        self._queued_bytes = 0
        self._wake = trio.Event()
        self._scope = trio.CancelScope()

    def put(self, data: bytes) -> None:
        """Queue a message; the oldest make room."""
        self._queue.append((trio.current_time(), data))
        self._queued_bytes += len(data)
        while len(self._queue) > QUEUE_MESSAGES or self._queued_bytes > QUEUE_BYTES:
            self._drop_oldest()
        self._wake.set()

    def stop(self) -> None:
        """End `run`."""
        self._scope.cancel()

    def _drop_oldest(self) -> None:
        self._queued_bytes -= len(self._queue.popleft()[1])
        self._owner.counters.messages_dropped += 1

    def _drop_stale(self) -> None:
        while self._queue and trio.current_time() - self._queue[0][0] > STALE_S:
            self._drop_oldest()

    async def run(self) -> None:
        """Open a stream whenever something waits, keep it, open it again when it is lost."""
        backoff = Backoff(0.03, 3.0, self._owner.rng)
        with self._scope:
            while True:
                while not self._queue:
                    self._wake = trio.Event()
                    await self._wake.wait()
                try:
                    stream, reader = await self._open()
                except _Refused as refused:
                    await self._was_refused(refused, backoff)
                except NetworkError:
                    await trio.sleep(backoff.next_s())
                else:
                    backoff.reset()
                    await self._use(stream, reader)
                self._drop_stale()

    async def _was_refused(self, refused: _Refused, backoff: Backoff) -> None:
        if refused.code == NO_TOPIC:
            await trio.sleep(backoff.next_s())
            return
        while self._queue:
            self._drop_oldest()
        self._owner.refused(self._topic, self._peer, refused.code, refused.reason)
        await trio.sleep(self._owner.rng.uniform(0.8, 1.2) * REFUSED_S)

    async def _open(self) -> tuple[PeerStream, FrameReader]:
        """A stream that was admitted. Raises NetworkError or _Refused."""
        topic = self._owner.topics.get(self._topic)
        if topic is None:
            raise _Refused(NO_TOPIC, "left")
        if self._host.peer < self._peer or not await self._host.wait_connected(self._peer, YIELD_S):
            await self._owner.connect(self._peer)
        stream = await self._host.open_stream(self._peer, PROTOCOL)
        try:
            hello = _Hello(self._owner.version, self._topic, topic.greet(self._peer))
            await stream.send_all(frame(msgspec.msgpack.encode(hello)))
            reader = FrameReader(stream.receive_some, self._peer)
            with trio.move_on_after(_HELLO_S):
                payload = await reader.next(4096)
                if payload is not None:
                    answer = decode(_answer, payload, self._peer)
                    if answer.code:
                        raise _Refused(answer.code, answer.reason)
                    return stream, reader
            raise PeerLostError(f"{self._peer} did not answer the greeting", peer=self._peer)
        except RemoteProtocolError as error:
            self._owner.faults.count(self._peer, trio.current_time())
            await stream.aclose()
            raise PeerLostError(error.message, peer=self._peer) from None
        except BaseException:
            await stream.aclose()
            raise

    async def _use(self, stream: PeerStream, reader: FrameReader) -> None:
        state = _Liveness(trio.current_time())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, reader, state)
                try:
                    await self._write(stream, state)
                except PeerLostError:
                    pass
                nursery.cancel_scope.cancel()
        finally:
            await stream.aclose()
        if state.silent:
            await self._host.disconnect(self._peer)

    async def _listen(self, reader: FrameReader, state: _Liveness) -> None:
        """Notes signs of life. The end of the stream is only noted too: to cancel a write in progress could break the connection."""
        try:
            while await reader.next(0) is not None:
                state.heard()
        except RemoteProtocolError:
            self._owner.faults.count(self._peer, trio.current_time())
        state.ended = True
        self._wake.set()

    async def _write(self, stream: PeerStream, state: _Liveness) -> None:
        """Send what waits, joined; ask for a sign of life when nothing does."""
        counters = self._owner.counters
        while not state.ended:
            batch = bytearray()
            while self._queue and len(batch) < BATCH_BYTES:
                data = self._queue.popleft()[1]
                self._queued_bytes -= len(data)
                batch += frame(data)
                counters.messages_sent += 1
                counters.bytes_sent += len(data)
            now = trio.current_time()
            if now - state.asked_at > PING_S:
                state.ask(now)
                batch += frame(b"")
            if state.unanswered_since is not None and now - state.unanswered_since > SILENT_S:
                state.silent = True
                return
            if batch:
                await stream.send_all(bytes(batch))
                continue
            self._wake = trio.Event()
            with trio.move_on_after(PING_S):
                await self._wake.wait()


@dataclass(slots=True)
class _Liveness:
    """Signs of life on an outgoing stream. Times are trio's."""

    asked_at: float
    unanswered_since: float | None = None
    ended: bool = False
    silent: bool = False

    def ask(self, now: float) -> None:
        self.asked_at = now
        if self.unanswered_since is None:
            self.unanswered_since = now

    def heard(self) -> None:
        self.unanswered_since = None

"""Persistent message streams: one per (peer, topic) and direction, opened on demand, with a
greeting that must be admitted.

On the wire (protocol ``/atoll/topic/1``): the opener sends a Hello, the other side an Answer that
shows its standing; the opener its Proof, the other side an Answer (`greeting`); then the opener
sends messages, one frame each. An empty frame asks for a sign of life and is answered with an empty
frame. A lost stream is opened again; messages in flight are lost with it (the protocols above
repair loss by asking again).

A stream that is used goes on as a wire (`wires`) where the other side can be dialled: the same
frames on a connection of their own. The opener dials the offer in the second Answer, waits until
all it has said was taken in, ends the stream, and speaks on the wire.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable

import msgspec
import trio

from ...collectives.errors import AtollError, LocalProtocolError, PeerLostError, RemoteProtocolError
from ...collectives.identifiers import PeerId
from ...collectives.record_layer import SECRET_BYTES
from .greeting import (
    MAX_HELLO_BYTES,
    MAX_PROOF_BYTES,
    MAX_RECALLED_BYTES,
    MAX_SHOWN_BYTES,
    MAX_TOPIC_CHARS,
    NO_TOPIC,
    PATIENCE_S,
    PROTOCOL,
    SILENT_S,
    VERSION,
    Counters,
    GreetingAnswer,
    GreetingHello,
    RefusedError,
    Topic,
    hello_decoder,
    preface_decoder,
    proof_decoder,
    transcript,
)
from .outbox import TopicOutbox
from .transport.addresses import MAX_ADDRESSES
from .transport.faults import Faults
from .transport.framing import MAX_FRAME_BYTES, FrameReader, decode, frame
from .transport.host import Host, PeerStream
from .transport.lane_sockets import TOKEN_BYTES, LaneListener, MayDial
from .wires import Wire, WireOffer

STREAMS_PER_PEER = 32
LOOK_S, HELD_S = 1.0, 0.2
"""So often this process looks whether it was held up itself: then it comes so much too late. What
holds it up unnoticed lasts less than both together, and a peer is not taken for slow by that
(`echoes.UNREAD_S`).
"""


class TopicStreams:
    """All topics of a node. Used from the trio thread only."""

    def __init__(
        self,
        host: Host,
        connect: Callable[[PeerId], Awaitable[None]],
        faults: Faults,
        rng: random.Random,
        listener: LaneListener,
        may_dial: MayDial,
        version: int = VERSION,
    ) -> None:
        """``connect`` makes sure of a connection or raises NetworkError; ``listener``: where wires
        arrive; ``may_dial``: where ours go.
        """
        self._host, self.connect, self.faults, self.rng, self.version = (
            host,
            connect,
            faults,
            rng,
            version,
        )
        self._listener, self.may_dial = listener, may_dial
        self.counters = Counters()
        self.refused: Callable[[str, PeerId, str, str], None] = lambda topic, peer, code, reason: (
            None
        )
        self.topics: dict[str, Topic] = {}
        self._outboxes: dict[tuple[PeerId, str], TopicOutbox] = {}
        self._inbound: dict[tuple[PeerId, str], PeerStream | Wire] = {}
        self._streams: dict[PeerId, int] = {}
        self._greetings: dict[PeerId, list[trio.Event]] = {}
        self._nursery: trio.Nursery | None = None
        host.handle(PROTOCOL, self._serve)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for outbox in self._outboxes.values():
                nursery.start_soon(outbox.run)
            task_status.started()
            while True:
                looked_at = trio.current_time()
                await trio.sleep(LOOK_S)
                if (now := trio.current_time()) - looked_at > LOOK_S + HELD_S:
                    for outbox in self._outboxes.values():
                        outbox.echoes.stopped(now)

    def open(self, name: str, topic: Topic) -> None:
        """Take part in a topic."""
        if not 0 < len(name) <= MAX_TOPIC_CHARS:
            raise LocalProtocolError(
                f"a topic has 1 to {MAX_TOPIC_CHARS} characters, not {len(name)}"
            )
        self.topics[name] = topic

    async def close(self, name: str, peer: PeerId | None = None) -> None:
        """Leave a topic, or end it with ``peer`` only: its streams end, what waits is dropped."""
        if peer is None:
            self.topics.pop(name, None)
        for key in [key for key in self._outboxes if key[1] == name and peer in (None, key[0])]:
            self._outboxes.pop(key).stop()
        for key in [key for key in self._inbound if key[1] == name and peer in (None, key[0])]:
            # It may have ended while another was being closed.
            stream = self._inbound.pop(key, None)
            if stream is not None:
                await stream.aclose()

    def send(self, name: str, peer: PeerId, data: bytes) -> None:
        """Queue a message (1 byte to 1 MiB). Never blocks; when the queue is full the oldest
        message is dropped and counted.
        """
        if name not in self.topics:
            raise LocalProtocolError(f"topic {name!r} is not open")
        if not 0 < len(data) <= MAX_FRAME_BYTES or peer == self._host.peer:
            raise LocalProtocolError(f"cannot send {len(data)} bytes to {peer}")
        outbox = self._outboxes.get((peer, name))
        if outbox is None:
            outbox = self._outboxes[peer, name] = TopicOutbox(self, self._host, peer, name)
            if self._nursery is not None:
                self._nursery.start_soon(outbox.run)
        outbox.put(data)

    def unread(self, name: str, peer: PeerId, rtt_s: float) -> bool:
        """Whether what we say to ``peer`` in a topic is not read for now (`echoes`)."""
        outbox = self._outboxes.get((peer, name))
        return outbox is not None and outbox.echoes.unread(trio.current_time(), rtt_s)

    def admitted(self, peer: PeerId) -> bool:
        """Whether ``peer`` has shown us a greeting we accept (in any topic), on a stream that is
        open now.
        """
        return any(key[0] == peer for key in self._inbound)

    async def greeted(self, peer: PeerId) -> bool:
        """`admitted`, once no greeting of ``peer`` is under way that may change it."""
        while not self.admitted(peer) and (under_way := self._greetings.get(peer)):
            await under_way[-1].wait()
        return self.admitted(peer)

    def common_topic(self, peer: PeerId) -> str | None:
        """A topic in which ``peer`` has shown us a greeting we accept; None: there is none."""
        return next((topic for other, topic in self._inbound if other == peer), None)

    def forget(self, peer: PeerId) -> None:
        """Drop what waits for a peer that is gone for good."""
        for key in [key for key in self._outboxes if key[0] == peer]:
            self._outboxes.pop(key).stop()

    def link_lost(self, peer: PeerId) -> None:
        """The libp2p connection to ``peer`` ended: so do the wires that were agreed on over it."""
        for wire in self._wires(peer):
            wire.close()
        for outbox in self._to(peer):
            outbox.dialled = None

    def dialled(self, peer: PeerId) -> tuple[str, int] | None:
        """Host and port where a peer took a wire, if it did."""
        return next(
            (outbox.dialled for outbox in self._to(peer) if outbox.dialled is not None), None
        )

    def wires(self) -> list[PeerId]:
        """To whom we speak on a wire."""
        return sorted(
            {peer for (peer, _), outbox in self._outboxes.items() if outbox.wire is not None}
        )

    def _to(self, peer: PeerId) -> list[TopicOutbox]:
        return [outbox for key, outbox in self._outboxes.items() if key[0] == peer]

    def _wires(self, peer: PeerId) -> list[Wire]:
        outgoing = [outbox.wire for outbox in self._to(peer)]
        return [
            end
            for end in [*outgoing, *(end for key, end in self._inbound.items() if key[0] == peer)]
            if isinstance(end, Wire)
        ]

    # --- the accepting side ---

    async def _serve(self, stream: PeerStream) -> None:
        peer = stream.peer
        if self._streams.get(peer, 0) >= STREAMS_PER_PEER or self.faults.shut_out(
            peer, trio.current_time()
        ):
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
        agreed, over = None, trio.Event()
        self._greetings.setdefault(stream.peer, []).append(over)
        try:
            with trio.move_on_after(PATIENCE_S):
                agreed = await self._greet(stream, reader)
            if agreed is None:
                return
            key = (stream.peer, agreed[0].topic)
            await self._replace(key, stream)
        except RefusedError as refused:
            await self._refuse(stream, refused)
            return
        finally:
            self._greeted(stream.peer, over)
        hello, topic = agreed
        offer = self._offer(hello)
        both = hello.secret + offer.secret if offer else b""
        expected = self._listener.expect(offer.token, stream.peer, both) if offer else None
        try:
            await stream.send_all(frame(msgspec.msgpack.encode(GreetingAnswer("", "", offer))))
            await self._receive(stream, reader, topic)
            if (
                offer and expected and expected.socket and self._inbound.get(key) is stream
            ):  # ended because the wire goes on
                sock, expected.socket = expected.socket, None
                bound = transcript(stream.peer, self._host.peer, hello.topic)
                await self._go_on(
                    key,
                    Wire(stream.peer, sock, offer.secret, hello.secret, bound, opener=False),
                    topic,
                )
        finally:
            if offer:
                self._listener.forget(offer.token)
            if self._inbound.get(key) is stream:
                del self._inbound[key]

    async def _go_on(self, key: tuple[PeerId, str], wire: Wire, topic: Topic) -> None:
        try:
            await self._replace(key, wire)
            await self._receive(wire, FrameReader(wire.receive_some, wire.peer), topic)
        finally:
            wire.close()
            if self._inbound.get(key) is wire:
                del self._inbound[key]

    def _offer(self, hello: GreetingHello) -> WireOffer | None:
        addresses = self._listener.addresses()[:MAX_ADDRESSES]
        if len(hello.secret) != SECRET_BYTES or not addresses:
            return None
        return WireOffer(
            secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(SECRET_BYTES), tuple(addresses)
        )

    async def _replace(self, key: tuple[PeerId, str], end: PeerStream | Wire) -> None:
        """From now on ``end`` is where this peer speaks in this topic."""
        older = self._inbound.get(key)
        self._inbound[key] = end
        if older is not None:
            await older.aclose()

    def _greeted(self, peer: PeerId, over: trio.Event) -> None:
        """A greeting of ``peer`` has ended, one way or the other."""
        over.set()
        self._greetings[peer].remove(over)
        if not self._greetings[peer]:
            del self._greetings[peer]

    async def _greet(
        self, stream: PeerStream, reader: FrameReader
    ) -> tuple[GreetingHello, Topic] | None:
        """What an opener wants, once both sides have shown their standing; None where it ended.
        Raises RefusedError.
        """
        greeting = await reader.next(MAX_HELLO_BYTES)
        if greeting is None:
            return None
        hello, topic = self._check(stream.peer, greeting)
        shown = topic.greet(stream.peer)[:MAX_SHOWN_BYTES]
        recalled = topic.recall(stream.peer)
        if len(recalled) > MAX_RECALLED_BYTES:
            recalled = b""
        answer = GreetingAnswer("", "", shown=shown, recalled=recalled)
        await stream.send_all(frame(msgspec.msgpack.encode(answer)))
        payload = await reader.next(MAX_PROOF_BYTES)
        if payload is None:
            return None
        proof = decode(proof_decoder, payload, stream.peer)
        if self.topics.get(hello.topic) is not topic:  # it was left meanwhile
            raise RefusedError(NO_TOPIC, "not open here")
        if not _judged(topic.admit, stream.peer, proof.shown):
            raise RefusedError("E201", "this run does not admit you")
        return hello, topic

    def _check(self, peer: PeerId, greeting: bytes) -> tuple[GreetingHello, Topic]:
        version = decode(preface_decoder, greeting, peer).version
        if version != self.version:
            raise RefusedError(
                "E140",
                (
                    f"you speak version {version} of the atoll protocol, this peer "
                    f"speaks {self.version}"
                ),
            )
        hello = decode(hello_decoder, greeting, peer)
        topic = self.topics.get(hello.topic)
        if topic is None:
            raise RefusedError(NO_TOPIC, "not open here")
        return hello, topic

    async def _refuse(self, stream: PeerStream, refused: RefusedError) -> None:
        self.counters.refusals += 1
        await stream.send_all(
            frame(msgspec.msgpack.encode(GreetingAnswer(refused.code[:16], refused.reason[:1024])))
        )
        await stream.finish()
        with trio.move_on_after(2.0):  # let it be read before the stream is reset
            while await stream.receive_some():
                pass

    async def _receive(self, stream: PeerStream | Wire, reader: FrameReader, topic: Topic) -> None:
        with trio.CancelScope() as silence:
            while True:
                silence.deadline = trio.current_time() + SILENT_S
                payload = await reader.next()
                if payload is None:
                    return
                if payload:
                    self.counters.messages_received += 1
                    self.counters.bytes_received += len(payload)
                    pause = topic.handler(stream.peer, payload)
                    if pause:  # the peer has used up its budget: TCP tells it so
                        silence.deadline += pause
                        await trio.sleep(pause)
                else:
                    await stream.send_all(frame(b""))


def _judged(judge: Callable[[PeerId, bytes], bool], peer: PeerId, shown: bytes) -> bool:
    """Whether ``judge`` is content with what was shown. Raises RefusedError with the code and the
    message it gives.
    """
    try:
        return judge(peer, shown)
    except RemoteProtocolError:
        raise
    except AtollError as error:
        raise RefusedError(error.code, error.message) from None

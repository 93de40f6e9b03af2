"""The members of a run, known to all of them within a round trip or two: signed announcements over ``/atoll/peers/1``.

A node that takes part in runs keeps a stream to each connected bootstrap, and a while later to two random members, so that
the death of the bootstrap changes nothing. On the stream both sides say what they know of a run, and from then on what is
new. Members are *known* first and *connected* only when somebody has something to say to them.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated

import msgspec
import trio

from ...collectives.errors import NetworkError, PeerLostError, RemoteProtocolError
from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import Identity
from .announcements import LIFE_S, MAX_PER_RUN, RENEW_S, Announcement, Registry, announce
from .backoff import Backoff
from .faults import Faults
from .framing import FrameReader, decode, frame
from .host import Host, NotSpokenError, PeerStream

PROTOCOL = "/atoll/peers/1"
MEMBER_STREAMS = 2
CONNECTED_STREAMS = 3
"""To whoever is connected, where no bootstrap is."""
MEMBER_DELAY_S = 2.0
"""Streams to random members come later: at the start everybody would dial everybody."""
MAX_STREAMS = 512
STREAMS_PER_PEER = 4
"""Ours to it included: else one peer could have all."""
AGAIN_S = 0.1
"""Before a peer is asked again."""
SILENT_FIRST_S, SILENT_MAX_S = 0.5, 60.0
"""The same where it said nothing: it need not be a node of ours, and there may be hundreds of such."""
FOREIGN_S = 600.0
"""The same where it said that it is none."""
TURN_S = 1.0
"""So long nobody else is asked in its place."""
SILENT_S = LIFE_S
_QUEUE = 64
_PER_FRAME = 128
"""Announcements a frame, each below 2 KB."""


class _News(msgspec.Struct, frozen=True, array_like=True):
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=PLAIN)]
    announcements: Annotated[tuple[Announcement, ...], msgspec.Meta(max_length=MAX_PER_RUN)]
    asks: bool  # please answer with what I lack


_decoder = msgspec.msgpack.Decoder(_News)


class _Exchange:
    """One stream, ours or theirs, over which announcements of some runs flow both ways."""

    def __init__(self, stream: PeerStream) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.runs: set[str] = set()
        self.heard = False
        """Whether the other end has said anything."""
        self._queue: deque[bytes] = deque(maxlen=_QUEUE)
        self._wake = trio.Event()

    def say(self, run: str, announcements: Iterable[Announcement], *, asks: bool = False) -> None:
        """Queue news; never blocks. What is lost in an overflow comes with the next renewal."""
        self.runs.add(run)
        known = tuple(announcements)
        for first in range(0, max(1, len(known)), _PER_FRAME):
            last = first + _PER_FRAME >= len(known)
            self._queue.append(
                frame(
                    msgspec.msgpack.encode(
                        _News(run, known[first : first + _PER_FRAME], asks and last)
                    )
                )
            )
        self._wake.set()

    async def write(self) -> None:
        """Send what is queued, until the stream breaks (PeerLostError) or cancelled."""
        while True:
            while self._queue:
                batch = b"".join(self._queue)
                self._queue.clear()
                await self.stream.send_all(batch)
            self._wake = trio.Event()
            await self._wake.wait()


class Rendezvous:
    """Announces our runs and learns who else is in them. Used from the trio thread only."""

    def __init__(
        self,
        identity: Identity,
        host: Host,
        connect: Callable[[PeerId], Awaitable[None]],
        bootstraps: Callable[[], list[PeerId]],
        faults: Faults,
        rng: random.Random,
    ) -> None:
        """``connect`` makes sure of a connection or raises NetworkError; ``bootstraps()`` names the peers to ask first."""
        self._identity, self._host, self._connect, self._bootstraps, self._faults, self._rng = (
            identity,
            host,
            connect,
            bootstraps,
            faults,
            rng,
        )
        self._mine: set[RunId] = set()
        self.registry = Registry(self._mine)
        self.learned: Callable[[Announcement], None] = lambda news: None
        self.answered: set[str] = set()
        """Runs of which somebody has told us what he knows, be it nothing."""
        self._hints: dict[PeerId, None] = {}
        self._exchanges: set[_Exchange] = set()
        self._partners: set[PeerId] = set()
        """Whom we ask, or have asked and ask again after a pause; the latter are `_resting`, too."""
        self._resting: set[PeerId] = set()
        self._pauses: dict[PeerId, Backoff] = {}
        self._changed = trio.Event()
        self._running = False
        host.handle(PROTOCOL, self._serve)

    def join(self, run: RunId) -> None:
        """Announce that we take part in ``run``, and learn its members, until `leave`."""
        self._mine.add(run)
        if self._running:
            self._announce(run)
        self.changed()

    def leave(self, run: RunId) -> None:
        """Say goodbye, as far as anybody listens."""
        if run not in self._mine:
            return
        self._mine.discard(run)
        self.answered.discard(run)
        self._take(announce(self._identity, run, (), time.time()), self._host.peer)

    def hint(self, peer: PeerId) -> None:
        """``peer`` may know about our runs (a provider record says so)."""
        if peer != self._host.peer and len(self._hints) < 64:
            self._hints[peer] = None
            self.changed()

    def moved(self) -> None:
        """We have other addresses: say so in all runs."""
        for run in self._mine if self._running else ():
            self._announce(run)

    def changed(self) -> None:
        """A connection came or went, or we joined a run."""
        self._changed.set()
        self._changed = trio.Event()

    def members(self, run: RunId) -> list[Announcement]:
        """Who is known to take part in ``run``, without ourselves."""
        return [
            news
            for news in self.registry.members(run, trio.current_time())
            if news.peer != self._host.peer
        ]

    async def run(self) -> None:
        """Until cancelled. The host must be listening, because its addresses are announced."""
        self._running = True
        for run in self._mine:
            self._announce(run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._renew)
            started = trio.current_time()
            while True:
                changed = self._changed
                wait_s = RENEW_S
                if self._mine:
                    if trio.current_time() - started < MEMBER_DELAY_S:
                        wait_s = MEMBER_DELAY_S
                    for peer in self._choose(trio.current_time() - started >= MEMBER_DELAY_S):
                        self._partners.add(peer)
                        nursery.start_soon(self._partner, peer)
                with trio.move_on_after(wait_s):
                    await changed.wait()

    def _choose(self, settled: bool) -> list[PeerId]:
        """With whom to open a stream now: bootstraps; whoever is connected if there is none; hints; later random members."""
        wanted = [peer for peer in self._bootstraps() if self._host.connected(peer)]
        if not wanted:
            others = [peer for peer in self._host.peers() if peer not in self._partners]
            wanted = self._rng.sample(
                others,
                min(len(others), max(0, CONNECTED_STREAMS - len(self._partners - self._resting))),
            )
        wanted += list(self._hints)[:2]
        self._hints.clear()
        members = [PeerId(news.peer) for run in self._mine for news in self.members(run)]
        if settled and members:
            have = sum(peer in self._partners - self._resting for peer in members)
            wanted += self._rng.sample(members, min(len(members), max(0, MEMBER_STREAMS - have)))
        return [peer for peer in dict.fromkeys(wanted) if peer not in self._partners]

    async def _partner(self, peer: PeerId) -> None:
        """One stream that we opened, for as long as it lives, and the pause that follows."""
        pauses, answered = (
            self._pauses.get(peer, Backoff(SILENT_FIRST_S, SILENT_MAX_S, self._rng)),
            False,
        )
        try:
            await self._connect(peer)
            stream = await self._host.open_stream(peer, PROTOCOL)
            try:
                exchange = _Exchange(stream)
                for run in self._mine:
                    exchange.say(run, self._known(run), asks=True)
                await self._converse(exchange)
                answered = exchange.heard
            finally:
                await stream.aclose()
        except NotSpokenError:
            pauses = Backoff(FOREIGN_S, FOREIGN_S, self._rng)
        except NetworkError:
            pass
        kept = self._pauses | {peer: pauses}
        if answered:
            del kept[peer]
        self._pauses = {
            other: kept[other]
            for other in kept
            if other in self._partners or self._host.connected(other)
        }
        pause_s = AGAIN_S if answered else pauses.next_s()
        await trio.sleep(min(pause_s, TURN_S))
        self._resting.add(peer)
        self.changed()
        await trio.sleep(max(0.0, pause_s - TURN_S))
        self._resting.discard(peer)
        self._partners.discard(peer)
        self.changed()

    async def _serve(self, stream: PeerStream) -> None:
        of_one = sum(exchange.peer == stream.peer for exchange in self._exchanges)
        if (
            len(self._exchanges) >= MAX_STREAMS
            or of_one >= STREAMS_PER_PEER
            or self._faults.shut_out(stream.peer, trio.current_time())
        ):
            return
        await self._converse(_Exchange(stream))

    async def _converse(self, exchange: _Exchange) -> None:
        self._exchanges.add(exchange)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, exchange, nursery.cancel_scope)
                await self._read(exchange)
                nursery.cancel_scope.cancel()
        finally:
            self._exchanges.discard(exchange)

    async def _write(self, exchange: _Exchange, scope: trio.CancelScope) -> None:
        try:
            await exchange.write()
        except PeerLostError:
            scope.cancel()

    async def _read(self, exchange: _Exchange) -> None:
        reader = FrameReader(exchange.stream.receive_some, exchange.peer)
        try:
            while True:
                payload = None
                with trio.move_on_after(SILENT_S):
                    payload = await reader.next()
                if payload is None:
                    return
                exchange.heard = True
                self._heard(exchange, decode(_decoder, payload, exchange.peer))
        except RemoteProtocolError:
            self._faults.count(exchange.peer, trio.current_time())

    def _heard(self, exchange: _Exchange, news: _News) -> None:
        for announcement in news.announcements:
            if announcement.run != news.run:
                raise RemoteProtocolError("announcement of another run", peer=exchange.peer)
            self._take(announcement, exchange.peer)
        if news.run in self._mine:
            self.answered.add(news.run)
        if news.asks and len(exchange.runs) < 64:
            exchange.say(
                news.run,
                self.registry.missing(RunId(news.run), news.announcements, trio.current_time()),
            )

    def _take(self, news: Announcement, sender: PeerId) -> None:
        """Keep an announcement and pass it on to everybody who asked for that run, except to whom it came from."""
        if not self.registry.accept(news, sender, trio.current_time(), time.time()):
            return
        for exchange in self._exchanges:
            if news.run in exchange.runs and exchange.peer not in (sender, news.peer):
                exchange.say(news.run, [news])
        if news.peer != self._host.peer and news.run in self._mine:
            self.learned(news)

    def _known(self, run: RunId) -> list[Announcement]:
        return self.registry.missing(run, (), trio.current_time())[:MAX_PER_RUN]

    def _announce(self, run: RunId) -> None:
        self._take(
            announce(self._identity, run, self._host.addresses(), time.time()), self._host.peer
        )
        for exchange in self._exchanges:
            if run not in exchange.runs and exchange.peer in self._partners:
                exchange.say(run, self._known(run), asks=True)

    async def _renew(self) -> None:
        while True:
            await trio.sleep(RENEW_S * self._rng.uniform(0.8, 1.0))
            for run in self._mine:
                self._announce(run)

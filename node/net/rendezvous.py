"""The members of a run, known to all of them within a round trip or two: signed announcements over
``/atoll/peers/1``.

A node that takes part in runs keeps a stream to each connected bootstrap, and a while later to two
random members, so that the death of the bootstrap changes nothing. On the stream both sides say
what they know of a run, and from then on what is new. Members are *known* first and *connected*
only when somebody has something to say to them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import trio

from ...collectives.errors import NetworkError, PeerLostError, RemoteProtocolError
from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import Identity
from .announcements import (
    LIFE_S,
    MAX_PER_RUN,
    RENEW_S,
    AnnouncedRun,
    Announcement,
    InviteReader,
    Registry,
    announce,
)
from .transport.backoff import Backoff
from .transport.door import Door
from .transport.faults import Faults
from .transport.framing import FrameReader, decode, frame
from .transport.host import Host, NotSpokenError, PeerStream

PROTOCOL = "/atoll/peers/1"
MEMBER_STREAMS = 2
CONNECTED_STREAMS = 3
"""To whoever is connected, where no bootstrap is."""
MEMBER_DELAY_S = 2.0
"""Streams to random members come later: at the start everybody would dial everybody."""
MAX_STREAMS = 512
"""Of others to us: the machine that has the most makes room."""
STREAMS_PER_PEER = 4
"""Ours to it included: else one peer could have all."""
ASK_S = 5.0
AGAIN_S = 0.1
"""Before a peer is asked again."""
SILENT_FIRST_S, SILENT_MAX_S = 0.5, 60.0
"""The same where it said nothing: it need not be a node of ours, and there may be hundreds of such.
"""
FOREIGN_S = 600.0
"""The same where it said that it is none."""
TURN_S = 1.0
"""So long nobody else is asked in its place."""
SILENT_S = LIFE_S
FRAME_BYTES = 65_536
"""Of announcements, in a frame that we send; each has less than 2 KB."""
MAX_NEWS_BYTES = 2 * FRAME_BYTES
"""Of a frame that others send."""
MAX_OWED = 1024
"""Announcements that wait for one reader. Whoever is owed more is asked nothing further until it
has read."""
MAX_HINTS, HINTS_AT_ONCE = 64, 4
"""Anybody can put a hint into the DHT: so many wait, and so many are being tried."""


@dataclass(slots=True)
class _Own:
    """A run of ours. ``hears(peer, certificate)``: whether an announcement counts. ``free``:
    whether peers without a certificate may be of it; None: that is not known yet."""

    place: AnnouncedRun
    certificate: bytes
    hears: Callable[[PeerId, bytes], bool]
    free: bool | None

    @property
    def places(self) -> set[AnnouncedRun]:
        return {self.place} if self.free is False else {self.place, AnnouncedRun(self.place.run)}


class _News(msgspec.Struct, frozen=True, array_like=True):
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=PLAIN)]
    announcements: Annotated[tuple[Announcement, ...], msgspec.Meta(max_length=MAX_PER_RUN)]
    asks: bool  # please answer with what I lack
    organiser: Annotated[str, msgspec.Meta(max_length=128, pattern=PLAIN)] = ""


_decoder = msgspec.msgpack.Decoder(_News)


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """`_News` as it is written, its announcements encoded already."""

    run: str
    announcements: list[msgspec.Raw]
    asks: bool
    organiser: str


class _Exchange:
    """One stream, ours or theirs, over which announcements of some runs flow both ways.

    What waits for its reader are names only, each once: the announcements of the moment are encoded
    when the last frame has been taken. So a reader that reads nothing holds one frame.
    """

    def __init__(self, stream: PeerStream, registry: Registry) -> None:
        self.stream, self._registry = stream, registry
        self.peer = stream.peer
        self.places: set[AnnouncedRun] = set()
        self.heard = False
        """Whether the other end has said anything."""
        self._owed: dict[AnnouncedRun, dict[PeerId, None]] = {}
        self._asks: set[AnnouncedRun] = set()
        self._count = 0
        self._wake, self._taken = trio.Event(), trio.Event()

    def owe(
        self, place: AnnouncedRun, announcements: Iterable[Announcement], *, asks: bool = False
    ) -> None:
        """Say these next, or that there are none; never blocks. See `room`."""
        self.places.add(place)
        owed = self._owed.setdefault(place, {})
        self._count -= len(owed)
        owed.update((PeerId(news.peer), None) for news in announcements)
        self._count += len(owed)
        if asks:
            self._asks.add(place)
        self._wake.set()

    def tell(self, news: Announcement) -> None:
        """Pass on what is new. What a slow reader has no room for comes with the next renewal."""
        if self._count < MAX_OWED:
            self.owe(news.place, [news])

    async def room(self) -> None:
        """Wait until the other end has read enough to be asked by it again."""
        while self._count >= MAX_OWED:
            self._taken = trio.Event()
            await self._taken.wait()

    async def write(self) -> None:
        """Send what is owed, until the stream breaks or nobody reads for `SILENT_S`
        (PeerLostError), or cancelled.
        """
        while True:
            while self._owed:
                batch = bytearray()
                while self._owed and len(batch) < FRAME_BYTES:
                    batch += self._next(next(iter(self._owed)), FRAME_BYTES - len(batch))
                self._taken.set()
                with trio.move_on_after(SILENT_S) as patience:
                    await self.stream.send_all(bytes(batch))
                if patience.cancelled_caught:
                    raise PeerLostError(f"{self.peer} reads nothing", peer=self.peer)
            self._wake = trio.Event()
            await self._wake.wait()

    def _next(self, place: AnnouncedRun, nbytes: int) -> bytes:
        """A frame of what is owed of a place."""
        owed, said = self._owed[place], list[msgspec.Raw]()
        for peer in list(owed):
            if nbytes <= 0 or len(said) == MAX_PER_RUN:
                break
            del owed[peer]
            self._count -= 1
            news = self._registry.get(place, peer, trio.current_time())
            if news is not None:
                said.append(msgspec.Raw(msgspec.msgpack.encode(news)))
                nbytes -= len(said[-1])
        asks = not owed and place in self._asks
        if not owed:
            del self._owed[place]
            self._asks.discard(place)
        return frame(msgspec.msgpack.encode(_Said(place.run, said, asks, place.organiser)))


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
        read_invite: InviteReader,
    ) -> None:
        """``connect`` makes sure of a connection or raises NetworkError; ``bootstraps()`` names the
        peers to ask first; ``read_invite`` checks the certificates of announcements.
        """
        self._identity, self._host, self._connect, self._bootstraps, self._faults, self._rng = (
            identity,
            host,
            connect,
            bootstraps,
            faults,
            rng,
        )
        self._mine: dict[RunId, _Own] = {}
        self._places: set[AnnouncedRun] = set()
        self.registry = Registry(self._places, read_invite)
        self.learned: Callable[[Announcement], None] = lambda news: None
        self.answered: set[str] = set()
        """Runs of which somebody has told us what he knows, be it nothing."""
        self._hints: dict[PeerId, None] = {}
        self._tried: set[PeerId] = set()
        """Partners that a hint named."""
        self._exchanges: set[_Exchange] = set()
        self._partners: set[PeerId] = set()
        """Whom we ask, or have asked and ask again after a pause; the latter are `_resting`, too.
        """
        self._resting: set[PeerId] = set()
        self._pauses: dict[PeerId, Backoff] = {}
        self._changed = trio.Event()
        self._running = False
        self._door = Door(MAX_STREAMS)
        host.handle(PROTOCOL, self._serve)

    def join(
        self,
        run: RunId,
        organiser: str = "",
        certificate: bytes = b"",
        hears: Callable[[PeerId, bytes], bool] = lambda peer, certificate: True,
        free: bool | None = True,
    ) -> None:
        """Announce that we take part in ``run`` with this certificate, and learn its members, until
        `leave`.

        ``organiser``: whose run it is, "" for one without certificates; others see
        `PeerNetwork.announce_run`.
        """
        self._mine[run] = _Own(AnnouncedRun(run, organiser), certificate, hears, free)
        self._places |= self._mine[run].places
        if self._running:
            self._announce(run)
        self.changed()

    def settle(self, run: RunId, free: bool) -> None:
        """Whether peers without a certificate may be of ``run`` is known now."""
        own = self._mine.get(run)
        if own is not None:
            own.free = free
            for place in {AnnouncedRun(run)} - own.places:
                self._places.discard(place)
                self.registry.drop(run)

    def leave(self, run: RunId) -> None:
        """Say goodbye, as far as anybody listens."""
        own = self._mine.pop(run, None)
        if own is None:
            return
        self._places -= {place for place in self._places if place.run == run}
        self.answered.discard(run)
        self._take(self._news(own, ()), self._host.peer)

    def hint(self, peer: PeerId) -> None:
        """``peer`` may know about our runs (a provider record says so)."""
        if peer != self._host.peer and len(self._hints) < MAX_HINTS:
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
        """Who is known to take part in ``run``, without ourselves.

        Where it is not known whether the run has certificates, those without count only where there
        is none with one.
        """
        own = self._mine.get(run)
        if own is None:  # what strangers have said, to nobody's use but a test's
            return self.registry.members(run, trio.current_time())
        found = self._heard_of(own, own.place)
        if own.place.organiser and (own.free or (own.free is None and not found)):
            known = {news.peer for news in found}
            found += [
                news for news in self._heard_of(own, AnnouncedRun(run)) if news.peer not in known
            ]
        return sorted(found, key=lambda news: news.peer)

    def uncertified(self, run: RunId) -> int:
        """How many announce themselves in ``run`` without a certificate, and are not believed."""
        own = self._mine.get(run)
        if own is None or own.free or not own.place.organiser:
            return 0
        return len(self.registry.members(run, trio.current_time()))

    def _heard_of(self, own: _Own, place: AnnouncedRun) -> list[Announcement]:
        return [
            news
            for news in self.registry.members(
                RunId(place.run), trio.current_time(), place.organiser
            )
            if news.peer != self._host.peer and own.hears(PeerId(news.peer), news.certificate)
        ]

    async def ask(self, peer: PeerId, place: AnnouncedRun) -> list[Announcement]:
        """What a connected peer has heard of a run in which we take no part; nothing is checked.
        Raises NetworkError, RemoteProtocolError.
        """
        found = list[Announcement]()
        stream = await self._host.open_stream(peer, PROTOCOL)
        try:
            with trio.move_on_after(ASK_S):
                await stream.send_all(
                    frame(msgspec.msgpack.encode(_News(place.run, (), True, place.organiser)))
                )
                payload = await FrameReader(stream.receive_some, peer).next(MAX_NEWS_BYTES)
                if payload:
                    found += decode(_decoder, payload, peer).announcements
        finally:
            await stream.aclose()
        return found

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
        """With whom to open a stream now: bootstraps; whoever is connected if there is none; hints;
        later random members.
        """
        wanted = [peer for peer in self._bootstraps() if self._host.connected(peer)]
        if not wanted:
            others = [peer for peer in self._host.peers() if peer not in self._partners]
            wanted = self._rng.sample(
                others,
                min(len(others), max(0, CONNECTED_STREAMS - len(self._partners - self._resting))),
            )
        hinted = [peer for peer in self._hints if peer not in self._partners]
        room = max(0, HINTS_AT_ONCE - len(self._tried))
        chosen = self._rng.sample(hinted, min(len(hinted), room))
        self._tried.update(chosen)
        self._hints = {peer: None for peer in hinted if peer not in chosen}
        wanted += chosen
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
                exchange = _Exchange(stream, self.registry)
                for place in sorted(self._places):
                    exchange.owe(place, self._known(place), asks=True)
                await self._converse(exchange)
                answered = exchange.heard
            finally:
                await stream.aclose()
        except NotSpokenError:
            pauses = Backoff(FOREIGN_S, FOREIGN_S, self._rng)
        except NetworkError:
            pass
        if peer in self._tried:  # the next hint's turn
            self._tried.discard(peer)
            if self._hints:
                self.changed()
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
        if of_one >= STREAMS_PER_PEER or self._faults.shut_out(stream.peer, trio.current_time()):
            return
        scope = trio.CancelScope()
        shown_out = self._door.enter(scope, stream.machine)
        if isinstance(shown_out, trio.CancelScope):
            shown_out.cancel()  # maybe our own
        try:
            with scope:
                await self._converse(_Exchange(stream, self.registry))
        finally:
            self._door.leave(scope)

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
                    payload = await reader.next(MAX_NEWS_BYTES)
                if payload is None:
                    return
                exchange.heard = True
                self._heard(exchange, decode(_decoder, payload, exchange.peer))
                await exchange.room()
        except RemoteProtocolError:
            self._faults.count(exchange.peer, trio.current_time())

    def _heard(self, exchange: _Exchange, news: _News) -> None:
        place = AnnouncedRun(news.run, news.organiser)
        for announcement in news.announcements:
            if announcement.place != place:
                raise RemoteProtocolError("announcement of another run", peer=exchange.peer)
            self._take(announcement, exchange.peer)
        if place in self._places:
            self.answered.add(news.run)
        if news.asks and len(exchange.places) < 64:
            exchange.owe(
                place,
                self.registry.missing(
                    RunId(place.run), news.announcements, trio.current_time(), place.organiser
                ),
            )

    def _take(self, news: Announcement, sender: PeerId) -> None:
        """Keep an announcement and pass it on to everybody who asked for that run, except to whom
        it came from.
        """
        own = self._mine.get(RunId(news.run))
        ours = own is not None and news.place in self._places
        if (
            own is not None
            and ours
            and news.peer != self._host.peer
            and not own.hears(PeerId(news.peer), news.certificate)
        ):
            return
        if not self.registry.accept(news, sender, trio.current_time(), time.time()):
            return
        for exchange in self._exchanges:
            if news.place in exchange.places and exchange.peer not in (sender, news.peer):
                exchange.tell(news)
        if news.peer != self._host.peer and ours:
            self.learned(news)

    def _known(self, place: AnnouncedRun) -> list[Announcement]:
        now = trio.current_time()
        return self.registry.missing(RunId(place.run), (), now, place.organiser)[:MAX_PER_RUN]

    def _announce(self, run: RunId) -> None:
        own = self._mine[run]
        self._take(self._news(own, self._host.addresses()), self._host.peer)
        for exchange in self._exchanges:
            for place in sorted(own.places - exchange.places):
                if exchange.peer in self._partners:
                    exchange.owe(place, self._known(place), asks=True)

    def _news(self, own: _Own, addresses: Sequence[str]) -> Announcement:
        """Our announcement: under the organiser where we can show that we belong there, else under
        nobody.
        """
        shows = bool(own.certificate) or own.place.organiser == self._host.peer
        return announce(
            self._identity,
            RunId(own.place.run),
            addresses,
            time.time(),
            own.place.organiser if shows else "",
            own.certificate,
        )

    async def _renew(self) -> None:
        while True:
            await trio.sleep(RENEW_S * self._rng.uniform(0.8, 1.0))
            for run in self._mine:
                self._announce(run)

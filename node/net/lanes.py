"""Lanes: direct TCP connections for bulk data, agreed on over an authenticated libp2p stream
(protocol ``/atoll/lane/1``).

The peer with the smaller id drives. It offers a token, a fresh 32-byte secret and its addresses,
and gets a secret and addresses back; then it proposes ways to make a connection (`lane_routes`): a
dial, a dial by the other side, a simultaneous open through both routers, a relay. If nothing works,
the libp2p stream itself becomes the lane, bridged to a socket pair, and whoever uses the lane need
not care. The larger peer asks the smaller one for an offer when it wants a lane. A lane that was
lost is offered again, with back-off, as long as it is wanted. For one that goes over a relay or the
stream a direct way is looked for again (`retry`); the new lane then takes the old one's place.

Several lanes to one peer are told apart by an index, and made each by itself. A lane is plain only
if both ends allow it, each by itself; both say so on the authenticated stream.
"""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from ...collectives.errors import NetworkError, NotAdmittedError, RemoteProtocolError
from ...collectives.foreign import quoted
from ...collectives.identifiers import PeerId
from .bridge import bridge
from .lane_routes import Follower, LaneRoutes, Made
from .lane_talk import (
    ANSWER_S,
    MAX_LANES,
    SECRET_BYTES,
    Again,
    Bridge,
    LaneDone,
    LaneOffer,
    LaneRequest,
    LaneTalk,
    Refuse,
    Take,
    Terms,
)
from .retry import Retry
from .transport.allowance import Allowance
from .transport.backoff import Backoff
from .transport.faults import Faults
from .transport.host import Host, PeerStream

PROTOCOL = "/atoll/lane/1"
PATIENCE_S = 0.25
"""How long the larger peer waits for an offer before it asks for one."""
PROVEN_S = 10.0
"""A lane that lived so long has proved its path; one that died sooner makes the next offer wait
longer.
"""

OnLane = Callable[[PeerId, socket.socket, bytes, bytes, bool, str, int, bool], None]
"""(peer, non-blocking socket, my secret, their secret, whether I drove, "lan" | "direct" |
"punched" | "relay" | "stream", index, whether it is plain).

The callee owns the socket. May be called again for the same peer and index: the new lane replaces
the old one, which the other side has given up.
"""

TALKS, TALKS_PER_S = 256, 20.0
"""That a peer may begin, of eight lanes that break and are made again."""
_Key = tuple[PeerId, int]


@dataclass
class _Wanted:
    """A lane that is wanted."""

    retry: Retry
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    changed: trio.Event = field(default_factory=trio.Event)
    up: bool = False
    since: float = 0.0
    token: bytes = bytes(16)

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class Lanes:
    """All lanes of a node. Used from the trio thread only."""

    def __init__(
        self,
        host: Host,
        routes: LaneRoutes,
        connect: Callable[[PeerId], Awaitable[None]],
        admitted: Callable[[PeerId], Awaitable[bool]],
        faults: Faults,
        rng: random.Random,
    ) -> None:
        """``admitted(peer)``: whether a lane with this peer is allowed; it may wait for a greeting
        under way.
        """
        self._host, self._routes, self._connect, self._admitted, self._faults, self._rng = (
            host,
            routes,
            connect,
            admitted,
            faults,
            rng,
        )
        self.on_lane: OnLane = lambda peer, sock, *_: sock.close()
        self.allows_plain: Callable[[PeerId], bool] = lambda peer: False
        self.paths: dict[PeerId, str] = {}
        self._wanted: dict[_Key, _Wanted] = {}
        # Since when, by which token: also what only the other side wants.
        self._there: dict[_Key, tuple[float, bytes]] = {}
        self._busy: set[_Key] = set()
        self._talks = Allowance(TALKS, TALKS_PER_S)
        self._nursery: trio.Nursery | None = None
        host.handle(PROTOCOL, self._serve)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the wanted lanes up until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._routes.listener.run)
            task_status.started()
            await trio.sleep_forever()

    def ensure(self, peer: PeerId, count: int = 1) -> None:
        """From now on keep so many lanes to ``peer`` up, at least. Idempotent."""
        assert self._nursery is not None, "lanes are not running"
        for index in range(min(count, MAX_LANES)):
            if (peer, index) not in self._wanted and peer != self._host.peer:
                wanted = self._wanted[peer, index] = _Wanted(Retry(timed=self._host.peer < peer))
                if (peer, index) in self._there:
                    wanted.up, (wanted.since, wanted.token) = True, self._there[peer, index]
                    wanted.retry.made(
                        trio.current_time(), self.paths.get(peer, "").partition(",")[0]
                    )
                self._nursery.start_soon(self._keep, peer, index, wanted)

    def release(self, peer: PeerId, keep: int = 0) -> None:
        """No more than ``keep`` lanes to ``peer`` are wanted; others that are open are their
        owner's to close.
        """
        for key in [key for key in self._wanted if key[0] == peer and key[1] >= keep]:
            self._wanted.pop(key).scope.cancel()
        for key in [key for key in self._there if key[0] == peer and key[1] >= keep]:
            del self._there[key]
        if not keep:
            self.paths.pop(peer, None)
            self._routes.why.pop(peer, None)

    def lost(self, peer: PeerId, index: int = 0) -> None:
        """The lane's owner says that it broke. If it is still wanted, a new one is offered."""
        self._there.pop((peer, index), None)
        wanted = self._wanted.get((peer, index))
        if wanted is not None and wanted.up:
            wanted.up = False
            wanted.notify()
        if not any(other.up for key, other in self._wanted.items() if key[0] == peer):
            self.paths.pop(peer, None)

    def arrived(self, peer: PeerId) -> None:
        """There is a connection to ``peer`` again: its lanes need not wait for the next try."""
        for key, wanted in self._wanted.items():
            if key[0] == peer and not wanted.up:
                wanted.notify()

    def moved(self) -> None:
        """Our addresses, our router's habits or who can help us have changed: roundabout lanes may
        be direct now.
        """
        for wanted in self._wanted.values():
            wanted.retry.asked(trio.current_time())
            wanted.notify()

    async def _keep(self, peer: PeerId, index: int, wanted: _Wanted) -> None:
        backoff = Backoff(0.05, 5.0, self._rng)
        drives = self._host.peer < peer
        with wanted.scope:
            while True:
                stays = wanted.up
                try:
                    if stays:
                        await self._stay(peer, index, wanted)
                    elif drives:
                        await self._offer(peer, index)
                    else:
                        await self._ask(peer, index, wanted)
                except (NetworkError, NotAdmittedError):
                    pass
                except RemoteProtocolError:
                    self._faults.count(peer, trio.current_time())
                if stays:
                    if trio.current_time() - wanted.since > PROVEN_S:
                        backoff.reset()
                elif not wanted.up:
                    away = not self._host.connected(peer)
                    with trio.move_on_after(backoff.next_s()):
                        await wanted.changed.wait()
                    if away and self._host.connected(peer):
                        backoff.reset()

    async def _stay(self, peer: PeerId, index: int, wanted: _Wanted) -> None:
        """The lane is up: until something changes, or it is time to look for a better way."""
        changed = wanted.changed
        with trio.move_on_at(wanted.retry.at):
            await changed.wait()
        if wanted.up and wanted.retry.due(trio.current_time()):
            if self._host.peer < peer:
                await self._offer(peer, index, better=True)
            else:
                await self._tell(peer, Again(index), until=lambda: False)

    def _up(self, peer: PeerId, made: Made, terms: Terms) -> None:
        plain = terms.plain and made.path != "relay"
        self._there[peer, terms.place] = trio.current_time(), terms.token
        wanted = self._wanted.get((peer, terms.place))
        if wanted is not None:
            wanted.up, (wanted.since, wanted.token) = True, self._there[peer, terms.place]
            wanted.retry.made(trio.current_time(), made.path)
            wanted.notify()
        self.paths[peer] = f"{made.path}, not encrypted" if plain else made.path
        self.on_lane(
            peer,
            made.socket,
            terms.mine,
            terms.theirs,
            terms.initiator,
            made.path,
            terms.place,
            plain,
        )

    # --- driving (the smaller peer id) ---

    async def _ask(self, peer: PeerId, index: int, wanted: _Wanted) -> None:
        with trio.move_on_after(PATIENCE_S):
            await wanted.changed.wait()
        if wanted.up:
            return
        await self._connect(peer)
        if not wanted.up:  # else it came meanwhile: to name its token would say that it is lost
            await self._tell(peer, LaneRequest(wanted.token, index), until=lambda: wanted.up)

    async def _tell(
        self, peer: PeerId, message: LaneRequest | Again, *, until: Callable[[], bool]
    ) -> None:
        """Say one thing, and wait until the other side has taken it in. Raises NetworkError."""
        talk = LaneTalk(await self._host.open_stream(peer, PROTOCOL))
        try:
            if until():
                return
            await talk.say(message)
            with trio.move_on_after(ANSWER_S):
                while not until() and await talk.stream.receive_some():
                    pass
        finally:
            await talk.stream.aclose()

    async def _offer(self, peer: PeerId, index: int, *, better: bool = False) -> None:
        """One attempt at a lane; ``better``: there is one already, and only a direct one is worth
        it. Raises NetworkError, NotAdmittedError, RemoteProtocolError."""
        if (peer, index) in self._busy:
            return
        self._busy.add((peer, index))
        try:
            await self._connect(peer)
            talk = LaneTalk(await self._host.open_stream(peer, PROTOCOL))
            try:
                bridged = await self._drive(talk, index, better)
            except BaseException:
                await talk.stream.aclose()
                raise
            if not bridged:
                await talk.stream.aclose()
        finally:
            self._busy.discard((peer, index))

    def _told(self, peer: PeerId) -> tuple[str, ...]:
        ends = self._host.ends(peer)
        return self._routes.addresses(ends[1] if ends is not None else "")

    async def _drive(self, talk: LaneTalk, index: int, better: bool) -> bool:
        """Whether the stream has become the lane."""
        token, mine, plain = (
            secrets.token_bytes(16),
            secrets.token_bytes(SECRET_BYTES),
            self.allows_plain(talk.peer),
        )
        sent_at = trio.current_time()
        await talk.say(LaneOffer(token, mine, self._told(talk.peer), index, plain))
        answer = await talk.hear()
        rtt_s = trio.current_time() - sent_at
        if isinstance(answer, Refuse):
            raise NotAdmittedError(
                f"{talk.peer} refused a lane: {quoted(answer.reason)}", peer=talk.peer
            )
        if not isinstance(answer, Take):
            raise RemoteProtocolError("an offer must be taken or refused", peer=talk.peer)
        if answer.plain and not plain:
            raise RemoteProtocolError("a plain lane that was not offered", peer=talk.peer)
        terms = Terms(mine, answer.secret, True, token, index, answer.plain)
        made = await self._routes.drive(talk, terms, answer.addresses, rtt_s, relay=not better)
        if made is None and better:
            return False
        if made is None:
            await talk.say(Bridge())
            self._start_bridge(talk, terms)
            return True
        try:
            await talk.say(LaneDone())
        except BaseException:
            made.socket.close()
            raise
        self._up(talk.peer, made, terms)
        return False

    def _start_bridge(self, talk: LaneTalk, terms: Terms) -> None:
        ours, far = socket.socketpair()
        ours.setblocking(False)
        far.setblocking(False)
        assert self._nursery is not None, "lanes are not running"
        self._nursery.start_soon(bridge, talk.stream, talk.reader.rest(), far)
        self._up(talk.peer, Made(ours, "stream"), terms)

    # --- the other side (the larger peer id, or an Ask) ---

    async def _serve(self, stream: PeerStream) -> None:
        talk = LaneTalk(stream)
        now = trio.current_time()
        if self._faults.shut_out(talk.peer, now) or not self._talks.allows(talk.peer, now):
            return
        try:
            message = await talk.hear()
            if isinstance(message, LaneRequest) and self._host.peer < talk.peer:
                await self._asked(talk, message)
            elif isinstance(message, Again) and self._host.peer < talk.peer:
                wanted = self._wanted.get((talk.peer, message.index))
                if wanted is not None:
                    wanted.retry.asked(trio.current_time())
                    wanted.notify()
            elif isinstance(message, LaneOffer) and talk.peer < self._host.peer:
                await self._offered(talk, message)
            else:
                raise RemoteProtocolError(
                    "a lane begins with an offer by the smaller peer", peer=talk.peer
                )
        except RemoteProtocolError:
            self._faults.count(talk.peer, trio.current_time())
        except NetworkError:
            pass

    async def _asked(self, talk: LaneTalk, ask: LaneRequest) -> None:
        """The larger peer wants a lane. If ours is the one it lost, it is lost for us too."""
        wanted = self._wanted.get((talk.peer, ask.index))
        if wanted is None:
            if await self._admitted(talk.peer):
                await self._offer(talk.peer, ask.index)
        elif not wanted.up or ask.lost == wanted.token:
            wanted.up = False
            self._there.pop((talk.peer, ask.index), None)
            wanted.notify()

    async def _offered(self, talk: LaneTalk, offer: LaneOffer) -> None:
        known = (talk.peer, offer.index) in self._wanted  # what we asked for needs no greeting
        if not known and not await self._admitted(talk.peer):
            await talk.say(Refuse("no run in common"))
            await talk.stream.finish()
            with trio.move_on_after(2.0):
                await talk.stream.receive_some()
            return
        mine = secrets.token_bytes(SECRET_BYTES)
        terms = Terms(
            mine,
            offer.secret,
            False,
            offer.token,
            offer.index,
            offer.plain and self.allows_plain(talk.peer),
        )
        expected = self._routes.listener.expect(offer.token, talk.peer, terms.both)
        try:
            await talk.say(Take(mine, self._told(talk.peer), terms.plain))
            made = await Follower(self._routes, talk, terms, offer.addresses, expected).run()
        finally:
            self._routes.listener.forget(offer.token)
        if made is None:
            await self._bridge_here(talk, terms)
        else:
            self._up(talk.peer, made, terms)

    async def _bridge_here(self, talk: LaneTalk, terms: Terms) -> None:
        """Inside the stream's handler, whose return closes the stream."""
        ours, far = socket.socketpair()
        ours.setblocking(False)
        far.setblocking(False)
        self._up(talk.peer, Made(ours, "stream"), terms)
        await bridge(talk.stream, talk.reader.rest(), far)

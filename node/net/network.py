"""PeerNetwork: the whole peer-to-peer network of a node behind one object."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from ...collectives.errors import NetworkError, RemoteProtocolError
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import Identity
from .announcements import AnnouncedRun, Announcement, InviteReader, read_no_certificate
from .bootstrap import Bootstrap
from .dht.node import Dht
from .dht.records import run_key
from .greeting import VERSION, Topic
from .lan.discovery import LanDiscovery
from .lane_routes import LaneRoutes
from .lanes import Lanes, OnLane
from .look import Look, LookAnswer, Looks, ask
from .measuring import Measuring
from .reach.reach import Reachability, ReachSettings, known_to_dial
from .rendezvous import Rendezvous
from .streams import TopicStreams
from .through.meeting import OBSERVERS
from .through.relaying import Helpers, LaneRelay
from .through.vouchers import Limits
from .transport import dnsaddr
from .transport.addresses import (
    check_announce,
    check_listen,
    host_and_port,
    host_of,
    is_internet,
    join_peer,
    split_circuit,
    split_peer,
    without_peer,
)
from .transport.allowance import Allowance
from .transport.backoff import Backoff
from .transport.door import machine_of
from .transport.faults import Faults
from .transport.host import Host
from .transport.lane_sockets import LaneListener, refuses
from .transport.peerbook import MAX_PEERS, PeerBook, save_cache

DIALS, DIALS_PER_S = 128, 1.0
"""Addresses at one machine of the internet that others named, at once and from then on: peers that
do not exist may be said to be at anybody's.
"""
SAVE_S = 1.0
SAVE_LEAST_S = 0.1  # between two writes, however many peers we are told of
SEARCH_FIRST_S = 0.5
"""Pause before the DHT is searched for a run: the bootstrap's list is nearly always faster."""
SEARCH_UNANSWERED_S = 5.0
"""Nor is it searched before the bootstrap has answered, or had so long for it."""
SEARCH_LATER_S = 5.0
"""The same where that list has named somebody: for so long no more members came. Nobody waits for
the DHT then, and a start has enough to do.
"""
SEARCH_AT_LAST_S = 30.0
"""A run to which new members come all the time is put into the DHT after so long."""
SEARCH_AGAIN_S, SEARCH_MAX_S = 2.0, 60.0
STRANGERS_ASKED = 8
CLOCKS_S = 3.0
"""How long peers are waited for that are asked for the time."""
NEIGHBOURS = 4
"""Peers of our LAN that are dialled just because they are there; the others are known, and dialled
when somebody has something to say to them.
"""


class PeerNetwork:
    """One node's network. Everything but `run` is called from the trio thread in which `run` runs;
    nothing blocks.

    Set the callbacks before `run`: ``on_link(peer, up)``; ``on_gone(peer)`` when, after a
    connection ended, the peer's machine refuses others where it used to take them; ``on_member(run,
    peer, addresses)`` when a member of a run we announced becomes known or moves (no addresses: it
    said goodbye); ``on_refused(topic, peer, code, reason)`` when a peer does not admit us (E140:
    another protocol version; E201 and others: as the peer's `admit` said); ``on_lane(peer, socket,
    secret_mine, secret_theirs, initiator, path)`` hands over a lane (see `lanes.OnLane`);
    ``on_path(peer, path)`` when a peer is connected in another way than before (see `Host.path`);
    ``on_addresses()`` when ours are others.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        lane_port: int = 0,
        bootstrap: Sequence[str] = (),
        announce: Sequence[str] = (),
        cache: Path | None = None,
        rng: random.Random | None = None,
        version: int = VERSION,
        max_connections: int = 300,
        texts: dnsaddr.Texts = dnsaddr.texts_of,
        reach: ReachSettings | None = None,
        lan_discovery: bool = False,
        dht: bool = True,
        read_invite: InviteReader = read_no_certificate,
    ) -> None:
        """``listen``, ``announce``: ``/ip4/HOST/tcp/PORT``; ``bootstrap``: the same with
        ``/p2p/PEER``, or ``/dnsaddr/HOST``.

        ``cache``: the peer cache file; ``texts``: where the names among ``bootstrap`` are looked
        up. ``lan_discovery``: look for peers in the house by multicast DNS, and be found by it (not
        where ``listen`` is loopback). ``dht``: be part of it. ``lane_port``: TCP port of the lane
        listener, on the hosts of the listen addresses; 0 takes any. ``read_invite``: checks the
        certificates of runs by invite; by default none is accepted. Long, since here all parts of
        the network are wired to one another. Raises ConfigError.
        """
        _ = [*map(check_listen, listen), *map(check_announce, announce)]
        self.peer, self._cache, self._rng = identity.peer, cache, rng or random.Random()
        self.on_link: Callable[[PeerId, bool], None] = lambda peer, up: None
        self.on_gone: Callable[[PeerId], None] = lambda peer: None
        self.on_member: Callable[[RunId, PeerId, Sequence[str]], None] = (
            lambda run, peer, addresses: None
        )
        self.on_path: Callable[[PeerId, str], None] = lambda peer, path: None
        self.on_addresses: Callable[[], None] = lambda: None
        self.book = PeerBook(self.peer)
        self._given: set[str] = set()
        self._faults, self._texts = Faults(), texts
        if cache is not None:
            self.book.load(cache)
        self._host = Host(
            identity, listen, announce=announce, max_connections=max_connections, rng=self._rng
        )
        listener = LaneListener(
            [host_and_port(address)[0] for address in listen], lane_port, self._host.strangers
        )
        self._streams = TopicStreams(
            self._host, self.connect, self._faults, self._rng, listener, self._may_dial, version
        )
        self._bootstrap = Bootstrap(
            [],
            self.connect,
            self._host.connected,
            lambda: not self._host.peers(),
            self.book.peers,
            self._look_up,
            self._rng,
        )
        self.add_bootstrap(bootstrap)
        self.dht = Dht(
            identity,
            self._host,
            self.connect,
            self._addresses_of,
            self.book,
            self._faults,
            self._rng,
            dht,
        )
        self._rendezvous = Rendezvous(
            identity,
            self._host,
            self.connect,
            lambda: self._bootstrap.peers,
            self._faults,
            self._rng,
            read_invite,
        )
        self._rendezvous.learned = self._learned
        self._helpers = Helpers(self._host, self.book.addresses)
        relays = (settings := reach or ReachSettings()).relay
        self._relay = LaneRelay(
            self._host,
            listener,
            lambda run, peer: relays.open_to_all or self._knows(run, peer),
            Limits(circuits=relays.circuits),
        )
        self._routes = LaneRoutes(
            listener, self._helpers, self._streams.common_topic, self._may_dial, self._rng
        )
        self._routes.guesses = settings.port_guessing
        if settings.relay_only:
            self._routes.hide(self._host)
        self._lanes = Lanes(
            self._host, self._routes, self.connect, self._streams.greeted, self._faults, self._rng
        )
        self.reach = Reachability(
            self._host,
            self._faults,
            self._rng,
            dataclasses.replace(settings, announce=tuple(announce), lane_port=lane_port),
            first=lambda: self._bootstrap.peers,
            known=self._known_to_dial,
            runs_of=lambda peer: self._rendezvous.registry.runs_of(peer, trio.current_time()),
            lanes=listener.addresses,
        )
        self.measuring = Measuring(
            self._host,
            lambda peer: bool(self._rendezvous.registry.runs_of(peer, trio.current_time())),
        )
        self.reach.changed, self.reach.turned, self.reach.moved = (
            self._moved,
            self._lanes.moved,
            listener.look_again,
        )
        listener.outside = self.reach.lanes_outside
        self.reach.on_path = lambda peer, path: self.on_path(peer, path)
        self.looks = Looks(self._host, self._faults)
        self._lan = LanDiscovery(
            self.peer,
            self._rng,
            mine=self.reach.manager.lan,
            found=self._neighbour,
            on=lan_discovery and not settings.relay_only,
        )
        self._host.known = lambda peer: (
            self._streams.admitted(peer) or self.named(peer) or self.reach.at_relay(peer)
        )
        self._runs: dict[RunId, trio.CancelScope] = {}
        self._learned_at, self._knocking = 0.0, set[PeerId]()
        self._unsaved, self._urgent = trio.Event(), trio.Event()  # the peer book
        self._nursery: trio.Nursery | None = None
        self._machines = Allowance(DIALS, DIALS_PER_S)
        self._homes: dict[PeerId, str] = {}  # the machine where a peer was met last, newest last

    @property
    def on_refused(self) -> Callable[[str, PeerId, str, str], None]:
        """See the class."""
        return self._streams.refused

    @on_refused.setter
    def on_refused(self, handler: Callable[[str, PeerId, str, str], None]) -> None:
        self._streams.refused = handler

    @property
    def on_lane(self) -> OnLane:
        """See the class."""
        return self._lanes.on_lane

    @on_lane.setter
    def on_lane(self, handler: OnLane) -> None:
        self._lanes.on_lane = handler

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be part of the network until cancelled; then every socket is closed and the peer cache
        written.

        Raises ConfigError E101 when a port is taken. Reports started when it listens; it never
        waits for any other peer.
        """
        try:
            async with trio.open_nursery() as outer:
                await outer.start(
                    self._host.run, self._link_changed, self.reach.path_changed, self._ended
                )
                self.reach.began()
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._lanes.run)
                    await nursery.start(self._streams.run)
                    await nursery.start(self.dht.run)
                    nursery.start_soon(self._bootstrap.run)
                    nursery.start_soon(self._rendezvous.run)
                    nursery.start_soon(self.reach.run)
                    nursery.start_soon(self._save_now_and_then)
                    nursery.start_soon(self._lan.run)
                    self._nursery = nursery
                    for run in self._runs:
                        nursery.start_soon(self._search, run)
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self._nursery = None
            self._relay.close()
            self._save()

    def addresses(self) -> list[str]:
        """Where others can dial us, with our peer id, most useful first; empty before `run`."""
        return [join_peer(self.peer, address) for address in self._host.addresses()]

    def add_addresses(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Addresses of a peer, from a membership record, say. With or without ``/p2p/…``; malformed
        ones are dropped.
        """
        self.book.add(peer, [without_peer(address) for address in addresses])
        self._unsaved.set()

    def add_bootstrap(self, addresses: Sequence[str]) -> None:
        """More addresses to start from (an invite's), while this node lives. Raises ConfigError."""
        names = [address for address in addresses if address.startswith(dnsaddr.PREFIX)]
        direct = [split_peer(address) for address in addresses if address not in names]
        for name in names:
            dnsaddr.split(name)
            self._bootstrap.add_name(name)
        for peer in self._noted(direct):
            self._bootstrap.add(peer)

    def named(self, peer: PeerId) -> bool:
        """Whether an invite or a setting names this peer as one to start from."""
        return peer in self._bootstrap.peers

    def _noted(self, found: Sequence[tuple[PeerId, str]]) -> list[PeerId]:
        for peer, address in found:
            self.book.give(peer, address)
            self._given.add(address)
        return [peer for peer, _ in found if peer != self.peer]

    async def _look_up(self, name: str) -> list[PeerId]:
        return self._noted(await dnsaddr.look_up(name, self._texts))

    async def connect(self, peer: PeerId) -> None:
        """Make sure of a connection. Raises PeerUnreachableError. `send` does it by itself."""
        addresses = await dnsaddr.numeric(self._known_to_dial(peer), self._given)
        if not self._host.has_connection(peer):
            addresses = self._spared(peer, addresses)
        await self._host.connect(peer, addresses)

    def _spared(self, peer: PeerId, addresses: list[str]) -> list[str]:
        """Without those at machines of the internet that were dialled too often by now, their own
        or that of a relay that we have yet to connect with. Where ``peer`` was met last it is
        dialled without limit, whoever else is said to be there.
        """
        now, home = trio.current_time(), self._homes.get(peer)

        def spared(address: str) -> bool:
            circuit = split_circuit(address)
            free = not is_internet(address) or (circuit and self._host.connected(circuit[0]))
            if free or address in self._given:
                return True
            machine = machine_of(host_of(address))
            return (machine == home and not circuit) or self._machines.allows(machine, now)

        return list(filter(spared, addresses))

    def _known_to_dial(self, peer: PeerId) -> tuple[str, ...]:
        return known_to_dial(self.book.addresses(peer), self._given, self.reach.may_dial)

    def path(self, peer: PeerId) -> str:
        """How ``peer`` is connected: "lan", "direct", "punched", "relay"; "" when it is not."""
        return self._host.path(peer)

    def address_of(self, peer: PeerId) -> str:
        """The host at the other end of a connection without a relay, ""."""
        ends = self._host.ends(peer)
        return ends[1] if ends else ""

    async def ping(self, peer: PeerId) -> float:
        """The round-trip time to ``peer`` in seconds, of a message over its connection, which is
        made if there is none. Raises NetworkError.
        """
        await self.connect(peer)
        return await self._host.ping(peer)

    async def round_trips(self, peers: Sequence[PeerId]) -> dict[PeerId, float]:
        """The round-trip times in milliseconds to those of ``peers`` that are connected and answer
        within a second.
        """
        found: dict[PeerId, float] = {}

        async def one(peer: PeerId) -> None:
            with contextlib.suppress(NetworkError):
                found[peer] = round(await self._host.ping(peer) * 1000, 2)

        with trio.move_on_after(1.0):
            async with trio.open_nursery() as nursery:
                for peer in filter(self.connected, peers):
                    nursery.start_soon(one, peer)
        return found

    async def clocks(self, peers: Sequence[PeerId]) -> dict[PeerId, tuple[float, float]]:
        """By how many seconds our clock is ahead of each of these that is connected and answers,
        and by how many that may be wrong.
        """
        found: dict[PeerId, tuple[float, float]] = {}

        async def one(peer: PeerId) -> None:
            with contextlib.suppress(NetworkError):
                found[peer] = await self.measuring.clock_of(peer)

        with trio.move_on_after(CLOCKS_S):
            async with trio.open_nursery() as nursery:
                for peer in filter(self.connected, peers):
                    nursery.start_soon(one, peer)
        return found

    def peers(self) -> list[PeerId]:
        """Whoever is connected."""
        return self._host.peers()

    def connected(self, peer: PeerId) -> bool:
        return self._host.connected(peer)

    # --- messages ---

    def on_message(
        self,
        topic: str,
        handler: Callable[[PeerId, bytes], float | None],
        greet: Callable[[PeerId], bytes] = lambda peer: b"",
        admit: Callable[[PeerId, bytes], bool] = lambda peer, greeting: True,
        accept: Callable[[PeerId, bytes], bool] = lambda peer, shown: True,
        recall: Callable[[PeerId], bytes] = lambda peer: b"",
        reminded: Callable[[PeerId, bytes], None] = lambda peer, recalled: None,
    ) -> None:
        """Take part in ``topic`` (a run id): ``handler(peer, message)`` for each message of an
        admitted peer. What it returns, in seconds, is how long nothing more of that peer's is read.

        ``greet(peer)`` is what we show a peer of our standing (at most 1 KiB; our certificate). A
        peer that opens a stream is shown it first. ``accept(peer, shown)`` is asked of what the
        other side has shown when we open one, before we show ours; ``admit(peer, shown)`` of what
        an opener shows. Both may raise an AtollError: an opener is told its code and message.
        ``recall(peer)`` is what an opener gets back of what its key has said of itself (at most 4
        KiB), and ``reminded(peer, recalled)`` takes what a peer recalls of us; it must not raise,
        whatever the bytes are. A handler may raise RemoteProtocolError: the stream is closed and
        the fault counted.
        """
        self._streams.open(topic, Topic(handler, greet, admit, accept, recall, reminded))

    async def close_topic(self, topic: str, peer: PeerId | None = None) -> None:
        """Leave a topic, or end it with ``peer`` only: its streams are closed, what waits to be
        sent is dropped.
        """
        await self._streams.close(topic, peer)

    def send(self, topic: str, peer: PeerId, data: bytes) -> None:
        """Queue a message of 1 byte to 1 MiB; never blocks. Order is kept while a stream lives; a
        lost stream loses what was on it.
        """
        self._streams.send(topic, peer, data)

    def unread(self, topic: str, peer: PeerId, rtt_s: float) -> bool:
        """Whether what we say to ``peer`` is not read for now; ``rtt_s``: the round-trip time to
        it, as far as it is known.
        """
        return self._streams.unread(topic, peer, rtt_s)

    def forget(self, peer: PeerId) -> None:
        """A peer is gone for good: drop what waits for it, and its lane."""
        self._streams.forget(peer)
        self._lanes.release(peer)

    # --- lanes ---

    def ensure_lane(self, peer: PeerId, count: int = 1) -> None:
        """Keep a lane (or ``count``) to ``peer`` up from now on; `on_lane` is called each time one
        is made. Idempotent, never blocks.
        """
        self._lanes.ensure(peer, count)

    def allow_plain_lanes(self, allowed: Callable[[PeerId], bool]) -> None:
        """Lanes are not encrypted where this holds at both ends; by default nowhere."""
        self._lanes.allows_plain = allowed

    def lane_lost(self, peer: PeerId, index: int = 0) -> None:
        """The current lane to ``peer`` of this index broke (not one that `on_lane` has replaced):
        another one is made, with back-off.
        """
        self._lanes.lost(peer, index)

    def lane_paths(self) -> dict[PeerId, str]:
        """By peer: how its lane goes, such as "direct" or "relay"."""
        return dict(self._lanes.paths)

    def release_lane(self, peer: PeerId, keep: int = 0) -> None:
        """No more than ``keep`` lanes to ``peer`` are wanted. The sockets of others are their
        owner's to close.
        """
        self._lanes.release(peer, keep)

    # --- runs ---

    def announce_run(
        self,
        run: RunId,
        organiser: str = "",
        certificate: bytes = b"",
        hears: Callable[[PeerId, bytes], bool] = lambda peer, certificate: True,
        free: bool | None = True,
    ) -> None:
        """Say that we take part in ``run`` (to the bootstrap, to members, in the DHT), and learn
        who else does, until `withdraw_run`.

        ``organiser``: whose run it is; ``certificate``: ours by it; ``hears(peer, certificate)``:
        whether a peer that announces itself with that is believed; ``free``: whether peers without
        a certificate may be of the run, None while that is not known (`settle_run`). Without an
        organiser whoever announces itself is believed.
        """
        if run in self._runs:
            return
        self._runs[run] = trio.CancelScope()
        self._rendezvous.join(run, organiser, certificate, hears, free)
        self.reach.runs_changed()
        if self._nursery is not None:
            self._nursery.start_soon(self._search, run)

    def settle_run(self, run: RunId, free: bool) -> None:
        """It is known now whether peers without a certificate may be of ``run``."""
        self._rendezvous.settle(run, free)

    def uncertified(self, run: RunId) -> int:
        """How many announce themselves in ``run`` without a certificate, and are not asked."""
        return self._rendezvous.uncertified(run)

    def withdraw_run(self, run: RunId) -> None:
        """Say goodbye to a run's members."""
        scope = self._runs.pop(run, None)
        if scope is not None:
            scope.cancel()
            self.dht.withdraw(run_key(run))
            self._rendezvous.leave(run)

    def members(self, run: RunId) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Who is known to take part in ``run`` (not we), with addresses. Asks nobody."""
        return [(PeerId(news.peer), news.addresses) for news in self._rendezvous.members(run)]

    async def find_strangers(
        self, run: RunId, organiser: PeerId
    ) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Who is said to take part in ``run``, by a few connected peers and the DHT. We say
        nothing; their addresses are hints.
        """
        found = dict[PeerId, tuple[str, ...]]()
        for peer in self._host.peers()[:STRANGERS_ASKED]:
            with contextlib.suppress(NetworkError, RemoteProtocolError):
                for place in (AnnouncedRun(run, organiser), AnnouncedRun(run)):
                    for news in await self._rendezvous.ask(peer, place):
                        found.setdefault(PeerId(news.peer), news.addresses)
        found |= dict(await self.dht.find_providers(run_key(run)))
        found.pop(self.peer, None)
        return sorted(found.items())

    async def look_at(self, peer: PeerId, look: Look) -> LookAnswer:
        """What ``peer`` shows of a run to strangers. Raises NetworkError, RemoteProtocolError."""
        await self.connect(peer)
        return await ask(self._host, peer, look)

    # --- inside ---

    def _addresses_of(self, peer: PeerId) -> Sequence[str]:
        return self._host.addresses() if peer == self.peer else self.book.addresses(peer)

    def _link_changed(self, peer: PeerId, up: bool) -> None:
        if up:
            self.book.confirm(peer)
            self._unsaved.set()
            if host := self.address_of(peer):
                self._homes.pop(peer, None)
                self._homes[peer] = machine_of(host)
                if len(self._homes) > MAX_PEERS:
                    del self._homes[next(iter(self._homes))]
            self._lanes.arrived(peer)
            if self._nursery is not None:
                self._nursery.start_soon(self._met, peer)
        else:
            self._helpers.lost(peer)
            self._streams.link_lost(peer)
        self.dht.link_changed(peer, up)
        self._bootstrap.link_changed()
        self._rendezvous.changed()
        self.reach.link_changed(peer, up)
        self.on_link(peer, up)

    async def _met(self, peer: PeerId) -> None:
        known = len(self._helpers.observers(self.peer))
        await self._helpers.met(peer)
        if known < min(OBSERVERS, len(self._helpers.observers(self.peer))):
            self._lanes.moved()

    def _may_dial(self, peer: PeerId, address: str) -> bool:
        if not self.reach.may_dial_peer(peer, address):
            return False
        ends = self._host.ends(peer)
        at_home = ends is not None and host_of(address) == ends[1]
        return at_home or self._routes.errands.allows(peer, trio.current_time())

    def _knows(self, run: str, peer: PeerId) -> bool:
        """Whether a peer is announced in a run: then our relay of lanes serves it."""
        return run in self._rendezvous.registry.runs_of(peer, trio.current_time())

    def _moved(self) -> None:
        """Others must be told other addresses of ours."""
        self._rendezvous.moved()
        self.on_addresses()

    def _ended(self, peer: PeerId) -> None:
        where = self._streams.dialled(peer)
        if (
            where is not None
            and self._nursery is not None
            and peer not in self._knocking
            and not self._host.has_connection(peer)
        ):
            self._nursery.start_soon(self._knock, peer, *where)

    async def _knock(self, peer: PeerId, host: str, port: int) -> None:
        """A process that was killed is told from a connection that broke."""
        self._knocking.add(peer)
        if await refuses(host, port) and self._host.lost(peer):
            self._link_changed(peer, False)
            self.on_gone(peer)
        self._knocking.discard(peer)

    def _learned(self, news: Announcement) -> None:
        peer = PeerId(news.peer)
        self._learned_at = trio.current_time()
        known = self.book.addresses(peer)
        self.book.add(peer, news.addresses)
        self._unsaved.set()
        if not known:  # a node that is killed now must find it again
            self._urgent.set()
        self.on_member(RunId(news.run), peer, news.addresses)

    def _neighbour(self, peer: PeerId, address: str) -> None:
        """Somebody in the house. A few are met at once: they know the members of runs, as a
        bootstrap does.
        """
        self.add_addresses(peer, [address])
        near = sum(self._host.path(other) == "lan" for other in self._host.peers())
        if near < NEIGHBOURS and not self.connected(peer) and self._nursery is not None:
            self._nursery.start_soon(self._visit, peer)

    async def _visit(self, peer: PeerId) -> None:
        with contextlib.suppress(NetworkError):
            await self.connect(peer)
            self._rendezvous.hint(peer)

    async def _search(self, run: RunId) -> None:
        """Provider records: the way in when no bootstrap knows anybody, and the way out when all of
        them are dead.
        """
        backoff = Backoff(SEARCH_AGAIN_S, SEARCH_MAX_S, self._rng)
        scope = self._runs.get(run)
        if scope is None or not self.dht.on:  # withdrawn before this task ran
            return
        with scope:
            while not self._host.peers():
                await trio.sleep(0.2)
            await self._until_quiet(run)
            await self.dht.provide(run_key(run))
            while True:
                known = {peer for peer, _ in self.members(run)}
                for peer, _ in await self.dht.find_providers(run_key(run), exhaustive=False):
                    if peer not in known:
                        self._rendezvous.hint(peer)
                await trio.sleep(backoff.next_s())

    async def _until_quiet(self, run: RunId) -> None:
        """Until we were told who takes part, and nobody new comes. A lookup asks, and so dials, a
        dozen peers: all at once at the start they would be most of what it costs."""
        quiet_s = SEARCH_LATER_S * self._rng.uniform(0.5, 1.5)
        with trio.move_on_after(SEARCH_UNANSWERED_S):
            while run not in self._rendezvous.answered:
                await trio.sleep(0.2)
        await trio.sleep(SEARCH_FIRST_S * self._rng.uniform(0.5, 1.5))
        with trio.move_on_after(SEARCH_AT_LAST_S):
            while (
                self.members(run) and (left := self._learned_at + quiet_s - trio.current_time()) > 0
            ):
                await trio.sleep(left)

    async def _save_now_and_then(self) -> None:
        """Soon after every change: a killed node must find its peers again without a bootstrap."""
        while True:
            await self._unsaved.wait()
            with trio.move_on_after(SAVE_S):
                await self._urgent.wait()
            self._unsaved, self._urgent = trio.Event(), trio.Event()
            if self._cache is not None and self.book.peers():
                with contextlib.suppress(OSError):  # as in `_save`
                    await trio.to_thread.run_sync(save_cache, self._cache, self.book.cached())
            await trio.sleep(SAVE_LEAST_S)

    def _save(self) -> None:
        if self._cache is not None and self.book.peers():
            try:
                self.book.save(self._cache)
            except OSError:
                pass  # only a convenience; a full disk is reported by those who must write

    def traffic(self) -> tuple[int, int]:
        """Bytes of control messages (sent, received) since the start."""
        return self._streams.counters.bytes_sent, self._streams.counters.bytes_received

    def status(self) -> dict[str, Any]:
        """What `atoll status` and the metrics show; plain values."""
        counters = self._streams.counters
        return {
            "peer": self.peer,
            "addresses": self.addresses(),
            "connected": list(self._host.peers()),
            "paths": {peer: self._host.path(peer) for peer in self._host.peers()},
            "reach": self.reach.status(),
            "bootstrap": {
                peer: "connected"
                if self.connected(peer)
                else self._bootstrap.failures.get(peer, "connecting")
                for peer in self._bootstrap.peers
            }
            | {
                name: self._bootstrap.failures[name]
                for name in self._bootstrap.names
                if name in self._bootstrap.failures
            },
            "runs": {run: [peer for peer, _ in self.members(run)] for run in self._runs},
            "lanes": self.lane_paths(),
            "lanes_outside": self.reach.lanes_outside(),
            "lanes_why": dict(self._routes.why),
            "relayed": {"circuits": self._relay.circuits, "bytes": self._relay.nbytes},
            "wires": self._streams.wires(),
            "lan": self._lan.status(),
            "remembered": len({*self.book.peers()} - {*self._bootstrap.peers}),
            "dht_peers": len(self.dht.table),
            "faults": dict(self._faults.total),
            "messages_sent": counters.messages_sent,
            "messages_received": counters.messages_received,
            "messages_dropped": counters.messages_dropped,
            "bytes_sent": counters.bytes_sent,
            "bytes_received": counters.bytes_received,
            "refusals": counters.refusals,
        }

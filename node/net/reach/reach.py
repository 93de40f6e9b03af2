"""Reachability: finds out where this node can be dialled, keeps relays while nobody can, makes
relayed paths direct. The driver of this folder.

Nothing here costs a node anything that meets no peer of the internet: it waits until it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from ....collectives.errors import ConfigError, NetworkError, RemoteProtocolError
from ....collectives.identifiers import PeerId
from ..transport.addresses import (
    host_of,
    is_direct,
    is_internet,
    is_ipv6,
    is_loopback,
    is_public,
    make_address,
    telling,
    usable,
)
from ..transport.faults import Faults
from ..transport.host import Host, NotSpokenError
from .autonat import AutoNat
from .circuits import Circuits
from .ledger import RelayLimits
from .manager import ENOUGH, AddressManager
from .portmap import PortMapper
from .punch import Puncher
from .relay import CircuitRelay
from .routes import assigned, has_route, source

WATCH_S = 5.0
"""How often this machine's addresses are looked at: two system calls."""
SOON_S = 0.3
"""After something changed: several changes come together."""
OBSERVE_S = 150.0
ASK_AGAIN_S = 300.0
MISSED_S = 15.0
"""After a question that could not be asked: its connection broke, or the machine was too busy. It
is asked again at once where there is another one.
"""
SERVERS = 3
"""On different hosts, asked at a time."""


@dataclass(frozen=True, slots=True)
class ReachSettings:
    """What the user says. ``announce``: addresses that need no proof; ``lane_port``: where lanes
    arrive at their hosts, 0: nobody said.

    ``relay_only``: nobody but bootstrap nodes and relays is to learn where this node is. It dials
    only what the user named, is dialled by nobody, tells circuits, and takes lanes through relays
    that it is connected with.
    """

    announce: tuple[str, ...] = ()
    lane_port: int = 0
    relay: RelayLimits = RelayLimits()
    port_mapping: bool = True
    port_guessing: bool = False
    relay_only: bool = False


class Reachability:
    """Everything about being reached. Used from the trio thread only."""

    def __init__(
        self,
        host: Host,
        faults: Faults,
        rng: random.Random,
        settings: ReachSettings,
        *,
        first: Callable[[], Sequence[PeerId]],
        known: Callable[[PeerId], Sequence[str]],
        runs_of: Callable[[PeerId], Collection[str]],
        lanes: Callable[[], list[str]],
    ) -> None:
        """``first()``: peers to prefer as servers and relays; ``known(peer)``: where it may be
        dialled; ``runs_of(peer)``: runs it is announced in; ``lanes()``: where our lane listener
        is."""
        self._host, self._faults, self._rng, self._first, self.settings = (
            host,
            faults,
            rng,
            first,
            settings,
        )
        self.changed: Callable[[], None] = lambda: None
        self.turned: Callable[[], None] = lambda: None
        """Called when addresses are others, or what is known of the router."""
        self.on_path: Callable[[PeerId, str], None] = lambda peer, path: None
        self.moved: Callable[[], None] = lambda: None
        """Called when interfaces of this machine are others."""
        self.manager = AddressManager(settings.announce, relay_only=settings.relay_only)
        self.autonat = AutoNat(host, faults)
        self.relay = CircuitRelay(
            host,
            faults,
            settings.relay,
            serves=lambda: (
                bool(self.manager.direct(trio.current_time())) or bool(settings.announce)
            ),
            knows=lambda peer: bool(runs_of(peer)),
            related=lambda a, b: not set(runs_of(a)).isdisjoint(runs_of(b)),
        )
        self.circuits = Circuits(
            host,
            faults,
            rng,
            wanted=self._wants_relays,
            candidates=self._relays,
            changed=self._update,
        )
        self.puncher = Puncher(
            host,
            faults,
            rng,
            seen_at=lambda: self.manager.seen_at(trio.current_time()),
            lan=self.manager.lan,
            known=lambda peer: [address for address in known(peer) if is_direct(address)],
        )
        self.mapper = PortMapper(rng, mine=self.manager.lan, on_change=self._mapped)
        self.lane_mapper = PortMapper(rng, mine=lanes, on_change=self._lane_mapped)
        self._lane_at: dict[str, str] = {}  # by the means
        self._look = trio.Event()
        self._look_s = ASK_AGAIN_S
        # (server's host, address; "": observed): when.
        self._asked: dict[tuple[str, str], float] = {}
        self._announced: tuple[str, ...] = ()
        self._nat = "unknown"
        self._paths: dict[PeerId, str] = {}
        host.dialler.from_listen = lambda to: (
            not settings.relay_only and not self.manager.plain(":" in to)
        )
        host.advertised = lambda: self.manager.advertised(trio.current_time())

    def may_dial(self, address: str) -> bool:
        """Whether an address that a peer named is worth a packet: on the internet we dial nobody's
        private addresses but those of our own house, and nothing of our own machine's."""
        if self.settings.relay_only:
            return not is_direct(address)
        if is_internet(address) or not self.manager.online:
            return True
        return not is_loopback(address) and (
            is_public(host_of(address)) or has_route(host_of(address))
        )

    def may_dial_peer(self, peer: PeerId, address: str) -> bool:
        """The same of an address that a connected peer calls its own. One that talks to us from
        elsewhere on the internet has nothing in our house; one that is on this machine may be
        dialled there."""
        if self.settings.relay_only:
            return False
        if not is_direct(address) or is_internet(address) or not self.manager.online:
            return is_direct(address)
        ends = self._host.ends(peer)
        if ends is None:  # over a relay: it may be next door
            return self.may_dial(address)
        ours = {host_of(seen) for seen in self.manager.seen_at(trio.current_time())}
        if is_public(ends[1]) and ends[1] not in ours and not assigned(ends[1]):
            return False
        return host_of(address) == ends[1] or (
            assigned(ends[1]) if is_loopback(address) else self.may_dial(address)
        )

    def began(self) -> None:
        """The host listens: from now on there are addresses."""
        self.manager.interfaces(self._host.listening(), source())
        self._announced = tuple(self._host.addresses())

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            for task in (
                self._watch,
                self._verify,
                self._ask_router,
                self.circuits.run,
                self.puncher.run,
            ):
                nursery.start_soon(task)

    def link_changed(self, peer: PeerId, up: bool) -> None:
        """A connection came or went."""
        self.relay.link_changed(peer, up)
        self.circuits.link_changed(peer, up)
        self.path_changed(peer)

    def at_relay(self, peer: PeerId) -> bool:
        """Whether we have a place at ``peer``, a relay, through which others come to us."""
        return peer in self.circuits.held

    def runs_changed(self) -> None:
        """We joined a run: relays may think otherwise of us."""
        self.circuits.again()

    def path_changed(self, peer: PeerId) -> None:
        """Connections of a peer came or went: whichever end made them, both must know the path they
        have now.
        """
        path = self._host.path(peer)
        if self._paths.get(peer, "") != path:
            self._paths[peer] = path
            if not path:
                del self._paths[peer]
            self.on_path(peer, path)
        self.circuits.path_changed(peer)
        self.puncher.path_changed(peer)
        self._look.set()

    # ---- our own addresses
    def _update(self) -> None:
        """Something new is known. Others are told if our addresses are now different."""
        self.manager.circuits(self.circuits.addresses())
        addresses, nat = tuple(self._host.addresses()), self.manager.nat(trio.current_time())
        changed, turned = addresses != self._announced, nat != self._nat
        self._announced, self._nat = addresses, nat
        if changed:
            self.changed()
        if changed or turned:
            self.turned()

    async def _watch(self) -> None:
        """Interfaces come and go: another network, another address, another way to the internet."""
        while True:
            await trio.sleep(WATCH_S)
            try:
                listening = self._host.listening()
            except ConfigError:
                continue  # no network at all; it will come back
            before = self.manager.way
            if self.manager.interfaces(listening, source()):
                self._asked.clear()
                self._lane_at.clear()
                self.moved()
                self.mapper.look_again()
                self.lane_mapper.look_again()
                self._update()
                self._look.set()
                await self._host.close_strays(partial(_stray, before))

    async def _ask_router(self) -> None:
        """Once it shows that we are behind a NAT: nothing is asked of the router of a node that can
        be dialled.
        """
        if self.settings.port_mapping and not self.settings.relay_only:
            while not self._wants_relays() or not self.manager.seen_at(trio.current_time()):
                await trio.sleep(WATCH_S)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.mapper.run)
                nursery.start_soon(self.lane_mapper.run)

    def _mapped(self, means: str, address: str | None) -> None:
        if self.manager.mapped(means, address):
            for key in [
                key for key in self._asked if key[1] == address
            ]:  # who tried it before it was mapped may try again
                del self._asked[key]
        self._update()
        self._look.set()

    def _lane_mapped(self, means: str, address: str | None) -> None:
        self._lane_at.pop(means, None)
        if address is not None and is_internet(address):
            self._lane_at[means] = address
        self.turned()

    def lanes_outside(self) -> list[str]:
        """Where the router leads to our lane listener. Nobody tries that for us; so it is told
        while somebody has reached our other port there. Where the user said what to announce and
        fixed the port of lanes, it is at that host."""
        if self.settings.lane_port and self.settings.announce:
            hosts = dict.fromkeys(
                host_of(address)
                for address in self.settings.announce
                if is_direct(address) and is_internet(address)
            )
            return [make_address(host, self.settings.lane_port) for host in hosts]
        reached = {host_of(address) for address in self.manager.direct(trio.current_time())}
        return [address for address in self._lane_at.values() if host_of(address) in reached]

    def _servers(self) -> list[tuple[PeerId, str]]:
        """Connected peers of the internet and their hosts, one a host, bootstraps first."""
        peers = list(self._host.peers())
        self._rng.shuffle(peers)
        found: dict[str, PeerId] = {}
        for peer in sorted(peers, key=lambda peer: peer not in self._first()):
            ends = self._host.ends(peer)
            if ends and is_public(ends[1]):
                found.setdefault(ends[1], peer)
        return [(peer, host) for host, peer in found.items()]

    async def _verify(self) -> None:
        while True:
            await trio.sleep(SOON_S * self._rng.uniform(0.8, 1.2))
            self._look = trio.Event()
            self._look_s = ASK_AGAIN_S * self._rng.uniform(0.4, 0.5)
            self._asked = {
                key: at for key, at in self._asked.items() if trio.current_time() - at < ASK_AGAIN_S
            }
            async with trio.open_nursery() as nursery:
                for peer, host in self._servers()[: 2 * SERVERS]:
                    nursery.start_soon(self._consult, peer, host)
            self._update()
            self.circuits.look()
            with trio.move_on_after(self._look_s):
                await self._look.wait()

    def _due(self, question: tuple[str, str], every_s: float) -> bool:
        """Whether a question is to be asked again; if so, it counts as asked."""
        now = trio.current_time()
        if now - self._asked.get(question, -1e9) < every_s:
            return False
        self._asked[question] = now
        return True

    async def _consult(self, peer: PeerId, host: str) -> None:
        """Ask one server at which address it sees us, and whether it gets there. Answers that come
        when the interfaces are others count no more. Over a relay it sees the relay: it is asked
        once that connection is gone."""
        if self._host.relayed(peer):
            return
        question = host, ""
        try:
            if self._host.ends(peer, from_listen=True) and self._due(question, OBSERVE_S):
                seen = await self.autonat.observe(peer)
                if seen and question in self._asked:
                    self.manager.observed(host, seen, trio.current_time())
                    self._update()
                    self.circuits.look()
            now = trio.current_time()
            for address in self.manager.candidates(now):
                question = host, address
                if is_ipv6(address) == (":" in host) and self._due(
                    question, ASK_AGAIN_S
                ):  # it tries where we come from
                    reached = await self.autonat.ask(peer, address)
                    if reached is not None and question in self._asked:
                        self.manager.report(address, host, reached, trio.current_time())
        except RemoteProtocolError:
            self._faults.count(peer, trio.current_time())
        except NotSpokenError:
            pass
        except NetworkError:
            self._asked.pop(question, None)
            self._look_s = MISSED_S

    # ---- relays
    def _wants_relays(self) -> bool:
        if self.settings.relay_only:
            return True
        return (
            self.manager.online
            and self.manager.reach(trio.current_time()) != "public"
            and not self._plainly_public()
        )

    def _plainly_public(self) -> bool:
        """An interface of ours has an address of the internet's for everybody, and nobody says that
        it does not answer.
        """
        direct = self.manager.direct(trio.current_time())
        return any(address in direct for address in telling([*self.manager.lan(), *direct]))

    def _relays(self) -> list[PeerId]:
        # Those are behind a NAT themselves.
        return [peer for peer, _ in self._servers() if self._host.path(peer) != "punched"]

    def status(self) -> dict[str, Any]:
        """For `atoll status`, `atoll netcheck` and the metrics; plain values."""
        ledger = self.relay.ledger
        return {
            **self.manager.status(trio.current_time()),
            "servers": len(self._servers()),
            "enough_servers": ENOUGH,
            "port_mapping": self.mapper.answer if self.settings.port_mapping else "off",
            "relays": {relay: list(held.addresses) for relay, held in self.circuits.held.items()},
            "relays_refused": dict(self.circuits.refused),
            "relaying": {
                "reservations": len(ledger.reserved()),
                "circuits": ledger.open,
                "bytes": ledger.carried,
                "refused": dict(ledger.refused),
            },
            "dial_backs": self.autonat.served,
        }


def _stray(left: str, here: str, there: str) -> bool:
    """Whether a connection between these hosts hangs on an address that this machine no longer has,
    or on ``left``, by which its packets left for the internet until now, and those to ``there`` do
    no more."""
    return not assigned(here) or (here == left and source(there) not in ("", here))


def known_to_dial(
    addresses: Sequence[str], given: Collection[str], may_dial: Callable[[str], bool]
) -> tuple[str, ...]:
    """Those of a peer's addresses that are dialled: what the user gave, and what
    `Reachability.may_dial` lets pass.
    """
    return usable(address for address in addresses if address in given or may_dial(address))

"""LAN discovery: the driver of `Neighbours`, one on each interface with a private address that
others in the house know us by.

A node that listens on loopback, or on an address of the internet's, sends nothing. Each socket is
bound to the multicast group: it hears what is sent to everybody on the network and nothing else,
and takes nothing from the system's own responder, which has the same port.

Not ``zeroconf``, which libp2p brings along: it runs an asyncio loop in a thread of its own and
keeps every record of every device on the network.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import socket
import struct
import sys
from collections.abc import Callable

import trio

from ....collectives.identifiers import PeerId
from ..reach.routes import has_route
from ..transport.addresses import (
    Place,
    host_and_port,
    is_loopback,
    is_scoped,
    links,
)
from .mdns import GROUP, GROUP6, MAX_BYTES, PORT
from .neighbours import Neighbours

WATCH_S = 5.0
AGAIN_S = 60.0
"""After the system refused a socket: another program may hold the port alone, or there is no
multicast here.
"""
TTL = 255
MOST_NETWORKS = 4
# IP_MULTICAST_ALL of Linux, which Python does not name: 0 keeps out what others on this machine
# joined
_MULTICAST_ALL = 49

log = logging.getLogger("atoll.net")


class _Wake:
    """What a sender waits for; a new event each time it has been set."""

    def __init__(self) -> None:
        self.event = trio.Event()


class LanDiscovery:
    """Used from the trio thread only."""

    def __init__(
        self,
        me: PeerId,
        rng: random.Random,
        *,
        mine: Callable[[], list[str]],
        found: Callable[[PeerId, str], None],
        on: bool = True,
    ) -> None:
        """``mine()``: our addresses that are not the internet's; ``found(peer, address)``: a
        neighbour, maybe for the second time.
        """
        self._mine, self._found, self._on = mine, found, on
        self._me, self._rng = me, rng
        self._networks: dict[str, Neighbours] = {}  # by the host that is ours there
        self._troubles: dict[str, str] = {}  # why the system lets us not, by the same

    @property
    def trouble(self) -> str:
        """Why the system lets us not, where it does so on no network."""
        some = len(self._troubles) < len(self._networks)
        return "" if some else next(iter(self._troubles.values()), "")

    async def run(self) -> None:
        """Until cancelled. Never raises."""
        if not self._on:
            return
        async with trio.open_nursery() as nursery:
            while True:
                for host in list(self._addresses())[:MOST_NETWORKS]:
                    if host not in self._networks and len(self._networks) < MOST_NETWORKS:
                        self._networks[host] = Neighbours(self._me, self._rng)
                        nursery.start_soon(self._take_part, host)
                await trio.sleep(WATCH_S)

    def _addresses(self) -> dict[str, list[str]]:
        """Where this house can dial us, by host: IPv4, and fe80 where there is none that somebody
        has assigned.
        """
        found = dict[str, list[str]]()
        for address in self._mine():
            host = host_and_port(address)[0]
            if is_scoped(host) or (":" not in host and not is_loopback(address)):
                found.setdefault(host, []).append(address)
        return found

    async def _take_part(self, host: str) -> None:
        """On one network, until ``host`` is no more ours. Never raises."""
        try:
            while host in self._addresses():
                try:
                    sock, group = _socket(host)
                    with sock:
                        self._troubles.pop(host, None)
                        await self._talk(sock, group, host)
                except* OSError as failed:
                    log.debug("no LAN discovery by %s: %r", host, failed.exceptions)
                    self._troubles[host] = str(failed.exceptions[0])
                    await trio.sleep(AGAIN_S)
        finally:
            del self._networks[host]
            self._troubles.pop(host, None)

    async def _talk(self, sock: trio.socket.SocketType, group: Place, host: str) -> None:
        """Until ``host`` is no more ours. Raises OSError, in a group."""
        neighbours, asked = self._networks[host], _Wake()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, sock, neighbours, asked)
            while addresses := self._addresses().get(host):
                now = trio.current_time()
                neighbours.here(addresses, now)
                for datagram in neighbours.due(now):
                    await sock.sendto(datagram, group)
                with trio.move_on_at(min(neighbours.due_at, now + WATCH_S)):
                    await asked.event.wait()
            nursery.cancel_scope.cancel()

    async def _listen(
        self, sock: trio.socket.SocketType, neighbours: Neighbours, asked: _Wake
    ) -> None:
        while True:
            data, (sender, *_) = await sock.recvfrom(MAX_BYTES + 1)
            now = trio.current_time()
            if neighbours.spent(now):
                await trio.sleep(1.0)  # what the kernel does not hold meanwhile is lost
                continue
            due_at = neighbours.due_at
            for peer, address in neighbours.heard(data, sender, now):
                if has_route(sender):  # from this network, and not from somewhere behind the router
                    self._found(peer, address)
            if neighbours.due_at < due_at:
                asked.event.set()
                asked.event = trio.Event()

    def status(self) -> dict[str, object]:
        """Plain values: whether it is on, why it does not work, whom it found."""
        return {
            "on": self._on,
            "trouble": self.trouble,
            "found": {
                peer: row
                for neighbours in self._networks.values()
                for peer, row in neighbours.status(trio.current_time()).items()
            },
        }


def _socket(host: str) -> tuple[trio.socket.SocketType, Place]:
    """For datagrams to and from the group on the interface with ``host``, and the group there.
    Raises OSError.
    """
    family = socket.AF_INET6 if is_scoped(host) else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        # The system's responder is there, too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            group: Place = _join6(sock, host)
            stack.pop_all()
            return trio.socket.from_stdlib_socket(sock), group
        if sys.platform.startswith("linux"):
            sock.setsockopt(socket.IPPROTO_IP, _MULTICAST_ALL, 0)
        sock.bind((GROUP, PORT))
        own = socket.inet_aton(host)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + own)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, TTL)
        # Another node on this machine.
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        stack.pop_all()
        return trio.socket.from_stdlib_socket(sock), (GROUP, PORT)


def _join6(sock: socket.socket, host: str) -> Place:
    """The IPv6 group on the link with ``host``. Raises OSError."""
    number = next((link.number for link in links() if link.host == host), None)
    if number is None:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    group = (GROUP6, PORT, 0, number)
    own = struct.pack("@I", number)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind(group)
    sock.setsockopt(
        socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, socket.inet_pton(socket.AF_INET6, GROUP6) + own
    )
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, own)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, TTL)
    # Another node on this machine.
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
    return group

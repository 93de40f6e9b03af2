"""Asking the router to lead a port to us, in the background: NAT-PMP first, then UPnP; renewed at
half of its time, removed at the end.

What it grants is a candidate like any other: it is announced when somebody has reached us there.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

from ..transport.addresses import host_and_port, is_internet, is_loopback, make_address
from ..transport.backoff import Backoff
from . import natpmp, upnp
from .routes import ROUTES

LIFE_S = 3600
AGAIN_FIRST_S, AGAIN_MAX_S = 5.0, 600.0
"""Pauses after a router that does not want to, or a network without one: the first may have been
busy, or its answer lost.
"""
HTTP_S = 4.0
REMOVE_S = 1.5
OUTSIDE, TRIES = (20_000, 60_000), 2
"""Ports that are asked for where the router refuses ours, and how many of them."""
MOST_ROUTERS = 4  # of those that answer a search
_FAILURES = (OSError, ValueError, trio.BrokenResourceError)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A port at a router. ``inside``: where it leads to; ``where``: the router (NAT-PMP), or the
    service and where it is asked (UPnP).
    """

    means: str
    address: str
    life_s: float
    inside: tuple[str, int]
    where: tuple[str, str]


class PortMapper:
    """Used from the trio thread only."""

    def __init__(
        self,
        rng: random.Random,
        *,
        mine: Callable[[], list[str]],
        on_change: Callable[[str, str | None], None],
    ) -> None:
        """``mine()``: our addresses in the house; ``told(means, address)``: a mapping came (or,
        None, went).
        """
        self._rng, self._mine, self._on_change = rng, mine, on_change
        self._wake = trio.Event()
        self._outside = 0  # the port that we were given last: it is asked for again
        self.answer = ""
        """What came of it: "mapped", "inner" (the router that opens one has no address of the
        internet itself), "none" (no router of this network opens one), "" (not asked yet)."""

    def look_again(self) -> None:
        """Our addresses in the house are others, and so may be the router."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; then what was mapped is unmapped, if the router answers at once."""
        held: Mapping | None = None
        pauses = Backoff(AGAIN_FIRST_S, AGAIN_MAX_S, self._rng)
        try:
            while True:
                self._wake = trio.Event()
                found = await self._map()
                if held is not None and (
                    found is None or (found.means, found.address) != (held.means, held.address)
                ):
                    self._on_change(held.means, None)
                held, self.answer = (
                    found,
                    "none"
                    if found is None
                    else "mapped"
                    if is_internet(found.address)
                    else "inner",
                )
                if found is not None:
                    self._on_change(found.means, found.address)
                    pauses.reset()
                with trio.move_on_after(
                    pauses.next_s() if found is None else max(30.0, min(found.life_s, LIFE_S) / 2)
                ):
                    await self._wake.wait()
                    pauses.reset()
        finally:
            if held is not None:
                with trio.move_on_after(REMOVE_S, shield=True):
                    await self._unmap(held)

    def _inside(self) -> tuple[str, int] | None:
        """Host and port in the house that a router may lead to: IPv4 only."""
        for address in self._mine():
            if (
                address.startswith("/ip4/")
                and not is_internet(address)
                and not is_loopback(address)
            ):
                return host_and_port(address)
        return None

    async def _map(self) -> Mapping | None:
        """A new mapping, or the old one for longer: of the first router with an address of the
        internet, else of the first that opens a port. Any device may say that it is a router.
        """
        inside = self._inside()
        if inside is None:
            return None
        inner: Mapping | None = None
        with suppress(*_FAILURES):
            inner = await self._by_natpmp(inside)
        if inner is None or not is_internet(inner.address):
            for location in await _discover(inside[0]):
                with suppress(*_FAILURES):
                    found = await self._by_upnp(inside, location)
                    if found is not None and is_internet(found.address):
                        if inner is not None:
                            await self._unmap(inner)
                        inner = found
                        break
                    if found is not None and inner is None:
                        inner = found
                    elif found is not None and inner is not None and found.address != inner.address:
                        await self._unmap(found)  # the same one, asked in another way, is kept
        if inner is not None:
            self._outside = host_and_port(inner.address)[1]
        return inner

    async def _unmap(self, mapping: Mapping) -> None:
        one, other = mapping.where
        try:
            if mapping.means == "nat-pmp":
                await _datagram(one, natpmp.PORT, natpmp.ask_port(mapping.inside[1], 0, 0))
            else:
                await _http(
                    other,
                    upnp.call(
                        one,
                        other,
                        "DeletePortMapping",
                        upnp.delete_port(host_and_port(mapping.address)[1]),
                    ),
                )
        except _FAILURES:
            pass

    async def _by_natpmp(self, inside: tuple[str, int]) -> Mapping | None:
        router = natpmp.gateway(ROUTES.read_text(encoding="ascii")) if ROUTES.exists() else ""
        if not router:
            return None
        host = natpmp.address_in(await _datagram(router, natpmp.PORT, natpmp.ask_address()))
        wish = natpmp.ask_port(inside[1], self._outside or inside[1], LIFE_S)
        outside, life_s = natpmp.mapping_in(await _datagram(router, natpmp.PORT, wish), inside[1])
        return Mapping("nat-pmp", make_address(host, outside), life_s, inside, (router, ""))

    async def _by_upnp(self, inside: tuple[str, int], location: str) -> Mapping | None:
        service, control = upnp.control_in(await _http(location, upnp.get(location)), location)
        host = upnp.external_in(
            await _http(control, upnp.call(service, control, "GetExternalIPAddress", {}))
        )
        # Another node of this house may have ours.
        others = [self._rng.randint(*OUTSIDE) for _ in range(TRIES)]
        for outside in dict.fromkeys([self._outside or inside[1], inside[1], *others]):
            for life_s in (LIFE_S, 0):  # some routers know mappings without an end only
                wish = upnp.add_port(outside, inside[1], inside[0], life_s)
                with suppress(ValueError):
                    await _http(control, upnp.call(service, control, "AddPortMapping", wish))
                    return Mapping(
                        "upnp",
                        make_address(host, outside),
                        life_s or LIFE_S,
                        inside,
                        (service, control),
                    )
        return None


async def _datagram(host: str, port: int, data: bytes) -> bytes:
    """The answer to a datagram, which is sent up to three times. Raises OSError when none comes."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.connect((host, port))
        for patience_s in natpmp.TRIES_S:
            await sock.send(data)
            with trio.move_on_after(patience_s):
                return await sock.recv(2048)
    raise OSError("no answer")


async def _discover(own: str) -> list[str]:
    """Where the descriptions of this network's routers are, at most `MOST_ROUTERS`."""
    found = dict[str, None]()
    with suppress(OSError), trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        await sock.bind((own, 0))
        for patience_s in upnp.SEARCHES_S:
            await sock.sendto(upnp.search(), (upnp.GROUP, upnp.PORT))
            with trio.move_on_after(patience_s):
                while len(found) < MOST_ROUTERS:
                    answer, sender = await sock.recvfrom(2048)
                    with suppress(ValueError):
                        found[upnp.location_in(answer, sender[0])] = None
            if found:
                break
    return list(found)


async def _http(address: str, request: bytes) -> str:
    """The body of the answer. Raises ValueError for a refusal, OSError when none comes."""
    where = urlsplit(address)
    answer = b""
    with trio.move_on_after(HTTP_S):
        async with await trio.open_tcp_stream(where.hostname or "", where.port or 80) as stream:
            await stream.send_all(request)
            while len(answer) <= upnp.MAX_ANSWER_BYTES and (
                piece := await stream.receive_some(8192)
            ):
                answer += piece
                if _complete(answer):
                    break
            return upnp.body_of(answer)
    raise OSError("the router did not answer")


def _complete(answer: bytes) -> bool:
    """Whether an answer that says its length is all there: some routers keep the connection."""
    head, mark, body = answer.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n") if mark else ():
        if line.startswith(b"content-length:") and line[15:].strip().isdigit():
            return len(body) >= int(line[15:])
    return False

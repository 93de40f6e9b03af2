"""From a relayed connection to a direct one: DCUtR (libp2p specification "relay/DCUtR") over TCP.

Who was called through a relay drives. It dials what the other announces; if nobody answers there,
both tell each other at which addresses public peers see them, and open a TCP connection to each
other at the same moment, from their listen ports: each one's first packet opens its NAT for the
other's. TCP makes one connection of two simultaneous opens, with equal ends: the caller plays the
opening part in the handshake. The caller goes on to dial what the other announces, a while later:
both at once, from their listen ports, would be such a connection with two beginnings.

That goes on for as long as nothing but relays connects the two, and begins whenever that comes to
be: a relayed connection may be there before the direct one has broken, or before this end has
noticed that it had. One that stands beside a direct one is closed once that has shown that it
lives.

py-libp2p 0.8.1 has this, too. What is wrong with it: it first dials every address it knows of the
peer, private ones as well, and waits 10 s for them (relay/circuit_v2/dcutr.py:488); it tells a
guess in place of the observed address (:1118), which no port-shifting NAT honours; both sides drive
(:278); after three tries it never tries again.

Two who call each other at the same moment both drive. A connection that both open at once in two
conversations has two beginnings, or none, and keeps their ports until its handshake times out. So
there is one conversation with a peer at a time: of two that cross, that of the smaller id goes on.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import trio

from ....collectives.errors import NetworkError, PeerLostError, RemoteProtocolError
from ....collectives.identifiers import PeerId
from ..transport.addresses import host_of, is_direct, is_internet, is_loopback
from ..transport.backoff import Backoff
from ..transport.faults import Faults
from ..transport.host import Host
from ..transport.packed import pack, unpack
from ..transport.peer_stream import PeerStream
from . import protobuf
from .circuit import kind_of

PROTOCOL = "/libp2p/dcutr"
CONNECT, SYNC = 100, 300
ANSWER_S = 5.0
DIAL_S = 2.0
LAN_S = 1.0
PUNCH_S = 4.0
RETRY_S, SPREAD_S = 0.03, 0.1
"""After a router has refused: the pause, and its random part at least, as for lanes
(`through.punch`).
"""
ATTEMPTS = 3
AGAIN_FIRST_S, AGAIN_MAX_S = 4.0, 300.0
"""Pauses between rounds of attempts, as long as the connection stays relayed: packets of a round
get lost, routers restart, people move.
"""
SETTLE_S = 5.0
"""How long the relayed connection lives beside the direct one: what is being said on it is said to
its end.
"""
MAX_ADDRESSES = 4
SERVED_PER_MINUTE = 12
MAX_DRIVEN = 256
"""Peers at a time: anybody may call through a relay."""

log = logging.getLogger("atoll.net")


class Puncher:
    """Used from the trio thread only."""

    def __init__(
        self,
        host: Host,
        faults: Faults,
        rng: random.Random,
        *,
        seen_at: Callable[[], Sequence[str]],
        lan: Callable[[], Sequence[str]],
        known: Callable[[PeerId], Sequence[str]],
    ) -> None:
        """``seen_at()``: our addresses as public peers see them; ``lan()``: those of our
        interfaces; ``known(peer)``: where a peer may be dialled.
        """
        self._host, self._faults, self._rng = host, faults, rng
        self._seen_at, self._lan, self._known = seen_at, lan, known
        self._driving: set[PeerId] = set()
        # The conversation, and whether it is ours.
        self._talking: dict[PeerId, tuple[trio.CancelScope, bool]] = {}
        self._served: dict[PeerId, tuple[float, int]] = {}
        self._nursery: trio.Nursery | None = None
        host.handle(PROTOCOL, self._serve)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await trio.sleep_forever()

    def path_changed(self, peer: PeerId) -> None:
        """Connections of ``peer`` came or went."""
        if (
            self._host.relayed(peer)
            and self._nursery is not None
            and peer not in self._driving
            and len(self._driving) < MAX_DRIVEN
        ):
            self._driving.add(peer)
            self._nursery.start_soon(self._drive, peer)

    async def _drive(self, peer: PeerId) -> None:
        pauses, turn = Backoff(AGAIN_FIRST_S, AGAIN_MAX_S, self._rng), self._host.called(peer)
        try:
            while self._host.relayed(peer):
                if self._host.path(peer) == "relay" and not (turn and await self._once(peer)):
                    await self._host.wait_path(peer, lambda path: path != "relay", pauses.next_s())
                turn = True
                await self._settle(peer)
        finally:
            self._driving.discard(peer)

    async def _once(self, peer: PeerId) -> bool:
        """Whether there is a direct connection after everything was tried that is ours to try."""
        if await self._host.dial_direct(peer, self._known(peer), DIAL_S):
            return True
        return self._host.called(peer) and await self._attempts(peer)

    async def _attempts(self, peer: PeerId) -> bool:
        for _ in range(ATTEMPTS):
            try:
                if await (
                    self._host.wait_direct(peer, PUNCH_S)
                    if peer in self._talking
                    else self._attempt(peer)
                ):
                    return True
            except RemoteProtocolError:
                self._faults.count(peer, trio.current_time())
                return False
            except NetworkError as error:
                log.debug("punching to %s: %s", peer, error)
            if self._host.path(peer) != "relay":
                break
            await trio.sleep(self._rng.uniform(0.1, 0.5))
        return self._host.path(peer) not in ("", "relay")

    @contextmanager
    def _conversation(self, peer: PeerId, *, ours: bool) -> Generator[None]:
        """The only one with ``peer`` from now on. It ends early if another replaces it."""
        if peer in self._talking:
            self._talking[peer][0].cancel()
        with trio.CancelScope() as scope:
            mine = self._talking[peer] = scope, ours
            try:
                yield
            finally:
                if self._talking.get(peer) is mine:
                    del self._talking[peer]

    async def _attempt(self, peer: PeerId) -> bool:
        with self._conversation(peer, ours=True):
            return await self._drive_once(peer)
        return False

    async def _drive_once(self, peer: PeerId) -> bool:
        stream = await self._host.open_stream(peer, PROTOCOL, ANSWER_S)
        try:
            mine = list(self._seen_at())[:MAX_ADDRESSES]
            asked_at = trio.current_time()
            await protobuf.send(stream, {1: CONNECT, 2: pack(mine)})
            theirs = await self._hear(stream, CONNECT)
            rtt_s = trio.current_time() - asked_at
            house = _same_house(mine, theirs)
            if house and await self._host.dial_direct(peer, house, LAN_S):
                return True
            await protobuf.send(stream, {1: SYNC})
            await trio.sleep(rtt_s / 2)
            return await self._open(peer, theirs, rtt_s, initiator=False)
        finally:
            await stream.aclose()

    async def _hear(self, stream: PeerStream, kind: int) -> list[str]:
        """The addresses of the next message, which must be of this kind. Raises NetworkError,
        RemoteProtocolError.
        """
        found: protobuf.Fields | None = None
        with trio.move_on_after(ANSWER_S):
            found = await protobuf.receive(stream)
        if found is None:
            raise PeerLostError(f"{stream.peer} did not go on with DCUtR", peer=stream.peer)
        if kind_of(found, stream.peer) != kind:
            raise RemoteProtocolError(f"DCUtR: message {kind} was expected", peer=stream.peer)
        return [
            address for address in unpack(found.get(2, []), 2 * MAX_ADDRESSES) if is_direct(address)
        ]

    async def _open(
        self, peer: PeerId, theirs: Sequence[str], rtt_s: float, *, initiator: bool
    ) -> bool:
        """Dial them, at the moment when they dial us. Addresses that are not the internet's are
        nobody's to name.
        """
        assert self._nursery is not None, "hole punching is not running"
        public = [address for address in theirs if is_internet(address)][:MAX_ADDRESSES]
        log.debug("punching to %s at %s", peer, public)
        dials = [trio.CancelScope(deadline=trio.current_time() + PUNCH_S) for _ in public]
        try:
            for address, dial in zip(public, dials, strict=True):
                self._nursery.start_soon(self._punch, peer, address, initiator, dial, rtt_s)
            return bool(public) and await self._host.wait_direct(peer, PUNCH_S)
        finally:
            for dial in dials:
                dial.cancel()

    async def _punch(
        self, peer: PeerId, address: str, initiator: bool, dial: trio.CancelScope, rtt_s: float
    ) -> None:
        """Where a router answers with a RST, two that try again at equal times stay out of step for
        ever: so most of the pause is chance.
        """
        spread_s = max(rtt_s, SPREAD_S)
        await self._host.punch(
            peer,
            address,
            initiator=initiator,
            dial=dial,
            pause_s=lambda: RETRY_S + self._rng.uniform(0.0, spread_s),
        )

    async def _settle(self, peer: PeerId) -> None:
        """Beside a direct connection that lives, the relayed ones are closed: one that was there
        before them may be dead, and nobody knows yet.
        """
        began = trio.current_time()
        if (
            not await self._host.wait_path(peer, lambda path: path in ("", "relay"), SETTLE_S)
            and self._host.heard_at(peer) > began
        ):
            await self._host.close_relayed(peer)

    async def _serve(self, stream: PeerStream) -> None:
        """The caller's part."""
        peer, now = stream.peer, trio.current_time()
        since, count = self._served.get(peer, (now, 0))
        self._served[peer] = (since, count + 1) if now - since < 60.0 else (now, 1)
        if len(self._served) > 1024:
            self._served.clear()
        _, ours = self._talking.get(peer, (None, False))
        if (
            self._host.path(peer) != "relay"
            or self._served.get(peer, (now, 0))[1] > SERVED_PER_MINUTE
            or (ours and self._host.peer < peer)
        ):
            return
        with self._conversation(peer, ours=False):
            await self._go_along(stream)

    async def _go_along(self, stream: PeerStream) -> None:
        peer = stream.peer
        try:
            theirs = await self._hear(stream, CONNECT)
            mine = list(self._seen_at())[:MAX_ADDRESSES]
            if {host_of(address) for address in mine} & {host_of(address) for address in theirs}:
                mine += [address for address in self._lan() if not is_loopback(address)][
                    :MAX_ADDRESSES
                ]
            answered_at = trio.current_time()
            await protobuf.send(stream, {1: CONNECT, 2: pack(mine)})
            await self._hear(stream, SYNC)
            await self._open(peer, theirs, trio.current_time() - answered_at, initiator=True)
        except RemoteProtocolError:
            self._faults.count(peer, trio.current_time())
        except NetworkError:
            pass


def _same_house(mine: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Private addresses among theirs, if the world sees both of us at one address: then we stand
    behind the same router.
    """
    shared = {host_of(address) for address in mine} & {host_of(address) for address in theirs}
    return (
        [address for address in theirs if not is_internet(address) and not is_loopback(address)]
        if shared
        else []
    )

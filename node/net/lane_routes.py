"""One lane is made: the driver tries way after way, the other side goes along.

lan, direct  one of the two dials the other's lane listener
punched      both dial at once, each from a port that observers have seen (`through.punch`); where
             neither has a public address
relay        over a third peer (`through.relaying`)

Where none works the stream itself becomes the lane (`lanes`). The driver asks observers while it
dials, so that trying costs no time.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import trio

from ...collectives.errors import NetworkError, PeerUnreachableError, RemoteProtocolError
from ...collectives.identifiers import PeerId
from .lane_talk import (
    ANSWER_S,
    Bridge,
    Dialled,
    LaneDone,
    LaneTalk,
    Meet,
    Met,
    Relayed,
    Reverse,
    Sync,
    Terms,
)
from .through.meeting import Spot
from .through.observing import ASK_S
from .through.punch import GUESSES, PUNCH_S, Punch, guesses, targets
from .through.relaying import Helpers, show
from .transport.addresses import MAX_ADDRESSES, has_public, host_of, usable
from .transport.allowance import Allowance
from .transport.host import Host
from .transport.lane_sockets import (
    DIAL_S,
    HELLO_S,
    Expected,
    LaneListener,
    MayDial,
    be_greeted,
    detach,
    dial,
    hello,
    path_of,
)

LOOK_S = 0.1
"""A dial on the same network has so long, however fast observers answer."""
REVERSE_S = 0.5
ARRIVE_S = 2.0
"""How much later than the driver the other side may have the lane."""
FOLLOW_S = 40.0
DOUBTFUL_S = 1.0
"""Where one router is symmetric: it works at once, or, mostly, not at all."""
RELAYS = 3
"""Tried, one after the other."""
ERRANDS, ERRANDS_PER_S = 128, 1.0
"""Addresses that are dialled because a peer named them, at machines that it does not come from: who
lives behind a router names some, and whoever names others' makes us a nuisance to them.
"""


class Made(NamedTuple):
    """A lane: a non-blocking socket, and by which way."""

    socket: socket.socket
    path: str


class LaneRoutes:
    """Used from the trio thread only."""

    def __init__(
        self,
        listener: LaneListener,
        helpers: Helpers,
        run_of: Callable[[PeerId], str | None],
        may_dial: MayDial,
        rng: random.Random,
    ) -> None:
        """``run_of``: a run that we have in common with a peer; ``may_dial``: which of its
        addresses are dialled.
        """
        self.listener, self.helpers, self._run_of, self._may_dial, self.rng = (
            listener,
            helpers,
            run_of,
            may_dial,
            rng,
        )
        self.errands = Allowance(ERRANDS, ERRANDS_PER_S)
        self.why: dict[PeerId, str] = {}
        """Why the last lane that we drove to a peer is not direct."""
        self.shown: Callable[[], set[str]] | None = None
        """Of a node that is to be reached through relays only: the hosts that know where it is
        already. It shows itself to no other.
        """
        self.guesses = False
        """Whether ports are guessed for the first lane where one router is symmetric
        (`through.punch`).
        """

    def addresses(self, far: str = "") -> tuple[str, ...]:
        """Where the lane listener is, for a peer that is connected from ``far``; nowhere, where
        nobody is to know.
        """
        return tuple(self.listener.addresses(far)[:MAX_ADDRESSES]) if self.shown is None else ()

    def hide(self, host: Host) -> None:
        """From now on nobody is told where our lane listener is, and circuits are taken only at
        hosts that we are connected with.
        """
        self.listener.hidden = True
        self.shown = lambda: {
            ends[1] for peer in host.peers() if (ends := host.ends(peer)) is not None
        }

    def relays_at(self, addresses: Sequence[str]) -> list[str]:
        """Those of a relay's addresses at which a circuit may be taken."""
        return [
            address
            for address in addresses
            if self.shown is None or host_of(address) in self.shown()
        ]

    async def dial(self, peer: PeerId, addresses: Sequence[str], terms: Terms) -> Made | None:
        """A lane to the listener of ``peer`` at these addresses; None if it does not answer."""
        found = await dial(
            [address for address in addresses if self._may_dial(peer, address)],
            terms.token,
            terms.both,
        )
        return None if found is None else Made(found, path_of(found))

    def spot(self) -> Spot | None:
        """A port to be met at; None where none is free, or nobody is to see one."""
        if self.shown is not None:
            return None
        with suppress(OSError):
            return Spot(self.listener.host, self.rng)
        return None

    def may_need_punching(self, theirs: tuple[str, ...]) -> bool:
        """Whether neither of us has a public address: then nobody waits for a dial to fail. (A
        public one may be behind a firewall, which shows only by that.)
        """
        return not has_public(theirs) and not has_public(self.addresses())

    async def drive(
        self,
        talk: LaneTalk,
        terms: Terms,
        theirs: tuple[str, ...],
        rtt_s: float,
        *,
        relay: bool = True,
    ) -> Made | None:
        """Propose until something works; None: nothing but the stream does. ``relay``: whether one
        is tried, too.

        Raises NetworkError, RemoteProtocolError.
        """
        attempt = _Drive(self, talk, terms, theirs, rtt_s)
        try:
            made = await attempt.direct()
            made = made or await attempt.punch()
            if made is None and (attempt.spot is None or has_public(self.addresses())):
                made = await attempt.reverse()
            if made is None and attempt.spot is None:
                made = await attempt.punch_after_all()
            if made is None and relay:
                made = await attempt.relay(self._run_of(talk.peer))
        finally:
            attempt.close()
        if made is None or made.path == "relay":
            self.why[talk.peer] = "; ".join(attempt.tried)
        else:
            self.why.pop(talk.peer, None)
        return made


class _Drive:
    """One attempt of the driver."""

    def __init__(
        self,
        routes: LaneRoutes,
        talk: LaneTalk,
        terms: Terms,
        theirs: tuple[str, ...],
        rtt_s: float,
    ) -> None:
        self._routes, self._talk, self._terms, self._theirs, self._rtt_s = (
            routes,
            talk,
            terms,
            theirs,
            rtt_s,
        )
        self.tried: list[str] = []
        observers = routes.helpers.observers(talk.peer)
        self._observers = observers if routes.may_need_punching(theirs) else []
        self.spot = routes.spot() if self._observers else None

    def close(self) -> None:
        """Release what is left."""
        if self.spot is not None:
            self.spot.close()

    async def direct(self) -> Made | None:
        """Dial, and meanwhile learn how our port is seen."""
        found: Made | None = None
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def look(spot: Spot) -> None:
                await spot.observe(self._observers)
                if spot.seen:
                    await trio.sleep_until(began + LOOK_S)
                    nursery.cancel_scope.cancel()

            if self.spot is not None:
                nursery.start_soon(look, self.spot)
            with trio.move_on_after(self._patience()):
                found = await self._routes.dial(self._talk.peer, self._theirs, self._terms)
            if found is not None:
                nursery.cancel_scope.cancel()
        if found is None:
            self.tried.append("no direct address answers")
        return found

    def _patience(self) -> float:
        """Who has no public address will hardly answer one who has, and can dial it."""
        return (
            REVERSE_S
            if has_public(self._routes.addresses()) and not has_public(self._theirs)
            else DIAL_S
        )

    async def reverse(self) -> Made | None:
        """Be dialled."""
        listener, token = self._routes.listener, self._terms.token
        expected = listener.expect(token, self._talk.peer, self._terms.both)
        try:
            await self._talk.say(Reverse())
            answer = await self._talk.hear(DIAL_S + ANSWER_S)
            if not isinstance(answer, Dialled):
                raise RemoteProtocolError("Reverse is answered by Dialled", peer=self._talk.peer)
            sock = taken(expected) if answer.ok else None
        finally:
            listener.forget(token)
        if sock is None:
            self.tried.append("ours does not answer either")
        return Made(sock, path_of(sock)) if sock is not None else None

    async def punch_after_all(self) -> Made | None:
        """One of us has a public address, which does not answer: it is behind a firewall."""
        observers = self._routes.helpers.observers(self._talk.peer)
        self.spot = self._routes.spot() if observers else None
        if self.spot is not None:
            await self.spot.observe(observers)
        return await self.punch()

    async def punch(self) -> Made | None:
        """Both dial half a round trip after our message: then the dials leave together."""
        if self.spot is None:
            return None
        await self._talk.say(Meet(self.spot.candidates, self.spot.symmetric, self._routes.guesses))
        answer = await self._talk.hear(ASK_S + ANSWER_S)
        if not isinstance(answer, Met):
            raise RemoteProtocolError("Meet is answered by Met", peer=self._talk.peer)
        if not (self.spot.candidates and answer.candidates):
            self.tried.append("nobody says how the two are seen from outside")
        elif self.spot.symmetric and answer.symmetric:
            self.tried.append("both routers give every destination another port")
        else:
            doubtful = self.spot.symmetric or answer.symmetric
            guess = doubtful and self._routes.guesses and answer.guesses and not self._terms.place
            await self._talk.say(Sync(guess))
            await trio.sleep(self._rtt_s / 2)
            with trio.move_on_after(
                DOUBTFUL_S + 3 * self._rtt_s if doubtful and not guess else PUNCH_S
            ):
                try:
                    return await meet(
                        self._routes,
                        self.spot,
                        self._talk.peer,
                        self._terms,
                        answer.candidates,
                        self._rtt_s,
                        guess=guess,
                    )
                except PeerUnreachableError as error:
                    self.tried.append(error.message)
                    return None
            self.tried.append(
                "one router gives every destination another port, and the other one "
                "lets in only whom it knows"
            )
        return None

    async def relay(self, run: str | None) -> Made | None:
        """Through somebody whom both reach."""
        peer = self._talk.peer
        for relay in self._routes.helpers.relays(peer)[:RELAYS] if run else []:
            try:
                mine, theirs, where = await self._routes.helpers.circuit(relay, run or "", peer)
                await self._talk.say(Relayed(where, theirs))
                sock = await through_relay(self._routes.relays_at(where), mine, self._terms)
                if sock is not None:
                    return Made(sock, "relay")
                self.tried.append(f"the relay {relay} led to somebody else")
            except (PeerUnreachableError, OSError) as error:
                self.tried.append(getattr(error, "message", str(error)))
        if not self._routes.helpers.relays(peer):
            self.tried.append("no relay is known")
        return None


class Follower:
    """The other side of one attempt."""

    def __init__(
        self,
        routes: LaneRoutes,
        talk: LaneTalk,
        terms: Terms,
        offered: tuple[str, ...],
        expected: Expected,
    ) -> None:
        """``offered``: the driver's addresses; ``expected``: where its dial arrives."""
        self._routes, self._talk, self._terms, self._offered, self._expected = (
            routes,
            talk,
            terms,
            offered,
            expected,
        )
        self._spot: Spot | None = None
        self._observed = trio.Event()
        self._scope = trio.CancelScope()  # of the way that was proposed last
        self._made: Made | None = None
        self._arrived: trio.Event | None = None
        self._theirs: tuple[str, ...] = ()
        self._guess = False
        self._proposed = Counter[type]()  # how often each way was

    async def run(self) -> Made | None:
        """Go along until the driver is done; None: the stream is the lane. Raises NetworkError,
        RemoteProtocolError.
        """
        failed: Exception | None = PeerUnreachableError(
            f"{self._talk.peer} took too long over a lane", peer=self._talk.peer
        )
        bridged = False
        try:
            with trio.move_on_after(FOLLOW_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._observe)
                    try:
                        bridged = await self._follow(nursery)
                        failed = None
                    except (NetworkError, RemoteProtocolError) as error:
                        failed = error
                    nursery.cancel_scope.cancel()
            if failed is not None:
                raise failed
            made, self._made = self._made, None
            return None if bridged else made or self._expected_one()
        finally:
            self._forget()
            if self._spot is not None:
                self._spot.close()

    async def _follow(self, nursery: trio.Nursery) -> bool:
        """Whether it ended with Bridge."""
        while True:
            message = await self._talk.hear(DIAL_S + PUNCH_S + ANSWER_S)
            self._proposed[type(message)] += 1
            if self._proposed[type(message)] > (RELAYS if isinstance(message, Relayed) else 1):
                raise RemoteProtocolError("a way is proposed once", peer=self._talk.peer)
            if isinstance(message, Reverse):
                self._forget()
                self._made = await self._routes.dial(self._talk.peer, self._offered, self._terms)
                await self._talk.say(Dialled(self._made is not None))
            elif isinstance(message, Meet):
                await self._observed.wait()
                if self._spot is None:
                    await self._look()
                self._theirs = message.candidates
                known = self._spot.candidates if self._spot is not None else ()
                await self._talk.say(
                    Met(
                        known, self._spot is not None and self._spot.symmetric, self._routes.guesses
                    )
                )
            elif isinstance(message, Sync):
                self._guess = message.guess and self._routes.guesses and not self._terms.place
                self._propose(nursery, self._punch)
            elif isinstance(message, Relayed):
                self._propose(nursery, partial(self._relay, message))
            elif isinstance(message, LaneDone):
                if self._arrived is not None:
                    with trio.move_on_after(ARRIVE_S):
                        await self._arrived.wait()
                return False
            elif isinstance(message, Bridge):
                return True
            else:
                raise RemoteProtocolError("a lane ends with Done or Bridge", peer=self._talk.peer)

    def _propose(self, nursery: trio.Nursery, way: Callable[[], Awaitable[Made | None]]) -> None:
        self._forget()
        self._arrived = trio.Event()
        nursery.start_soon(self._go, way, self._scope, self._arrived)

    async def _go(
        self,
        way: Callable[[], Awaitable[Made | None]],
        scope: trio.CancelScope,
        arrived: trio.Event,
    ) -> None:
        with scope, suppress(NetworkError, OSError):
            self._made = await way()
        arrived.set()

    def _forget(self) -> None:
        """What was proposed before has failed, or all is over."""
        self._scope.cancel()
        self._scope = trio.CancelScope()
        if self._made is not None:
            self._made.socket.close()
            self._made = None

    def _expected_one(self) -> Made:
        sock = taken(self._expected)
        if sock is None:
            raise PeerUnreachableError("the lane never arrived", peer=self._talk.peer)
        return Made(sock, path_of(sock))

    async def _observe(self) -> None:
        """Before we are asked: in the time that the driver's dial takes."""
        try:
            if self._routes.may_need_punching(self._offered):
                await self._look()
        finally:
            self._observed.set()

    async def _look(self) -> None:
        """Learn how a port of ours is seen."""
        observers = self._routes.helpers.observers(self._talk.peer)
        self._spot = self._routes.spot() if observers else None
        if self._spot is not None:
            await self._spot.observe(observers)

    async def _punch(self) -> Made | None:
        if self._spot is None or not self._theirs:
            return None
        return await meet(
            self._routes,
            self._spot,
            self._talk.peer,
            self._terms,
            self._theirs,
            0.0,
            guess=self._guess,
        )

    async def _relay(self, message: Relayed) -> Made | None:
        where = [
            address
            for address in self._routes.relays_at(usable(message.addresses))
            if has_public((address,))
        ][:RELAYS]
        now, errands = trio.current_time(), self._routes.errands
        where = [address for address in where if errands.allows(self._talk.peer, now)]
        sock = await through_relay(where, message.voucher, self._terms)
        return None if sock is None else Made(sock, "relay")


async def meet(
    routes: LaneRoutes,
    spot: Spot,
    peer: PeerId,
    terms: Terms,
    offered: tuple[str, ...],
    rtt_s: float,
    *,
    guess: bool,
) -> Made:
    """A simultaneous open of both sides. ``guess``: one of us has another port for every
    destination. Raises PeerUnreachableError.
    """
    now, to = trio.current_time(), targets(offered, spot.candidates)
    hosts = {host for host, _ in to if routes.errands.allows(peer, now)}
    to = [target for target in to if target[0] in hosts]
    if guess and not spot.symmetric:
        to = guesses(to, routes.rng)
    punch = Punch(now, to, rtt_s, routes.rng)
    ports = GUESSES if guess and spot.symmetric else 1
    sock = await spot.meet(
        peer, punch, terms.token, terms.both, driver=terms.initiator, ports=ports
    )
    return Made(sock, path_of(sock, "punched"))


async def through_relay(where: Sequence[str], voucher: bytes, terms: Terms) -> socket.socket | None:
    """Our end of a circuit, once the partner has proved itself at the other; None: it is somebody
    else. Raises OSError.
    """
    with await show(where, voucher) as sock, trio.move_on_after(HELLO_S):
        if await (hello if terms.initiator else be_greeted)(sock, terms.token, terms.both):
            return detach(sock)
    return None


def taken(expected: Expected) -> socket.socket | None:
    """The socket that has arrived, which is the caller's from now on."""
    sock, expected.socket = expected.socket, None
    return sock

"""Connections through relays, at both of their ends: dialling through one, keeping places at some,
and being called there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from ....collectives.errors import NetworkError, PeerUnreachableError, RemoteProtocolError
from ....collectives.identifiers import PeerId
from ..transport.addresses import circuit as circuit_address
from ..transport.addresses import host_of, is_direct, make_address
from ..transport.faults import Faults
from ..transport.host import Host, NotSpokenError
from ..transport.peer_stream import PeerStream
from . import circuit, protobuf

KEPT = 2
"""Relays that a node which nobody can dial has a place at."""
RENEW_SHARE = 0.5
"""Of a reservation's time, after which it is renewed."""
LOOK_S = 15.0
REFUSED_S, SILENT_S = 60.0, 5.0
"""Pauses after a refusal, and after no answer: then the connection broke, or one of us was too
busy.
"""
STRANGER_S = 2.0
"""First pause after a relay that does not know our runs (it hears of them soon after we joined
one); every further one is twice as long.
"""
MAX_PAUSE_S = 300.0


@dataclass(frozen=True, slots=True)
class Held:
    """A place at a relay: the circuits it is called by, and when to renew it (trio's time)."""

    addresses: tuple[str, ...]
    renew_at: float


class Circuits:
    """Used from the trio thread only."""

    def __init__(
        self,
        host: Host,
        faults: Faults,
        rng: random.Random,
        *,
        wanted: Callable[[], bool],
        candidates: Callable[[], list[PeerId]],
        changed: Callable[[], None],
    ) -> None:
        """``wanted()``: whether we need places; ``candidates()``: peers that may have some, best
        first; ``changed()`` is called when the places are others."""
        self._host, self._faults, self._rng = host, faults, rng
        self._wanted, self._candidates, self._changed = wanted, candidates, changed
        self.held: dict[PeerId, Held] = {}
        self.refused: dict[PeerId, str] = {}
        self._again: dict[PeerId, float] = {}
        self._strange: dict[PeerId, int] = {}
        self._wake = trio.Event()
        host.through = self.dial
        host.handle(circuit.STOP, self._serve)

    def addresses(self) -> list[str]:
        """Where we can be called."""
        return [address for held in self.held.values() for address in held.addresses]

    def again(self) -> None:
        """We joined a run: who refused us may think otherwise now."""
        self._again.clear()
        self._strange.clear()
        self.look()

    def look(self) -> None:
        """Something changed: places may be needed, or to be had."""
        self._wake.set()

    def link_changed(self, peer: PeerId, up: bool) -> None:
        """A place ends with the connection to its relay; on another one it is asked for at once."""
        if up:
            self._again.pop(peer, None)
        else:
            self.refused.pop(peer, None)
            if self.held.pop(peer, None) is not None:
                self._changed()
        self.look()

    def path_changed(self, peer: PeerId) -> None:
        """A connection of ``peer`` came or went. It may have had none for a moment, and have given
        our place away.
        """
        if peer in self.held:
            self.held[peer] = replace(self.held[peer], renew_at=trio.current_time())
            self.look()

    async def run(self) -> None:
        """Keep the places that are wanted until cancelled."""
        while True:
            self._wake = trio.Event()
            due = trio.current_time() + LOOK_S
            self._again = {
                relay: at for relay, at in self._again.items() if at > trio.current_time()
            }
            if self._wanted():
                await self._renew()
                await self._fill()
                due = min([due, *(held.renew_at for held in self.held.values())])
                if len(self.held) < KEPT:
                    due = min(
                        [due, *(at for at in self._again.values() if at > trio.current_time())]
                    )
            elif self.held:
                self.held.clear()
                self._changed()
            with trio.move_on_at(due):
                await self._wake.wait()

    async def _renew(self) -> None:
        for relay, held in list(self.held.items()):
            if held.renew_at <= trio.current_time() and not await self.reserve(relay):
                self.held.pop(relay, None)
                self._changed()

    async def _fill(self) -> None:
        for relay in self._candidates():
            if len(self.held) >= KEPT:
                break
            if relay not in self.held and self._again.get(relay, 0.0) <= trio.current_time():
                await self.reserve(relay)

    async def reserve(self, relay: PeerId) -> bool:
        """Ask for a place, or for more time at one."""
        status, pause_s = 0, SILENT_S
        try:
            stream = await self._host.open_stream(relay, circuit.HOP)
            try:
                with trio.move_on_after(circuit.ANSWER_S):
                    await protobuf.send(stream, {1: circuit.HOP_RESERVE})
                    found = await protobuf.receive(stream)
                    status, pause_s = circuit.status_in(found, 5), REFUSED_S
                    if status == circuit.OK and self._granted(
                        relay, circuit.reservation_in(found, relay)
                    ):
                        return True
            finally:
                await stream.aclose()
        except RemoteProtocolError:
            self._faults.count(relay, trio.current_time())
            pause_s = REFUSED_S
        except NotSpokenError:
            pause_s = REFUSED_S
        except NetworkError:
            pass
        self.refused[relay] = circuit.WORDS.get(
            status, "is no relay" if pause_s == REFUSED_S else "did not answer"
        )
        if status == circuit.PERMISSION_DENIED:
            self._strange[relay] = times = self._strange.get(relay, 0) + 1
            pause_s = min(MAX_PAUSE_S, STRANGER_S * 2 ** min(times, 10) / 2)
        self._again[relay] = trio.current_time() + pause_s * self._rng.uniform(0.8, 1.2)
        return False

    def _granted(self, relay: PeerId, reservation: circuit.Reservation) -> bool:
        """Note it. A relay is believed only where it is: addresses at other hosts would send our
        callers to somebody else.
        """
        ends = self._host.ends(relay)
        here = [a for a in reservation.addresses if ends and is_direct(a) and host_of(a) == ends[1]]
        seconds = min(reservation.expires_s - time.time(), 86_400.0)
        if not here or seconds < 10.0:
            return False
        new = relay not in self.held
        self.held[relay] = Held(
            (circuit_address(relay, here[0]),), trio.current_time() + RENEW_SHARE * seconds
        )
        self.refused.pop(relay, None)
        self._strange.pop(relay, None)
        if new:
            self._changed()
        return True

    async def dial(self, relay: PeerId, address: str, target: PeerId) -> None:
        """A connection to ``target`` through ``relay``. Raises NetworkError."""
        if relay == self._host.peer:
            raise PeerUnreachableError(f"{target} is not connected to us, its relay", peer=target)
        await self._host.connect(relay, [address], nested=True)
        stream = await self._host.open_stream(relay, circuit.HOP)
        try:
            await protobuf.send(stream, {1: circuit.HOP_CONNECT, 2: circuit.peer_field(target)})
            status = circuit.status_in(await protobuf.receive(stream), 5)
            if status != circuit.OK:
                raise PeerUnreachableError(
                    f"the relay {relay} {circuit.WORDS.get(status, f'says {status}')}", peer=target
                )
        except BaseException:
            await stream.aclose()
            raise
        await self._host.join(stream, circuit_address(relay, address), target, initiator=True)

    async def _serve(self, stream: PeerStream) -> None:
        """Somebody calls us at ``stream.peer``, a relay."""
        relay, ends = stream.peer, stream.remote
        if relay not in self.held or ends is None:  # nobody has a reason to call us there
            await circuit.answer(stream, circuit.PERMISSION_DENIED, hop=False)
            await stream.finish()
            return
        with trio.fail_after(circuit.ANSWER_S):
            request = await protobuf.receive(stream)
            caller = circuit.peer_in(request, relay)
            if circuit.kind_of(request, relay) != circuit.STOP_CONNECT or caller == self._host.peer:
                raise RemoteProtocolError("a relay calls with CONNECT", peer=relay)
            await circuit.answer(stream, circuit.OK, hop=False)
        await self._host.join(
            stream, circuit_address(relay, make_address(*ends)), caller, initiator=False
        )

"""Finding the first peers: every bootstrap address and every cached peer, again and again, for as
long as it takes.

A bootstrap node may be started last, restart, or die for good; nothing here gives up, and nothing
here waits for anything.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import trio

from ...collectives.errors import NetworkError
from ...collectives.identifiers import PeerId
from .transport.backoff import Backoff

FIRST_S = 0.05
EAGER_MAX_S = 0.4
"""Longest delay between tries while the node is alone: a start should take a moment, not a
back-off.
"""
EAGER_FOR_S = 60.0
PATIENT_MAX_S = 30.0
NAMES_AGAIN_S, NAMES_ALONE_S = 600.0, 30.0
"""A name is looked up again after so long; sooner while nobody is connected, since it may stand for
others by now.
"""
CACHED_AT_ONCE = 8
"""Cached peers tried per round while nobody is connected."""


class Bootstrap:
    """Keeps a connection to every bootstrap peer; uses the cache while nobody is connected."""

    def __init__(
        self,
        peers: Sequence[PeerId],
        connect: Callable[[PeerId], Awaitable[None]],
        connected: Callable[[PeerId], bool],
        alone: Callable[[], bool],
        cached: Callable[[], Sequence[PeerId]],
        look_up: Callable[[str], Awaitable[Sequence[PeerId]]],
        rng: random.Random,
    ) -> None:
        """``connect`` raises NetworkError; ``alone()``: no connection at all; ``cached()``: peers
        of an earlier life.

        ``look_up(name)``: the peers that a ``/dnsaddr/…`` stands for now; raises NetworkError.
        """
        self._peers = list(dict.fromkeys(peers))
        self._connect, self._connected, self._alone, self._cached, self._rng = (
            connect,
            connected,
            alone,
            cached,
            rng,
        )
        self._changed = trio.Event()
        self._look_up = look_up
        self._names: list[str] = []
        self.failures: dict[str, str] = {}  # by peer or name
        self._nursery: trio.Nursery | None = None

    def add(self, peer: PeerId) -> None:
        if peer not in self._peers:
            self._peers.append(peer)
            if self._nursery is not None:
                self._nursery.start_soon(self._hold, peer)

    def add_name(self, name: str) -> None:
        """Whoever ``name`` stands for, now and later, is a bootstrap peer."""
        if name not in self._names:
            self._names.append(name)
            if self._nursery is not None:
                self._nursery.start_soon(self._resolve, name)

    @property
    def names(self) -> list[str]:
        """The names that stand for bootstrap peers."""
        return self._names

    @property
    def peers(self) -> list[PeerId]:
        return self._peers

    def link_changed(self) -> None:
        """A connection came or went."""
        self._changed.set()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for peer in self._peers:
                nursery.start_soon(self._hold, peer)
            for name in self._names:
                nursery.start_soon(self._resolve, name)
            nursery.start_soon(self._use_cache)
            await trio.sleep_forever()

    async def _resolve(self, name: str) -> None:
        backoff = Backoff(FIRST_S, NAMES_ALONE_S, self._rng)
        while True:
            try:
                for peer in await self._look_up(name):
                    self.add(peer)
                self.failures.pop(name, None)
                again_s = NAMES_ALONE_S if self._alone() else NAMES_AGAIN_S
            except NetworkError as error:
                self.failures[name] = error.message
                again_s = backoff.next_s()
            await trio.sleep(again_s * self._rng.uniform(0.8, 1.0))

    async def _hold(self, peer: PeerId) -> None:
        backoff, since = self._eager(), trio.current_time()
        while True:
            changed = self._changed
            if self._connected(peer):
                await changed.wait()
                if not self._connected(peer):
                    backoff, since = self._eager(), trio.current_time()
                continue
            try:
                await self._connect(peer)
                self.failures.pop(peer, None)
            except NetworkError as error:
                self.failures[peer] = error.message
                if trio.current_time() - since > EAGER_FOR_S:
                    backoff = self._patient(backoff)
            with trio.move_on_after(backoff.next_s()):
                await changed.wait()

    async def _use_cache(self) -> None:
        backoff = Backoff(0.2, PATIENT_MAX_S, self._rng)
        while True:
            changed = self._changed
            if not self._alone():
                backoff.reset()
                await changed.wait()
                continue
            async with trio.open_nursery() as nursery:
                for peer in list(self._cached())[:CACHED_AT_ONCE]:
                    nursery.start_soon(self._try, peer)
            with trio.move_on_after(backoff.next_s()):
                await changed.wait()

    async def _try(self, peer: PeerId) -> None:
        try:
            await self._connect(peer)
        except NetworkError:
            pass

    def _eager(self) -> Backoff:
        return Backoff(FIRST_S, EAGER_MAX_S, self._rng)

    def _patient(self, backoff: Backoff) -> Backoff:
        """The same back-off with a longer limit; made once."""
        return (
            backoff
            if backoff.max_s == PATIENT_MAX_S
            else Backoff(EAGER_MAX_S, PATIENT_MAX_S, self._rng)
        )

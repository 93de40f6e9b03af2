"""Iterative lookups: ask the nearest known peers, learn nearer ones, stop early. One phase, hedged against slow peers.

A request that is not answered within the hedge time no longer counts against the parallelism, but its answer is still
welcome. A peer is called dead only when no connection to it can be made; then it is not asked again for ten seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum, auto

import trio

from ....collectives.errors import NetworkError
from ....collectives.identifiers import PeerId
from .routing import K, RoutingTable, closest
from .wire import Rpc

ALPHA = 3
BETA = 3
"""An early stop needs answers of this many nearest peers."""
HEDGE_S = 0.05
DEAD_FOR_S = 10.0


class _State(Enum):
    ASKED = auto()
    SLOW = auto()
    ANSWERED = auto()
    FAILED = auto()


class Lookups:
    """Runs lookups over ``ask`` (which raises NetworkError)."""

    def __init__(
        self,
        table: RoutingTable,
        ask: Callable[[PeerId, Rpc], Awaitable[Rpc]],
        heard_of: Callable[[PeerId, Sequence[str]], None],
        connected: Callable[[PeerId], bool],
        me: PeerId,
        nursery: trio.Nursery,
    ) -> None:
        self.table, self.ask, self.heard_of, self.connected, self.me, self.nursery = table, ask, heard_of, connected, me, nursery
        self._dead_until: dict[PeerId, float] = {}

    async def run(
        self, request: Rpc, target: int, enough: Callable[[Rpc], bool], *, width: int = K, exhaustive: bool = False
    ) -> list[PeerId]:
        """Live peers nearest to ``target``, nearest first.

        ``enough(answer)`` True ends the lookup. ``exhaustive`` asks all of the ``width`` nearest; otherwise the lookup also ends
        when the three nearest have answered and nobody nearer is known. Cancelled, it stops listening; requests run out.
        """
        return await _Lookup(self, request, target, enough, width, exhaustive).run()

    def mark_dead(self, peer: PeerId) -> None:
        """No connection could be made."""
        if not self.connected(peer):
            self.table.remove(peer)
            self._dead_until[peer] = trio.current_time() + DEAD_FOR_S
            if len(self._dead_until) > 4096:
                del self._dead_until[next(iter(self._dead_until))]

    def alive(self, peer: PeerId) -> bool:
        """Whether it is worth asking."""
        return self.connected(peer) or self._dead_until.get(peer, 0.0) <= trio.current_time()


class _Lookup:
    def __init__(self, owner: Lookups, request: Rpc, target: int, enough: Callable[[Rpc], bool], width: int, exhaustive: bool) -> None:
        self._owner, self._request, self._target, self._enough = owner, request, target, enough
        self._width, self._exhaustive = width, exhaustive
        self._known = dict.fromkeys(owner.table.closest(target, K))
        self._states: dict[PeerId, _State] = {}
        self._asked_at: dict[PeerId, float] = {}
        self._changed = trio.Event()
        self._stop = False

    async def run(self) -> list[PeerId]:
        while not self._stop:
            self._let_go_of_the_slow()
            ranked = closest(self._candidates(), self._target, self._width)
            if not self._exhaustive and ranked and all(self._states.get(peer) is _State.ANSWERED for peer in ranked[:BETA]):
                break
            todo = [peer for peer in ranked if peer not in self._states]
            flying = [peer for peer, state in self._states.items() if state is _State.ASKED]
            if not todo and not flying:
                break
            for peer in todo[: max(0, ALPHA - len(flying))]:
                self._states[peer] = _State.ASKED
                self._asked_at[peer] = trio.current_time()
                flying.append(peer)
                self._owner.nursery.start_soon(self._one, peer)
            await self._wait(flying)
        return closest((peer for peer in self._candidates() if self._states.get(peer) is not _State.SLOW), self._target, self._width)

    def _candidates(self) -> Iterable[PeerId]:
        return [peer for peer in self._known if self._states.get(peer) is not _State.FAILED]

    def _let_go_of_the_slow(self) -> None:
        now = trio.current_time()
        for peer, state in self._states.items():
            if state is _State.ASKED and now - self._asked_at[peer] >= HEDGE_S:
                self._states[peer] = _State.SLOW

    async def _wait(self, flying: Sequence[PeerId]) -> None:
        self._changed = trio.Event()
        deadline = min(self._asked_at[peer] for peer in flying) + HEDGE_S
        with trio.move_on_at(max(deadline, trio.current_time() + 0.001)):
            await self._changed.wait()

    async def _one(self, peer: PeerId) -> None:
        try:
            answer = await self._owner.ask(peer, self._request)
        except NetworkError:
            self._states[peer] = _State.FAILED
            self._owner.mark_dead(peer)
        else:
            self._states[peer] = _State.ANSWERED
            self._owner.table.add(peer)
            for other, addresses in answer.closer:
                self._learn(other, addresses)
            if self._enough(answer):
                self._stop = True
        self._changed.set()

    def _learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if peer == self._owner.me:
            return
        self._owner.heard_of(peer, addresses)
        if self._owner.alive(peer):
            self._known.setdefault(peer, None)

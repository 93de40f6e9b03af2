"""What one operation asks of the network, without I/O: a lookup by disjoint paths, and storing at
the nearest.

The driver sends what `poll` returns, reports each answer or failure, and polls again after every
report and at `wake`. A request that is not answered within the hedge time no longer counts, but its
answer is still welcome.

Disjoint paths are those of S/Kademlia (Baumgart and Mies, 2007): a peer is asked on one path only,
and what it says is believed on that path only, so that a liar spoils a third of the lookup.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Protocol

from ....collectives.identifiers import PeerId
from .routing import K, closest, position_of
from .wire import Rpc

PATHS = 3
"""Each has one request under way: together Kademlia's alpha."""
BETA = 3
"""A path may stop early when this many of its nearest peers have answered."""
GRACE_HEDGES = 4
"""So many hedge times after the others a path is given up: somebody keeps it busy with peers that
do not exist.
"""
PATIENCE_S = 1.0
"""Who found or stored too little waits so long for the slow ones: a first connection over a long
way takes its time.
"""
SPARES = 2
"""A store that fails is made elsewhere, up to this many times the replicas."""

Request = tuple[PeerId, Rpc]


class DhtWork(Protocol):
    """Something the driver carries out. ``now``: seconds of any monotonic clock."""

    @property
    def done(self) -> bool:
        """Whether the result is there; some of the work may go on."""
        ...

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        ...

    def poll(self, now: float) -> list[Request]:
        """What to send now."""
        ...

    def wake(self) -> float:
        """When to poll again if nothing happens; infinity for never."""
        ...

    def answered(self, peer: PeerId, answer: Rpc, now: float) -> None:
        """``peer`` answered. Raises ValueError when it said something that nobody honest says."""
        ...

    def failed(self, peer: PeerId, now: float) -> None:
        """``peer`` will not answer."""
        ...


class _QueryState(Enum):
    ASKED = auto()
    SLOW = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True)
class _Asked:
    at: float
    path: int
    state: _QueryState = _QueryState.ASKED


class _Requests:
    """Whom we asked, when, and what became of it."""

    def __init__(self, hedge_s: float) -> None:
        self.hedge_s = hedge_s
        self.by_peer: dict[PeerId, _Asked] = {}

    def ask(self, peer: PeerId, path: int, now: float) -> None:
        self.by_peer[peer] = _Asked(now, path)

    def state(self, peer: PeerId) -> _QueryState | None:
        asked = self.by_peer.get(peer)
        return asked.state if asked is not None else None

    def settle(self, peer: PeerId, state: _QueryState) -> None:
        self.by_peer[peer].state = state

    def flying(self) -> list[_Asked]:
        return [asked for asked in self.by_peer.values() if asked.state is _QueryState.ASKED]

    def any_slow(self) -> bool:
        return any(asked.state is _QueryState.SLOW for asked in self.by_peer.values())

    def let_go_of_the_slow(self, now: float) -> None:
        for asked in self.flying():
            if now - asked.at >= self.hedge_s:
                asked.state = _QueryState.SLOW

    def wake(self) -> float:
        return min((asked.at for asked in self.flying()), default=float("inf")) + self.hedge_s


class _Path:
    """Whom a path knows, nearest first."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._ranked: list[tuple[int, PeerId]] = []
        self._known: set[PeerId] = set()

    def add(self, peer: PeerId) -> None:
        if peer not in self._known:
            self._known.add(peer)
            insort(self._ranked, (position_of(peer) ^ self._target, peer))

    def __iter__(self) -> Iterator[PeerId]:
        return (peer for _, peer in self._ranked)


class Lookup:
    """Finds the live peers nearest to a place in the key space, asking ``request`` on the way."""

    def __init__(
        self,
        request: Rpc,
        target: int,
        start: Sequence[PeerId],
        *,
        hedge_s: float,
        width: int = K,
        exhaustive: bool = False,
        enough: Callable[[PeerId, Rpc], bool] = lambda peer, answer: False,
        worth_asking: Callable[[PeerId, float], bool] = lambda peer, now: True,
    ) -> None:
        """``start``: peers to begin with, nearest first. ``enough(peer, answer)`` True ends the
        lookup; its ValueError discards the answer.

        ``exhaustive`` asks all of each path's ``width`` nearest; otherwise a path ends when its
        three nearest have answered.
        """
        self._request, self._target, self._width, self._exhaustive = (
            request,
            target,
            width,
            exhaustive,
        )
        self._enough, self._worth_asking = enough, worth_asking
        self._paths = [_Path(target) for _ in range(PATHS)]
        for number, peer in enumerate(start):
            self._paths[number % PATHS].add(peer)
        self._requests = _Requests(hedge_s)
        self._ended: set[int] = set()
        self._sound: set[int] = set()  # those among them that somebody answered on
        self._last_end = 0.0
        self.done = False

    @property
    def over(self) -> bool:
        return self.done

    def poll(self, now: float) -> list[Request]:
        self._requests.let_go_of_the_slow(now)
        out: list[Request] = []
        for path in range(PATHS) if not self.done else ():
            peer = self._step(path, now)
            if peer is not None:
                self._requests.ask(peer, path, now)
                out.append((peer, self._request))
        if now >= self._give_up_at():
            self.done = True
            return []
        return out

    def wake(self) -> float:
        return min(self._requests.wake(), self._give_up_at())

    def answered(self, peer: PeerId, answer: Rpc, now: float) -> None:
        if self.done:
            return
        try:
            self.done = self._enough(peer, answer)
        except ValueError:
            self._requests.settle(peer, _QueryState.FAILED)
            raise
        self._requests.settle(peer, _QueryState.ANSWERED)
        path = self._requests.by_peer[peer].path
        named = [other for other, _ in answer.closer[:K] if self._worth_asking(other, now)]
        # A path that has nobody gets a share.
        takers = [path, *(other for other in range(PATHS) if not self._ranked(other, 1))]
        for number, other in enumerate(named):
            self._paths[takers[number % len(takers)]].add(other)
        self._ended -= set(takers)
        self._sound &= self._ended

    def failed(self, peer: PeerId, now: float) -> None:
        self._requests.settle(peer, _QueryState.FAILED)

    def nearest(self, count: int) -> list[PeerId]:
        """The result: who answered, and whom a finished path named; nearest first."""
        found = {
            peer
            for path in self._sound or range(PATHS)
            for peer in self._paths[path]
            if self._requests.state(peer) is not _QueryState.SLOW
        }
        found |= {
            peer
            for peer in self._requests.by_peer
            if self._requests.state(peer) is _QueryState.ANSWERED
        }
        return closest(
            (peer for peer in found if self._requests.state(peer) is not _QueryState.FAILED),
            self._target,
            count,
        )

    def _step(self, path: int, now: float) -> PeerId | None:
        """Whom to ask next on a path; notes its end."""
        if path in self._ended or any(asked.path == path for asked in self._requests.flying()):
            return None
        reach = self._ranked(path, self._width if self._exhaustive else BETA)
        for peer in reach:
            if self._requests.state(peer) is None:
                return peer
        if self._exhaustive or all(
            self._requests.state(peer) is _QueryState.ANSWERED for peer in reach
        ):
            self._ended.add(path)
            self._last_end = now
            if any(self._requests.state(peer) is _QueryState.ANSWERED for peer in reach):
                self._sound.add(path)
        return None  # or another path is asking the nearest ones: wait

    def _ranked(self, path: int, count: int) -> list[PeerId]:
        live = (
            peer
            for peer in self._paths[path]
            if self._requests.state(peer) not in (_QueryState.FAILED, _QueryState.SLOW)
        )
        return list(islice(live, count))

    def _give_up_at(self) -> float:
        """When the lookup is over if nothing more happens."""
        if len(self._ended) == PATHS:
            patient = self._requests.any_slow() and (self._exhaustive or not self._sound)
            return self._last_end + (PATIENCE_S if patient else 0.0)
        return (
            self._last_end + GRACE_HEDGES * self._requests.hedge_s if self._sound else float("inf")
        )


class Store:
    """Sends a request to the nearest of ``peers``; whoever fails or is slow is replaced by the
    next. Done at a majority.
    """

    def __init__(
        self,
        request: Rpc,
        peers: Sequence[PeerId],
        replicas: int,
        *,
        hedge_s: float,
        kept: Callable[[Rpc], bool],
    ) -> None:
        """``peers``: nearest first. ``kept(answer)``: whether that peer has taken it."""
        self._request, self._waiting, self._kept = request, list(peers[: SPARES * replicas]), kept
        self._wanted = min(replicas, len(peers))
        self._requests = _Requests(hedge_s)
        self._patient_until, self._given_up = float("inf"), False
        self.stored = 0

    @property
    def over(self) -> bool:
        if self._requests.flying():
            return False
        return self.stored >= self._wanted or (
            not self._waiting and (self._given_up or not self._requests.any_slow())
        )

    @property
    def done(self) -> bool:
        return 2 * self.stored > self._wanted or self.over

    def poll(self, now: float) -> list[Request]:
        self._requests.let_go_of_the_slow(now)
        out: list[Request] = []
        while self._waiting and self.stored + len(self._requests.flying()) < self._wanted:
            peer = self._waiting.pop(0)
            self._requests.ask(peer, 0, now)
            self._patient_until = now + PATIENCE_S
            out.append((peer, self._request))
        self._given_up = now >= self._patient_until
        return out

    def wake(self) -> float:
        return min(self._requests.wake(), self._patient_until)

    def answered(self, peer: PeerId, answer: Rpc, now: float) -> None:
        self._requests.settle(peer, _QueryState.ANSWERED)
        self.stored += self._kept(answer)

    def failed(self, peer: PeerId, now: float) -> None:
        self._requests.settle(peer, _QueryState.FAILED)

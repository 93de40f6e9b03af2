"""What is served to strangers, over all protocols: so many streams, bytes and seconds of our own
time, of all together. Sans-IO.

A stranger is whoever has shown no greeting that we accept, and whom we have not chosen ourselves. A
key costs it nothing, so machines have shares and peers have none (`door.machine_of`). A machine
that has taken more than its share rests: nothing that it sends is read meanwhile, so that nothing
of it is kept. What TCP's handshake proves, that it is at its address, is all that is asked of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from time import perf_counter
from types import coroutine
from typing import Any, TypeVar

from .door import Door

MOST_STREAMS = 1024
"""Open at once; the machine that has the most gives up its oldest to another."""
BYTES_AT_ONCE, BYTES_PER_S = 64 << 20, 16 << 20
"""In both directions, what is passed on as a relay included."""
SECONDS_AT_ONCE, SECONDS_PER_S = 5.0, 0.5
"""Of the loop in which everything of a node runs: half of it at most goes to strangers."""
FRAME_S = 0.000_25
"""To decrypt a frame and hand it on."""
MOST_REST_S = 10.0
"""Who would have to rest longer is hung up on."""

T = TypeVar("T")


class FairRate:
    """``per_s`` of something for all who want it, in equal shares; what one leaves goes to the
    others. ``at_once``: so much may be ahead of time, likewise of all. ``now``: monotonic seconds.

    Each has its due, the mark that the common counter must reach until its share has paid for
    what it took. The counter rises by ``per_s`` over the number of those who are due.
    """

    def __init__(self, at_once: float, per_s: float) -> None:
        self._at_once, self._per_s = at_once, per_s
        self._counter = self._at = 0.0
        self._due: dict[str, float] = {}
        self._next: list[tuple[float, str]] = []  # one row each; the mark may have moved on

    def take(self, who: str, amount: float, now: float) -> None:
        """``who`` has had so much."""
        self._advance(now)
        new = who not in self._due
        self._due[who] = (self._counter if new else self._due[who]) + amount
        if new:
            heapq.heappush(self._next, (self._due[who], who))

    def rest_s(self, who: str, now: float) -> float:
        """For how long ``who`` must rest before it has more."""
        self._advance(now)
        due, many = self._due.get(who, self._counter), len(self._due) or 1
        return max(0.0, (due - self._counter - self._at_once / many) * many / self._per_s)

    def _advance(self, now: float) -> None:
        left = max(0.0, now - self._at) * self._per_s
        self._at = max(now, self._at)
        while self._next:
            mark, who = self._next[0]
            due = self._due[who]
            if mark < due:
                heapq.heapreplace(self._next, (due, who))
                continue
            needed = (due - self._counter) * len(self._due)
            if needed > left:
                self._counter += left / len(self._due)
                return
            left, self._counter = left - needed, due
            heapq.heappop(self._next)
            del self._due[who]


class StrangersShare:
    """Of one node. ``known(peer)``: whether it is no stranger now; ``clock``: monotonic."""

    def __init__(self, known: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self.known, self._clock = known, clock
        self.streams = Door(MOST_STREAMS)
        self._bytes = FairRate(BYTES_AT_ONCE, BYTES_PER_S)
        self._seconds = FairRate(SECONDS_AT_ONCE, SECONDS_PER_S)

    def take(self, machine: str, nbytes: int = 0, seconds: float = 0.0) -> None:
        """It was given so much."""
        now = self._clock()
        if nbytes:
            self._bytes.take(machine, nbytes, now)
        if seconds:
            self._seconds.take(machine, seconds, now)

    def rest_s(self, machine: str) -> float:
        """For how long nothing of it is to be read."""
        now = self._clock()
        return max(self._bytes.rest_s(machine, now), self._seconds.rest_s(machine, now))


@coroutine
def timed(work: Coroutine[Any, Any, T], spent: Callable[[float], None]) -> Generator[Any, Any, T]:
    """``await timed(work, spent)``: what ``work`` returns; ``spent`` is told the seconds of each
    step, from one wait to the next, of this task alone.
    """
    said: Any = None
    failed: BaseException | None = None
    while True:
        began = perf_counter()
        try:
            asked = work.send(said) if failed is None else work.throw(failed)
        except StopIteration as over:
            return over.value
        finally:
            spent(perf_counter() - began)
        said = failed = None
        try:
            said = yield asked
        except BaseException as error:
            failed = error

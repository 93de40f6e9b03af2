"""Virtual time: a heap of events, seeded randomness, and a running hash of everything that
happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush

from ..identifiers import PeerId

Action = Callable[[], None]


class Timer:
    """One event to come. `cancel` makes it a no-op; cancelling twice or too late is harmless."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Action) -> None:
        self.when = when
        self.action: Action | None = action

    def cancel(self) -> None:
        """Let the event pass without effect."""
        self.action = None


class World:
    """A discrete-event scheduler. Events at one instant run in the order in which they were made.

    ``now`` is virtual seconds. Nothing in a world reads a clock, and all chance comes from
    `stream`, so a seed determines the run.
    """

    def __init__(self, seed: int | str = 0) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0  # events run so far
        self._made = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._trace = blake2b(digest_size=16)

    def stream(self, name: str) -> random.Random:
        """A generator of its own for ``name``: drawing from one does not disturb the others."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, when: float, action: Action) -> Timer:
        """Run ``action`` at virtual second ``when`` (now, if that is past)."""
        timer = Timer(when if when > self.now else self.now, action)
        self._made += 1
        heappush(self._heap, (timer.when, self._made, timer))
        return timer

    def after(self, delay_s: float, action: Action) -> Timer:
        """Run ``action`` ``delay_s`` seconds from now."""
        return self.at(self.now + delay_s, action)

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        while self._heap:
            when, _, timer = heappop(self._heap)
            if timer.action is not None:
                self._happen(when, timer.action, timer)
                return True
        return False

    def _happen(self, when: float, action: Action, timer: Timer) -> None:
        timer.action = None
        self.now = when
        self.events += 1
        action()

    def run(self, until: float = float("inf"), stop: Callable[[], bool] | None = None) -> bool:
        """Run events up to virtual second ``until`` or until ``stop()`` (asked after each). True
        when ``stop`` said so.
        """
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, timer = heappop(heap)
            if timer.action is not None:
                self._happen(when, timer.action, timer)
                if stop is not None and stop():
                    return True
        if until != float("inf"):
            self.now = max(self.now, until)
        return False

    def note(self, what: bytes) -> None:
        """Add something that happened to the trace."""
        self._trace.update(b"%.9f %b" % (self.now, what))

    def trace(self) -> str:
        """32 hex digits that name everything noted so far, in order and with its time."""
        return self._trace.hexdigest()


class ProcessDied(BaseException):
    """Raised inside a process that is killed in the middle of a call. Not an Exception: nothing in
    the process may catch it.
    """

    def __init__(self, peer: PeerId, back_after_s: float) -> None:
        super().__init__(peer)
        self.peer = peer
        self.back_after_s = back_after_s

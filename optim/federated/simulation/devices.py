"""The clients' machines in virtual time: how long a step takes, when they are there, and whether
they come back. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....collectives.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """``step_s``: seconds an inner step. ``windows``: [from, to) in seconds of every ``period_s``
    in which it works; none: always.

    Away, it keeps what it has, and goes on when it is back.

    ``killed``: [from, to) in seconds of the run, in order, in which node and script are dead: a
    turn under way is lost, and begins anew afterwards.
    """

    step_s: float
    windows: tuple[tuple[float, float], ...] = ()
    period_s: float = math.inf
    killed: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and math.isfinite(self.step_s)):
            raise ConfigError(
                f"a device of {self.step_s} s a step", key="speeds", hint="--speeds 1,1.5,2,4,5"
            )
        edges = [edge for window in self.windows for edge in window]
        if edges and not (
            edges[0] >= 0
            and edges[-1] <= self.period_s < math.inf
            and all(a < b for a, b in pairwise(edges))
        ):
            raise ConfigError(
                f"windows {self.windows} of {self.period_s} s",
                key="trace",
                why="they are in order, apart, and within the period",
            )

    def next_there(self, now: float) -> float:
        """``now``, or when the device is there next."""
        if not self.windows:
            return now
        turn, at = divmod(now, self.period_s)
        for start, stop in self.windows:
            if at < stop:
                return turn * self.period_s + max(at, start)
        return (turn + 1) * self.period_s + self.windows[0][0]

    def back_at(self, now: float) -> float:
        """``now``, or when it is alive again; `math.inf`: never."""
        return next((stop for start, stop in self.killed if start <= now < stop), now)

    def done_at(self, now: float, steps: int) -> float:
        """As `finished`, whatever it dies of meanwhile; `math.inf`: never."""
        while (now := self.back_at(now)) < math.inf:
            end = self.finished(now, steps)
            death = next((start for start, _ in self.killed if now <= start < end), None)
            if death is None:
                return end
            now = death
        return math.inf

    def finished(self, now: float, steps: int) -> float:
        """When so many steps are done that begin now, or when it is there."""
        left = steps * self.step_s
        while self.windows:
            now = self.next_there(now)
            turn, at = divmod(now, self.period_s)
            room = next(stop for _, stop in self.windows if at < stop) - at
            if left <= room:
                break
            now, left = turn * self.period_s + at + room, left - room
        return now + left


@dataclass(frozen=True, slots=True)
class Fleet:
    """All devices. ``dropout``: how likely a client is not to come back from a turn; that is seen
    when it should have come.
    """

    devices: tuple[Device, ...]
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"a dropout of {self.dropout}", key="dropout", why="it is a probability, below 1"
            )

    def drops(self, rng: random.Random) -> bool:
        """Whether a client that was asked now does not come back."""
        return self.dropout > 0 and rng.random() < self.dropout


def fleet(
    clients: int,
    speeds: Sequence[float],
    dropout: float = 0.0,
    windows: Sequence[Sequence[Sequence[float]]] = (),
    period_s: float = math.inf,
) -> Fleet:
    """Devices whose speeds (seconds a step) and windows repeat from the first client on."""
    traces = [tuple((float(start), float(stop)) for start, stop in trace) for trace in windows] or [
        ()
    ]
    return Fleet(
        tuple(
            Device(speeds[i % len(speeds)], traces[i % len(traces)], period_s)
            for i in range(clients)
        ),
        dropout,
    )

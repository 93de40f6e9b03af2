"""When a round of a federated run with `work` closes, in virtual time: by the rule of nodes
(`collectives.round.turns`), of machines that are described. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ....collectives.round.turns import AWAY_S


@dataclass(frozen=True, slots=True)
class SiteTurn:
    """A site's turn in an open round. ``done_at``: when its work is done, `math.inf` for never;
    ``away``: [from, to) in which nobody hears it, in order; ``since``: from when on it is a member,
    of one that comes back in the meantime. Times in seconds.
    """

    client: int
    done_at: float
    away: tuple[tuple[float, float], ...] = ()
    since: float = 0.0

    def away_s(self, now: float) -> float | None:
        """For how long it has not been heard; None: it is."""
        return next((now - start for start, stop in self.away if start <= now < stop), None)

    def done(self, now: float) -> bool:
        """Whether its contribution can be had."""
        return self.done_at <= now and self.away_s(now) is None

    def at_work(self, now: float) -> bool:
        """Whether it is waited for."""
        away_s = self.away_s(now)
        here = away_s is None or away_s < AWAY_S
        return now >= self.since and here and not self.done(now)


@dataclass(frozen=True, slots=True)
class Close:
    """``at``: when a round closes; ``done``: the clients whose contributions are in it."""

    at: float
    done: tuple[int, ...]


def closing(
    turns: Sequence[SiteTurn],
    now: float,
    ends_at: float | None,
    lacks: Callable[[float, Collection[int]], str],
) -> Close | str:
    """When a round that opened at ``now`` closes: all who take part are done, or are not heard for
    `AWAY_S`, or the round's time is over (``ends_at``). ``lacks(at, done)``: why the contributions
    of these clients make no round then, "" where they do; if they do not, it waits on.

    Also, where it never closes, what it lacks in the end.
    """
    instants, why = {now} | ({ends_at} if ends_at is not None else set[float]()), ""
    for turn in turns:
        instants.add(turn.done_at)
        instants |= {at for start, stop in turn.away for at in (start + AWAY_S, stop)}
    for at in sorted(each for each in instants if now <= each < math.inf):
        if (ends_at is not None and at >= ends_at) or not any(turn.at_work(at) for turn in turns):
            done = tuple(turn.client for turn in turns if turn.done(at))
            if not (why := lacks(at, done)):
                return Close(at, done)
    return why

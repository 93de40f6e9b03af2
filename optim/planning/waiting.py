"""Whom a round waits for, and how long: the rule by which a slow member stands aside
(`optim/rounds/slow.py` plays it), and the grace of whoever convenes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..rounds.slow import LATE_SHARE, TWICE, costs_more

# `collectives.round.thin` and `node.session.durations`
THIN, FEWEST, SPARE = 4.0, 2, 0.005
CARRIED = 2.0  # rounds' worth of samples in a contribution that is counted now and then
# `collectives.round.Timing`, whose package loads torch: after the first contribution
GRACE_MIN_S, GRACE_MOST_S, GRACE_SHARE, STEP_MOST_S = 1.0, 5.0, 0.25, 60.0


def grace_s(round_s: float, steps: int | None = None) -> float:
    """How long after the first contribution others are waited for, by the last round's length and
    the steps in it; None: where it does not end by steps.
    """
    share = min(TWICE / steps, GRACE_SHARE) if steps else 0.0
    usual_s = min(GRACE_MOST_S, max(GRACE_MIN_S, GRACE_SHARE * round_s))
    return max(usual_s, min(STEP_MOST_S, share * round_s))


def thin_of(rates: Sequence[float]) -> list[int]:
    """Whose links, of these in bytes/s, are so thin that they are in every n-th round only, where
    nothing is trained meanwhile: their places.

    >>> thin_of([100.0, 100.0, 90.0, 5.0])
    [3]
    """
    if len(rates) <= FEWEST:
        return []
    usual = median(rates)
    thin = [at for at, rate in enumerate(rates) if THIN * rate <= usual]
    return thin if FEWEST <= len(rates) - len(thin) > len(rates) / 2 else []


@dataclass(frozen=True, slots=True)
class Machines:
    """Those that are alike: seconds of a step, samples in it, and how many there are."""

    step_s: float
    samples: int
    count: int


@dataclass(frozen=True, slots=True)
class RoundWaits:
    """Of rounds of so many steps. ``apart_s``: by how much the last one that is waited for comes
    after the first, on the mean; ``speed``: samples a second of those that are waited for, while
    they train; ``aside``: who is not.
    """

    apart_s: float
    speed: float
    aside: tuple[Machines, ...]

    def rate(self, share: float, period_s: float) -> float:
        """Samples a second of all, where ``share`` of the time is training and a round begins every
        ``period_s`` seconds. Who stands aside makes as many steps as end while the others train, or
        one within several rounds.
        """
        rate = self.speed * share
        for each in self.aside:
            fitting = math.floor(share * period_s / each.step_s + 1e-9)
            visits = fitting or 1 / math.ceil(each.step_s / period_s - 1e-9)
            rate += each.count * each.samples * visits / period_s
        return rate


class Rounds:
    """Of one group of machines, whom rounds wait for. A plan asks thousands of times."""

    def __init__(self, machines: Sequence[Machines]) -> None:
        self._machines = sorted(machines, key=lambda each: each.step_s)
        self._fastest_s, self._slowest_s = (
            self._machines[0].step_s,
            self._machines[-1].step_s,
        )
        self._speed = sum(each.count * each.samples / each.step_s for each in machines)

    def waits(self, steps: int, others_s: float, *, may_stand_aside: bool) -> RoundWaits:
        """Of rounds of so many steps of the fastest machine, which take ``others_s`` beside them.
        ``may_stand_aside``: whether anybody may.
        """
        round_s = steps * self._fastest_s + others_s
        slowest_s, speed, aside = self._slowest_s, self._speed, ()
        least_s = TWICE * round_s / steps  # of a step of who stands aside
        if may_stand_aside and slowest_s > least_s:
            samples = steps * self._fastest_s * speed
            aside = tuple(
                each
                for each in self._machines
                if each.step_s > least_s
                and costs_more(each.step_s / round_s, samples / each.samples)
            )
            if aside:
                waited = [each for each in self._machines if each not in aside]
                slowest_s = waited[-1].step_s
                speed = sum(each.count * each.samples / each.step_s for each in waited)
        apart_s = LATE_SHARE * slowest_s if slowest_s > self._fastest_s else 0.0
        return RoundWaits(min(apart_s, grace_s(round_s, steps)), speed, aside)

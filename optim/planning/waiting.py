"""Whom a round waits for, and how long: the rule by which a slow member stands aside
(`optim/rounds/slow.py` plays it), and the grace of whoever convenes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TWICE = 2.0  # as long as the fastest member's steps: members alike come together by themselves
LATE_SHARE = 0.5  # of a step by which the others come after the fastest, on the mean
# `collectives.round.Timing`, whose package loads torch: after the first contribution
GRACE_MIN_S, GRACE_MOST_S, GRACE_SHARE = 1.0, 5.0, 0.25


def costs_more(step: float, others: float) -> bool:
    """Whether waiting for a member costs more samples than it brings. ``step``: how long its step
    is, in rounds; ``others``: the samples of all in a round over those of one of its steps.

    It brings 1 / step steps a round, and all others wait for half of one on the mean.

    >>> costs_more(1 / 10, others=80), costs_more(1 / 2, others=80)
    (False, True)
    """
    return LATE_SHARE * step * others > 1 / step


def grace_s(round_s: float) -> float:
    """How long after the first contribution others are waited for, by the last round's length."""
    return min(GRACE_MOST_S, max(GRACE_MIN_S, GRACE_SHARE * round_s))


@dataclass(frozen=True, slots=True)
class Machines:
    """Those that are alike: seconds of a step, samples in it, and how many there are."""

    step_s: float
    samples: int
    count: int


@dataclass(frozen=True, slots=True)
class Waits:
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


def waits(machines: Sequence[Machines], steps: int, others_s: float) -> Waits:
    """Whom rounds of so many steps of the fastest machine wait for. ``others_s``: what a round takes
    beside them.
    """
    fastest_s = min(each.step_s for each in machines)
    round_s = steps * fastest_s + others_s
    all_samples = steps * fastest_s * sum(e.count * e.samples / e.step_s for e in machines)
    aside, slowest_s, speed = list[Machines](), 0.0, 0.0
    for each in machines:
        if each.step_s > TWICE * round_s / steps and costs_more(
            each.step_s / round_s, all_samples / each.samples
        ):
            aside.append(each)
        else:
            slowest_s = max(slowest_s, each.step_s)
            speed += each.count * each.samples / each.step_s
    apart_s = LATE_SHARE * slowest_s if slowest_s > fastest_s else 0.0
    return Waits(min(apart_s, grace_s(round_s)), speed, tuple(aside))

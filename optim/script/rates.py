"""What a learning rate does, step by step, and where it is when the run ends: of a schedule whose
class says nothing, such as those of timm, and of rates that a script sets by hand.

A rate that stays is no schedule, and one that goes up and down again and again means to. One that
falls has an end which can be known where it falls in a straight line or on a half cosine. These two
are told from other curves by the differences of a few of their values, which a schedule computes
without noise: those of a line are equal, and the second ones of a cosine are in proportion to its
distance from the middle. An exponential, a root or a few steps are neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

KEPT = 64  # values; then every other one is dropped
LEAST, WINDOW = 6, 12  # values that a curve is known by; the newest, where older ones fit none
APART = 0.1  # by which the steps between them may differ: the last batches of an epoch
STRAIGHT, COSINE = 1e-6, 1e-3  # of the first and of the second difference: no more than rounding
ROUNDING, SURE = 1e-15, 0.02  # of a value; of what the differences say of the end
GROUPS = 8  # of an optimizer: all of them follow one schedule


class RateEnd(NamedTuple):
    """``curve``: "line" or "cosine". ``way``: share of it that is done when the run ends; of a line
    to 0. ``left``: share of its highest value that the rate has then.
    """

    curve: str
    way: float
    left: float


class RateHistory:
    """Of the optimizers of one attachment: of the first group whose rate has ever changed."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._groups = [
            (each, at)
            for each in optimizers
            for at in range(len(getattr(each, "param_groups", ())[:GROUPS]))
        ]
        self._before = list[float]()  # what the newest step was made with
        self._steps = self._changes = 0
        self._every = 1
        self._rates: list[tuple[int, float]] = []  # at which step a rate began, from the highest on
        self._over = False  # it is no schedule with one end

    def stepped(self) -> None:
        """The optimizers have made a step with the rates that they have now."""
        self._steps += 1
        if self._over:
            return
        if not self._before:
            self._before = [_rate(*each) for each in self._groups]
        if not self._rates:
            for group, before in zip(self._groups, self._before, strict=True):
                if _rate(*group) != before:
                    self._groups, self._before = [group], [before]
                    self._rates = [(0, before)]
                    break
            else:
                return
        rate, last = _rate(*self._groups[0]), self._before[0]
        if rate == last:
            return
        self._before = [rate]
        if rate > last:
            self._over = len(self._rates) > LEAST  # up again
            self._rates, self._changes, self._every = [(self._steps, rate)], 0, 1
            return
        self._changes += 1
        if self._changes % self._every == 0:
            self._rates.append((self._steps, rate))
            if len(self._rates) > KEPT:
                self._rates, self._every = self._rates[::2], 2 * self._every
                self._changes = 0

    def end(self, left: int) -> RateEnd | None:
        """Where it is after ``left`` more steps; None where it has no end that can be known."""
        fallen = self._rates[1:]  # how long the first one stood before is its own
        if self._over or not all(math.isfinite(each) for _, each in fallen):
            return None
        return self._end(fallen, left) or self._end(fallen[-WINDOW:], left)

    def _end(self, newest: Sequence[tuple[int, float]], left: int) -> RateEnd | None:
        if len(newest) < LEAST:
            return None
        gaps = [b - a for (a, _), (b, _) in itertools.pairwise(newest)]
        if max(gaps) - min(gaps) > max(1, APART * max(gaps)):
            return None
        values, highest = [rate for _, rate in newest], self._rates[0][1]
        each = (newest[-1][0] - newest[0][0]) / (len(newest) - 1)
        further = (left + self._steps - newest[-1][0]) / each  # of these gaps
        return _line(values, highest, further) or _cosine(values, highest, further)


def _rate(optimizer: Any, at: int) -> float:
    """Looked up anew: load_state_dict makes other groups."""
    groups = optimizer.param_groups
    rate = groups[at].get("lr") if at < len(groups) else None
    return float(rate) if isinstance(rate, int | float) else math.inf  # no device is waited for


def _line(values: Sequence[float], highest: float, further: float) -> RateEnd | None:
    falls = [a - b for a, b in itertools.pairwise(values)]
    mean = sum(falls) / len(falls)
    if max(falls) - min(falls) > STRAIGHT * mean:
        return None
    left = max(0.0, values[-1] - further * mean) / highest
    return RateEnd("line", 1 - left, left)


def _cosine(values: Sequence[float], highest: float, further: float) -> RateEnd | None:
    """By y'' = -k (y - a), of values at equal distances."""
    inner = values[1:-1]
    second = [a - 2 * b + c for a, b, c in zip(values, inner, values[2:], strict=False)]
    mean_y, mean_s = sum(inner) / len(inner), sum(second) / len(second)
    spread = sum((y - mean_y) ** 2 for y in inner)
    if not spread:
        return None
    k = -sum((y - mean_y) * (s - mean_s) for y, s in zip(inner, second, strict=True)) / spread
    if not 0 < k < 1 or ROUNDING * max(values) > SURE * k * math.sqrt(spread):
        return None
    middle = mean_y + mean_s / k
    most = max(abs(s) for s in second)
    if any(abs(s + k * (y - middle)) > COSINE * most for y, s in zip(inner, second, strict=True)):
        return None
    angle = math.acos(1 - k / 2)  # of a gap
    along = values[-1] - middle
    across = (values[-2] - middle - along * math.cos(angle)) / math.sin(angle)
    now, wide = math.atan2(across, along), math.hypot(along, across)
    if not 0 < now < math.pi or not 0.9 * highest < middle + wide < 1.1 * highest:
        return None
    way = now + angle * further
    if way >= math.pi:
        return RateEnd("cosine", way / math.pi, max(0.0, middle - wide) / highest)
    return RateEnd("cosine", way / math.pi, (middle + wide * math.cos(way)) / highest)

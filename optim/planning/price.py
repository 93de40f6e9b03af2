"""What settings cost in loss: times that of synchronous training on as many samples.

Three factors, multiplied: rounds of many steps, a codec, results that come late. Each is
interpolated in what was measured on a small model (`scripts/bench/bench_methods.py`; the tables of
docs/benchmarks-training.md) and, for long rounds, in what is published of large ones (DiLoCo's
scaling laws, arXiv 2503.09799: 1.2 % for 8 peers at 30 steps and 2.4 billion parameters; DiLoCo,
2311.08105: about 3 % from 50 steps to 1,000). Between sizes it goes by the logarithm. Another
model, other data and more rounds change the figures; which of two settings costs more they change
seldom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ...collectives.codec_names import FACTS
from .estimate import Choice

Points = Sequence[tuple[float, float]]

SMALL, LARGE = 43_000, 2_400_000_000  # parameters of the models that were measured
# rounds of 5 steps came no closer than those of 10 (measured on the small model)
STEPS_SMALL: Points = ((1, 1.0179), (10, 1.0179), (20, 1.0234), (50, 1.045))
STEPS_LARGE: Points = ((1, 1.007), (10, 1.007), (30, 1.012), (50, 1.017), (1000, 1.047))
# by delay over steps of a round
LATE: dict[str, Points] = {
    "late": ((0.0, 1.0), (0.3, 1.0253 / 1.0179), (1.0, 1.057 / 1.0179)),
    "eager": ((0.0, 1.0), (0.3, 1.0407 / 1.0179), (1.0, 1.0575 / 1.0179)),
}
# The plain mean from random weights, over what "auto" does (short rounds that are twenty of full
# length, and momentum later), by the steps of a round. Of the sweep's record
# (docs/benchmarks-outer.jsonl.gz): ``1/0`` over ``1/0 grow=20``, 1 and 10 million parameters, 500
# and 1,000 steps, 1.039, 1.083, 1.152 and 1.190 on the mean; times that over ``0.9/0.6 grow=20
# hold=40 warm=40``, 42 thousand, 1.041 to 1.048. The product has 1.133 with 20
# (docs/benchmarks-cold.md). After 8,000 steps it is 0.15 of that: the plain mean was 1.02 times
# constant momentum with 20, the best that was tried so long.
PLAIN: Points = ((10, 1.08), (20, 1.13), (50, 1.21), (100, 1.25))
PLAIN_STEPS: Points = ((math.log(1000), 1.0), (math.log(8000), 0.15))
# How loss falls with samples in such runs, by their steps: one of four members alone has 1.394
# times the loss of one machine with all samples after 1,000 and 1.186 times after 8,000 (the same
# record). At a large model's exponent the plain mean would seem worse than a member alone, which it
# never was.
PLAIN_EXPONENT: Points = ((math.log(1000), 0.24), (math.log(8000), 0.123))
DATA_EXPONENT = 0.095  # loss falls as samples ** -0.095 (Kaplan et al. 2020, arXiv 2001.08361)


@dataclass(frozen=True, slots=True)
class Price:
    """The factors of the loss; ``loss`` is their product. ``exponent``: by which loss falls with
    samples, where ``plain`` was measured.
    """

    steps: float
    codec: float
    late: float
    plain: float = 1.0
    exponent: float = DATA_EXPONENT

    @property
    def loss(self) -> float:
        """Times the loss of synchronous training on as many samples."""
        return self.steps * self.codec * self.late * self.plain

    @property
    def samples(self) -> float:
        """Times as many samples until the loss is that of synchronous training."""
        large = (self.steps * self.codec * self.late) ** (1 / DATA_EXPONENT)
        return large * self.plain ** (1 / self.exponent)


def price(parameters: int, choice: Choice, peers: int = 8) -> Price:
    """What settings cost a model of this size. One peer alone pays nothing."""
    if peers == 1:
        return Price(1.0, 1.0, 1.0)
    late = 1.0
    if choice.overlap != "none":
        delay = choice.sync_every if choice.delay is None else choice.delay
        late = _between(LATE[choice.overlap], min(1.0, delay / choice.sync_every))
    return Price(_steps(parameters, choice.sync_every), FACTS[choice.codec].price, late)


def with_plain_mean(found: Price, sync_every: int, steps: int | None) -> Price:
    """The price where the plain mean is taken, of a run from random weights that could begin with
    short rounds and take momentum later. ``steps``: of the run; None: it has no end.

    >>> one = Price(1.0, 1.0, 1.0)
    >>> [round(with_plain_mean(one, 20, steps).loss, 3) for steps in (1000, None)]
    [1.13, 1.02]
    >>> [round(with_plain_mean(one, 20, steps).samples, 2) for steps in (1000, None)]
    [1.66, 1.17]
    """
    at = min(max(sync_every, PLAIN[0][0]), PLAIN[-1][0])
    short, long = PLAIN_STEPS[0][0], PLAIN_STEPS[-1][0]
    length = long if steps is None else min(max(math.log(steps), short), long)
    plain = 1 + _between(PLAIN_STEPS, length) * (_between(PLAIN, at) - 1)
    return replace(found, plain=plain, exponent=_between(PLAIN_EXPONENT, length))


@lru_cache(maxsize=1024)  # a plan asks for few lengths of rounds, thousands of times
def _steps(parameters: int, steps: int) -> float:
    small, large = (
        _between([(math.log(x), y) for x, y in points], math.log(steps))
        for points in (STEPS_SMALL, STEPS_LARGE)
    )
    place = math.log(parameters / SMALL) / math.log(LARGE / SMALL)
    return small + min(1.0, max(0.0, place)) * (large - small)


def _between(points: Points, x: float) -> float:
    """On the straight line between the two points around x; beyond the last one on its line."""
    number = next((i for i, (right, _) in enumerate(points) if x <= right), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, number - 1)], points[max(1, number)]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

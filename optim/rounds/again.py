"""The plan again at every boundary: how long the next round is, from what the log says of the last
one.

Every contribution carries how many inner steps its member's rounds last took to be decided, medians
of eight; the log records it, so the median over a round's contributors, the **lag** of the anchor
after it, is the same for all members. The plan is a pure function of it and of the manifest:
whoever starts from an anchor, whenever and wherever, has the same plan until the next one. A word
may be false: half of the contributors have to lie to move the median far, and the plan stays
between bounds that the manifest sets.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ...collectives.round_settings import RoundSettings

REMEMBERED = 8  # rounds
# shorter rounds did not come closer to synchronous training (5 against 10, measured on 42k
# parameters)
LEAST_STEPS = 10
# results are due this much later than estimated: links are never exactly as fast as they were
MARGIN = 1.25
LARGE = 100_000_000  # parameters
MAX_STEPS, MAX_STEPS_SMALL = 500, 100
"""The longest round, in inner steps, of models above and below LARGE. The published runs lose about
3 % from H = 50 to 1000 (arXiv 2311.08105), and small models more: 2 % at 10, 3 % at 20, 4 to 5 % at
50 (measured on 42k parameters)."""


def longest_round(parameters: int) -> int:
    """The longest round of a model of this size, in inner steps, where nobody says another."""
    return MAX_STEPS if parameters >= LARGE else MAX_STEPS_SMALL


@dataclass(frozen=True, slots=True)
class RoundSteps:
    """Inner steps of a round, and from a contribution to its result where training goes on
    meanwhile (None: to the end of the next round).
    """

    steps: int
    delay: int | None


def again(settings: RoundSettings, parameters: int, lag: float) -> RoundSteps:
    """The plan for training that starts from an anchor with this lag, in a run whose rounds end by
    steps.

    Waiting, the shortest round of which the wanted share is training, from `LEAST_STEPS` on. With
    overlap, results are due when they are there, with a quarter to spare, and rounds are as long as
    the manifest says, or as long as that takes.
    """
    first = settings.sync_every
    assert first is not None
    if settings.share is None or not lag > 0:
        return RoundSteps(first, settings.delay)
    longest = settings.max_steps or max(first, longest_round(parameters))
    if settings.overlap == "none":
        needed = math.ceil(min(settings.share / (1 - settings.share) * lag, float(longest)) - 1e-9)
        return RoundSteps(max(min(LEAST_STEPS, longest), needed), None)
    due = max(1, math.ceil(min(MARGIN * lag, float(longest))))
    if settings.delay is None:
        return RoundSteps(min(max(first, due), longest), None)
    steps = min(max(first, due + 1), longest)
    return RoundSteps(steps, min(due, steps - 1))


@dataclass(slots=True)
class Lag:
    """What one member measures of its own rounds: seconds of an inner step, and from a contribution
    to its result.
    """

    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _round_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def trained(self, steps: int, seconds: float) -> None:
        """So many inner steps took so long, without what was waited."""
        if steps > 0 and seconds > 0:
            self._step_s.append(seconds / steps)

    def decided(self, seconds: float) -> None:
        """A round took so long."""
        self._round_s.append(seconds)

    @property
    def steps(self) -> float | None:
        """How many inner steps a round takes; None before both were measured."""
        return (
            median(self._round_s) / median(self._step_s) if self._round_s and self._step_s else None
        )

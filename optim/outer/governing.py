"""What some runs do about the mean of a round before its outer step: it is stretched, a governor
watches it, one that is too long is clipped.
"""

from __future__ import annotations

import logging

from torch import Tensor

from ...collectives.outer_rules import PLAIN_MEAN, OuterSettings
from ...collectives.telemetry import emit
from . import governor, worth
from .mean_watch import MeanVerdict, MeanWatch
from .readings import median_loss, stretch
from .reported import Reported
from .rules import as_float32

logger = logging.getLogger("atoll")

PLAIN = (PLAIN_MEAN.kind, PLAIN_MEAN.lr)


class Governing(MeanWatch):
    """Of one outer step."""

    measures = True

    def __init__(self, settings: OuterSettings) -> None:
        self._settings = settings
        self._evaluated = settings.governor and settings.watch > 0
        self.numbers = governor.NUMBERS if settings.governor else 0
        self.numbers += governor.WATCHING if self._evaluated else 0

    def plain_since(self, numbers: Tensor) -> int:
        return int(numbers[governor.NUMBERS]) if self._evaluated else 0

    def judge(
        self, numbers: Tensor, norm: float, reported: Reported, entry: int, steps: float
    ) -> MeanVerdict:
        settings, scales = self._settings, list[float]()
        plain = restart = False
        if self._evaluated:
            plain, restart = self._goes_plain(numbers[governor.NUMBERS :], reported, entry)
        if not plain and settings.stretch and (factor := as_float32(stretch(reported, norm))) != 1:
            norm *= factor
            scales.append(factor)
        rate = 1.0
        # short rounds are of unlike lengths
        if settings.governor and (not settings.short or steps >= settings.short):
            rate, event = governor.judge(numbers[: governor.NUMBERS], norm, median_loss(reported))
            if event is not None:
                self._tell(event)
                restart = restart or not settings.advises
        longest = settings.clip_norm
        if longest is not None and norm > longest:
            scales.append(as_float32(longest / norm))
        return MeanVerdict(plain, tuple(scales), 1.0 if settings.advises else rate, restart)

    def _tell(self, event: governor.Governed) -> None:
        if self._settings.advises:
            deed = "some members may lie, so nothing is changed; lr = 1 with momentum = 0 is safe"
        else:
            calm = governor.CALM_ROUNDS
            deed = f"the outer momentum restarts, its lr is halved for {calm} rounds"
        jump = event.what, event.value, event.median
        logger.warning("the %s jumped to %.4g, usual is %.4g: %s", *jump, deed)
        emit(event)

    def _goes_plain(self, numbers: Tensor, reported: Reported, entry: int) -> tuple[bool, bool]:
        """Whether the step is the plain mean, after a look at what members evaluated; and whether
        it is from this one on.
        """
        settings = self._settings
        plain = (settings.kind, settings.lr, settings.stretch) == (*PLAIN, False)
        found = worth.worth_of([reading for _, reading in reported])
        cured = governor.watch(numbers, found, settings.watch, entry, plain=plain)
        if cured is not None:
            logger.warning(
                "%s; the outer step takes the plain mean from entry %d on",
                cured.finding,
                cured.entry,
            )
            emit(cured)
        return bool(numbers[0]), cured is not None

"""The governor: when the update's norm jumps, momentum restarts and the rate is halved for some rounds.

A function of the log alone, so that all members act alike: it sees the norm of each committed mean and keeps what it remembers in the
state vector beside the momentum, which is transferred, checked and stored with it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives.telemetry import Event

WINDOW = 15  # norms remembered
LEAST = 5  # before so many were seen nothing is a jump
DEVIATIONS = 3 * 1.4826  # three standard deviations, by the median absolute deviation of normal values
SHARE = 0.5  # of the median that a jump exceeds it by at least: norms of a quiet run hardly differ
CALM_ROUNDS = 8
NUMBERS = WINDOW + 2  # norms, newest first (0: none yet), rounds left at half rate, how often it acted


@dataclass(frozen=True, slots=True)
class Governed(Event):
    """The outer step restarted its momentum and halves its rate: ``norm`` of the mean is far above the ``median`` of the last rounds."""

    norm: float
    median: float


def judge(numbers: Tensor, norm: float) -> tuple[float, Governed | None]:
    """What to do in a round whose mean has this norm: (factor of the rate, whether it jumped). ``numbers``: float32 (NUMBERS,), updated."""
    values = numbers.tolist()
    norms, calm, acted = [value for value in values[:WINDOW] if value > 0], values[WINDOW], values[WINDOW + 1]
    event = None
    if len(norms) >= LEAST:
        median = statistics.median(norms)
        deviation = statistics.median(abs(value - median) for value in norms)
        if norm > median + max(DEVIATIONS * deviation, SHARE * median):
            event, calm, acted = Governed(norm, median), float(CALM_ROUNDS), acted + 1
            norm = median  # so that what is usual does not follow a jump
    factor = 0.5 if calm else 1.0
    kept = [norm, *values[: WINDOW - 1], max(0.0, calm - 1), acted]
    numbers.copy_(torch.tensor(kept, dtype=torch.float32, device="cpu"))
    return factor, event

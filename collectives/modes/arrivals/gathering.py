"""When a round that does not wait for everybody has what it waits for. Pure functions.

Such a round is made of the contributions that have come once there are enough, or once its time is
over. Members do not hurry for it: each contributes when its own turn is done, perhaps on an older
anchor, and reports what that is worth (`optim.federated.arrivals`). Every member judges by what it
knows; the convener's judgement makes the plan, the others' tells them whether it is late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...arrivals import ArrivalSettings, GraceWindow

LONGEST_WINDOW_S = 60.0  # whatever a member says that a step takes it


def is_ripe(
    arrivals: ArrivalSettings, now: float, *, born: float, first_at: float, there: int, awaited: int
) -> bool:
    """Whether a round by count (FedBuff) or by period (FedFix) is complete.

    ``born``: when the round opened, in seconds like ``now``; ``first_at``: when its first
    contribution came; ``there``: how many have come; ``awaited``: how many living members have not
    yet announced what they contribute.
    """
    if arrivals.period_s is not None:
        periods = max(1, math.ceil((first_at - born) / arrivals.period_s))
        return now >= born + periods * arrivals.period_s
    return there >= (arrivals.count or 1) or not awaited


def window_s(window: GraceWindow, step_s: Iterable[float | None]) -> float:
    """How long a round that has its count is held open for others. ``step_s``: what those that are
    there say an inner step takes them; without a word of anybody, not at all."""
    if window.seconds is not None:
        return window.seconds
    said = [seconds for seconds in step_s if seconds is not None]
    return min([*said, LONGEST_WINDOW_S]) if said and min(said) > 0 else 0.0

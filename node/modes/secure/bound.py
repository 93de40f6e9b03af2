"""The bound on the norm of what sites contribute, where it follows a quantile of their norms
(Andrew et al. 2021, arXiv 1905.03871).

Each site adds to its masked vector whether it was within the bound, with noise of its own. From the
sum all members calculate the next bound, and state it with the mean in the log
(`group.Reading.norm`): so who comes later, or starts again, has it too. Half of a round's
contributors have to lie to move it. A wrong bound costs accuracy and no privacy, as the noise is in
proportion to it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from ....collectives.swarm import PrivacySettings
from ....security.privacy import AdaptiveBound

if TYPE_CHECKING:
    from ...session.session import Session

FARTHEST = 1e6  # times the manifest's bound, up and down
# of the count of those within the bound, in units of [privacy] noise: it costs a sixteenth, so
# vectors get 3 % more noise
COUNT_NOISE = 2.0


def rule(terms: PrivacySettings, bound: float) -> AdaptiveBound | None:
    """The bound as it moves; None where it is fixed. Raises ConfigError where the count leaves
    nothing for the vectors.
    """
    if terms.quantile is None:
        return None
    count_noise = terms.count_noise if terms.count_noise is not None else COUNT_NOISE * terms.noise
    moving = AdaptiveBound(bound, terms.quantile, terms.clip_rate, count_noise)
    moving.vector_noise(terms.noise)
    return moving


def bound_at(session: Session, terms: PrivacySettings, round_: int) -> float:
    """What contributions to log entry ``round_`` are bounded by: the same at all members that have
    the entries before it.
    """
    if terms.quantile is None:
        return terms.clip
    norms = [reading.norm for reading in session.readings(round_ - 1) if reading.norm is not None]
    return held(terms, statistics.median(norms or [terms.clip]))


def held(terms: PrivacySettings, bound: float) -> float:
    """A bound no farther from the manifest's than it may go."""
    return min(max(bound, terms.clip / FARTHEST), terms.clip * FARTHEST)

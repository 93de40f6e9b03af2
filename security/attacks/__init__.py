"""What hostile members send: pure functions for tests, benchmarks and simulations. Nothing here is
used by a node.

An attacker is omniscient: it sees what all honest members of a round have. All hostile members send
the same, unless something else is said.

vectors   attacks on one round, from the honest contributions: sign flip, IPM, ALIE, mimic, random
          direction, Gaussian, huge, no numbers; drift and reverse, which stay within the honest
          spread; and the factors that do most harm to a rule
habits    attacks that last: delayed contributions; labels that are flipped
"""

from __future__ import annotations

from .habits import Delayed, flipped_labels
from .vectors import (
    ATTACKS,
    alie,
    alie_factor,
    drift,
    gaussian,
    honest_radius,
    huge,
    ipm,
    mimic,
    no_number,
    optimised_alie,
    optimised_ipm,
    random_direction,
    reverse,
    sign_flip,
)

__all__ = [
    "ATTACKS",
    "Delayed",
    "alie",
    "alie_factor",
    "drift",
    "flipped_labels",
    "gaussian",
    "honest_radius",
    "huge",
    "ipm",
    "mimic",
    "no_number",
    "optimised_alie",
    "optimised_ipm",
    "random_direction",
    "reverse",
    "sign_flip",
]

"""How many rounds the privacy that a run allows is enough for.

Every vector handed over counts as one step of the Gaussian mechanism without subsampling: who takes
part in a round is known to all members, so chance in choosing them hides nothing from these.
"""

from __future__ import annotations

from ...collectives.swarm import PrivacySettings
from .accountant import Accountant

RATE = 1.0
"""Of a Gaussian mechanism without subsampling."""


def most_rounds(terms: PrivacySettings) -> int:
    """How many rounds a member can take part in."""
    return Accountant(terms.delta, terms.stop_at_epsilon).room(RATE, terms.noise)


def epsilon_after(terms: PrivacySettings, rounds: int) -> float:
    """What a member has spent that took part in so many."""
    return Accountant(terms.delta).after(RATE, terms.noise, rounds)

"""What a site saw of a federated run in virtual time whose rounds do not wait for everybody."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.collectives.swarm import Outcome


@dataclass
class Seen:
    """Outcomes, and the newest anchor in the end."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    anchor: Tensor = field(default_factory=lambda: torch.zeros(0))
    round: int = 0
    dropped: int = 0
    steps: int = 0
    waited_s: float = 0.0
    unsent: int = 0
    opened: int = 0
    at: list[int] = field(default_factory=list[int])  # steps made before each outcome

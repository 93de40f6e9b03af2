"""What attackers and the checker see of a simulated swarm: they import this, never the swarm, which
creates both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..attempt import Attempt
from ..messages import Fault
from ..settings import AttemptSettings


class Attack(NamedTuple):
    """``attempt``: what it does otherwise; ``vector``: name of an attack on gradients. ``faults``:
    what attackers are removed for; ``at_once``: in the step in which they struck. ``intervals``: it
    is one on local steps."""

    attempt: type[Attempt] = Attempt
    vector: str = ""
    faults: tuple[Fault, ...] = (Fault.GRADIENT,)
    at_once: bool = False
    intervals: int = 0


@dataclass(frozen=True)
class BtardOptions:
    """``messages``: through the network, with real signatures; else fast. ``rate``: in which part
    of the steps an attacker strikes, from ``since`` on. ``noise``: relative, of a gradient that is
    computed again. ``until_clean``: end when no attacker is left."""

    n: int = 16
    b: int = 7
    attack: str = "sign_flip"
    steps: int = 50
    messages: bool = False
    rate: float = 1.0
    since: int = 1
    noise: float = 0.0
    until_clean: bool = True
    latency_s: float = 0.02
    jitter_s: float = 0.1
    settings: AttemptSettings = field(
        default_factory=lambda: AttemptSettings(radius=8.0, timeout_s=2.0, compute_s=4.0)
    )

"""What attackers and the checker see of a simulated swarm: they import this, never the swarm, which
creates both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from ....collectives.identifiers import PeerId
from ....collectives.simulation import World
from ..attempt import Attempt
from ..messages import Fault, Signer, Vector, Verify
from ..peer import BtardPeer
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


class MemberView(Protocol):
    """One peer of the swarm."""

    @property
    def swarm(self) -> BtardSwarmView:
        """All of them."""
        ...

    @property
    def name(self) -> PeerId:
        """Its id."""
        ...

    @property
    def attack(self) -> Attack | None:
        """None: it is honest."""
        ...

    @property
    def signer(self) -> Signer:
        """Its key."""
        ...

    @property
    def rng(self) -> Random:
        """Of its attacks."""
        ...

    @property
    def machine(self) -> BtardPeer:
        """Its part in the run."""
        ...

    def acts(self, step: int) -> bool:
        """Whether an attacker strikes in a step."""
        ...


class BtardSwarmView(Protocol):
    """The swarm."""

    @property
    def options(self) -> BtardOptions:
        """What was asked for."""
        ...

    @property
    def attack(self) -> Attack:
        """What its hostile peers do."""
        ...

    @property
    def world(self) -> World:
        """Virtual time."""
        ...

    @property
    def names(self) -> tuple[PeerId, ...]:
        """All peers."""
        ...

    @property
    def hostile(self) -> Set[PeerId]:
        """The attackers."""
        ...

    @property
    def members(self) -> Mapping[PeerId, MemberView]:
        """All, by id."""
        ...

    @property
    def honest(self) -> Sequence[MemberView]:
        """Those who are not hostile."""
        ...

    @property
    def strikes(self) -> Mapping[tuple[bytes, bool], Set[PeerId]]:
        """Who has struck, by attempt, and whether it shows in the next step only."""
        ...

    @property
    def verify(self) -> Verify:
        """Checks signatures."""
        ...

    def struck(self, attempt: bytes, peer: PeerId, later: bool = False) -> None:
        """An attacker did something."""
        ...

    def gradient_of(self, step: int, peer: PeerId) -> Vector:
        """The right gradient of anybody."""
        ...

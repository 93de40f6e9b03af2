"""What attach tells telemetry. Fields only; sinks make words of them."""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.outcomes import Outcome
from ...collectives.reach import Reach
from ...collectives.telemetry import Event


@dataclass(frozen=True, slots=True)
class RoundSeen(Event):
    """A contribution of ``samples`` samples has an outcome; the script waited ``waited_s``."""

    run_id: str
    samples: int
    waited_s: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TrainingAlone(Event):
    """No other member is there; training goes on. ``node_lost``: the node itself is gone."""

    run_id: str
    node_lost: bool


@dataclass(frozen=True, slots=True)
class QuorumSeen(Event):
    """Too few members are reached to decide the open round, or (``reach.quorum``) enough."""

    run_id: str
    reach: Reach


@dataclass(frozen=True, slots=True)
class ProgressDropped(Event):
    """Work of ``samples`` samples is not contributed (or of unknown fate); ``reason``: why."""

    run_id: str
    samples: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reentered(Event):
    """The node is back; training goes on from anchor ``round``."""

    run_id: str
    round: int

"""Which replica, which flat vector and which turns of factors a run's settings ask for, for whoever
attaches a script.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from torch import nn

from ...collectives.script_swarm import Swarm
from ...collectives.swarm import RunSettings
from ..model.flat import FlatVector, no_sums
from ..model.registry import MODES
from .fragments import MakeReplica, make_strands
from .replica import Replica
from .run_extras import RunExtras
from .schedule import StepCounter
from .strand import Strand


class Turns(Protocol):
    """Which parameters train, by the rounds of the log."""

    def turn(self, round: int) -> None:
        """Training starts from the anchor of so many committed rounds."""
        ...

    def release(self) -> None:
        """All train that did at first."""
        ...


class AllTrain:
    """Implements `Turns`: no parameter ever rests."""

    def turn(self, round: int) -> None:
        """Nothing changes."""

    def release(self) -> None:
        """Nothing was at rest."""


def turns_of(model: nn.Module, settings: RunSettings, *, wrapped: bool = False) -> Turns:
    """Which factors of the model's adapters train; ``wrapped``: by wrappers of several ranks.
    Raises ConfigError.
    """
    if settings.adapters.mode == "plain":
        return AllTrain()
    make = MODES.load("adapters", "AdapterTurns", key="[adapters]")
    return make(model, settings.adapters.mode, wrapped=wrapped)


def replicas_of(settings: RunSettings, examples: int = 0) -> MakeReplica:
    """What makes a replica of a run. ``examples``: how many this site has, where the run goes by
    that. Raises ConfigError where the run asks for a mode that is not registered.
    """
    if settings.site is not None or settings.sample is not None:
        key = "[federated]" if settings.site is not None else "[sample]"
        return partial(_site, MODES.load("federated", "SiteReplica", key=key), examples)
    if settings.arrivals is not None:  # such runs are in one piece: it gets a whole swarm
        if settings.arrivals.groups is None:
            return MODES.load("arrivals", "ArrivingReplica", key="[arrivals]")
        return MODES.load("arrivals.groups", "GroupedReplica", key="[arrivals]")
    if settings.method == "gradient_averaging":
        return MODES.load("gradients", "GradientReplica", key="train.method")
    return Replica


def _site(
    make: Callable[..., Replica],
    examples: int,
    flat: FlatVector,
    swarm: Any,
    clock: Any,
    dropped: Any,
    settings: RunSettings,
) -> Replica:
    return make(flat, cast("Swarm", swarm), clock, dropped, settings, examples)


def strands_of(
    swarm: Swarm,
    flat: FlatVector,
    counter: StepCounter,
    clock: Callable[[], float],
    dropped: Callable[[int, str], None],
    examples: int = 0,
) -> list[Strand]:
    """The strands of a run at this script: as `make_strands`, of the replicas that it asks for."""
    settings = swarm.settings
    own = examples if settings.site is not None or settings.sample is not None else 0
    strands = make_strands(swarm, flat, counter, clock, dropped, replicas_of(settings, own), own)
    for replica in (strand.replica for strand in strands):
        replica.extras = RunExtras(replica.flat, settings, looks_back=replica.looks_back)
    return strands


def flat_vector(model: nn.Module, settings: RunSettings, **how: Any) -> FlatVector:
    """The model as the run's flat vector, with the sums that its method has beside it. ``how``: as
    for `FlatVector`.
    """
    beside = no_sums
    if settings.site is not None:
        beside = MODES.load("federated.sums", "sums_beside", key="[federated]")
    return FlatVector(model, settings, beside=beside, **how)

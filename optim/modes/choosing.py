"""Which replica and which flat vector a run's settings ask for, for whoever attaches a script.
Nothing else on the script's side names a mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import nn

from ...collectives.swarm import RunSettings, Swarm
from ..federated.site import sums_beside
from ..model.flat import FlatVector
from ..rounds.replica import Replica
from ..rounds.schedule import StepCounter
from ..rounds.strand import MakeReplica, Strand, make_strands
from .arriving import ArrivingReplica
from .gradients import GradientReplica
from .grouped import GroupedReplica
from .site import SiteReplica


def replicas_of(settings: RunSettings, examples: int = 0) -> MakeReplica:
    """What makes a replica of a run. ``examples``: how many this site has, where the run goes by
    that.
    """
    if settings.site is not None or settings.sample is not None:
        return partial(_site, examples)
    if settings.arrivals is not None:
        arriving = ArrivingReplica if settings.arrivals.groups is None else GroupedReplica
        return cast("MakeReplica", arriving)  # such runs are in one piece: it gets a whole swarm
    return GradientReplica if settings.method == "gradient_averaging" else Replica


def _site(
    examples: int,
    flat: FlatVector,
    swarm: Any,
    clock: Any,
    dropped: Any,
    settings: RunSettings,
) -> Replica:
    return SiteReplica(flat, cast("Swarm", swarm), clock, dropped, settings, examples)


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
    make = replicas_of(settings, own)
    return make_strands(swarm, flat, counter, clock, dropped, make, own)


def flat_vector(model: nn.Module, settings: RunSettings, **how: Any) -> FlatVector:
    """The model as the run's flat vector, with the sums that its method has beside it. ``how``: as
    for `FlatVector`.
    """
    return FlatVector(model, settings, beside=sums_beside, **how)

"""Which modes a run's settings ask for, for whoever makes its sessions: the node and the simulator.
Nothing else in a run names a mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ...collectives.modes.arrivals.policy import PartialArrivals
from ...collectives.modes.byzantine.model import Byzantine
from ...collectives.modes.relays import relayed
from ...collectives.modes.sealing import Sealing
from ...collectives.round.arrival_policy import ArrivalPolicyMaker, wait_for_all
from ...collectives.round.faults import FaultModel, FaultModelMaker
from ...collectives.swarm import RunSettings
from ...security.identity import Identity
from ...security.rules.reducers import find_reducer
from ..session.modes import Modes
from ..session.pre_round import PreRound
from .btard.rounds import BtardRounds
from .distances import Distances
from .operations.operations import Operations, operations_of
from .recertifying import Recertifying
from .secure.rounds import SecureRounds

if TYPE_CHECKING:
    from ..session.session import Session


def modes_of(
    settings: RunSettings, identity: Identity | None, secrets: Random | None = None
) -> Modes:
    """The modes of a run at the member with this ``identity``; without one it takes no part in
    masked rounds or BTARD. ``secrets``: what makes their secrets in a simulation.
    """
    return Modes(
        faults=_faults_of(settings),
        arrivals=_arrivals_of(settings),
        seal=Sealing,
        recertifying=Recertifying,
        dissemination=relayed,
        pre_round=_pre_round_of(settings, identity, secrets),
        operations=lambda session: Operations(session, session.serving),
        measures=Distances,
        reducers=find_reducer,
    )


def _faults_of(settings: RunSettings) -> FaultModelMaker:
    return partial(Byzantine, settings.lying) if settings.lying else FaultModel


def _arrivals_of(settings: RunSettings) -> ArrivalPolicyMaker:
    return (
        wait_for_all if settings.arrivals is None else partial(PartialArrivals, settings.arrivals)
    )


def _pre_round_of(
    settings: RunSettings, identity: Identity | None, secrets: Random | None
) -> Callable[[Session], PreRound] | None:
    secure, btard = settings.secure, settings.btard
    if identity is None:
        return None
    if btard is not None:
        return lambda session: BtardRounds(session, btard, identity, secrets)
    if secure is not None:
        return lambda session: SecureRounds(
            session, operations_of(session), secure, identity, secrets
        )
    return None

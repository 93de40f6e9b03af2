"""Which modes a run's settings ask for, for whoever makes its sessions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ...collectives.codecs.mixtures import mixture_of
from ...collectives.layout import Layout
from ...collectives.reducers import REDUCERS
from ...collectives.round.arrival_policy import ArrivalPolicyMaker, wait_for_all
from ...collectives.round.dissemination import everybody
from ...collectives.round.faults import FaultModel, FaultModelMaker, Proofs
from ...collectives.round.log_modes import LogModes
from ...collectives.round.seals import RoundSeal
from ...collectives.swarm import RunSettings
from ...security.identity import Identity
from ..run.registry import MODES
from .durations import spare_of
from .equivocation import EquivocationWatch
from .histories import Histories
from .log_settings import LogSettings
from .measures import Measures
from .modes import Modes
from .other_logs import OtherLogs
from .pre_round import PreRound
from .race import Race
from .recertification import Recertification
from .retaining import Retaining
from .shapes import FindReducer
from .timeline import Timeline
from .waiting import Waits

if TYPE_CHECKING:
    from .session import Session


def find_reducers() -> FindReducer:
    """What finds the reducers that runs and operations may name: the plain ones, and the robust
    rules.
    """
    return MODES.find("rules", "find_reducer") or REDUCERS.get


def log_settings_of(settings: RunSettings) -> LogSettings:
    """What a run's settings say of each of its logs."""

    def codec_of(layout: Layout) -> str:
        return mixture_of(
            layout, settings.codec, settings.codecs, settings.error, exact=settings.exact
        )

    return LogSettings(
        codec=settings.codec,
        codec_of=codec_of,
        reducer=settings.reducer,
        plan=settings.plan,
        rounds=settings.rounds,
        lying=settings.lying,
        coordinator=settings.coordinator,
        sample=settings.sample,
        by_work=settings.work is not None,
        spare=spare_of(settings),
        evaluations=settings.evaluate.rounds if settings.evaluate is not None else 0,
        partial=settings.arrivals is not None,
        meets=(settings.secure or settings.btard) is not None,
    )


def modes_of(
    settings: RunSettings, identity: Identity | None, secrets: Random | None = None
) -> Modes:
    """The modes of a run at the member with this ``identity``; without one it takes no part in
    masked rounds or BTARD. ``secrets``: what makes their secrets in a simulation. Raises
    ConfigError where the run asks for a mode that is not registered.
    """
    operations: Callable[..., OtherLogs] | None = MODES.find("operations", "Operations")
    masked = settings.secure is not None
    return Modes(
        log=LogModes(
            faults=_faults_of(settings),
            policy=_arrivals_of(settings),
            seal=MODES.find("sealing", "Sealing") or RoundSeal,
            dissemination=MODES.find("relays", "relayed") or everybody,
        ),
        proofs=_proofs_of(settings),
        recertifying=MODES.find("sealing.recertifying", "Recertifying")
        or (lambda _: Recertification()),
        pre_round=_pre_round_of(settings, identity, secrets),
        operations=lambda session: (
            operations(session, session.serving, settings.limits, masked=masked)
            if operations is not None
            else OtherLogs()
        ),
        measures=MODES.find("rules.distances", "Distances") or (lambda _: Measures()),
        reducers=find_reducers(),
        histories=Histories,
        votes=EquivocationWatch,
        retention=Retaining,
        times=Timeline,
        race=Race,
        waits=lambda session, now: Waits(session, session.others, session.recertifying, now),
    )


def _faults_of(settings: RunSettings) -> FaultModelMaker:
    if not settings.lying:
        return FaultModel
    return partial(MODES.load("byzantine", "Byzantine", key="join.lying"), settings.lying)


def _proofs_of(settings: RunSettings) -> Callable[[Session], Proofs]:
    if not settings.lying:
        return lambda _: Proofs()
    return MODES.load("byzantine.evidence", "LogProofs", key="join.lying")


def _arrivals_of(settings: RunSettings) -> ArrivalPolicyMaker:
    if settings.arrivals is None:
        return wait_for_all
    return partial(MODES.load("arrivals", "PartialArrivals", key="[arrivals]"), settings.arrivals)


def _pre_round_of(
    settings: RunSettings, identity: Identity | None, secrets: Random | None
) -> Callable[[Session], PreRound] | None:
    name = "btard" if settings.btard is not None else "secure"
    asked = settings.btard if settings.btard is not None else settings.secure
    if asked is None:
        return None
    MODES.check(name, f"[{name}]")
    if identity is None:
        return None
    if settings.btard is not None:
        rounds = MODES.load("btard", "BtardRounds", key="[btard]")
        return lambda session: rounds(session, asked, identity, secrets)
    masked = MODES.load("secure", "SecureRounds", key="[secure]")
    return lambda session: masked(session, asked, settings.privacy, identity, secrets)

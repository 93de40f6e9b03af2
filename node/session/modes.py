"""What stands at the doors of a run's sessions. A run asks for modes in its settings; whoever makes
its sessions hands them in (`node.session.composing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...collectives.errors import LocalProtocolError
from ...collectives.reduce import find_reducer
from ...collectives.round.arrival_policy import wait_for_all
from ...collectives.round.faults import Proofs
from ...collectives.round.log_modes import LogModes
from .log_settings import LogSettings
from .measures import Measures
from .other_logs import OtherLogs
from .recertification import Recertification
from .shapes import FindReducer
from .watches import OneHistory, OneSource, Retention, RoundTimes, VoteWatch, WaitWatch

if TYPE_CHECKING:
    from .pre_round import PreRound
    from .session import Session


@dataclass(frozen=True, slots=True)
class Modes:
    """``log``: what stands at the doors of the run's logs; where each member must hear every vote,
    news is told to everybody in any case. ``proofs``: what becomes of proofs that some lie.
    ``recertifying``: how a run goes on without a quorum. ``pre_round``: makes what members do
    together before the log is given anything; None: nothing. ``operations``: the logs beside the
    run's. ``measures``: what the rule of this name learns over rounds. ``reducers``: finds those
    that the run and its operations may name. ``histories``, ``votes``, ``retention``, ``times``,
    ``waits``, ``race``: what watches the log (`watches`).
    """

    log: LogModes = LogModes()
    proofs: Callable[[Session], Proofs] = lambda _: Proofs()
    pre_round: Callable[[Session], PreRound] | None = None
    recertifying: Callable[[Session], Recertification] = lambda _: Recertification()
    operations: Callable[[Session], OtherLogs] = lambda _: OtherLogs()
    measures: Callable[[str], Measures] = lambda _: Measures()
    reducers: FindReducer = find_reducer
    histories: Callable[[Session], OneHistory] = lambda _: OneHistory()
    votes: Callable[[Session], VoteWatch] = lambda _: VoteWatch()
    retention: Callable[[Session], Retention] = lambda _: Retention()
    times: Callable[[], RoundTimes] = RoundTimes
    race: Callable[..., OneSource] = OneSource
    waits: Callable[[Session, float], WaitWatch] = lambda _, __: WaitWatch()

    def check(self, settings: LogSettings) -> None:
        """Raise LocalProtocolError where a run asks for a mode that is not here."""
        if settings.lying != self.log.faults().tolerated:
            raise LocalProtocolError(
                f"the run bears {settings.lying} members that lie, and was given a fault model "
                f"of {self.log.faults().tolerated}"
            )
        if settings.partial == (self.log.policy is wait_for_all):
            raise LocalProtocolError("the run's arrivals are not those that it was given")
        if settings.meets and self.pre_round is None:
            raise LocalProtocolError(
                "a secure run, or one with BTARD, takes an identity, and is in one piece"
            )


PLAIN = Modes()
"""Members crash, tell everybody, and do nothing before the log is given their contributions."""

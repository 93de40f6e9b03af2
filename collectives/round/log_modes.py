"""What stands at the doors of one log."""

from __future__ import annotations

from dataclasses import dataclass

from .arrival_policy import ArrivalPolicyMaker, wait_for_all
from .dissemination import DisseminationMaker, everybody
from .faults import FaultModel, FaultModelMaker
from .seals import RoundSeal, SealMaker
from .site_names import SiteNamesMaker, no_names


@dataclass(frozen=True, slots=True)
class LogModes:
    """Each makes what one log is given, by default what a plain run does: which faults of members
    it bears, whom a round waits for, how one ends without a quorum, how its news travels, under
    which names members' privacy is counted.
    """

    faults: FaultModelMaker = FaultModel
    policy: ArrivalPolicyMaker = wait_for_all
    seal: SealMaker = RoundSeal
    dissemination: DisseminationMaker = everybody
    sites: SiteNamesMaker = no_names

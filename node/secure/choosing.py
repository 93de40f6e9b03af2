"""What members of a run do together before its log is given anything: masks, BTARD, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from ...collectives.swarm import RunSettings
from ...security.identity import Identity
from ..btard.rounds import BtardRounds
from ..session.operations import Operations
from ..session.pre_round import PreRound
from .rounds import SecureRounds

if TYPE_CHECKING:
    from ..session.session import Session


def pre_round_of(
    settings: RunSettings, identity: Identity | None, secrets: Random | None = None
) -> Callable[[Session, Operations], PreRound] | None:
    """What a session makes of it; None where the run asks for nothing, or there is no ``identity``
    of this peer's. ``secrets``: what makes their secrets in a simulation.
    """
    secure, btard = settings.secure, settings.btard
    if identity is None:
        return None
    if btard is not None:
        return lambda session, _: BtardRounds(session, btard, identity, secrets)
    if secure is not None:
        return lambda session, operations: SecureRounds(
            session, operations, secure, identity, secrets
        )
    return None

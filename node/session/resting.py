"""When a member has nothing to repair: training takes minutes, and a look at the clock twenty times
a second for nothing takes from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session

RESTING_PULLS = 4  # a member that rests looks once in so many pulls


def look_s(session: Session) -> float:
    """Seconds between two looks at what may need repair."""
    return session.timing.pull_s * (RESTING_PULLS if resting(session) else 1)


def resting(session: Session) -> bool:
    """Whether nothing is under way as far as this member knows, no round, no operation and no
    transfer, and it waits for nobody.
    """
    machine, transfer = session.machine, session.transfer
    if (
        machine is None or machine.contribution is not None or session.operations.under_way
    ):  # the likeliest, asked for every message
        return False
    if session.beforehand is not None and session.beforehand.active:
        return False
    if session.branching.after_s is not None:  # whether a quorum is in sight must be seen soon
        return False
    if machine.stateless or machine.engaged or machine.leaving or not machine.is_member:
        return False
    if any(who not in machine.config for who in machine.joiners):
        return False
    if (
        machine.open.first_ready_at is not None
        or machine.voted >= machine.round
        or session.applying.unrecorded
    ):
        return False
    if session.recertifying.view() is not None:
        return False
    return not (session.installing.busy or transfer.fetching or transfer.seeking_state)

"""A round that does not wait for everybody: it is made of whoever has come once enough have, or
once its time is over.

Nobody hurries for it: members contribute when their turn is done, also on an older anchor, and say
by themselves what that is worth (`optim.federated.arrivals`). Every member judges by what it knows;
the convener's judgement makes the plan, the others' tells them whether it is late.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import TYPE_CHECKING

from ..group import Member

if TYPE_CHECKING:
    from .grouping import Grouping
    from .machine import RoundMachine


def look(machine: RoundMachine, now: float) -> None:
    """Note whether the open round has what it waits for: `OpenRound.ripe_at`. Nothing, where it
    waits for all; and whether those that were drawn had their time."""
    machine.draw.look(now)
    arrivals, opened = machine.shape.arrivals, machine.open
    if arrivals is None or (opened.ripe_at is not None and machine.grouping is None):
        return
    convenes = (
        machine.convener_of(machine.ballot) == machine.me
    )  # then its plan is made of what it was told, by itself, too
    mine = {machine.me} if machine.contribution is not None and not convenes else set()
    there = mine | {offer.member for offer in machine.offered() if not machine.silent(offer.member)}
    if machine.grouping is not None:
        return _look_at_groups(machine, machine.grouping, there, now)
    if not there:
        return
    if opened.first_ready_at is None:
        opened.first_ready_at = now
    if arrivals.period_s is not None:
        periods = max(1, math.ceil((opened.first_ready_at - opened.born) / arrivals.period_s))
        ripe = now >= opened.born + periods * arrivals.period_s
    else:
        ripe = len(there) >= (arrivals.count or 1) or not _awaited(machine, mine)
    if ripe:
        opened.ripe_at = now


def _awaited(machine: RoundMachine, mine: Set[Member]) -> list[Member]:
    """Who lives and has not said what it contributes."""
    return [
        who
        for who in machine.config
        if who not in mine and machine.acceptor.awaits(who) and not machine.silent(who)
    ]


def _look_at_groups(
    machine: RoundMachine, grouping: Grouping, there: Set[Member], now: float
) -> None:
    """What the round waits for can be gone again, when somebody of a group that is there dies: then
    it waits for another.
    """
    opened, awaited = machine.open, [member.peer for member in _awaited(machine, there)]
    opened.due = grouping.ready({member.peer for member in there}, awaited, now)
    if opened.due:
        opened.ripe_at = now if opened.ripe_at is None else opened.ripe_at
    else:
        opened.ripe_at = None


def elapsed_s(machine: RoundMachine, now: float) -> float | None:
    """Seconds since the entry before, for the one that is proposed; None where the log needs no
    time.
    """
    return None if machine.grouping is None else machine.grouping.elapsed_s(now)


def waits(machine: RoundMachine) -> bool:
    """Whether the open round waits for more to come, as far as this member knows."""
    return machine.shape.arrivals is not None and machine.open.ripe_at is None

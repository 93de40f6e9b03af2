"""A round that does not wait for everybody: it is made of whoever has come once enough have, or once its time is over.

Nobody hurries for it: members contribute when their turn is done, also on an older anchor, and say by themselves what that is worth
(`optim.federated.arrivals`). Every member judges by what it knows; the convener's judgement makes the plan, the others' tells them whether it is late.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .machine import RoundMachine


def look(machine: RoundMachine, now: float) -> None:
    """Note whether the open round has what it waits for: `OpenRound.ripe_at`. Nothing, where it waits for all."""
    arrivals, opened = machine.shape.arrivals, machine.open
    if arrivals is None or opened.ripe_at is not None:
        return
    convenes = machine.convener_of(machine.ballot) == machine.me  # then its plan is made of what it was told, by itself, too
    mine = {machine.me} if machine.contribution is not None and not convenes else set()
    there = mine | {offer.member for offer in machine.offers() if not machine.silent(offer.member)}
    if not there:
        return
    if opened.first_ready_at is None:
        opened.first_ready_at = now
    if arrivals.period_s is not None:
        periods = max(1, math.ceil((opened.first_ready_at - opened.born) / arrivals.period_s))
        ripe = now >= opened.born + periods * arrivals.period_s
    else:
        awaited = [who for who in machine.config if who not in mine and machine.acceptor.awaits(who) and not machine.silent(who)]
        ripe = len(there) >= (arrivals.count or 1) or not awaited
    if ripe:
        opened.ripe_at = now


def waits(machine: RoundMachine) -> bool:
    """Whether the open round waits for more to come, as far as this member knows."""
    return machine.shape.arrivals is not None and machine.open.ripe_at is None

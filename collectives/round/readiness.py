"""What this member has for the open round, and whom it tells so (Ready); what others say of
themselves. Sans I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import messages as m
from ..errors import RemoteProtocolError
from ..group import Member
from .gathering import waits

if TYPE_CHECKING:
    from .machine import RoundMachine


def my_ready(machine: RoundMachine) -> m.Ready | None:
    """The own contribution, or that none will come; None where there is nothing to say yet."""
    aside = machine.open.aside == machine.ballot
    if (
        machine.contribution and not aside and machine.draw.takes_part
    ):  # else it is kept: a later draw may want it
        pace, (cid, weight, reading) = machine.actions.pace(), machine.contribution
        return m.Ready(
            machine.base,
            cid,
            weight,
            machine.leaving,
            site=machine.site,
            up=pace.up,
            down=pace.down,
            proven=pace.proven,
            reading=reading,
            ballot=machine.ballot,
        )
    closing = (
        machine.open.first_ready_at is not None
    )  # before that, a script may still attach and contribute to this round
    waits = machine.unsettled or machine.draw.waiting
    silent = (
        machine.leaving
        or waits
        or aside
        or (machine.idle and (closing or machine.shape.sample is not None))
    )
    return (
        m.Ready(machine.base, None, 0, machine.leaving, waits, ballot=machine.ballot)
        if silent
        else None
    )


def send_ready(machine: RoundMachine) -> None:
    """Tell the convener."""
    ready = my_ready(machine)
    if ready and machine.is_member and not machine.open.decided:
        machine.tell(machine.convener_of(machine.ballot).peer, ready)


def repeat_ready(machine: RoundMachine, now: float) -> None:
    """Tell the convener again; and all others now and then while a plan needs more contributions
    than are known here, or fewer than were drawn give any: each counts them."""
    opened = machine.open
    if not waits(machine):
        send_ready(machine)
    if (
        machine.waits_for_offers or machine.draw.declines
    ) and now - opened.told_at > machine.timing.detect_s:
        opened.told_at = now
        close_round(machine)


def close_round(machine: RoundMachine) -> None:
    """Say to all that a contribution is there: whoever has something contributes it now. So does
    who was drawn, and has none.
    """
    send_ready(machine)
    ready = my_ready(machine)
    if ready and (machine.contribution or machine.draw.declines) and machine.is_member:
        for peer in machine.others:
            machine.tell(peer, ready)


def ready_fits(machine: RoundMachine, ready: m.Ready) -> bool:
    """Whether it is of the open round."""
    return ready.base == machine.base and (ready.cid is None or ready.weight >= 1)


def on_ready(machine: RoundMachine, now: float, who: Member, ready: m.Ready) -> None:
    """A member has a contribution, or will have none. Raises RemoteProtocolError when it is of
    another round.
    """
    opened = machine.open
    if not ready_fits(machine, ready):
        raise RemoteProtocolError(f"Ready for round {machine.round} on another base", peer=who.peer)
    if ready.cid is not None and who not in machine.draw.members:
        raise RemoteProtocolError(
            f"{who.peer} contributes to round {machine.round}, for which it was not drawn",
            peer=who.peer,
        )
    if ready.cid is not None and opened.first_ready_at is None:
        opened.first_ready_at = now
        machine.actions.closing(machine.round)
        if machine.idle:
            send_ready(machine)
    opened.ready[who] = ready
    machine.convening.on_ready(who)
    if ready.ballot > machine.ballot and who == machine.convener_of(machine.ballot):
        return machine.next_ballot(now)  # it has given its ballot up: nobody need find that out
    return machine.convening.step(now)

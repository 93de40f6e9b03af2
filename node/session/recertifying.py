"""Recertify at one session: who may be removed on the organiser's word, and how far the seal is (`collectives.round.sealing`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...collectives.errors import RecertifyError
from ...collectives.group import Certified, Member
from ...collectives.identifiers import PeerId
from ...collectives.round import gone
from . import events as ev

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, slots=True)
class SealView:
    """The open round is sealed here. ``removed``: whose votes never come; ``awaited``: at the organiser, whose answers are not here yet."""

    removed: tuple[PeerId, ...]
    awaited: tuple[PeerId, ...]


class Recertifying:
    """What the organiser's user asks for, checked."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def view(self) -> SealView | None:
        """The seal of the open round, or one that was asked for and is to come; None where there is none."""
        machine = self.session.machine
        if machine is None:
            return None
        sealing, removed = machine.sealing, machine.sealing.record.removed
        coming = sealing.leading and not machine.quorum([member for member in machine.config if member not in removed])
        if not sealing.active and not coming:
            return None
        awaited = sealing.awaited() - {machine.me.peer} if sealing.leading else ()
        return SealView(tuple(member.peer for member in removed), tuple(sorted(awaited)))

    def ask(self, now: float, peers: Collection[PeerId]) -> tuple[Member, ...]:
        """These never vote again: go on without them. Nothing is known here that could prove it.

        Raises RecertifyError (E306) where it cannot be right, StorageError. Returns who is removed, as members.
        """
        session, machine = self.session, self.session.machine
        if session.me != session.organiser:
            raise RecertifyError("only the run's organiser can recertify it", why=f"its organiser is {session.organiser}")
        if machine is None or machine.stateless:
            raise RecertifyError("the run's state is not here yet", why="what is recertified goes on from this node's state")
        if not peers or session.me in peers:
            raise RecertifyError("name the members that are lost for ever, not this node itself")
        removed = tuple(sorted(self._life(peer) for peer in peers))
        for member in removed:
            if session.membership.live(now, member.peer) and session.others.there(now, member.peer):
                raise RecertifyError(f"{member.peer} is alive", why="it answers at this moment: a member that may vote must not be removed")
        going = machine.sealing.record.removed if machine.sealing.leading else ()
        rest = [member for member in machine.config if member not in (*removed, *going)]
        if machine.quorum(rest) and not going:
            raise RecertifyError(
                "there is nothing to recertify",
                why=f"the other {len(rest)} of {len(machine.config)} members are enough to decide: they go on, and evict who is silent",
            )
        machine.sealing.ask(removed)
        session.settle(now)
        return removed

    def decided(self, certified: Certified) -> None:
        """An entry is applied: tell where it was certified without votes, and whether this member is removed by it."""
        session, machine = self.session, self.session.machine
        if certified.removed and machine is not None:
            session.ports.emit(ev.Recertified(certified.entry.round, tuple(member.peer for member in certified.removed)))
            if self.removed:
                session.ports.emit(ev.Removed(certified.entry.round))

    @property
    def removed(self) -> bool:
        """Whether this member's present life was removed from the run."""
        machine = self.session.machine
        return machine is not None and gone(machine.me, machine.removed)

    def _life(self, peer: PeerId) -> Member:
        """The newest life of a peer that was ever a member."""
        machine = self.session.machine
        assert machine is not None
        for certified in reversed(machine.journal.entries):
            for member in certified.entry.next_config:
                if member.peer == peer:
                    return member
        raise RecertifyError(f"{peer} was never a member of this run", why="only members can be removed")

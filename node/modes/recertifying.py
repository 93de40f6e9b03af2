"""Recertify: who may be removed on the organiser's word, and how far the seal is
(`collectives.modes.sealing`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...collectives.errors import RecertifyError
from ...collectives.group import Certified, Member
from ...collectives.identifiers import PeerId
from ...collectives.modes.sealing import Sealing
from ..session import events as ev
from ..session.recertification import Recertification, SealView

if TYPE_CHECKING:
    from ...collectives.round.machine import RoundMachine
    from ..session.session import Session

# another process under the same key is heard of sooner: until then an earlier life may still live
ALONE_S = 10.0


def recertify(sessions: Sequence[Session], now: float, peers: Collection[PeerId]) -> None:
    """The organiser's user says: these never vote again, go on without them. Nothing is known here
    that could prove it.

    ``sessions``: of all fragments of the run. The word holds for the logs of all of them, or is
    refused for all: one that can be decided without these members goes on and evicts them. Raises
    RecertifyError (E306) where it cannot be right, StorageError.
    """
    first = sessions[0]
    if first.me != first.organiser:
        raise RecertifyError(
            "only the run's organiser can recertify it", why=f"its organiser is {first.organiser}"
        )
    if first.settings.lying:
        raise RecertifyError(
            "this run cannot be recertified",
            why=(
                "Its manifest says that members may lie: the organiser's word, and "
                "answers to it, are theirs."
            ),
            hint="Start the lost machines again with their folders. If they are gone for "
            "ever: atoll export RUN DIR at the newest round, and a new run whose "
            "scripts start from that model",
        )
    if any(session.machine is None or session.machine.stateless for session in sessions):
        raise RecertifyError(
            "the run's state is not here yet",
            why=(
                "What is recertified goes on from this node's state, and it has none that is whole."
            ),
            hint=(
                "Start a node that has the state, or restore this node's folder of the run from a "
                "backup; wait until `atoll status` shows a round. If nobody has it any more, a new "
                "run goes on from the newest checkpoint of any member: atoll export RUN DIR there, "
                "then atoll new --from DIR --name NAME"
            ),
        )
    lives = [_of(session).lives(peers) for session in sessions]
    if not peers or (
        first.me in peers and not any(who.peer == first.me for found in lives for who in found)
    ):
        raise RecertifyError("name the members that are lost for ever, not this node itself")
    lost = [
        [who for who in found if not _of(session).there(now, who)]
        for session, found in zip(sessions, lives, strict=True)
    ]
    for peer in peers:
        if not any(who.peer == peer for found in lives for who in found):
            raise RecertifyError(
                f"{peer} was never a member of this run", why="only members can be removed"
            )
        if not any(who.peer == peer for found in lost for who in found):
            raise RecertifyError(
                f"{peer} is alive",
                why="it answers at this moment: a member that may vote must not be removed",
            )
    enough = [_of(session).enough(removed) for session, removed in zip(sessions, lost, strict=True)]
    if all(enough):
        raise RecertifyError("there is nothing to recertify", why=enough[0])
    for session, removed in zip(sessions, lost, strict=True):
        if removed:
            _of(session).ask(now, removed)


class Recertifying(Recertification):
    """By the organiser's word."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def view(self) -> SealView | None:
        """The seal of the open round, or one requested and to come; None if there is none."""
        machine = self.session.machine
        if machine is None:
            return None
        sealing = _sealing_of(machine)
        removed = sealing.record.removed
        coming = sealing.leading and not machine.quorum(
            [member for member in machine.config if member not in removed]
        )
        if not sealing.active and not coming:
            return None
        awaited = sealing.awaited() - {machine.me.peer} if sealing.leading else ()
        return SealView(tuple(member.peer for member in removed), tuple(sorted(awaited)))

    def lives(self, peers: Collection[PeerId]) -> list[Member]:
        """The newest life of each of these peers that was ever a member of this log, or asks to be:
        an entry that was accepted may admit it. And this node's, where it is an earlier one: after
        a restored backup or a lost disk nobody votes in it any more."""
        machine = self.session.machine
        assert machine is not None
        found = {who.peer: who for who in sorted(machine.entrance.joiners) if who.peer in peers}
        for certified in machine.journal.entries:
            found.update(
                (who.peer, who)
                for who in certified.entry.next_config
                if who.peer in (*peers, machine.me.peer)
            )
        return sorted(who for who in found.values() if who != machine.me)

    def there(self, now: float, who: Member) -> bool:
        """Whether this life answers at this moment. (A member that lost this log's journal is in
        another one.)
        """
        session = self.session
        return (
            who.peer != session.me
            and session.membership.live(now, who.peer)
            and bool(self.session.others.there(now, who.peer))
        )

    def enough(self, removed: Collection[Member]) -> str:
        """Why there is nothing to recertify: the others decide; "" where they do not, or a seal is
        under way.
        """
        machine = self.session.machine
        assert machine is not None
        rest = [member for member in machine.config if member not in removed]
        if _sealing_of(machine).leading or not machine.quorum(rest):
            return ""
        return (
            f"the other {len(rest)} of {len(machine.config)} members are enough to decide: they go "
            "on, and evict who is silent"
        )

    def tick(self, now: float) -> None:
        """The organiser's node gives up by itself the lives that are over, where the others are too
        few without them and nobody is silent: whoever voted as one of them lives on as another
        member, and says itself that it never votes as that one again. So after old copies of homes,
        or disks that lost more than they had confirmed.
        """
        session, machine = self.session, self.session.machine
        assert machine is not None
        if (
            session.me != session.organiser
            or session.settings.lying
            or machine.stateless
            or now - session.began_at < ALONE_S
            or machine.open.decided is not None
            or _sealing_of(machine).leading
        ):
            return
        gone = [who for who in machine.config if who != machine.me and not self.there(now, who)]
        if not gone or machine.quorum([who for who in machine.config if who not in gone]):
            return
        if all(self._lives_on(now, who) for who in gone):
            self.ask(now, gone)

    def _lives_on(self, now: float, who: Member) -> bool:
        """Whether the peer of this life is there as a later one."""
        session, machine = self.session, self.session.machine
        assert machine is not None
        if who.peer == session.me:
            return who != machine.me
        return machine.ended(who) and session.membership.live(now, who.peer)

    def ask(self, now: float, removed: Collection[Member]) -> None:
        """The organiser's word, for this log."""
        machine = self.session.machine
        assert machine is not None
        _sealing_of(machine).ask(removed)
        self.session.settle(now)

    def decided(self, certified: Certified) -> None:
        """An entry is applied: tell where it was certified without votes, and whether this member
        is removed by it.
        """
        session, machine = self.session, self.session.machine
        if certified.removed and machine is not None:
            session.ports.emit(
                ev.Recertified(
                    certified.entry.round, tuple(member.peer for member in certified.removed)
                )
            )
            if session.removed:
                session.ports.emit(ev.Removed(certified.entry.round))


def _of(session: Session) -> Recertifying:
    found = session.recertifying
    if not isinstance(found, Recertifying):
        raise RecertifyError("this node was not given what recertifies a run")
    return found


def _sealing_of(machine: RoundMachine) -> Sealing:
    found = machine.sealing
    assert isinstance(found, Sealing)  # whoever makes a session hands in both or none
    return found

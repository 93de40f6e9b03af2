"""What a member waits for: one typed value, from which status, log and events are drawn. Nobody
waits in silence.

`Waits.look` names it at any time; `Waits.tick` tells it as an event once no round was committed for
several times as long as rounds take, again when it changes, and that it is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...collectives.group import Member
from ...collectives.identifiers import PeerId
from ...collectives.round import RoundMachine
from ...collectives.round.turns import AWAY_S
from . import events as ev
from .events import Waiting, WaitState
from .peer_selection import PeerSelection
from .pre_round import PreRoundView
from .recertification import Recertification
from .watches import WaitWatch

if TYPE_CHECKING:
    from .session import Session

QUIET_ROUNDS = 3.0  # no commit for so many times as long as the last round took is silence
ALL_SEEK_IT = "every member that would have it seeks it, too"
RESTORED = (
    "a member's folder is put back from a backup; if there is none, a new run begins from the"
    " newest checkpoint: atoll export RUN DIR, then atoll new --from DIR --name NAME"
)
A_SCRIPT_BEGINS = "a script of yours, with whose model the run begins: none has attached here"
A_SCRIPT_TRAINS = "a script that trains: none is attached here, and none is known elsewhere"
LONG_S = 600.0  # by then a script has loaded its model: the run may have begun, and lost its state
LARGE_LOOK_S = 1.0  # between two looks at a large run
QUIET_S = 5.0  # and for at least so long


class Waits(WaitWatch):
    """Of one log."""

    def __init__(
        self, session: Session, others: PeerSelection, recertifying: Recertification, now: float
    ) -> None:
        self.session, self._others, self._recertifying = session, others, recertifying
        self._moved_at = now  # when the log came on last
        self._round = -1
        self._look_at = now
        self._now: Waiting | None = None
        self._missing: dict[
            PeerId, float
        ] = {}  # sites that are waited for and not heard, since when
        self._announced: tuple[str, tuple[PeerId, ...]] | None = None

    def tick(self, now: float) -> None:
        """Look, and tell what changed while nothing comes on."""
        round_ = self._open_round()
        if round_ != self._round:
            self._round, self._moved_at = round_, now
            # an entry that only leaves out a site which a sum needs ends no wait
            if self._announced is not None and not self._missed(now):
                self._announced = None
                self.session.ports.emit(ev.WaitEnded())
        quiet = now - self._moved_at <= self.quiet_s and not self._missed(now)
        if quiet or now < self._look_at:
            return
        if self.session.membership.large:  # each of hundreds is looked at
            self._look_at = now + LARGE_LOOK_S
        waiting = self.look(now)
        if (key := (waiting.state, waiting.of)) != self._announced:
            self._announced = key
            self.session.ports.emit(ev.StillWaiting(waiting))

    @property
    def quiet_s(self) -> float:
        """No entry for longer than this is silence."""
        machine = self.session.machine
        usual = machine.round_s if machine is not None and machine.round_s is not None else 0.0
        return max(QUIET_S, QUIET_ROUNDS * usual)

    @property
    def announced(self) -> bool:
        """Whether the present wait was told as an event."""
        return self._announced is not None

    def look(self, now: float) -> Waiting:
        """What is waited for at this moment."""
        state, what, of, ends = self._reason(now)
        missing = tuple(peer for peer in self._missed(now) if peer in of)
        since = (
            self._now.since
            if self._now is not None and (self._now.state, self._now.of) == (state, of)
            else now
        )
        moved_at = self._moved_at if self._open_round() == self._round else now
        self._now = Waiting(state, what, of, ends, since, now - moved_at, missing)
        return self._now

    def _begins(self, now: float) -> tuple[WaitState, str, tuple[PeerId, ...], str]:
        """What is waited for where nothing of the log is here."""
        session, holders = self.session, self._others.with_log(now)
        what = "the beginning of the run's log"
        founded = session.ports.storage.was_founded
        loading = session.script is None and not founded and now - self._moved_at <= LONG_S
        lost = "" if loading else f"; if the run had begun already, {RESTORED}"
        if holders:
            ends = "a member that has it is reached"
            return "waiting for peers", what, _names(holders), ends
        if session.me == session.organiser and not founded:
            return "waiting for peers", A_SCRIPT_BEGINS, (), f"one trains here{lost}"
        what += f"; {ALL_SEEK_IT}"
        return "waiting for peers", what, (), f"the organiser's script begins the run{lost}"

    def _open_round(self) -> int:
        """The round that is open here; -1 without a state."""
        machine = self.session.machine
        return machine.round if machine is not None and not machine.stateless else -1

    # ---- reasons, the first that holds
    def _reason(self, now: float) -> tuple[WaitState, str, tuple[PeerId, ...], str]:
        session, machine = self.session, self.session.machine
        if session.left:
            return "left", "nothing", (), "atoll join RUN enters the run again"
        if session.doubled:
            return (
                "doubled",
                "the end of the other process that has this node's key",
                (session.me,),
                "one of the two stops and the other is started again; its machine enters with"
                " atoll join INVITE --fresh-key",
            )
        if session.me in session.membership.banned:
            return "banned", "nothing", (), "the organiser lifts the ban"
        if session.removed:
            return "removed", "nothing", (), "this node joins again in a new life"
        if machine is None:
            return self._begins(now)
        if session.doors.limited(session.me) and session.admission.uncounted(session.me):
            return (
                "waiting for peers",
                "to be counted, before it is given the model: its invite is for so many peers",
                tuple(peer for peer in session.config_peers() if peer != session.me),
                "the next entry of the members counts it, unless others have used up the invite",
            )
        if machine.stateless or session.transfer.seeking_state:
            least = session.actions.least_state()
            what = f"the state after entry {least} or a later one"
            holders = [
                peer for peer in self._holders(machine) if not self._others.lacks_state(peer, least)
            ]
            if not holders:
                return "lacking state", f"{what}; {ALL_SEEK_IT}", (), RESTORED
            if offering := session.transfer.unbelieved:
                what += f"; no quorum of the members confirms what {', '.join(offering)} would give"
            return (
                "lacking state",
                what,
                tuple(holders),
                "one of them that holds it is reached",
            )
        if (view := self._recertifying.view()) is not None:
            return (
                "recertifying",
                "the answers of all known nodes to the organiser's seal",
                _names(view.awaited),
                "all of them answer",
            )
        rounds = session.settings.rounds
        if rounds is not None and session.completed >= rounds:
            return "finished", "nothing", (), "all rounds of the run are committed"
        if over := session.over:
            return "finished", "nothing", (), over
        if machine.open.decided is not None:
            return (
                "lacking state",
                f"the result of entry {machine.round}, which is decided",
                self._holders(machine),
                "one of them that holds it is reached",
            )
        there = [member for member in machine.config if self._there(now, member)]
        if not machine.quorum(there):
            return self._no_quorum(machine, there)
        if not machine.may_act:
            return self._outside(machine, there)
        late, away = session.at_work(now), self._missed(now)
        if late or away:
            return self._at_work(now, machine, late, away)
        return self._in_round(machine)

    def _missed(self, now: float) -> list[PeerId]:
        """Sites of a run of sites that the round waits for and that are not heard, or without
        whom too few are left for a sum: however long a round is, that is told soon."""
        machine, session = self.session.machine, self.session
        over = session.over or session.completed >= (
            session.settings.rounds or session.completed + 1
        )
        if machine is None or not session.settings.by_work or over:
            self._missing = {}
            return []
        before = self._before(now)
        gone, asked = before.gone, {*session.at_work(now), *before.awaited}
        silent = [peer for peer in sorted(asked) if session.actions.suspected(peer)]
        self._missing = {peer: self._missing.get(peer, now) for peer in [*gone, *silent]}
        return [*gone, *(peer for peer in silent if now - self._missing[peer] >= QUIET_S)]

    def _before(self, now: float) -> PreRoundView:
        before = self.session.pre_round
        return before.look(now) if before is not None else PreRoundView()

    def _at_work(
        self, now: float, machine: RoundMachine, late: list[PeerId], away: list[PeerId]
    ) -> tuple[WaitState, str, tuple[PeerId, ...], str]:
        """A round of a run of sites: sites that are done wait for the work of the others, or for
        some without whom there is no sum."""
        sampled = {member.peer for member in machine.draw.members}
        sites = len(sampled | {*away})
        what = f"the work of {len(late)} of {sites} sites"
        if not late or not sampled >= {*away}:
            what = f"a sum of {sites} sites"
        for peer in away:
            lost = "is not heard" if peer in sampled else "has been left out"
            what += f"; {peer} {lost} for {now - self._missing[peer]:.0f} s"
        needed = self._before(now).needed
        ends_at = machine.turns.ends_at
        if away and sites - len(away) < needed:
            ends = f"they are back: a sum needs {needed} of {sites} sites"
        elif away:
            ends = f"they are back; after {AWAY_S:.0f} s the round goes on without them"
        elif ends_at is None or sites - len(late) < needed:
            ends = "they are done"
        else:
            ends = f"they are done; in {max(0.0, ends_at - now):.0f} s they are left out"
        return ("waiting for peers" if away else "training"), what, _names(away or late), ends

    def _no_quorum(
        self, machine: RoundMachine, there: list[Member]
    ) -> tuple[WaitState, str, tuple[PeerId, ...], str]:
        counted = set(there)
        gone = [member.peer for member in machine.config if member not in counted]
        needed = (len(machine.config) + machine.tolerated) // 2 + 1
        what = f"{needed} of {len(machine.config)} members; {len(there)} can be counted on"
        for peer in gone:
            if (how := self._others.other_life(peer, machine)) is not None:
                what += f"; {peer} {how}"
        way_out = "the organiser runs atoll recertify RUN --without PEER"
        if machine.tolerated or self.session.organiser in gone:
            # The organiser's word is no proof there, or nobody is left to give it.
            way_out = "atoll export RUN DIR, then atoll new --from DIR --name NAME"
        ends = f"enough of them come back as they were; if they never will, {way_out}"
        return "no quorum", what, _names(gone), ends

    def _outside(
        self, machine: RoundMachine, there: list[Member]
    ) -> tuple[WaitState, str, tuple[PeerId, ...], str]:
        """A quorum is there, and this member takes no part in it yet."""
        if machine.recovery.unasked:
            return (
                "waiting for peers",
                (
                    "what the others know, since this member decides alone and "
                    "may come from an old copy"
                ),
                _names(machine.recovery.unasked),
                "they answer; who is not heard is waited for 10 s",
            )
        if machine.is_member:
            return (
                "waiting for peers",
                "what the others heard this member say, since it has just been started",
                _names(member.peer for member in there if member.peer != self.session.me),
                "as many of them answer as make a quorum with it",
            )
        shape = machine.shape
        if len(machine.config) >= shape.most:
            return (
                "waiting for peers",
                f"a place: the run has {len(machine.config):,} members, the most that its plan "
                f"({shape.topology}) bears",
                (),
                "a member leaves",
            )
        return (
            "waiting for peers",
            "to be let in by the next entry",
            _names(member.peer for member in there),
            "their next round is decided",
        )

    def _in_round(self, machine: RoundMachine) -> tuple[WaitState, str, tuple[PeerId, ...], str]:
        """A quorum is there, and this member is one of it."""
        ready = {offer.member.peer for offer in machine.offered()}
        untrained = self.session.script is None  # nobody waits for oneself without a script
        late = [
            member.peer
            for member in machine.config
            if member.peer not in ready
            and not machine.silent(member)
            and not (untrained and member.peer == self.session.me)
        ]
        if untrained and not late and not ready and machine.open.plan is None:
            return "training", A_SCRIPT_TRAINS, (), "one attaches, here or at another member"
        if machine.contribution is None and machine.open.plan is None and not ready:
            return (
                "training",
                "the contributions of the members that train",
                _names(late),
                "one of them contributes",
            )
        if machine.open.plan is None:
            return (
                "waiting for peers",
                f"contributions: {len(ready)} are there, {machine.shape.least} are needed",
                _names(late),
                "they contribute, or have had their time",
            )
        owners = [part.owner for part in machine.open.plan.parts]
        return (
            "round under way",
            "the sums of those who add up, and the votes",
            _names(owners),
            "a quorum votes; whoever is silent is left out",
        )

    def _there(self, now: float, member: Member) -> bool:
        """Whether a decision can count on this life of a member."""
        session, machine = self.session, self.session.machine
        assert machine is not None
        if member.peer == session.me:
            return member == machine.me
        return not machine.ended(member) and self._others.there(now, member.peer) is not False

    def _holders(self, machine: RoundMachine) -> tuple[PeerId, ...]:
        """Likely holders of the newest state: voters for the newest known entry, its members."""
        tail = machine.tail
        peers = [vote.member.peer for vote in tail.votes]
        peers += [member.peer for member in tail.entry.next_config]
        return _names(peer for peer in peers if peer != self.session.me)


def _names(peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    return tuple(sorted(set(peers)))

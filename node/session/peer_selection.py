"""Whom a session asks: for the log while there is none, and for admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from ...collectives import messages as m
from ...collectives.group import Config
from ...collectives.identifiers import PeerId
from ...collectives.round import RoundMachine
from .admission import Admission

if TYPE_CHECKING:
    from .session import Session

ASKED_AT_ONCE = 3
CONVENERS_ASKED = 3
"""To let this member into a large configuration: of the first ballots, and of the next rounds."""
OTHERS_ASKED = 5  # and in each knock so many owners of the ballots that follow
MOST_DRAWN = 32  # members of a large run, and as many strangers, that are worth asking at once
MOST_NOTED = 1024  # peers of which it is remembered what they lack


class PeerSelection:
    """The other peers of the run, as far as they can be asked."""

    def __init__(self, session: Session, admission: Admission) -> None:
        self.session, self._admission = session, admission
        self._knocked = -1, 0  # the round of the last knock, and the ballot that the next begins at
        self._lives: dict[PeerId, int] = {}  # members: the newest incarnation that spoke
        self._speaking: dict[PeerId, int] = {}  # members: the incarnation that spoke last
        self._config: Config = ()
        self._counted = dict[PeerId, int]()  # its members' incarnations
        self._logless: set[PeerId] = set()  # they ask for the beginning of the log
        self._lacking: dict[PeerId, int] = {}  # they ask for a state after this entry or later

    def targets(self, now: float) -> list[PeerId]:
        """Peers worth asking, the likeliest first."""
        session = self.session
        config = session.config_peers()
        inside = set(config)
        if session.membership.large:
            return self._some(now, config, inside)
        known = [
            *config,
            *(record.peer for record in session.membership.records()),
            *session.contacts,
        ]
        unique = [peer for peer in dict.fromkeys(known) if peer != session.me]
        live = [
            peer
            for peer in unique
            if not session.membership.suspected(now, peer)
            and not session.budgets.deaf_to(now, peer)
        ]
        session.rng.shuffle(live)
        return [peer for peer in live if peer in inside] + [
            peer for peer in live if peer not in inside
        ]

    def _some(self, now: float, config: list[PeerId], inside: Set[PeerId]) -> list[PeerId]:
        """Of hundreds of members: others in each look, and of those that are none likewise."""
        session = self.session
        strangers = [peer for peer in session.membership.known() if peer not in inside]
        strangers += [peer for peer in session.contacts if peer not in inside]
        sampled = [
            *session.rng.sample(config, min(MOST_DRAWN, len(config))),
            *session.rng.sample(strangers, min(MOST_DRAWN, len(strangers))),
        ]
        return [
            peer
            for peer in dict.fromkeys(sampled)
            if peer != session.me
            and not session.membership.suspected(now, peer)
            and not session.budgets.deaf_to(now, peer)
        ]

    def knock(self, now: float, targets: Callable[[], Sequence[PeerId]]) -> None:
        """Ask for the log while there is none, or nobody is heard of those who would have the rest
        of it; for admission while this member is not in the configuration. ``targets``: see
        `targets`, which is asked where that is needed."""
        session = self.session
        machine = session.machine
        if session.left:
            return
        if machine is None:
            for peer in targets()[:ASKED_AT_ONCE]:
                session.actions.tell(peer, 0, m.Fetch())
            return
        if self._deserted(now):
            # They are asked for what follows the newest entry known, applied or not.
            others = [peer for peer in targets() if not session.in_config(peer)]
            for peer in others[:ASKED_AT_ONCE]:
                session.actions.tell(peer, machine.tail.entry.round + 1, m.Fetch())
        limited = session.doors.limited(session.me)
        if limited and (machine.stateless or self._admission.uncounted(session.me)):
            for peer in self._likely_conveners(machine):
                session.actions.tell(peer, machine.tail.entry.round + 1, m.Join(holds=False))
        if (
            not machine.stateless
            and not machine.is_member
            and not machine.leaving
            and not machine.frontier
            and self._belongs()
        ):
            for peer in self._doorkeepers(machine):
                session.actions.tell(peer, machine.round, m.Join())

    def _likely_conveners(self, machine: RoundMachine) -> list[PeerId]:
        """Who is asked to count this member, which knows no newer state: all of a small
        configuration; of a large one some that are sampled anew each time.
        """
        peers = [peer for peer in self.session.config_peers() if peer != self.session.me]
        if len(peers) <= MOST_DRAWN:
            return peers
        return self.session.rng.sample(peers, MOST_DRAWN)

    def _doorkeepers(self, machine: RoundMachine) -> list[PeerId]:
        """Who is asked to let this member in: all of a small configuration. Of a large one those
        whose turn it is to write the next entries, the organiser, and with each knock the owners of
        the ballots that follow: who of them suspects those before goes on to its own ballot.
        """
        peers = self.session.config_peers()
        if not machine.dissemination.is_large:
            return peers
        round_, ballot = self._knocked
        if round_ != machine.round or ballot >= len(peers):
            ballot = CONVENERS_ASKED
        self._knocked = machine.round, ballot + OTHERS_ASKED
        ballots = [*range(CONVENERS_ASKED), *range(ballot, ballot + OTHERS_ASKED)]
        owners = [machine.convener_of(each).peer for each in ballots]
        founder = [peer for peer in (self.session.organiser,) if self.session.in_config(peer)]
        return list(dict.fromkeys([*owners, *machine.next_conveners(CONVENERS_ASKED), *founder]))

    def _deserted(self, now: float) -> bool:
        """Whether nobody else of the configuration that is known here is heard. The log may go on
        under a later one, of whom they let in since.
        """
        session = self.session
        others = [peer for peer in session.config_peers() if peer != session.me]
        return bool(others) and not any(session.membership.live(now, peer) for peer in others)

    def _belongs(self) -> bool:
        """Whether this member may ask to be let in: a script of another model would be counted in
        quorums, and then end.
        """
        session = self.session
        if session.removed or not self._admission.may_enter():
            return False
        return (
            session.seeding
            if session.script is None
            else session.replica is not None and session.script == session.replica.layout
        )

    def there(self, now: float, peer: PeerId) -> bool | None:
        """Whether a decision can count on a member; None where that is not known yet. Not on one
        that speaks as another incarnation than the one that was let in: it lost its journal, or
        runs from an older one."""
        membership, machine = self.session.membership, self.session.machine
        if machine is not None and self.other_life(peer, machine) is not None:
            return False
        return (
            True
            if membership.live(now, peer)
            else False
            if membership.suspected(now, peer)
            else None
        )

    def other_life(self, peer: PeerId, machine: RoundMachine) -> str | None:
        """How a peer of the configuration lives on, where not as the life that counts."""
        if self._config is not machine.config:  # asked for each member of it
            self._config = machine.config
            self._counted = {who.peer: who.incarnation for who in reversed(machine.config)}
        counted = self._counted.get(peer)
        if counted is None:
            return None
        if peer == self.session.me:
            newest = speaks = machine.me.incarnation
        else:
            newest = self._lives.get(peer, 0)
            speaks = self._speaking.get(peer, counted)
        if newest > counted:
            return "lives on as another member, since it lost what it had voted"
        if speaks < counted:
            return "lives on from an older folder than the one that it has voted from"
        return None

    # ---- who has what
    def note(self, peer: PeerId, envelope: m.Envelope) -> None:
        """What a message of the main log tells of its sender: as which life it speaks, and what it
        lacks.
        """
        if self.session.in_config(peer):
            self._lives[peer] = max(envelope.incarnation, self._lives.get(peer, 0))
            self._speaking[peer] = envelope.incarnation
        match envelope.body:
            case m.Fetch() if envelope.round == 0 and len(self._logless) < MOST_NOTED:
                self._logless.add(peer)
            case m.AskState(least=least) if len(self._lacking) < MOST_NOTED:
                self._lacking[peer] = least
            case m.Join() | m.Ready() | m.Promise() | m.Accepted() | m.Catch():
                self._logless.discard(peer)
                if not isinstance(envelope.body, m.Catch):
                    self._lacking.pop(peer, None)
            case m.Offer() if envelope.body.layout is not None:
                self._lacking.pop(peer, None)
            case _:
                pass

    def lacks_state(self, peer: PeerId, least: int) -> bool:
        """Whether a peer has said that it has no state after entry ``least`` or later."""
        return self._lacking.get(peer, least + 1) <= least

    def with_log(self, now: float) -> list[PeerId]:
        """Who would have the log, where there is none here: the organiser, dead or alive, those who
        have said that they are in a round, and whoever is there and has not asked for it."""
        session = self.session
        inside = [record.peer for record in session.membership.records() if record.round > 0]
        found = dict.fromkeys([session.organiser, *inside, *self.targets(now)])
        return [peer for peer in found if peer != session.me and peer not in self._logless]

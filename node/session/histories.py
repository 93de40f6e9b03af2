"""Who is on another history of the run. There is one certified log, but for what no vote can
prevent:

* *founded twice*: an organiser that lost its state founds the run again. The two logs begin with
  another genesis; both are signed by it.
* *split*: a home from an old copy that was enough to decide alone, while nobody else was there, or
  homes that were copied and went on as two swarms; the organiser's word (`recertifying`) about
  members that vote on elsewhere. The two logs begin alike, and from one round on each has another
  entry, both of them certified by the members of the entry before.

Either is named only with its proof: the other log's first entry that is not ours, verified against
the last one that is. Each side tells the other its own, so both know; neither counts on the other
any more, and both go on if they are enough.

A peer whose answer does not continue our log is asked for older entries until the first that
differs is found: half of what is left with each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...collectives import messages as m
from ...collectives.errors import RemoteProtocolError
from ...collectives.group import Certified
from ...collectives.identifiers import PeerId
from ...collectives.round import RoundMachine, check_genesis, check_log
from . import events as ev
from .watches import OneHistory

if TYPE_CHECKING:
    from .session import Session

COMPARE_S = 5.0  # a peer is asked what of its log is ours again after this long
ASKED_AT_ONCE = 3
MOST_SEARCHED = 64  # peers whose logs are compared at one time
MOST_ANSWERS = 64  # of one peer, until the first entry that differs must have been found


class _Comparison:
    """For the first entry of a peer's log that is not ours: it lies above ``same`` and not above
    ``other``.
    """

    def __init__(self, other: int) -> None:
        self.same, self.other, self.answers = 0, other, 0


class Histories(OneHistory):
    """Of one log."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.splits: dict[PeerId, ev.HistorySplit] = {}
        self._same: set[PeerId] = set()  # their log begins as ours
        self._twice: set[PeerId] = set()  # it begins with another genesis
        self._asked: dict[PeerId, float] = {}  # strangers: when they were asked last
        self._told: dict[PeerId, float] = {}  # of a split: when they were told last
        self._searches: dict[PeerId, _Comparison] = {}

    # ---- asking
    def compare(self, now: float, targets: Callable[[], Sequence[PeerId]]) -> None:
        """The organiser asks strangers for the beginning of their log. ``targets``:
        `PeerSelection.targets`.
        """
        session, machine = self.session, self.session.machine
        assert machine is not None
        asked = self._asked
        if session.me == session.organiser:
            strangers = [
                peer for peer in targets() if peer not in self._same and not session.in_config(peer)
            ]
            self._asked = asked = {
                peer: at for peer in strangers if now - (at := asked.get(peer, -1e9)) < COMPARE_S
            }
            for peer in [peer for peer in strangers if peer not in asked][:ASKED_AT_ONCE]:
                asked[peer] = now
                session.actions.tell(peer, 0, m.Fetch())
        for peer in self.splits:  # it may not have heard of it, and has no other way to
            if now - self._told.get(peer, -1e9) >= COMPARE_S:
                self._told[peer] = now
                self._tell(peer)

    # ---- what is heard
    def ignores(self, peer: PeerId, envelope: m.Envelope) -> bool:
        """Whether a message of the log comes from another history, or proves that its sender is on
        one, or has to be compared first. Raises RemoteProtocolError.
        """
        machine, body = self.session.machine, envelope.body
        if machine is None:
            return False
        foreign = self.session.membership.foreign
        if isinstance(body, m.Catch) and body.entries:
            if body.entries[0].entry.round == 0:
                self._begins(machine, peer, body.entries[0])
            if (peer not in foreign or peer in self.splits) and self._differs(machine, peer, body):
                return True
        elif peer in foreign and isinstance(body, m.Fetch):
            if envelope.round:
                self._tell(peer)
            else:  # it may have nothing by now, and come to us
                self._rejoin(peer)
        return peer in foreign

    def _begins(self, machine: RoundMachine, peer: PeerId, theirs: Certified) -> None:
        """Its first entry is ours, or proves that the run was founded twice."""
        session = self.session
        if theirs.entry.hash() == machine.journal.entries[0].entry.hash():
            self._same.add(peer)
            if peer in self._twice:
                self._rejoin(peer)
        elif peer not in self._twice:
            check_genesis(
                theirs,
                run=session.run,
                organiser=session.organiser,
                verify=session.ports.verify,
                peer=peer,
            )
            self._found(peer, None)

    def _differs(self, machine: RoundMachine, peer: PeerId, body: m.Catch) -> bool:
        """Whether these entries are none of our log, nor continue it."""
        entries = machine.journal.entries
        search = self._searches.get(peer)
        same, other, first = 0, -1, None
        for certified in body.entries:
            entry, at = certified.entry, certified.entry.round
            if at >= len(entries):
                if at == len(entries) and entry.base != entries[-1].entry.hash():
                    other = at - 1  # the one before it is not ours, or it lies
                break
            if entry.hash() == entries[at].entry.hash():
                same = at
            else:
                other, first = at, certified
                break
        if other < 0:
            if search is not None:
                search.same = max(search.same, same)
            elif (split := self.splits.get(peer)) is not None and same >= split.round:
                self._rejoin(peer)  # it gave its own history up
            return search is not None and self._narrow(peer, search)
        if peer in self.splits:
            return True
        if search is None:
            if len(self._searches) >= MOST_SEARCHED:
                self._searches.pop(next(iter(self._searches)))
            search = self._searches[peer] = _Comparison(other)
        if first is not None and other > 0:
            if first.entry.base == entries[other - 1].entry.hash():
                self._split(machine, peer, first, body.head)
                return True
            other -= 1  # nor is what it follows
        search.same, search.other = max(search.same, same), min(search.other, other)
        return self._narrow(peer, search)

    def _narrow(self, peer: PeerId, search: _Comparison) -> bool:
        """Ask for what lies between. Raises RemoteProtocolError where its answers fit no log."""
        search.answers += 1
        if search.answers > MOST_ANSWERS or search.same >= search.other > 0:
            del self._searches[peer]
            raise RemoteProtocolError("its entries are of no one log", peer=peer)
        between = (search.same + search.other + 1) // 2  # 0 where its first entry is not ours
        self.session.actions.tell(peer, between, m.Fetch())
        return True

    def _split(self, machine: RoundMachine, peer: PeerId, theirs: Certified, head: int) -> None:
        """An entry that is not ours follows one that is: if it is certified, there are two."""
        del self._searches[peer]
        session, entries = self.session, machine.journal.entries
        at = theirs.entry.round
        before = entries[at - 1].entry
        check_log(
            [theirs],
            run=session.run,
            log=session.log,
            base=before.hash(),
            config=before.next_config,
            organiser=session.organiser,
            verify=session.ports.verify,
            peer=peer,
            tolerated=session.settings.lying,
        )
        mine = entries[at].entry.hash()
        self._found(
            peer, ev.HistorySplit(at, mine, theirs.entry.hash(), len(entries) - 1, head - 1)
        )

    # ---- what is known
    def _found(self, peer: PeerId, split: ev.HistorySplit | None) -> None:
        self.session.membership.foreign.add(peer)
        if split is not None:
            self.splits[peer] = split
        else:
            self._twice.add(peer)
            self._searches.pop(peer, None)
        self._tell(peer)
        self.session.ports.emit(ev.AnotherHistory(peer, split))

    def _rejoin(self, peer: PeerId) -> None:
        """It has nothing that is not ours any more."""
        self.session.membership.foreign.discard(peer)
        self._twice.discard(peer)
        self.splits.pop(peer, None)
        self._told.pop(peer, None)

    def _tell(self, peer: PeerId) -> None:
        """Our first entry that is none of its log."""
        machine = self.session.machine
        assert machine is not None
        split = self.splits.get(peer)
        first = machine.journal.entries[split.round if split is not None else 0]
        results_from = self.session.actions.results_from()
        self.session.actions.tell(
            peer, first.entry.round, m.Catch((first,), machine.round, results_from)
        )

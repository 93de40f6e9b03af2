"""What became of contributions that an earlier life of this node offered: the run's log tells, once
their round is decided.

The buffer died with that life, so no plan after the open round can name them. Where every script
waits like this, nobody would offer anything to that round: the members ask for an entry without
contributors instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...collectives.group import Entry
from . import events as ev
from .tallies import shares_of

if TYPE_CHECKING:
    from .session import Session


class PriorContributions:
    """Contributions of earlier lives that a script asks for."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._waiting: dict[bytes, int] = {}  # cid -> the first round whose decision settles it

    def ask(self, now: float, cid: bytes) -> None:
        """Answered by one EarlierSettled, at once if the log tells already."""
        session, machine = self.session, self.session.machine
        assert machine is not None
        for certified in reversed(machine.journal.entries):
            if certified.entry.counts(session.me, cid):
                return self._settle(cid, certified.entry)
        if session.spending.gave(cid):  # no entry names it, and it may be in a sum
            return self._settle(cid, machine.journal.entries[-1].entry, counted=True)
        self._waiting[cid] = machine.round
        machine.set_unsettled(now, True)
        return session.settle(now)

    def decided(self, entry: Entry) -> None:
        """An entry is decided and applied. Where it counts the contribution, that settles it.

        That it does not count it settles it only where no later entry of the log can:

        * this process heard somebody vote for the entry. Entries that it was merely handed may be
          from before its home came back from a backup, and the run may be further, with the
          contribution in it;
        * no later entry is known, and the journal is not known to be an old copy;
        * this member is in the configuration. One that is kept out may be kept in under the
          incarnation that offered.

        Otherwise the next entry is waited for, and asked for if need be.
        """
        machine = self.session.machine
        assert machine is not None
        newest = machine.tail.entry.round <= entry.round and not machine.recovery.forgotten
        tells = newest and machine.heard_votes_for(entry) and machine.me in entry.next_config
        for cid, round_ in list(self._waiting.items()):
            if entry.counts(self.session.me, cid) or (tells and round_ <= entry.round):
                del self._waiting[cid]
                self._settle(cid, entry)
        if self._waiting:
            machine.keep_unsettled()

    def forget(self, now: float) -> None:
        """The script is gone."""
        self._waiting.clear()
        if self.session.machine:
            self.session.machine.set_unsettled(now, False)

    def _settle(self, cid: bytes, entry: Entry, counted: bool = False) -> None:
        shares = shares_of(entry.contributors)
        counted = counted or entry.counts(self.session.me, cid)
        self.session.ports.emit(
            ev.EarlierSettled(cid, self.session.rounds(entry.round), shares, counted)
        )

"""Known bugs of what `losses` and `deaths` play: homes from a backup, disks that fail, members that
die for good.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from atoll.collectives.errors import StorageError
from atoll.collectives.group import Entry
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import LastSaid
from atoll.collectives.round import machine as machine_module
from atoll.collectives.round.catching_up import CatchingUp
from atoll.collectives.round.recovery import Recovery
from atoll.node.run.membership import Membership
from atoll.node.session.prior_contributions import PriorContributions
from atoll.node.session.waiting import Waits

from .plant import Plant
from .storage import SimJournal, SimStates, SimStorage

IS_DOUBLED = "is_doubled"  # the attribute of a membership


class _OneLife(Recovery):
    @property
    def forgotten(self) -> int:  # type: ignore[override]
        """It takes nothing for a proof."""
        return 0

    @forgotten.setter
    def forgotten(self, life: int) -> None:
        pass


class OldLifeVotes(Plant):
    """A member whose home came back from a backup goes on voting as the life that it was."""

    moments, recovery = 1.0, _OneLife


class _Forgetful(CatchingUp):
    def answer(self, now: float, peer: PeerId, round_: int, anew: int = 0) -> None:
        recovery = self.view.recovery
        known, recovery.heard_of = recovery.heard_of, LastSaid((), at_once=True)
        super().answer(now, peer, round_, anew)
        recovery.heard_of = known


class _Silent(machine_module.RoundMachine):
    def __init__(self, *, now: float, **given: Any) -> None:
        super().__init__(now=now, **given)
        self.catching_up = _Forgetful(self, now)


class NobodyTells(Plant):
    """Whoever is asked by a process that has just begun does not tell what it heard it say."""

    moments, machine = 1.0, _Silent


class _Hasty(machine_module.RoundMachine):
    @property
    def may_act(self) -> bool:
        """It does not wait for answers."""
        return self.is_member


class NobodyAsks(Plant):
    """A process that has just begun votes before anybody has told what it may have forgotten."""

    moments, machine = 1.0, _Hasty


class _HastyPrior(PriorContributions):
    def decided(self, entry: Entry) -> None:
        """Any entry after the question tells, also one that others decided long ago."""
        for cid in list(self._waiting):
            if self._waiting[cid] <= entry.round:
                del self._waiting[cid]
                self._settle(cid, entry)


class VerdictOfBackup(Plant):
    """A node that came back from a backup says that work is not counted before it knows the entries
    that count it.
    """

    losing, prior = 1.0, _HastyPrior


class BallotZeroAgain(Plant):
    """A process that was started again convenes ballot 0 of the open round, as its earlier life may
    have.
    """

    def crashed(self, storage: SimStorage) -> None:
        """Nothing says that there was an earlier life."""
        storage.journal().restarted = False


class PromiseForgotten(Plant):
    """A promise above the vote is gone after a crash."""

    moments = 1.0

    def crashed(self, storage: SimStorage) -> None:
        """Forget it."""
        journal = storage.journal()
        journal.promised = journal.accepted[0] if journal.accepted is not None else -1


class _MuteWaits(Waits):
    def tick(self, now: float) -> None:
        """Nothing is said."""


class SilentWaiting(Plant):
    """Who waits for a quorum that is dead for good says nothing."""

    dying, waits = 1.0, _MuteWaits


class NewestStateOnly(Plant):
    """Nobody offers a state below the newest one, which nobody can believe alone."""

    moments = dying = 1.0

    @contextmanager
    def planted(self, relayed_above: int | None = None) -> Generator[None]:
        """The older checkpoint is not looked at."""
        saved = SimStates.saved
        SimStates.saved = lambda self, before: None  # type: ignore[method-assign]
        try:
            with super().planted(relayed_above):
                yield
        finally:
            SimStates.saved = saved  # type: ignore[method-assign]


class TwinsUnheard(Plant):
    """Nobody looks whether another process speaks under a member's key: both go on."""

    twins = 1.0

    @contextmanager
    def planted(self, relayed_above: int | None = None) -> Generator[None]:
        """What was seen is forgotten."""
        blind = property(lambda membership: False, lambda membership, seen: None)
        setattr(Membership, IS_DOUBLED, blind)
        try:
            with super().planted(relayed_above):
                yield
        finally:
            delattr(Membership, IS_DOUBLED)


class _OtherSync(Plant):
    moments = power = 1.0

    def sync(self, journal: SimJournal, forced: Callable[[], None]) -> None:
        """What becomes of a sync of the journal."""
        forced()

    @contextmanager
    def planted(self, relayed_above: int | None = None) -> Generator[None]:
        """It is done by `sync`."""
        whole = SimJournal.sync
        SimJournal.sync = (  # type: ignore[method-assign]
            lambda journal: self.sync(journal, lambda: whole(journal))
        )
        try:
            with super().planted(relayed_above):
                yield
        finally:
            SimJournal.sync = whole  # type: ignore[method-assign]


class SyncFailureIgnored(_OtherSync):
    """A sync that failed counts as one that succeeded: what was voted is told, and is gone with the
    power.
    """

    losing = 1.0

    def sync(self, journal: SimJournal, forced: Callable[[], None]) -> None:
        """The error is dropped."""
        try:
            forced()
        except StorageError:
            journal.pretend()


class VoteNotForced(_OtherSync):
    """A vote is not forced, unless something else is that was written after it."""

    def sync(self, journal: SimJournal, forced: Callable[[], None]) -> None:
        """Nothing, where the newest record is a vote."""
        if journal.newest_record == "vote":
            journal.pretend()
        forced()


class PromiseNotForced(_OtherSync):
    """A promise is not forced, unless something else is that was written after it."""

    def sync(self, journal: SimJournal, forced: Callable[[], None]) -> None:
        """Nothing, where the newest record is a promise."""
        if journal.newest_record == "promise":
            journal.pretend()
        forced()


class EntryNotForced(_OtherSync):
    """An entry is not forced, unless something else is that was written after it."""

    def sync(self, journal: SimJournal, forced: Callable[[], None]) -> None:
        """Nothing, where the newest record is an entry."""
        if journal.newest_record == "entry":
            journal.pretend()
        forced()


LOSS_PLANTS: dict[str, type[Plant]] = {
    "old-life-votes": OldLifeVotes,
    "nobody-tells": NobodyTells,
    "nobody-asks": NobodyAsks,
    "verdict-of-backup": VerdictOfBackup,
    "ballot-0-again": BallotZeroAgain,
    "promise-forgotten": PromiseForgotten,
    "silent-waiting": SilentWaiting,
    "newest-state-only": NewestStateOnly,
    "twins-unheard": TwinsUnheard,
    "sync-failure-ignored": SyncFailureIgnored,
    "vote-not-forced": VoteNotForced,
    "promise-not-forced": PromiseNotForced,
    "entry-not-forced": EntryNotForced,
}

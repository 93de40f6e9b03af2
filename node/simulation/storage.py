"""What a simulated member keeps over the life of its process: journal, results, checkpoint. Lost only with the disk itself.

Every write first goes past ``before_write``, where a trap may kill the process: what was not written then never will be.
"""

from __future__ import annotations

from ...collectives.group import Certified, Entry, Vote
from ...collectives.layout import Layout
from ...collectives.round import MemoryJournal, SealRecord
from ...collectives.swarm import OuterSettings
from ..session.kept import Votes
from ..session.memory_storage import MemoryStorage, MemoryVotes
from ..session.ports import Replica
from ..session.record import BranchRecord
from ..session.replica import ModelReplica, PlainSlots


class Observer:
    """Hears of every durable act of a member. The default hears nothing."""

    def before_write(self, kind: str) -> None:
        """A write is about to happen; may raise ProcessDied."""

    def voted(self, ballot: int, entry: Entry) -> None:
        """A vote was recorded."""

    def appended(self, certified: Certified, last: int) -> None:
        """An applied entry was recorded, after ``last`` entries."""

    def published(self, replica: ModelReplica, round_: int) -> None:
        """An anchor became current."""

    def branched(self, record: BranchRecord) -> None:
        """Where it stands without a quorum was recorded."""

    def forgot(self) -> None:
        """The session gave up its journal."""


class SimJournal(MemoryJournal):
    """A journal that survives the process and tells an observer."""

    def __init__(self, observer: Observer, incarnation: int) -> None:
        super().__init__(incarnation)
        self.observer = observer

    def promise(self, ballot: int) -> None:
        """Record a promise."""
        self.observer.before_write("promise")
        super().promise(ballot)

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        """Record a vote."""
        self.observer.before_write("accept")
        super().accept(ballot, entry, proof)
        self.observer.voted(ballot, entry)

    def echo(self, ballot: int, entry: Entry) -> None:
        """Record an echo."""
        self.observer.before_write("echo")
        super().echo(ballot, entry)

    def seal(self, record: SealRecord) -> None:
        """Record a seal."""
        self.observer.before_write("seal")
        super().seal(record)

    def append(self, certified: Certified) -> None:
        """Record an applied entry."""
        self.observer.before_write("append")
        self.observer.appended(certified, len(self.entries))
        super().append(certified)


class SimReplica(ModelReplica):
    """A replica that tells an observer what it publishes."""

    def __init__(self, layout: Layout, outer: OuterSettings, observer: Observer) -> None:
        super().__init__(layout, outer, PlainSlots(layout.numel))
        self.observer = observer

    def publish(self, round_: int) -> None:
        """Make the newest applied generation current."""
        super().publish(round_)
        self.observer.published(self, round_)


class SimStorage(MemoryStorage):
    """The disk of one simulated member."""

    def __init__(self, outer: OuterSettings, observer: Observer) -> None:
        super().__init__(outer)
        self.observer = observer
        self._journal = SimJournal(observer, 0)
        self.replica_now: SimReplica | None = None

    # ---- for the harness
    @property
    def incarnation(self) -> int:
        """The incarnation of the next process."""
        return self._journal.incarnation

    def wipe(self) -> None:
        """The disk is lost, but for the number of lives."""
        self._journal = SimJournal(self.observer, self.incarnation + 1)
        self._layout, self._checkpoint, self._kept, self._from, self._branch = (
            None,
            None,
            {},
            0,
            None,
        )
        self._before = None
        self.votes: Votes = MemoryVotes()

    def reboot(self) -> None:
        """The machine lost power: what was voted for is not known any more, so the next life is a new one with the same log."""
        journal = self._journal
        journal.incarnation, journal.promised, journal.accepted, journal.echoed = (
            journal.incarnation + 1,
            -1,
            None,
            None,
        )

    def end_of_life(self) -> None:
        """The process died; the next one reads what is here."""
        self.restart()
        self.replica_now = None

    def holds(self, entry: Entry) -> bool:
        """Whether the result bytes of an entry are stored."""
        return not entry.contributors or entry.hash() in self._kept

    # ---- ports.Storage, as a session sees it
    def keep_result(self, entry: Entry, data: memoryview) -> None:
        """Keep result bytes."""
        self.observer.before_write("result")
        super().keep_result(entry, data)

    def keep_branch(self, record: BranchRecord) -> None:
        """Keep the branch record."""
        self.observer.before_write("branch")
        self.observer.branched(record)
        super().keep_branch(record)

    def replica(self, layout: Layout, *, restore: bool) -> Replica:
        """A replica of this layout, filled from the checkpoint with ``restore``."""
        replica = self.replica_now = SimReplica(layout, self._outer, self.observer)
        if restore and self._checkpoint:
            round_, data = self._checkpoint
            replica.install(memoryview(data), round_)
            replica.publish(round_)
        return replica

    def checkpoint(self, replica: Replica, entry: Certified, rounds: int) -> None:
        """Keep the state."""
        self.observer.before_write("checkpoint")
        super().checkpoint(replica, entry, rounds)

    def reset(self) -> None:
        """Begin a new incarnation with an empty log."""
        self.observer.forgot()
        self.wipe()

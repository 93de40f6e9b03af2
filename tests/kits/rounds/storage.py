"""What a simulated member keeps over the life of its process: journal, results, checkpoint. Lost
only with the disk itself.

Every write first goes past ``before_write``, where a trap may kill the process: what was not
written then never will be.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

from atoll.collectives.digest import merkle_root
from atoll.collectives.errors import StorageError
from atoll.collectives.group import Certified, Entry, Vote
from atoll.collectives.layout import Layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import SealRecord
from atoll.node.session.memory_storage import MemoryResults, MemoryStates, MemoryStorage
from atoll.node.session.replica import ModelReplica, PlainSlots, bytes_of
from atoll.node.storage import checkpoint as cp
from atoll.node.storage.journal import FileJournal

from .checker import Violation
from .medium import SimMedium

FOLDER = Path("disk")


class Observer:
    """Hears of every durable act of a member. The default hears nothing."""

    def before_write(self, kind: str) -> None:
        """A write is about to happen; may raise ProcessDied."""

    def voted(self, ballot: int, entry: Entry) -> Callable[[], None]:
        """A vote was recorded. What is to be called once it is on the medium, and may be told."""
        return lambda: None

    def appended(self, certified: Certified, last: int) -> None:
        """An applied entry was recorded, after ``last`` entries."""

    def published(self, replica: ModelReplica, round_: int) -> None:
        """An anchor became current."""

    def forgot(self) -> None:
        """The session gave up its journal."""


class SimJournal(FileJournal):
    """The node's journal, on a simulated disk; it tells an observer. A vote is told once it is on
    the medium: before, nobody has heard it.
    """

    WASTE = 2_000

    def __init__(self, observer: Observer, incarnation: int, medium: SimMedium) -> None:
        self.observer = observer
        self._untold = list[tuple[int, Entry, Callable[[], None]]]()
        super().__init__(
            FOLDER / "journal", incarnation=incarnation, medium=medium, boot=str(medium.boots)
        )

    newest_record = ""  # what was written last

    def pretend(self) -> None:
        """A planted bug: the journal believes that all of it is on the medium."""
        self._on_medium = self._end

    def promise(self, ballot: int) -> None:
        """Record a promise."""
        self.observer.before_write("promise")
        super().promise(ballot)
        self.newest_record = "promise"

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        """Record a vote."""
        self.observer.before_write("accept")
        super().accept(ballot, entry, proof)
        self.newest_record = "vote"
        self._untold.append((ballot, entry, self.observer.voted(ballot, entry)))

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
        self.newest_record = "entry"

    def sync(self) -> None:
        """Force it: what was voted may be said from now on."""
        super().sync()
        untold, self._untold = self._untold, []
        for _, _, tell in untold:
            tell()

    def again(self, medium: SimMedium) -> SimJournal:
        """What the next life reads. Raises Violation where it has forgotten what was said."""
        medium.whole = True  # a node that cannot open its files does not start
        later = SimJournal(self.observer, self.incarnation, medium)
        medium.whole = False
        if later.damaged:
            raise Violation("durability", f"a journal that was forced is damaged: {later.damaged}")
        said = [vote for vote in (self.accepted, self.echoed) if vote is not None]
        for ballot, entry, tell in self._untold:
            if later.accepted == (ballot, entry):
                tell()
            said = [vote for vote in said if vote != (ballot, entry)]
        later.told = self.told
        rounds, promised = self.told
        if len(later.entries) < rounds:
            raise Violation(
                "durability", f"{rounds} entries were told of, {len(later.entries)} are left"
            )
        if len(later.entries) == rounds and later.promised < promised:
            raise Violation("durability", f"a promise of ballot {promised} was told and is gone")
        return later

    told: tuple[int, int] = (0, -1)
    """How many entries, and which promise in the open round, messages have told of."""

    def note(self) -> None:
        """Messages that tell of everything written so far may leave."""
        self.told = (len(self.entries), self.promised)

    def forget_votes(self) -> None:
        """The home is an old copy: the log is here, and what was said in the open round is not
        known.
        """
        self._write_vote(-1, None, (), None)
        self.told = (
            self.told[0],
            -1,
        )  # what was promised binds the old life, which never votes again
        self.renew(self.incarnation + 1)


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy of a member's disk, made while it lived."""

    files: dict[Path, dict[str, bytes]]
    incarnation: int
    entries: int
    promised: int
    """In the open round; a vote or an echo promises, too."""
    kept: dict[str, dict[str, Any]]
    """What `SimStorage` has in memory, as if it were on the disk."""


IN_MEMORY = {
    "states": ("_layout", "_checkpoint", "_before", "_begun", "_numel"),
    "results": ("_kept", "_from", "_forced"),
    "spent": ("_keys", "_noisy"),
}


class SimReplica(ModelReplica):
    """A replica that tells an observer what it publishes."""

    def __init__(self, layout: Layout, outer: OuterSettings, observer: Observer) -> None:
        super().__init__(layout, outer, PlainSlots(layout.numel))
        self.observer = observer

    def publish(self, round_: int) -> None:
        """Make the newest applied generation current."""
        super().publish(round_)
        self.observer.published(self, round_)


class SimResults(MemoryResults):
    """Bytes that were not forced may be lost with the power."""

    storage: SimStorage
    forces = True

    def __init__(self, storage: SimStorage) -> None:
        super().__init__(storage)
        self._forced: dict[tuple[int, tuple[bytes, ...]], bytes] = {}

    def clear(self) -> None:
        """The disk is lost."""
        super().clear()
        self._forced = {}

    def lose_power(self, rng: Random) -> None:
        """Half of what was not forced is gone."""
        self._kept = {name: kept for name, kept in self._kept.items() if rng.random() < 0.5}

    def holds(self, entry: Entry) -> bool:
        """Whether the result bytes of an entry are stored."""
        return not entry.contributors or self.kept(entry) is not None

    def force(self, log: str, round_: int, digests: tuple[bytes, ...], data: memoryview) -> None:
        """See Results."""
        self._forced[round_, digests] = bytes(data)

    def keep(self, entry: Entry, data: memoryview) -> None:
        """Keep result bytes."""
        self.storage.observer.before_write("result")
        super().keep(entry, data)

    def kept(self, entry: Entry) -> memoryview | None:
        """Kept bytes."""
        forced = self._forced.get((entry.round, entry.part_digests))
        return memoryview(bytearray(forced)) if forced is not None else super().kept(entry)

    def forget(self, before: int) -> None:
        """Those that were forced, too."""
        super().forget(before)
        self._forced = {key: data for key, data in self._forced.items() if key[0] >= self._from}


class SimStates(MemoryStates):
    """Checkpoints on the medium; what memory says must be what the medium says."""

    storage: SimStorage

    def __init__(self, storage: SimStorage) -> None:
        self._numel = 0  # elements of the checkpoints' anchors
        super().__init__(storage)

    def clear(self) -> None:
        """The disk is lost."""
        super().clear()
        self._begun: list[tuple[int, bytes]] = []
        """Checkpoints since the newest that was told to be kept: the disk failed somewhere in them,
        and each may be there or not.
        """

    def needed(self) -> int:
        """The older checkpoint (as `RunFiles` has it): the name of the newer one may be gone with
        the power.
        """
        return self.checkpointed()

    @property
    def lost(self) -> bool:
        """Whether there was a checkpoint, and none is whole."""
        return self._checkpoint is not None and self.newest() is None

    @property
    def has_one(self) -> bool:
        """Whether a checkpoint was written."""
        return self._checkpoint is not None

    def replica(self, layout: Layout, *, restore: bool) -> ModelReplica:
        """A replica of this layout, with ``restore`` filled from the newest checkpoint that the
        journal reaches.
        """
        replica = self.storage.replica_now = SimReplica(
            layout, self.storage.outer, self.storage.observer
        )
        self._fill(replica, restore)
        return replica

    def checkpoint(self, replica: ModelReplica, entry: Certified, rounds: int) -> None:
        """Keep the state."""
        self.storage.observer.before_write("checkpoint")
        saved = cp.SavedCheckpoint(
            replica.applied, rounds, merkle_root(replica.hashes()), replica.anchor, replica.momentum
        )
        self._numel = replica.layout.numel
        again = self._checkpoint is not None and self._checkpoint[0] == saved.entry
        self._begun.append((saved.entry, bytes(bytes_of(saved.anchor)) + bytes_of(saved.momentum)))
        cp.save(
            FOLDER / "checkpoint",
            replica.layout,
            saved,
            run_id="run",
            entry_hash=entry.entry.hash(),
            medium=self.storage.medium,
            keep_newest=not again,
        )
        super().checkpoint(replica, entry, rounds)
        self._begun.clear()

    def newest(self) -> tuple[int, bytes] | None:
        """The newest checkpoint that is whole. What memory says must be what the medium says."""
        assert self._checkpoint is not None
        newest, before = self._on_medium(cp.NEWEST), self._on_medium(cp.BEFORE)
        if newest is None:
            newest, before = before, None
        if newest is not None and newest != self._checkpoint:
            self._checkpoint, self._before = newest, before
        return newest

    def _on_medium(self, name: str) -> tuple[int, bytes] | None:
        """What a file holds, if it is whole and one of the checkpoints that were written."""
        assert self._checkpoint is not None
        try:
            found = cp.load(
                FOLDER / "checkpoint",
                self._numel,
                len(self._checkpoint[1]) // 4 - self._numel,
                medium=self.storage.medium,
                name=name,
            )
        except StorageError:
            return None
        if found is None:
            return None
        data = bytes(bytes_of(found.anchor)) + bytes_of(found.momentum)
        known = (self._checkpoint, self._before, *self._begun)
        return next((kept for kept in known if kept is not None and data == kept[1]), None)


class SimStorage(MemoryStorage):
    """The disk of one simulated member: the node's journal and checkpoints on a `SimMedium`; the
    rest in memory, as if it were forced at once.
    """

    def __init__(self, outer: OuterSettings, observer: Observer, rng: Random, skip: str) -> None:
        """``skip``: see `SimMedium`."""
        super().__init__(outer)
        self.observer = observer
        self._rng, self._skip = rng, skip
        self.medium = SimMedium(rng, skip)
        self._journal = SimJournal(observer, 0, self.medium)
        self.replica_now: SimReplica | None = None
        self.states: SimStates = SimStates(self)
        self.results: SimResults = SimResults(self)

    # ---- for the harness
    @property
    def incarnation(self) -> int:
        """The incarnation of the next process."""
        return self.journal().incarnation

    def wipe(self) -> None:
        """The disk is lost, but for the number of lives."""
        self.medium = SimMedium(self._rng, self._skip)
        self._journal = SimJournal(self.observer, self.incarnation + 1, self.medium)
        self.states.clear()
        self.results.clear()

    def backup(self) -> Backup | None:
        """A copy of what is here now; None where the run was not entered yet."""
        journal = self.journal()
        if not journal.entries or not self.states.has_one:
            return None
        return Backup(
            self.medium.copy(),
            journal.incarnation,
            len(journal.entries),
            journal.promised,
            {
                part: {name: copy(getattr(getattr(self, part), name)) for name in names}
                for part, names in IN_MEMORY.items()
            },
        )

    def restore_backup(self, backup: Backup) -> None:
        """A copy takes the place of the disk, of a dead member, on the same machine. Who restores
        one makes room for it: no call of it fails.
        """
        fail, self.medium.fail = self.medium.fail, {}
        self.medium.fill(backup.files)
        for part, values in backup.kept.items():
            for name, value in values.items():
                setattr(getattr(self, part), name, copy(value))
        self._journal = SimJournal(self.observer, backup.incarnation, self.medium)
        self.medium.fail = fail

    def renew(self) -> None:
        """The home turned out to be an old copy: the next life is a new one with the same log."""
        self.journal().forget_votes()

    def end_of_life(self, *, power: bool = False) -> None:
        """The process died, or with ``power`` the machine; the next one reads what is here."""
        self.replica_now = None
        if power:
            self.medium.cut()
            self.results.lose_power(self._rng)
        else:
            self.medium.kill()
        self._journal = self.journal().again(self.medium)
        if self.states.lost:
            raise Violation("durability", "no whole checkpoint is left")

    # ---- ports.Storage, as a session sees it
    def journal(self) -> SimJournal:
        """The journal."""
        return cast(SimJournal, self._journal)

    @property
    def written(self) -> int:
        """See Storage."""
        return self.journal().written

    def sync(self) -> None:
        """See Storage."""
        self.journal().sync()
        self.journal().note()

    def found(self, replica: ModelReplica, genesis: Certified) -> None:
        """Keep layout, initial state and genesis."""
        super().found(replica, genesis)
        self.journal().sync()

    def reset(self) -> None:
        """Begin a new incarnation with an empty log."""
        self.observer.forgot()
        self.wipe()

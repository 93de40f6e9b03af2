"""The Storage of one run on disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from blake3 import blake3

from ...collectives.digest import merkle_root
from ...collectives.errors import StorageError
from ...collectives.group import Certified, Entry
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from ...collectives.round_settings import MOST_REPLAYED
from ...optim.outer import OuterStep
from ..home.private_folders import make_private
from ..session.record import MAX_SPENT
from ..session.replica import ModelReplica, Slots, bytes_of
from . import checkpoint as cp
from .contributions import ContributionFiles
from .journal import FileJournal
from .medium import REAL, storage_error, write_atomically
from .results import ResultFiles
from .spent import SpentCounter

log = logging.getLogger("atoll")
SET_ASIDE = "set-aside"
_layout = msgspec.msgpack.Decoder(Layout)


def result_name(log: str, round_: int, digests: tuple[bytes, ...]) -> str:
    """What result bytes are called before there is an entry that names them."""
    return f"{round_}-{blake3(log.encode() + b''.join(digests)).hexdigest(16)}"


def _name_of(entry: Entry) -> str:
    return result_name(entry.log, entry.round, entry.part_digests)


class RunFiles:
    """Implements `session.ports.Storage` under one folder. ``slots`` makes the memory for anchor
    generations.

    ``trouble`` is told (from any thread) when damaged local state cannot be used, or the state
    could not be written. Damaged state is set aside and fetched anew; but where ``me`` is the only
    member known, nothing is touched and StorageError E303 is raised, by the constructor or later by
    `reset` and `check`. ``founded``: the file that says that this organiser has founded the run.
    State that belongs to another peer than ``me`` is refused untouched (StorageError E309).
    ``first_life``: the incarnation to begin with where nothing is on disk, larger than that of any
    earlier folder: what a lost journal has voted for is not known any more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        outer: OuterSettings,
        slots: Callable[[int], Slots],
        trouble: Callable[[StorageError], None],
        me: str = "",
        organiser: str | None = None,
        founded: Path | None = None,
        first_life: int = 0,
        keep_contributions: int = 0,
    ) -> None:
        self._folder, self._run_id, self._outer, self._slots, self._trouble = (
            folder,
            run_id,
            outer,
            slots,
            trouble,
        )
        self._first_life = first_life
        self._me, self._organiser, self._founded = me, organiser, founded or folder / "founded"
        self.damage: StorageError | None = None
        """What of the local state could not be used in this life."""
        self.unsaved: StorageError | None = None
        """Why the state could not be written last time."""
        self._journal = self._open_journal(self._life())
        self.contributions = (
            ContributionFiles(folder, keep_contributions, trouble) if keep_contributions else None
        )
        self._budget = SpentCounter(folder / "privacy")
        self._results = ResultFiles(folder / "results")
        self._saved: list[int] = []  # the entries of the checkpoints on disk, the older first
        self._newest_whole = True
        self._from = self._spends = self._written_before = 0
        self._spent_unforced = False
        self._spent_renewed = False
        self._spent_lost: StorageError | None = None  # why a sync of them failed
        if self._journal.damaged:
            self._damaged(cp.damaged(folder / "journal", self._journal.damaged, alone=self.alone))
            try:
                self._begin_anew()
            except StorageError:
                self._journal.close(clean=False)
                raise
            return
        if self._journal.blemish:
            trouble(cp.damaged(folder / "journal", self._journal.blemish, alone=False))
        if self._journal.rebooted:
            self._journal.note_boot()
        if self._journal.entries and not self._founded.exists():
            self._mark_founded()  # power went while the run was being founded

    def _open_journal(self, incarnation: int) -> FileJournal:
        return FileJournal(self._folder / "journal", incarnation=incarnation, owner=self._me)

    # ---- what must be on the medium
    @property
    def written(self) -> int:
        return self._written_before + self._journal.written + self._spends

    def sync(self) -> None:
        if self._spent_lost is not None:
            raise self._spent_lost
        spent, self._spent_unforced = self._spent_unforced, False
        self._journal.sync()
        if spent:
            path = self._folder / "operations"
            try:
                file = REAL.open(path)
                try:
                    REAL.sync(file)
                finally:
                    REAL.close(file)
                REAL.sync_folder(self._folder)
            except OSError as error:
                # As the journal's: the next sync would succeed without what this one has forgotten.
                self._spent_lost = storage_error(path, error)
                raise self._spent_lost from error

    @property
    def forces_results(self) -> bool:
        return True

    def force_result(
        self, log: str, round_: int, digests: tuple[bytes, ...], data: memoryview
    ) -> None:
        self._results.keep(result_name(log, round_, digests), round_, data, forced=True)

    # ---- who has the state
    @property
    def alone(self) -> bool:
        """Whether this member is the only one known to have the run's state."""
        newest = self._journal.newest
        if newest is None:
            return self._me == self._organiser and self.was_founded
        return {member.peer for member in newest.entry.next_config} <= {self._me}

    def check(self) -> None:
        """To be called when the state is not here after the start. Raises StorageError E303 where
        nobody else can have it.
        """
        if self.alone:
            raise self.lost()

    def lost(self) -> StorageError:
        """The error for an organiser whose run was founded here, whose state is gone, and who
        reaches no other member.
        """
        return self.damage or StorageError(
            f"this run was founded here and its state is missing: {self._folder / 'journal'}",
            code="E303",
            exit_code=74,
            why=(
                "Founded again it would have two histories. No other member "
                "answers that has its state."
            ),
            hint=(
                "Start another member's node first: the state comes from there. Or restore "
                "the folder from a backup."
            ),
        )

    def _damaged(self, error: StorageError) -> None:
        self.damage = error
        self._trouble(error)

    # ---- journal
    def journal(self) -> FileJournal:
        return self._journal

    @property
    def was_founded(self) -> bool:
        """Whether this member ever held the run's state: its founder must not found it twice."""
        return self._founded.exists() or bool(self._journal.entries)

    def layout(self) -> Layout | None:
        try:
            return _layout.decode((self._folder / "layout").read_bytes())
        except FileNotFoundError:
            return cp.saved_layout(self._folder / "checkpoint")
        except (OSError, msgspec.MsgspecError) as error:
            copy = cp.saved_layout(self._folder / "checkpoint")
            self._damaged(
                cp.damaged(self._folder / "layout", str(error), alone=self.alone and copy is None)
            )
            return copy

    def save_layout(self, layout: Layout) -> None:
        """Keep the layout. The control loop waits for the disk, once, before the state comes."""
        write_atomically(self._folder / "layout", msgspec.msgpack.encode(layout))
        self._mark_founded()

    def _mark_founded(self) -> None:
        if self._me == self._organiser:
            make_private(self._founded.parent)
            write_atomically(self._founded, b"1\n")

    # ---- results
    def allocate(self, nbytes: int) -> memoryview:
        return self._results.allocate(nbytes)

    def keep_result(self, entry: Entry, data: memoryview) -> None:
        """Name result bytes, unless `force_result` has."""
        if not self._results.has(_name_of(entry)):
            self._results.keep(entry.hash().hex(), entry.round, data, forced=False)

    def kept(self, entry: Entry) -> memoryview | None:
        data = self._results.kept(_name_of(entry))
        return data if data is not None else self._results.kept(entry.hash().hex())

    def results_from(self) -> int:
        """Oldest round from which on all results are kept."""
        return self._from

    def forget_results(self, before: int) -> None:
        """Older results may go, but none newer than the older checkpoint: it is as good as the
        newer one only with them.
        """
        limit = min(before, (self._saved[0] if self._saved else -1) + 1)
        self._from = max(self._from, limit)
        try:
            self._results.forget(limit)
        except (
            StorageError
        ) as error:  # the list on disk still names them: they are only kept for longer
            self._trouble(error)

    def installed(self, round_: int) -> None:
        """Results up to this round are not here; state that was set aside is no longer of use."""
        self._from = max(self._from, round_ + 1)
        shutil.rmtree(self._folder / SET_ASIDE, ignore_errors=True)

    # ---- state
    def state_bytes(self, layout: Layout) -> int:
        return OuterStep(self._outer, layout).state_bytes(layout.numel)

    def replica(self, layout: Layout, *, restore: bool) -> ModelReplica:
        """A replica, with ``restore`` filled from the checkpoint; a damaged checkpoint is told and
        left out.

        One that is ahead of the journal is no damage, and only noted. Where nobody else has the
        state, `check` raises it.
        """
        replica = ModelReplica(layout, self._outer, self._slots(layout.numel))
        if restore:
            try:
                self._restore(replica)
            except cp.AheadError as error:
                self.damage = error
                log.info("run %s: %s", self._run_id, error.message)
            except StorageError as error:
                self._damaged(error)
        return replica

    def _restore(self, replica: ModelReplica) -> None:
        """From the newest checkpoint that is whole and that the journal reaches.

        A power cut may leave a newest one that the journal does not reach yet, or none between two
        renames: that is noted where the one before serves. The other one is told where it is
        damaged. Raises StorageError where neither serves.
        """
        folder = self._folder / "checkpoint"
        damage, ahead = list[StorageError](), list[cp.AheadError]()
        for name in (cp.NEWEST, cp.BEFORE):
            try:
                saved = self._load(replica, name)
            except cp.AheadError as error:
                ahead.append(error)
                continue
            except StorageError as error:
                damage.append(error)
                continue
            if saved is None:
                continue
            for error in damage:
                self._trouble(error)
            if name == cp.BEFORE and not damage:
                why = ahead[0].message if ahead else f"{folder / cp.NEWEST} is missing"
                log.info("run %s: %s: entry %d is taken", self._run_id, why, saved.entry)
            replica.publish(saved.entry)
            older = cp.entry_of(folder, cp.BEFORE) if name == cp.NEWEST else None
            self._saved = sorted({saved.entry, saved.entry if older is None else older})
            self._newest_whole = name == cp.NEWEST
            self._from = saved.entry + 1
            while self._saved[0] < self._from - 1 and self._has(
                self._journal.entries[self._from - 1].entry
            ):
                self._from -= 1
            return
        raise next(iter([*damage, *ahead]), cp.damaged(folder, "it is missing", alone=self.alone))

    def _load(self, replica: ModelReplica, name: str) -> cp.SavedCheckpoint | None:
        """Fill a replica from one checkpoint; None where there is none. Raises StorageError,
        `cp.AheadError`.
        """
        folder = self._folder / "checkpoint"
        saved = cp.load(
            folder, replica.layout.numel, replica.momentum.numel(), alone=self.alone, name=name
        )
        if saved is None:
            return None
        if saved.entry >= len(self._journal.entries):
            raise cp.AheadError(folder / name, saved.entry, alone=self.alone)
        both = bytearray(bytes_of(saved.anchor)) + bytes_of(saved.momentum)
        replica.install(memoryview(both), saved.entry)
        if merkle_root(replica.hashes()) != saved.root:
            raise cp.damaged(folder / name, "its digest is wrong", alone=self.alone)
        return saved

    def _has(self, entry: Entry) -> bool:
        return (
            not entry.contributors
            or self._results.has(_name_of(entry))
            or self._results.has(entry.hash().hex())
        )

    def saved(self, before: int) -> tuple[int, memoryview] | None:
        """What the newest file holds is kept for the time in which the one before it is sought. A
        checkpoint that is written meanwhile renames the files that are read here: each is read
        through one descriptor, and judged by what it says itself.
        """
        folder, layout = self._folder / "checkpoint", self.layout()
        if layout is None:
            return None
        for name in (cp.NEWEST, cp.BEFORE):
            entry = cp.entry_of(folder, name)
            if entry is None or not self._from - 1 <= entry < before:
                continue
            try:
                saved = cp.load(folder, layout.numel, self._momentum_numel(layout), name=name)
            except StorageError as error:
                self._trouble(error)
                continue
            if saved is not None and self._from - 1 <= saved.entry < before:
                return saved.entry, memoryview(
                    bytearray(bytes_of(saved.anchor)) + bytes_of(saved.momentum)
                )
        return None

    def _momentum_numel(self, layout: Layout) -> int:
        return OuterStep(self._outer, layout).state_numel(layout.numel)

    def found(self, replica: ModelReplica, genesis: Certified) -> None:
        """Initial state, layout and genesis, all on the medium, or nothing. The mark that it was
        founded comes last.

        The control loop waits for it: once in a run's life, before there is a round or another
        member, and what follows stands on it.
        """
        try:
            self._save(replica, genesis, 0)
            write_atomically(self._folder / "layout", msgspec.msgpack.encode(replica.layout))
            self._journal.append(genesis)
            self._journal.sync()
            self._mark_founded()
        except StorageError:
            for file in (self._founded, self._folder / "layout"):
                file.unlink(missing_ok=True)
            shutil.rmtree(self._folder / "checkpoint", ignore_errors=True)
            self._saved = []
            raise

    def _save(self, replica: ModelReplica, entry: Certified, rounds: int) -> None:
        self._journal.sync()  # a checkpoint that the journal does not reach is of no use
        saved = cp.SavedCheckpoint(
            replica.applied, rounds, merkle_root(replica.hashes()), replica.anchor, replica.momentum
        )
        # The same one twice, where the older has fallen so far behind that there is no room for the
        # results since then: two are whole, and these results may go.
        behind = bool(self._saved) and saved.entry - self._saved[0] > 2 * MOST_REPLAYED
        another = self._saved[-1:] != [saved.entry] or behind
        cp.save(
            self._folder / "checkpoint",
            replica.layout,
            saved,
            run_id=self._run_id,
            entry_hash=entry.entry.hash(),
            keep_newest=self._newest_whole and another,
        )
        self._newest_whole = True
        if another:
            self._saved = [*self._saved[-1:], saved.entry]

    def checkpoint(self, replica: ModelReplica, entry: Certified, rounds: int) -> None:
        """Write the current state to disk; told, not raised, when that fails: the last checkpoint
        and all later results stay.
        """
        try:
            self._save(replica, entry, rounds)
        except StorageError as error:
            self.unsaved = error
            self._trouble(error)
        else:
            self.unsaved = None

    def checkpointed(self) -> int:
        """The entry of the older checkpoint on disk; -1 where there is none."""
        return self._saved[0] if self._saved else -1

    # ---- operations
    def spent(self) -> list[str]:
        """Operations voted in; the file is cut to the newest when it is read, and as often as so
        many were added. The first time it is written anew: an earlier life's sync may have failed.
        """
        file = self._folder / "operations"
        try:
            lines = file.read_text(encoding="ascii", errors="replace").split()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(file, error) from error
        if len(lines) > MAX_SPENT or not self._spent_renewed:
            lines = lines[-MAX_SPENT:]
            write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
        self._spent_renewed = True
        return lines

    def spend(self, key: str) -> None:
        """One short line, on the medium before anything is said in the operation."""
        path = self._folder / "operations"
        self._spends += 1
        if self._spends % MAX_SPENT == 0:
            self.spent()
        try:
            with open(path, "a", encoding="ascii") as file:
                file.write(key + "\n")
        except OSError as error:
            raise storage_error(path, error) from error
        self._spent_unforced = True

    def noisy(self) -> int:
        return self._budget.count()

    def noisy_entry(self) -> int:
        return self._budget.last()

    def spend_noisy(self, entry: int) -> None:
        """One more; on the medium before it is handed over."""
        self._budget.add(entry)

    def raise_noisy(self, steps: int) -> None:
        self._budget.raise_to(steps)

    # ---- life
    def lacks_results(self) -> None:
        """They are fetched, if there is somebody to have them; votes and promises are all here, so
        it is the same life.
        """
        self._damaged(
            cp.damaged(
                self._folder / "results",
                "results since the checkpoint are missing or changed",
                alone=self.alone,
            )
        )
        self.check()

    def reset(self) -> None:
        """A new incarnation with an empty log. Raises StorageError."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Set the state aside, take a new incarnation. The old state stays until a new one has been
        fetched.
        """
        self.check()
        incarnation, aside = self._journal.incarnation + 1, self._folder / SET_ASIDE
        self._journal.close(clean=False)
        # Also where a kill leaves us without a journal.
        write_atomically(self._folder / "life", b"%d\n" % incarnation)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(mode=0o700)
            for name in ("checkpoint", "layout", "journal"):
                if (self._folder / name).exists():
                    (self._folder / name).rename(aside / name)
            REAL.sync_folder(aside)
            # Else the old journal could come back as the life that it was.
            REAL.sync_folder(self._folder)
        except OSError as error:
            raise storage_error(aside, error) from error
        self._results.clear()
        if self._journal.sealed is None:
            (self._folder / "seal").unlink(missing_ok=True)  # unreadable, if it is there
        self._written_before += self._journal.written
        self._journal = self._open_journal(incarnation)
        self._saved, self._newest_whole, self._from = [], True, 0

    def _life(self) -> int:
        """The incarnation of a journal that is made now."""
        try:
            return max(self._first_life, int((self._folder / "life").read_text()))
        except (OSError, ValueError):
            return self._first_life

    def close(self) -> None:
        """End of the run at this node; nothing on disk changes but the journal's end. Raises
        StorageError.
        """
        self._results.close()
        self._journal.close()

"""The Storage of one run on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...collectives.errors import StorageError
from ...collectives.group import Certified
from ...collectives.outer_rules import OuterSettings
from ..home.private_folders import make_private
from ..session.replica import ModelReplica, Slots
from . import checkpoint as cp
from .contributions import ContributionFiles
from .entry_results import EntryResults
from .journal import FileJournal
from .medium import REAL, storage_error, write_atomically
from .spent import SpentFiles
from .states import StateFiles

SET_ASIDE = "set-aside"


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
        self.folder, self.run_id, self.trouble = folder, run_id, trouble
        self._first_life = first_life
        self._me, self._organiser, self._founded = me, organiser, founded or folder / "founded"
        self.damage: StorageError | None = None
        """What of the local state could not be used in this life."""
        self._journal = self._open_journal(self._life())
        self.contributions = (
            ContributionFiles(folder, keep_contributions, trouble) if keep_contributions else None
        )
        self.spent = SpentFiles(folder)
        self.states = StateFiles(self, outer, slots)
        self.results = EntryResults(folder / "results", self.states.checkpointed, trouble)
        self._written_before = 0
        if self._journal.damaged:
            self.note_damage(
                cp.damaged(folder / "journal", self._journal.damaged, alone=self.alone)
            )
            try:
                self.reset()
            except StorageError:
                self._journal.close(clean=False)
                raise
            return
        if self._journal.blemish:
            trouble(cp.damaged(folder / "journal", self._journal.blemish, alone=False))
        if self._journal.rebooted:
            self._journal.note_boot()
        if self._journal.entries and not self._founded.exists():
            self.mark_founded()  # power went while the run was being founded

    def _open_journal(self, incarnation: int) -> FileJournal:
        return FileJournal(self.folder / "journal", incarnation=incarnation, owner=self._me)

    # ---- what must be on the medium
    @property
    def written(self) -> int:
        return self._written_before + self._journal.written + self.spent.written

    def sync(self) -> None:
        self.spent.sync(self._journal.sync)

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
            f"this run was founded here and its state is missing: {self.folder / 'journal'}",
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

    def note_damage(self, error: StorageError) -> None:
        """Local state cannot be used."""
        self.damage = error
        self.trouble(error)

    # ---- journal
    def journal(self) -> FileJournal:
        return self._journal

    @property
    def was_founded(self) -> bool:
        """Whether this member ever held the run's state: its founder must not found it twice."""
        return self._founded.exists() or bool(self._journal.entries)

    def mark_founded(self) -> None:
        """Remember that this organiser has founded the run. Raises StorageError."""
        if self._me == self._organiser:
            make_private(self._founded.parent)
            write_atomically(self._founded, b"1\n")

    def installed(self, round_: int) -> None:
        """Results up to this round are not here; state that was set aside is no longer of use."""
        self.results.begin_at(max(self.results.first(), round_ + 1))
        shutil.rmtree(self.folder / SET_ASIDE, ignore_errors=True)

    def found(self, replica: ModelReplica, genesis: Certified) -> None:
        """Initial state, layout and genesis, all on the medium, or nothing. The mark that it was
        founded comes last.

        The control loop waits for it: once in a run's life, before there is a round or another
        member, and what follows stands on it.
        """
        try:
            self.states.write(replica, genesis, 0)
            write_atomically(self.folder / "layout", msgspec.msgpack.encode(replica.layout))
            self._journal.append(genesis)
            self._journal.sync()
            self.mark_founded()
        except StorageError:
            for file in (self._founded, self.folder / "layout"):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)
            self.states.clear()
            raise

    # ---- life
    def lacks_results(self) -> None:
        """They are fetched, if there is somebody to have them; votes and promises are all here, so
        it is the same life.
        """
        self.note_damage(
            cp.damaged(
                self.folder / "results",
                "results since the checkpoint are missing or changed",
                alone=self.alone,
            )
        )
        self.check()

    def reset(self) -> None:
        """Set the state aside, take a new incarnation with an empty log. The old state stays until
        a new one has been fetched. Raises StorageError.
        """
        self.check()
        incarnation, aside = self._journal.incarnation + 1, self.folder / SET_ASIDE
        self._journal.close(clean=False)
        # Also where a kill leaves us without a journal.
        write_atomically(self.folder / "life", b"%d\n" % incarnation)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(mode=0o700)
            for name in ("checkpoint", "layout", "journal"):
                if (self.folder / name).exists():
                    (self.folder / name).rename(aside / name)
            REAL.sync_folder(aside)
            # Else the old journal could come back as the life that it was.
            REAL.sync_folder(self.folder)
        except OSError as error:
            raise storage_error(aside, error) from error
        self.results.clear()
        if self._journal.sealed is None:
            (self.folder / "seal").unlink(missing_ok=True)  # unreadable, if it is there
        self._written_before += self._journal.written
        self._journal = self._open_journal(incarnation)
        self.states.clear()

    def _life(self) -> int:
        """The incarnation of a journal that is made now."""
        try:
            return max(self._first_life, int((self.folder / "life").read_text()))
        except (OSError, ValueError):
            return self._first_life

    def close(self) -> None:
        """End of the run at this node; nothing on disk changes but the journal's end. Raises
        StorageError.
        """
        self.results.close()
        self._journal.close()

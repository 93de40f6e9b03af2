"""The states of one log on disk: the model's layout, and two checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ...collectives.digest import merkle_root
from ...collectives.errors import StorageError
from ...collectives.group import Certified
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from ...collectives.round_settings import MOST_REPLAYED
from ...optim.outer import OuterStep
from ..session.replica import ModelReplica, Slots, bytes_of
from . import checkpoint as cp
from .medium import write_atomically

if TYPE_CHECKING:
    from .run_files import RunFiles

log = logging.getLogger("atoll")
_layout = msgspec.msgpack.Decoder(Layout)


class StateFiles:
    """Implements `session.ports.States` for the files of a run; ``slots`` makes the memory for
    anchor generations.
    """

    def __init__(
        self, files: RunFiles, outer: OuterSettings, slots: Callable[[int], Slots]
    ) -> None:
        self._files, self._outer, self._slots = files, outer, slots
        self._folder = files.folder
        self._checkpoints = files.folder / "checkpoint"
        self.unsaved: StorageError | None = None
        """Why the state could not be written last time."""
        self._saved: list[int] = []  # the entries of the checkpoints on disk, the older first
        self._newest_whole = True

    def clear(self) -> None:
        """All are set aside, of a life that is over."""
        self._saved, self._newest_whole = [], True

    def layout(self) -> Layout | None:
        try:
            return _layout.decode((self._folder / "layout").read_bytes())
        except FileNotFoundError:
            return cp.saved_layout(self._checkpoints)
        except (OSError, msgspec.MsgspecError) as error:
            copy = cp.saved_layout(self._checkpoints)
            self._files.note_damage(
                cp.damaged(
                    self._folder / "layout", str(error), alone=self._files.alone and copy is None
                )
            )
            return copy

    def save_layout(self, layout: Layout) -> None:
        """Keep the layout. The control loop waits for the disk, once, before the state comes."""
        write_atomically(self._folder / "layout", msgspec.msgpack.encode(layout))
        self._files.mark_founded()

    def state_bytes(self, layout: Layout) -> int:
        return OuterStep(self._outer, layout).state_bytes(layout.numel)

    def replica(self, layout: Layout, *, restore: bool) -> ModelReplica:
        """A replica, with ``restore`` filled from the checkpoint; a damaged checkpoint is told and
        left out.

        One that is ahead of the journal is no damage, and only noted. Where nobody else has the
        state, `RunFiles.check` raises it.
        """
        replica = ModelReplica(layout, self._outer, self._slots(layout.numel))
        if restore:
            try:
                self._restore(replica)
            except cp.AheadError as error:
                self._files.damage = error
                log.info("run %s: %s", self._files.run_id, error.message)
            except StorageError as error:
                self._files.note_damage(error)
        return replica

    def _restore(self, replica: ModelReplica) -> None:
        """From the newest checkpoint that is whole and that the journal reaches.

        A power cut may leave a newest one that the journal does not reach yet, or none between two
        renames: that is noted where the one before serves. The other one is told where it is
        damaged. Raises StorageError where neither serves.
        """
        folder = self._checkpoints
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
                self._files.trouble(error)
            if name == cp.BEFORE and not damage:
                why = ahead[0].message if ahead else f"{folder / cp.NEWEST} is missing"
                log.info("run %s: %s: entry %d is taken", self._files.run_id, why, saved.entry)
            replica.publish(saved.entry)
            older = cp.entry_of(folder, cp.BEFORE) if name == cp.NEWEST else None
            self._saved = sorted({saved.entry, saved.entry if older is None else older})
            self._newest_whole = name == cp.NEWEST
            first, entries = saved.entry + 1, self._files.journal().entries
            while self._saved[0] < first - 1 and self._files.results.has(entries[first - 1].entry):
                first -= 1
            self._files.results.begin_at(first)
            return
        raise next(
            iter([*damage, *ahead]), cp.damaged(folder, "it is missing", alone=self._files.alone)
        )

    def _load(self, replica: ModelReplica, name: str) -> cp.SavedCheckpoint | None:
        """Fill a replica from one checkpoint; None where there is none. Raises StorageError,
        `cp.AheadError`.
        """
        folder = self._checkpoints
        saved = cp.load(
            folder,
            replica.layout.numel,
            replica.momentum.numel(),
            alone=self._files.alone,
            name=name,
        )
        if saved is None:
            return None
        if saved.entry >= len(self._files.journal().entries):
            raise cp.AheadError(folder / name, saved.entry, alone=self._files.alone)
        both = bytearray(bytes_of(saved.anchor)) + bytes_of(saved.momentum)
        replica.install(memoryview(both), saved.entry)
        if merkle_root(replica.hashes()) != saved.root:
            raise cp.damaged(folder / name, "its digest is wrong", alone=self._files.alone)
        return saved

    def saved(self, before: int) -> tuple[int, memoryview] | None:
        """What the newest file holds is kept for the time in which the one before it is sought. A
        checkpoint that is written meanwhile renames the files that are read here: each is read
        through one descriptor, and judged by what it says itself.
        """
        folder, layout = self._checkpoints, self.layout()
        first = self._files.results.first()
        if layout is None:
            return None
        for name in (cp.NEWEST, cp.BEFORE):
            entry = cp.entry_of(folder, name)
            if entry is None or not first - 1 <= entry < before:
                continue
            try:
                saved = cp.load(folder, layout.numel, self._momentum_numel(layout), name=name)
            except StorageError as error:
                self._files.trouble(error)
                continue
            if saved is not None and first - 1 <= saved.entry < before:
                return saved.entry, memoryview(
                    bytearray(bytes_of(saved.anchor)) + bytes_of(saved.momentum)
                )
        return None

    def _momentum_numel(self, layout: Layout) -> int:
        return OuterStep(self._outer, layout).state_numel(layout.numel)

    def write(self, replica: ModelReplica, entry: Certified, rounds: int) -> None:
        """Raises StorageError."""
        self._files.journal().sync()  # a checkpoint that the journal does not reach is of no use
        saved = cp.SavedCheckpoint(
            replica.applied, rounds, merkle_root(replica.hashes()), replica.anchor, replica.momentum
        )
        # The same one twice, where the older has fallen so far behind that there is no room for the
        # results since then: two are whole, and these results may go.
        behind = bool(self._saved) and saved.entry - self._saved[0] > 2 * MOST_REPLAYED
        another = self._saved[-1:] != [saved.entry] or behind
        cp.save(
            self._checkpoints,
            replica.layout,
            saved,
            run_id=self._files.run_id,
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
            self.write(replica, entry, rounds)
        except StorageError as error:
            self.unsaved = error
            self._files.trouble(error)
        else:
            self.unsaved = None

    def checkpointed(self) -> int:
        """The entry of the older checkpoint on disk; -1 where there is none."""
        return self._saved[0] if self._saved else -1

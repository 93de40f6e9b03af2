"""Storage in memory: survives a simulated crash, and serves members that keep nothing on disk."""

from __future__ import annotations

from ...collectives.group import Certified, Entry
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from ...collectives.round import Journal, MemoryJournal
from ...optim.outer import OuterStep
from .ports import Contributions
from .record import MAX_SPENT
from .replica import ModelReplica, PlainSlots


class MemoryStorage:
    """Implements `ports.Storage`. A simulated crash keeps the object; `restart` is called before
    the next life uses it.
    """

    def __init__(self, outer: OuterSettings, incarnation: int = 0) -> None:
        self._outer = outer
        self._journal: Journal = MemoryJournal(incarnation)
        self._layout: Layout | None = None
        self._kept: dict[bytes, tuple[int, bytes]] = {}
        self._from = 0
        self._spent: list[str] = []
        self._noisy, self._noisy_entry = 0, -1
        self.contributions: Contributions | None = None
        self._checkpoint: tuple[int, bytes] | None = None
        self._before: tuple[int, bytes] | None = None  # the checkpoint before it

    def restart(self) -> None:
        """The process died and comes back."""
        self._journal.restarted = True

    def copy(self) -> MemoryStorage:
        """A backup: what is here now."""
        copy = MemoryStorage(self._outer, self._journal.incarnation)
        mine, its = self._journal, copy._journal
        for certified in mine.entries.since(0):
            its.append(certified)
        its.promised, its.accepted, its.sealed = mine.promised, mine.accepted, mine.sealed
        its.restarted = True
        copy._layout, copy._from = self._layout, self._from
        copy._kept, copy._spent = dict(self._kept), list(self._spent)
        copy._noisy, copy._noisy_entry = self._noisy, self._noisy_entry
        copy._checkpoint, copy._before = self._checkpoint, self._before
        return copy

    def journal(self) -> Journal:
        return self._journal

    @property
    def was_founded(self) -> bool:
        """A later life than the first has lost what it held."""
        return self._journal.incarnation > 0 or bool(self._journal.entries)

    @property
    def written(self) -> int:
        """Nothing is: there is no medium."""
        return 0

    def sync(self) -> None:
        """There is no medium."""

    @property
    def forces_results(self) -> bool:
        return False

    def force_result(
        self, log: str, round_: int, digests: tuple[bytes, ...], data: memoryview
    ) -> None:
        """There is no medium to force it to."""

    def layout(self) -> Layout | None:
        return self._layout

    def save_layout(self, layout: Layout) -> None:
        self._layout = layout

    def allocate(self, nbytes: int) -> memoryview:
        """Plain memory."""
        return memoryview(bytearray(nbytes))

    def keep_result(self, entry: Entry, data: memoryview) -> None:
        self._kept[entry.hash()] = (entry.round, bytes(data))

    def kept(self, entry: Entry) -> memoryview | None:
        """Kept bytes, as a writable copy (codecs wrap writable memory)."""
        found = self._kept.get(entry.hash())
        return memoryview(bytearray(found[1])) if found else None

    def results_from(self) -> int:
        """Oldest round from which on all results are kept."""
        return self._from

    def forget_results(self, before: int) -> None:
        """Older results may go, but none newer than the checkpoint."""
        base = self._checkpoint
        if base and self._before and base[0] + 1 >= len(self._journal.entries):
            base = self._before  # no entry certifies the newest yet
        limit = min(before, base[0] + 1 if base else 0)
        self._from = max(self._from, limit)
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0] >= limit}

    def state_bytes(self, layout: Layout) -> int:
        return OuterStep(self._outer, layout).state_bytes(layout.numel)

    def replica(self, layout: Layout, *, restore: bool) -> ModelReplica:
        """A replica, filled from the checkpoint with ``restore``."""
        replica = ModelReplica(layout, self._outer, PlainSlots(layout.numel))
        self._fill(replica, restore)
        return replica

    def _fill(self, replica: ModelReplica, restore: bool) -> None:
        """With ``restore``: from the newest checkpoint that the journal reaches. A power cut may
        lose the entry of the newest, which is recorded but not forced when its checkpoint is on the
        medium; the vote for it and results since the one before are there."""
        for kept in (self._checkpoint, self._before):
            if restore and kept is not None and kept[0] < len(self._journal.entries):
                replica.install(memoryview(kept[1]), kept[0])
                replica.publish(kept[0])
                return

    def found(self, replica: ModelReplica, genesis: Certified) -> None:
        """Keep layout and initial state."""
        self.save_layout(replica.layout)
        self.checkpoint(replica, genesis, 0)
        self.journal().append(genesis)

    def checkpoint(self, replica: ModelReplica, entry: Certified, rounds: int) -> None:
        """Keep the state, and the one before it."""
        if self._checkpoint is not None and self._checkpoint[0] < replica.applied:
            self._before = self._checkpoint
        self._checkpoint = (replica.applied, bytes(replica.snapshot()))

    def checkpointed(self) -> int:
        """The entry of the older checkpoint; -1 where there is none."""
        older = self._before or self._checkpoint
        return older[0] if older is not None else -1

    def saved(self, before: int) -> tuple[int, memoryview] | None:
        for kept in (self._checkpoint, self._before):
            if kept is not None and self._from - 1 <= kept[0] < before:
                return kept[0], memoryview(bytearray(kept[1]))
        return None

    def installed(self, round_: int) -> None:
        """A fetched state replaced everything up to this round: older results are not here."""
        self._from = max(self._from, round_ + 1)

    def spent(self) -> list[str]:
        return list(self._spent)

    def spend(self, key: str) -> None:
        self._spent = [*self._spent[1 - MAX_SPENT :], key]

    def noisy(self) -> int:
        return self._noisy

    def noisy_entry(self) -> int:
        return self._noisy_entry

    def spend_noisy(self, entry: int) -> None:
        self._noisy, self._noisy_entry = self._noisy + 1, entry

    def raise_noisy(self, steps: int) -> None:
        self._noisy = max(self._noisy, steps)

    def lacks_results(self) -> None:
        """They are fetched."""

    def reset(self) -> None:
        """A new incarnation with an empty log."""
        sealed = self._journal.sealed
        self._journal = MemoryJournal(self._journal.incarnation + 1)
        self._journal.sealed = sealed
        self._layout, self._checkpoint, self._kept, self._from = None, None, {}, 0
        self._before = None

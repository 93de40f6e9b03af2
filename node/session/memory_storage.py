"""Storage in memory: survives a simulated crash, and serves members that keep nothing on disk."""

from __future__ import annotations

from copy import copy

from ...collectives.group import Certified, Entry
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from ...collectives.round import Journal, MemoryJournal
from ...optim.outer import OuterStep
from .ports import Contributions
from .record import MAX_SPENT
from .replica import ModelReplica, PlainSlots


class MemoryResults:
    """Implements `ports.Results`."""

    forces = False

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self._kept: dict[bytes, tuple[int, bytes]] = {}
        self._from = 0

    def clear(self) -> None:
        """The log begins anew."""
        self._kept, self._from = {}, 0

    def force(self, log: str, round_: int, digests: tuple[bytes, ...], data: memoryview) -> None:
        """There is no medium to force it to."""

    def allocate(self, nbytes: int) -> memoryview:
        """Plain memory."""
        return memoryview(bytearray(nbytes))

    def keep(self, entry: Entry, data: memoryview) -> None:
        self._kept[entry.hash()] = (entry.round, bytes(data))

    def kept(self, entry: Entry) -> memoryview | None:
        """Kept bytes, as a writable copy (codecs wrap writable memory)."""
        found = self._kept.get(entry.hash())
        return memoryview(bytearray(found[1])) if found else None

    def first(self) -> int:
        """Oldest round from which on all results are kept."""
        return self._from

    def forget(self, before: int) -> None:
        """Older results may go, but none newer than the checkpoint."""
        limit = min(before, self.storage.states.needed() + 1)
        self._from = max(self._from, limit)
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0] >= limit}

    def begin_at(self, round_: int) -> None:
        """Results before this round are not here."""
        self._from = max(self._from, round_)


class MemoryStates:
    """Implements `ports.States`."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self.clear()

    def clear(self) -> None:
        """The log begins anew."""
        self._layout: Layout | None = None
        self._checkpoint: tuple[int, bytes] | None = None
        self._before: tuple[int, bytes] | None = None  # the checkpoint before it

    def needed(self) -> int:
        """The entry of the checkpoint that results since are kept for; -1 where there is none."""
        base = self._checkpoint
        if base and self._before and base[0] + 1 >= len(self.storage.journal().entries):
            base = self._before  # no entry certifies the newest yet
        return base[0] if base else -1

    def layout(self) -> Layout | None:
        return self._layout

    def save_layout(self, layout: Layout) -> None:
        self._layout = layout

    def state_bytes(self, layout: Layout) -> int:
        return OuterStep(self.storage.outer, layout).state_bytes(layout.numel)

    def replica(self, layout: Layout, *, restore: bool) -> ModelReplica:
        """A replica, filled from the checkpoint with ``restore``."""
        replica = ModelReplica(layout, self.storage.outer, PlainSlots(layout.numel))
        self._fill(replica, restore)
        return replica

    def _fill(self, replica: ModelReplica, restore: bool) -> None:
        """With ``restore``: from the newest checkpoint that the journal reaches. A power cut may
        lose the entry of the newest, which is recorded but not forced when its checkpoint is on the
        medium; the vote for it and results since the one before are there."""
        for kept in (self._checkpoint, self._before):
            if restore and kept is not None and kept[0] < len(self.storage.journal().entries):
                replica.install(memoryview(kept[1]), kept[0])
                replica.publish(kept[0])
                return

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
        first = self.storage.results.first()
        for kept in (self._checkpoint, self._before):
            if kept is not None and first - 1 <= kept[0] < before:
                return kept[0], memoryview(bytearray(kept[1]))
        return None


class MemorySpent:
    """Implements `ports.UsedUp`."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._noisy, self._entry = 0, -1

    def operations(self) -> list[str]:
        return list(self._keys)

    def spend(self, key: str) -> None:
        self._keys = [*self._keys[1 - MAX_SPENT :], key]

    def noisy(self) -> int:
        return self._noisy

    def noisy_entry(self) -> int:
        return self._entry

    def spend_noisy(self, entry: int) -> None:
        self._noisy, self._entry = self._noisy + 1, entry

    def raise_noisy(self, steps: int) -> None:
        self._noisy = max(self._noisy, steps)


class MemoryStorage:
    """Implements `ports.Storage`. A simulated crash keeps the object; `restart` is called before
    the next life uses it.
    """

    def __init__(self, outer: OuterSettings, incarnation: int = 0) -> None:
        self.outer = outer
        self._journal: Journal = MemoryJournal(incarnation)
        self.states = MemoryStates(self)
        self.results = MemoryResults(self)
        self.spent = MemorySpent()
        self.contributions: Contributions | None = None

    def restart(self) -> None:
        """The process died and comes back."""
        self._journal.restarted = True

    def copy(self) -> MemoryStorage:
        """A backup: what is here now."""
        found = MemoryStorage(self.outer, self._journal.incarnation)
        mine, its = self._journal, found._journal
        for certified in mine.entries.since(0):
            its.append(certified)
        its.promised, its.accepted, its.sealed = mine.promised, mine.accepted, mine.sealed
        its.restarted = True
        found.states, found.results = copy(self.states), copy(self.results)
        found.states.storage = found.results.storage = found
        found.spent = copy(self.spent)
        return found

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

    def found(self, replica: ModelReplica, genesis: Certified) -> None:
        """Keep layout and initial state."""
        self.states.save_layout(replica.layout)
        self.states.checkpoint(replica, genesis, 0)
        self.journal().append(genesis)

    def installed(self, round_: int) -> None:
        """A fetched state replaced everything up to this round: older results are not here."""
        self.results.begin_at(round_ + 1)

    def lacks_results(self) -> None:
        """They are fetched."""

    def reset(self) -> None:
        """A new incarnation with an empty log."""
        sealed = self._journal.sealed
        self._journal = MemoryJournal(self._journal.incarnation + 1)
        self._journal.sealed = sealed
        self.states.clear()
        self.results.clear()

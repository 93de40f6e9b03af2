"""What this member has spent of its privacy in a run: durable, counted before its vector is handed
over, so never below what others can know.

Every vector handed over counts as one step of the Gaussian mechanism without subsampling: who takes
part in a round is known to all members, so chance in choosing them hides nothing from these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....collectives.swarm import PrivacySettings
from ....security.privacy import Accountant
from ....security.privacy.budget import RATE

if TYPE_CHECKING:
    from ...session.ports import Storage


class Budget:
    """Of one member in one run. Raises StorageError where what was spent cannot be read."""

    def __init__(self, terms: PrivacySettings, storage: Storage) -> None:
        self.terms, self._storage = terms, storage
        self._accountant = Accountant(terms.delta, terms.stop_at_epsilon)
        self._accountant.spend(RATE, terms.noise, storage.spent.noisy())
        self.last = storage.spent.noisy_entry()
        """For which entry of the log the newest was handed over; -1: for none."""

    @property
    def epsilon(self) -> float:
        """Spent so far, for the manifest's delta."""
        return self._accountant.epsilon

    @property
    def steps(self) -> int:
        """Vectors handed over."""
        return self._accountant.steps

    @property
    def allows(self) -> bool:
        """Whether one more stays within `stop_at_epsilon`."""
        return self._accountant.allows(RATE, self.terms.noise)

    @property
    def room(self) -> int:
        """How many more do."""
        return self._accountant.room(RATE, self.terms.noise)

    def record(self, entry: int) -> None:
        """One more is about to be handed over: it is on the medium when this returns. Waits for the
        disk; from any thread. Raises StorageError: then it must not be."""
        self._storage.spent.spend_noisy(entry)
        self.last = entry

    def raise_to(self, steps: int) -> None:
        """Earlier lives under this name may have handed over so many. Raises StorageError."""
        if steps > self.steps:
            self._storage.spent.raise_noisy(steps)
            self._accountant.spend(RATE, self.terms.noise, steps - self.steps)

    def spend(self) -> None:
        """One more is on the medium."""
        self._accountant.spend(RATE, self.terms.noise)

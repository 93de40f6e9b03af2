"""Samples between a loader and the steps made on them, and what is attached to which swarm."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from ...collectives.errors import ConfigError
from .first_batch import FirstBatches

SHORT = 64


class SampleLedger:
    """Of one attachment. Its `shard` writes what it gives, its steps what they took."""

    def __init__(self, batch_size: int | None = None) -> None:
        """``batch_size``: samples of a step of which nothing else is known."""
        self.batch_size = batch_size
        self.guessed = False  # whether a step was taken for one sample, since nobody said more
        self.used = False  # whether a shard gives samples
        self.given = 0  # and not yet taken by a step
        self._left = 0  # of it after the last step
        self._growing = 0  # steps in a row that left more of it than the one before
        self._short = False  # whether that was too many of them
        self._empty = 0  # steps in a row that the script declared to be of no samples
        self._told_empty = False
        self._again = 0  # steps in a row for which the shard gave nothing
        self._told_again = False
        self.turns = 0  # grows whenever the anchor, or what is contributed, may be another

    def step(self, declared: int | None) -> int:
        """The samples of a step; ``declared``: what the script says. Raises ConfigError where that
        is more than it was given.
        """
        self._empty = self._empty + 1 if declared == 0 else 0
        if not self.used:
            if declared is not None:
                return declared
            self.guessed = self.guessed or self.batch_size is None
            return 1 if self.batch_size is None else self.batch_size
        self._again = 0 if self.given else self._again + 1
        if declared is None:
            declared = self.given
        elif declared > self.given:
            raise ConfigError(
                f"a step of {declared} samples, of which the shard gave {self.given}",
                key="samples",
                why=(
                    "What a round counts is what the members have read of the data: whole samples "
                    "of the shard, nothing else."
                ),
                hint=(
                    "Leave samples() out, or call it with the number of "
                    "samples, such as len(batch)."
                ),
            )
        self.given -= declared
        self._growing = self._growing + 1 if self.given > self._left else 0
        self._left = self.given
        return declared

    def empty(self) -> int | None:
        """How many steps in a row were declared to be of no samples, once `SHORT` were; 0 when one
        is of some again. None: nothing new.
        """
        if self._told_empty == (self._empty >= (1 if self._told_empty else SHORT)):
            return None
        self._told_empty = not self._told_empty
        return self._empty

    def again(self) -> int | None:
        """How many steps in a row were made on nothing that the shard gave, once `SHORT` were; 0
        when one is on something again. None: nothing new.
        """
        if self._told_again == (self._again >= (1 if self._told_again else SHORT)):
            return None
        self._told_again = not self._told_again
        return self._again

    def left(self) -> int | None:
        """How many samples the shard gave that no step counts, once `SHORT` steps in a row have
        counted fewer than there were; 0 when they do no longer. None: nothing new. A loop that
        reads ahead leaves as many after each step, one that drops a batch leaves more once.
        """
        if self._short == (self._growing >= (1 if self._short else SHORT)):
            return None
        self._short = not self._short
        return self.given if self._short else 0


class AttachmentView(Protocol):
    """What a shard sees of an attachment."""

    @property
    def ledger(self) -> SampleLedger:
        """Samples that the shard gave and steps took."""
        ...

    @property
    def first_batches(self) -> FirstBatches:
        """What it reads, for comparison with what others read."""
        ...

    @property
    def round(self) -> int:
        """Committed rounds of the anchor that the model started from."""
        ...

    @property
    def begun(self) -> tuple[int, int]:
        """Committed rounds in the model's anchor, and samples trained since that no decided
        contribution counts.
        """
        ...

    @property
    def done(self) -> bool:
        """Whether the run has committed as many rounds as its manifest asks for."""
        ...


attached: weakref.WeakKeyDictionary[Any, weakref.ref[AttachmentView]] = weakref.WeakKeyDictionary()
"""What is attached to a model, an optimizer or a swarm. An attachment enters itself."""


def attached_to(thing: object) -> AttachmentView | None:
    """What is attached to it; None: nothing."""
    found = attached.get(thing)
    return found() if found is not None else None

"""Training that is seen and not counted: gradients reach the attached parameters, and no step
follows. The rules, as a state machine that is given the time; `uncounted` tells it what happens.

Whatever a lawful script does is no finding: long accumulation, a scaler that skips steps, two
optimizers in turns, several backwards a step (GAN, SAM), evaluation, averages of weights that are
put in and taken out again. Each rule therefore compares with what was usual between two counted
steps.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Cause = Literal["replaced", "foreign", "without", "nothing", "partial", "cleared", "adding"]

FIRST_FOREIGN = 16  # weights changed so often before the first step was counted
CLEARED = 64  # gradients cleared so often, weights the same
ADDING = 64  # gradients added up so often …
ADDING_S = 600.0  # … and for so long
LONGER = 8  # than the usual accumulation


class Finding(NamedTuple):
    """What is wrong, after so many backwards (of "without": changes of the weights, of
    "nothing": iterations) without a counted step.
    """

    cause: Cause
    backwards: int


class Silence:
    """Whether training is seen that is not counted."""

    def __init__(self, *, by_hand: bool = False) -> None:
        """``by_hand``: the script counts steps itself, and may do so once a round only."""
        self.finding: Finding | None = None  # that stands
        self._by_hand = by_hand
        self._steps = 0
        # between two counted steps
        self._most_foreign = self._most_partial = self._most_set = self._longest = 0
        self._longest_s = 0.0
        self._backwards = self._foreign = self._partial = self._cleared = 0  # since the last one
        self._set = 0  # changes of the weights since then without a backward before them
        self._since: float | None = None  # when the first backward since then came
        self._idle = self._most_idle = 0  # looks since, that found nothing new
        self._most_idle_s = 0.0
        self._idle_since: float | None = None

    @property
    def backwards(self) -> int:
        """Since the last counted step."""
        return self._backwards

    @property
    def usual(self) -> int:
        """The most backwards there ever were between two counted steps."""
        return self._longest

    def counted(self, now: float, *, replaced: bool = False) -> Finding | None:
        """A step is counted. Returns the finding that this withdraws: none while tensors are
        ``replaced``, since such steps train what no round contributes.
        """
        if self._since is not None:
            self._longest = max(self._longest, self._backwards)
            self._longest_s = max(self._longest_s, now - self._since)
            self._most_foreign = max(self._most_foreign, self._foreign)
            self._most_partial = max(self._most_partial, self._partial)
        self._most_set = max(self._most_set, self._set)
        if self._idle_since is not None:
            self._most_idle = max(self._most_idle, self._idle)
            self._most_idle_s = max(self._most_idle_s, now - self._idle_since)
        self._idle, self._idle_since = 0, None
        self._steps += 1
        self._backwards = self._foreign = self._partial = self._cleared = self._set = 0
        self._since = None
        if replaced:
            return None
        withdrawn, self.finding = self.finding, None
        return withdrawn

    def set_by_hand(self) -> Finding | None:
        """The script has changed weights, and no gradient has come since the last such look."""
        self._set += 1
        least = 3 + 3 * self._most_set if self._steps else FIRST_FOREIGN
        if self.finding is not None or self._by_hand or self._set < least:
            return None
        self.finding = Finding("without", self._set)
        return self.finding

    def looked(self, now: float) -> Finding | None:
        """The script goes on, and nothing has come to the model since the last such look."""
        self._idle_since = now if self._idle_since is None else self._idle_since
        self._idle += 1
        enough = self._idle >= max(ADDING, LONGER * self._most_idle)
        long = now - self._idle_since >= max(ADDING_S, LONGER * self._most_idle_s)
        if self.finding is not None or self._by_hand or not (enough and long):
            return None
        self.finding = Finding("nothing", self._idle)
        return self.finding

    def stepped_in_part(self) -> None:
        """One of several attached optimizers has stepped, and others have not yet."""
        self._partial += 1
        self._cleared = 0

    def backward(
        self, now: float, *, foreign: int = 0, cleared: int = 0, replaced: bool = False
    ) -> Finding | None:
        """Gradients come. ``foreign``: how often weights were changed by no attached optimizer
        since the backward before, as far as is known; ``cleared``: how often gradients were;
        ``replaced``: the model holds other tensors than the attached ones. Returns a
        finding once, when it begins to stand.
        """
        self._since = now if self._since is None else self._since
        self._idle, self._idle_since = 0, None
        self._backwards += 1
        self._foreign += foreign
        self._cleared += cleared
        if self.finding is None and (cause := self._cause(now, replaced)) is not None:
            self.finding = Finding(cause, self._backwards)
            return self.finding
        return None

    def _cause(self, now: float, replaced: bool) -> Cause | None:
        assert self._since is not None
        if replaced:
            return "replaced"
        if not self._by_hand:
            if self._foreign >= (3 + 3 * self._most_foreign if self._steps else FIRST_FOREIGN):
                return "foreign"
            if self._partial >= max(CLEARED, 3 + 3 * self._most_partial):
                return "partial"
            if not self._foreign and self._cleared >= CLEARED:
                return "cleared"
        quiet = self._by_hand or not (self._foreign or self._partial)
        enough = self._backwards >= max(ADDING, LONGER * self._longest)
        since_s = now - self._since
        if quiet and enough and since_s >= max(ADDING_S, LONGER * self._longest_s):
            return "adding"
        return None

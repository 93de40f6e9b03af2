"""Live parameters between two anchors: freeze a contribution, wait for its outcome, adopt what was decided.

A replica always knows where each unit of its work is: in a frozen contribution (at most one), or in the live parameters as the
difference to ``base``, the leased anchor it started from. ``unsent`` is the number of samples of the latter. A snapshot of the
live values is taken only when training goes on while a contribution is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives.errors import SwarmClosedError
from ...collectives.swarm import AnchorView, Outcome, Pending, Swarm
from ..model.flat import FlatTensor, FlatVector
from ..model.pseudograd import write_pseudo_gradient
from ..model.reconcile import adopt, rebase
from .schedule import FLOOR_S

NOT_FINITE = "{} holds NaN or infinity; the model goes back to the anchor (the inner optimizer's state may be damaged, too)"


@dataclass(slots=True)
class Frozen:
    """A contribution that was offered and is not known to be decided."""

    pending: Pending[Outcome]
    samples: int
    snapshot: Tensor | None = None  # live values when it was frozen; None: the live values are still those


@dataclass(frozen=True, slots=True)
class Turn:
    """One look at a contribution of ``samples`` samples, after waiting ``waited_s`` seconds."""

    outcome: Outcome
    samples: int
    waited_s: float


class Replica:
    """The member's copy of the model. Methods raise what the swarm raises; the replica stays consistent when they do."""

    base: AnchorView

    def __init__(self, flat: FlatVector, swarm: Swarm, clock: Callable[[], float], dropped: Callable[[int, str], None]) -> None:
        """``dropped(samples, reason)`` hears of work that will not be contributed."""
        self.flat = flat
        self.swarm = swarm
        self.unsent = 0
        self.frozen: Frozen | None = None
        self._clock = clock
        self._dropped = dropped
        self._spare: Tensor | None = None

    def enter(self) -> None:
        """Open the run; the live parameters become its anchor (the founder's own parameters become the anchor)."""
        self.base = self.swarm.open(self.flat.layout, self.flat.write_to)
        adopt(self.flat, self.base)

    def reenter(self) -> Turn | None:
        """Open the run again after the node was lost, keeping what was trained meanwhile; returns what a frozen contribution met.

        One whose fate the new node cannot tell is taken for counted: counting it twice would be wrong, dropping it is merely a loss.
        """
        new = self.swarm.open(self.flat.layout, self.base.copy_into)
        frozen = self.frozen
        if frozen is None:
            self._rebase(new)
            return None
        try:
            outcome = frozen.pending.wait(0.0)
        except SwarmClosedError:
            self._adopt(frozen, True, new)
            self._dropped(frozen.samples, "the node was lost while they were being exchanged; they may or may not have been counted")
            return None
        if outcome.status == "open":
            new.release()
            return None
        self._adopt(frozen, outcome.counted, new)
        return Turn(outcome, frozen.samples, 0.0)

    def turn(self, deadline_s: float, decidable: Callable[[], bool] = lambda: True) -> Iterator[Turn]:
        """One boundary: look at what is frozen; once that is decided, offer what was trained since and wait up to ``deadline_s``, but no
        longer than `FLOOR_S` at a time once it is not ``decidable``."""
        frozen = self.frozen
        if frozen is not None:
            outcome = frozen.pending.wait(0.0)
            decided = outcome.status != "open"
            if decided:
                self._adopt(frozen, outcome.counted, self.swarm.anchor())
            yield Turn(outcome, frozen.samples, 0.0)
            if not decided:
                return
        self._rebase(self.swarm.anchor())  # a contribution is made on the newest anchor, or it is refused
        if self.unsent == 0:
            return
        if bad := self.flat.not_finite():
            self.drop(self.swarm.anchor(), NOT_FINITE.format(bad))
        else:
            yield self._offer(deadline_s, decidable)

    def drop(self, new: AnchorView, reason: str) -> None:
        """Give up what was not sent and make the live parameters the anchor ``new``, which the replica takes over."""
        samples, self.unsent = self.unsent, 0
        adopt(self.flat, new)
        self._take(new)
        self._dropped(samples, reason)

    def at_base(self) -> bool:
        """Whether the live parameters are bit for bit those of ``base`` (running statistics aside)."""
        parameters = sum(spec.numel for spec in self.flat.layout.tensors if spec.role == "parameter")
        for segment, live in self.flat.pull():
            anchor = torch.empty(segment.numel, dtype=torch.float32, device="cpu")
            self.base.copy_into(anchor, segment.start)
            self.flat.round_to_live(segment, anchor)
            compared = max(0, min(segment.stop, parameters) - segment.start)
            if not torch.equal(live[:compared], anchor[:compared]):
                return False
        return True

    def take(self, new: AnchorView) -> None:
        """Measure progress against ``new`` from now on; the live parameters stay as they are."""
        self._take(new)

    def _offer(self, deadline_s: float, decidable: Callable[[], bool]) -> Turn:
        started, samples, base = self._clock(), self.unsent, self.base
        pending = self.swarm.contribute(samples=samples, write=lambda out: write_pseudo_gradient(self.flat, base, out), base=base.round)
        frozen = self.frozen = Frozen(pending, samples)
        self.unsent = 0
        decided = False
        try:
            outcome = pending.wait(min(deadline_s, FLOOR_S))
            while outcome.status == "open" and (deadline_s := deadline_s - FLOOR_S) > 0 and decidable():
                outcome = pending.wait(min(deadline_s, FLOOR_S))
            if outcome.status != "open":
                new = self.swarm.anchor()
                decided = True
                self._adopt(frozen, outcome.counted, new)
        finally:
            if not decided:  # open, the node was lost, or somebody interrupted the wait: training will go on
                self._remember(frozen)
        return Turn(outcome, samples, self._clock() - started)

    def _adopt(self, frozen: Frozen, counted: bool, new: AnchorView) -> None:
        if not counted:
            self.unsent += frozen.samples
            rebase(self.flat, new, self.base)
        elif frozen.snapshot is None:
            adopt(self.flat, new)
        else:
            rebase(self.flat, new, FlatTensor(frozen.snapshot))
        self._spare = frozen.snapshot if frozen.snapshot is not None else self._spare
        self.frozen = None
        self._take(new)

    def _rebase(self, new: AnchorView) -> None:
        """Carry the live parameters over to ``new`` when it is another anchor."""
        if new.round == self.base.round:  # one run has one anchor a round
            new.release()
            return
        rebase(self.flat, new, self.base)
        self._take(new)

    def _remember(self, frozen: Frozen) -> None:
        if frozen.snapshot is None:
            snapshot, self._spare = self._spare, None
            if snapshot is None:
                snapshot = torch.empty(self.flat.numel, dtype=torch.float32, device="cpu")
            self.flat.write_to(snapshot)
            frozen.snapshot = snapshot

    def _take(self, new: AnchorView) -> None:
        old, self.base = self.base, new
        old.release()

"""Live parameters between two anchors: freeze a contribution, wait for its outcome, adopt what was
decided.

A replica always knows where each unit of its work is: in a frozen contribution (at most one), or in
the live parameters as the difference to ``base``, the leased anchor it started from. ``unsent`` is
the number of samples of the latter. A snapshot of the live values is taken only when training goes
on while a contribution is undecided.

With **overlap** training always goes on: a contribution is not waited for when it is offered but
when the next one is due, or some inner steps later (`settle`). "late": members train on from their
own values, which get what the others did one round late. "eager": from the anchor and what they
expect of the round, their own share of it taken, the others' to come (`reconcile.expect`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...collectives.errors import ConfigError, SwarmClosedError
from ...collectives.group import Evaluated
from ...collectives.layout import Layout
from ...collectives.outcomes import AnchorView, Outcome, Pending
from ...collectives.round_settings import RoundSettings
from ..model.pseudograd import write_pseudo_gradient
from ..model.reconcile import LOST_SHARE, adopt, expect, mix, rebase
from ..model.vector import SEGMENT_ELEMENTS, FlatTensor, ModelVector, RangeSource
from .extras import Extras
from .schedule import FLOOR_S, expected_share

NOT_FINITE = (
    "{} holds NaN or infinity; the model goes back to the anchor (the inner optimizer's "
    "state may be damaged, too)"
)

NULL = (
    "{} holds NaN or infinity; in its place nothing but noise goes into the sum, so that nobody "
    "sees that it was missing (the inner optimizer's state may be damaged, too)"
)

MOVED = "{}. The model goes back to the anchor"

MISSED = 3
"""Rounds in a row that may count others and not this member. What it did in all of them would weigh
as many rounds' samples in the next, and be of little use there: mixing has halved it in each."""
TOO_OLD = (
    "{} rounds in a row did not count them, and the model goes to the newest anchor. A member with "
    'a link much thinner than others\' is in every n-th round; with overlap = "late" it is in all'
)


@dataclass(slots=True)
class OfferedContribution:
    """A contribution that was offered and is not known to be decided."""

    pending: Pending[Outcome]
    samples: int
    # Live values when training went on; None: the live values are still those.
    snapshot: Tensor | None = None
    own: Tensor | None = None  # live values when it was frozen, where training went on from others
    members: int = 1  # how many there were known to be when it was offered


@dataclass(frozen=True, slots=True)
class WaitedOutcome:
    """One look at a contribution of ``samples`` samples, after waiting ``waited_s`` seconds."""

    outcome: Outcome
    samples: int
    waited_s: float


class ReplicaSwarm(Protocol):
    """What a replica asks of its run: a `Swarm`, or one fragment of it."""

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> AnchorView: ...

    def anchor(self) -> AnchorView: ...

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> Pending[Outcome]: ...


class Replica:
    """The member's copy of the model. Methods raise what the swarm raises; the replica stays
    consistent when they do.
    """

    base: AnchorView
    takes_part = True  # whether this member takes part in the round; else it waits for its end
    follows = True  # whether a round that another member has finished is over here, too
    steps: int | None = None  # inner steps of this turn, where each member has its number
    # whether a contribution under way was decided, and is to be looked at before the turn's end
    settled = False
    # why the live parameters are not what was trained since the anchor, "" where they are
    moved = ""
    # whether its progress is all of what was trained from the newest anchor
    looks_back = True
    on_purpose = False  # whether the script has declared that it changes the weights
    ordinary = False  # whether nothing but steps as long as ever moved the live parameters
    over = ""  # why nothing more is contributed to the run, "" where something is
    # above 0: the next contribution does not end the round, and waits for others to do so
    hold_s = 0.0
    resumes = True  # whether a saved attachment's progress since the anchor can be gone on from

    def __init__(
        self,
        flat: ModelVector,
        swarm: ReplicaSwarm,
        clock: Callable[[], float],
        dropped: Callable[[int, str], None],
        settings: RoundSettings | None = None,
    ) -> None:
        """``dropped(samples, reason)`` hears of work that will not be contributed."""
        self.flat = flat
        self.swarm = swarm
        self.unsent = 0
        self.made = 0  # inner steps in it
        self.frozen: OfferedContribution | None = None
        self.settings = settings or RoundSettings()
        self.extras = Extras()
        self._carried = False  # whether there is progress from an older anchor in the live values
        self._missed = 0  # rounds in a row that counted others only
        self.still = 0  # contributions in a row that were zero, though steps were made for them
        # mean of the inner steps that are contributed next, and what an evaluation found
        self.loss: float | Evaluated | None = None
        self.lag: float | None = None  # how many inner steps rounds take here
        self.members = 1
        self.own: Tensor | None = None  # eager: the momentum of one's own contributions
        self.share = 0.0  # of the samples, in the last round that counted
        self.among = 0  # of so many members; 0: not known
        self._clock = clock
        self._dropped = dropped
        self._spare: list[Tensor] = []

    @property
    def may_stand_aside(self) -> bool:
        """Whether rounds of this run may be without a member whose steps are too long for them.
        With overlap a slow one costs a sixtieth of the others' time, and one that holds back its
        work trains further than its lease of samples reaches.
        """
        plain = self.settings.may_be_without and not self.overlap
        plain = plain and self.settings.sync_every is not None
        return plain and bool(getattr(self.swarm, "holds", False))

    @property
    def overlap(self) -> bool:
        """Whether training goes on while a contribution is under way."""
        return self.settings.overlap != "none"

    def enter(self) -> None:
        """Open the run; the live parameters become its anchor (the founder's own parameters become
        the anchor).
        """
        self.base = self.swarm.open(self.flat.layout, self.flat.write_initial)
        self.extras.take_anchor(self.base)
        adopt(self.flat, self.base)

    def reenter(self) -> WaitedOutcome | None:
        """Open the run again after the node was lost, keeping what was trained meanwhile; returns
        what a frozen contribution met.

        One whose fate the new node cannot tell is taken for counted: counting it twice would be
        wrong, dropping it is merely a loss.
        """
        new = self.swarm.open(self.flat.layout, self.base.copy_into)
        frozen = self.frozen
        if frozen is None:
            self._rebase(new)
            return None
        try:
            outcome = frozen.pending.wait(0.0)
        except SwarmClosedError:
            self._adopt(frozen, self._fate(), new)
            self._dropped(
                frozen.samples,
                (
                    "the node was lost while they were being exchanged; they may or "
                    "may not have been counted"
                ),
            )
            return None
        if outcome.status == "open":
            new.release()
            return None
        self._decided(frozen, outcome, new)
        return WaitedOutcome(outcome, frozen.samples, 0.0)

    def turn(
        self, deadline_s: float, decidable: Callable[[], bool] = lambda: True
    ) -> Iterator[WaitedOutcome]:
        """One boundary: look at what is frozen; once that is decided, offer what was trained since
        and wait up to ``deadline_s``, but no longer than `FLOOR_S` at a time once it is not
        ``decidable``."""
        if self.frozen is not None:
            yield (turn := self.settle(deadline_s if self.overlap else 0.0, decidable))
            if turn.outcome.status == "open":
                return
        # A contribution is made on the newest anchor, or it is refused.
        self._rebase(self.swarm.anchor())
        if self.unsent == 0 or self.finished:
            return
        if self.settings.noised and (bad := self.not_finite()):
            # That it was missing would tell of its data, as no noise is put over who takes part.
            self._dropped(self.unsent, NULL.format(bad))
            yield self._offer(deadline_s, decidable)
        elif why := self._why_not():
            self.drop(self.swarm.anchor(), why)
        else:
            yield self._offer(deadline_s, decidable)
        self.on_purpose = False

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """An inner step is about to be made. Returns other arguments of ``optimizer.step`` in its
        place (args, kwargs), None: these.
        """

    def stepped(self, samples: int) -> None:
        """An inner step on ``samples`` samples was made."""

    def own_model(self) -> RangeSource:
        """This member's personal model. Raises ConfigError in a run without."""
        raise ConfigError(
            "this run has no personal models", key="own", hint='[federated] personal = "ditto"'
        )

    def not_finite(self) -> str:
        """What of the next contribution holds NaN or infinity, "" when nothing does."""
        return self.flat.not_finite()

    def _why_not(self) -> str:
        """Why what was trained since the anchor is not to be contributed, "" where it is."""
        if bad := self.not_finite():
            return NOT_FINITE.format(bad)
        if self.moved:
            return MOVED.format(self.moved)
        whole = not (self.on_purpose or self._carried)
        return self.extras.find_fault(self.base, self.unsent, whole=whole, ordinary=self.ordinary)

    def collect(self, samples: int) -> None:
        """So many samples more are in the live parameters."""
        self.unsent += samples

    @property
    def finished(self) -> bool:
        """Whether the run has committed as many rounds as its manifest asks for, or takes nothing
        more from this member."""
        rounds = self.settings.rounds
        return bool(self.over) or (rounds is not None and self.base.round >= rounds)

    def settle(
        self, deadline_s: float, decidable: Callable[[], bool] = lambda: True
    ) -> WaitedOutcome:
        """Wait for what is frozen as `turn` does, and adopt what was decided."""
        started, frozen = self._clock(), self.frozen
        assert frozen is not None
        outcome = _wait(frozen.pending, deadline_s, decidable)
        if outcome.status != "open":
            self._decided(frozen, outcome, self.swarm.anchor())
        return WaitedOutcome(outcome, frozen.samples, self._clock() - started)

    def drop(self, new: AnchorView, reason: str) -> None:
        """Give up what was not sent and make the live parameters the anchor ``new``, which the
        replica takes over.
        """
        samples, self.unsent = self.unsent, 0
        self.moved, self._carried = "", False
        adopt(self.flat, new)
        self._take(new)
        self.forget()
        self._dropped(samples, reason)

    def give_up(self) -> None:
        """Drop what was not sent and leave the live parameters as they are: nothing follows."""
        samples, self.unsent = self.unsent, 0
        if samples:
            self._dropped(samples, self.moved)

    def forget(self) -> None:
        """The live values have no history with the anchor: nothing is carried over."""
        self.own = None
        self.extras.forget()

    def at_base(self) -> bool:
        """Whether the live parameters equal ``base`` bit for bit (running statistics aside)."""
        parameters = self.flat.parameters
        moved = ""
        for segment, live in self.flat.pull():
            anchor = torch.empty(segment.numel, dtype=torch.float32, device="cpu")
            self.base.copy_into(anchor, segment.start)
            self.flat.round_to_live(segment, anchor)
            compared = max(0, min(segment.stop, parameters) - segment.start)
            if not torch.equal(live[:compared], anchor[:compared]):
                moved = "moved"
        return not self.flat.agreed(moved)

    def take(self, new: AnchorView) -> None:
        """Measure progress against ``new`` from now on; the live parameters stay as they are."""
        self._take(new)

    def _offer(self, deadline_s: float, decidable: Callable[[], bool]) -> WaitedOutcome:
        started, samples, base = self._clock(), self.unsent, self._offered_on()
        pending = self.swarm.contribute(
            samples=self._counts(samples) if self.takes_part else 0,
            write=self._fill,
            base=base,
            loss=self.loss,
            lag=self.lag,
            hold_s=self.hold_s,
        )
        frozen = self.frozen = OfferedContribution(pending, samples, members=self.members)
        self.unsent = 0
        self._carried = False
        decided = False
        try:
            outcome = (
                pending.wait(0.0) if self.overlap else self._wait(pending, deadline_s, decidable)
            )
            if outcome.status != "open":
                new = self.swarm.anchor()
                decided = True
                self._decided(frozen, outcome, new)
        finally:
            # Open, the node was lost, or somebody interrupted the wait: training will go on.
            if not decided:
                self._remember(frozen)
        return WaitedOutcome(outcome, samples, self._clock() - started)

    def _counts(self, samples: int) -> int:
        """What a contribution of so many samples counts in the mean."""
        return samples

    def _wait(
        self, pending: Pending[Outcome], deadline_s: float, decidable: Callable[[], bool]
    ) -> Outcome:
        return _wait(pending, deadline_s, decidable)

    def _offered_on(self) -> int:
        """The round of the anchor that a contribution is for: on any other it is refused."""
        return self.base.round

    def _fill(self, out: Tensor) -> None:
        self._write(out)
        if self.takes_part:
            self.extras.measure(out, self.base.round)

    def _write(self, out: Tensor) -> None:
        write_pseudo_gradient(self.flat, self.base, out)
        self._note_progress(out)
        self.extras.carry_over(out)

    def _note_progress(self, out: Tensor) -> None:
        """Before anything is carried over: whether any parameter has moved. Looks no further than
        the first part that has."""
        parts = out[: self.flat.parameters].split(SEGMENT_ELEMENTS)
        self.still = 0 if any(bool(part.any()) for part in parts) else self.still + 1

    def _decided(self, frozen: OfferedContribution, outcome: Outcome, new: AnchorView) -> None:
        total = sum(share.samples for share in outcome.contributors)
        if outcome.counted and total:
            self.share = self._counts(frozen.samples) / total
            self.among = max(frozen.members, len(outcome.contributors))
        self.over = outcome.over
        if outcome.unfit or outcome.over:
            self.frozen = None
            self.unsent += frozen.samples
            self.drop(new, f"{outcome.reason}; the model goes back to the anchor")
        else:
            self._adopt(frozen, outcome.counted, new)

    def _is_too_old(self, counted: bool, new: AnchorView) -> bool:
        """Whether a contribution that was not counted is given up, in a run that may be without."""
        carries = self.settings.may_be_without and not self.overlap
        passed = carries and not counted and new.round != self.base.round
        self._missed = self._missed + 1 if passed else 0
        return self._missed >= MISSED

    def _adopt(self, frozen: OfferedContribution, counted: bool, new: AnchorView) -> None:
        self.extras.settle(counted)
        if too_old := self._is_too_old(counted, new):
            self._missed = 0
            self._dropped(frozen.samples, TOO_OLD.format(MISSED))
        if not counted and not too_old:
            self._restore(frozen)
            self.unsent += frozen.samples
            self._carry(new, frozen.snapshot if frozen.own is None else frozen.own)
        elif frozen.snapshot is None:
            adopt(self.flat, new)
        elif self.settings.mixing is not None and self.overlap:
            mix(self.flat, new, self.settings.mixing)
        else:
            rebase(self.flat, new, FlatTensor(frozen.snapshot))
        self._spare += [tensor for tensor in (frozen.snapshot, frozen.own) if tensor is not None]
        self.frozen = None
        self._take(new)

    def _fate(self) -> bool:
        """Whether a contribution was counted that the node cannot tell of."""
        return True

    def _restore(self, frozen: OfferedContribution) -> None:
        """Take back what was expected of a round: the progress that was not counted is the live
        parameters' again.
        """
        if frozen.own is not None and frozen.snapshot is not None:
            rebase(self.flat, FlatTensor(frozen.own), FlatTensor(frozen.snapshot))
            self.own = None

    def _rebase(self, new: AnchorView) -> None:
        """Carry the live parameters over to ``new`` when it is another anchor."""
        if new.round == self.base.round:
            new.release()
            return
        self._carry(new)
        self._take(new)

    def _carry(self, new: AnchorView, frozen: Tensor | None = None) -> None:
        """Make live parameters with progress that was not counted start from ``new``; ``frozen``:
        live values that had some of it, and no other.
        """
        self._carried = True
        # What the node gave for it may be another view, of the same values.
        if new.round == self.base.round:
            rebase(self.flat, new, self.base)
        elif self.settings.mixing is None:
            mix(self.flat, new, LOST_SHARE, frozen)
        else:
            mix(self.flat, new, self.settings.mixing)

    def _remember(self, frozen: OfferedContribution) -> None:
        if frozen.snapshot is None:
            frozen.snapshot = self._snapshot()
            if self.settings.overlap == "eager":
                frozen.own = frozen.snapshot
                self._expect()
                frozen.snapshot = self._snapshot()

    def _snapshot(self) -> Tensor:
        snapshot = (
            self._spare.pop()
            if self._spare
            else torch.empty(self.flat.numel, dtype=torch.float32, device="cpu")
        )
        self.flat.write_to(snapshot)
        return snapshot

    def _expect(self) -> None:
        if self.own is None:
            self.own = torch.zeros(self.flat.numel, dtype=torch.float32, device="cpu")
        outer = self.settings.effective_outer
        expect(
            self.flat,
            self.base,
            self.own,
            outer.lr * expected_share(self.share, self.among, self.members),
            outer.momentum if outer.kind == "nesterov" else 0.0,
        )

    def _take(self, new: AnchorView) -> None:
        old, self.base = self.base, new
        self.extras.take_anchor(self.base)
        old.release()


def _wait(pending: Pending[Outcome], deadline_s: float, decidable: Callable[[], bool]) -> Outcome:
    """Up to the deadline; at most `FLOOR_S` at a time once the round cannot be decided."""
    outcome = pending.wait(min(deadline_s, FLOOR_S))
    while outcome.status == "open" and (deadline_s := deadline_s - FLOOR_S) > 0 and decidable():
        outcome = pending.wait(min(deadline_s, FLOOR_S))
    return outcome

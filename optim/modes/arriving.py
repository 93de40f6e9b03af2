"""A replica of a run whose rounds do not wait for everybody: FedAsync (arXiv 1903.03934), FedBuff
(2106.06639), FedFix (2206.10189), and asynchronous DiLoCo (2401.09135, 2604.21428).

A turn is ``sync_every`` inner steps, or as many as the log gives this member (DyLU), from an
anchor, whichever anchors are decided meanwhile. What came of it, anchor - parameters, is scaled
by what it is worth in the round that it is offered for (`federated.arrivals`, as in simulations),
and offered until a round counts it; each time anew, since it gets staler. Then the next turn
begins, at the newest anchor. So a member is in no round twice, and its contribution in one at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.outcomes import AnchorView
from ...collectives.script_swarm import Swarm
from ...collectives.swarm import RunSettings
from ..federated.arrivals import buffered_factor, faded, fixed_weight
from ..model.flat import FlatVector
from ..model.pseudograd import write_pseudo_gradient
from ..outer.step import statistics_ranges
from ..rounds.replica import MOVED, OfferedContribution, Replica
from ..rounds.replica import WaitedOutcome as Look

OVER = "the run was complete before they were counted"


class ArrivingReplica(Replica):
    """See the module. FedBuff's and FedAsync's members have a weight in the mean by their samples,
    and FedFix' each the same share. What a member of FedAsync offers goes from the newest anchor to
    its parameters: it is mixed in, not added."""

    resumes = False
    follows = False
    looks_back = False

    def __init__(
        self,
        flat: FlatVector,
        swarm: Swarm,
        clock: Callable[[], float],
        dropped: Callable[[int, str], None],
        settings: RunSettings,
    ) -> None:
        """As for Replica. Raises ConfigError for a run whose rounds wait for all."""
        super().__init__(flat, swarm, clock, dropped, settings)
        if settings.arrivals is None:
            raise ConfigError("rounds of this run wait for all members", key="arrivals")
        self._arrivals, self._run = settings.arrivals, swarm
        # The turn; how long its steps took, once it is offered.
        self._began, self._took_s = (
            clock(),
            0.0,
        )
        self._factor = 1.0
        # Steps since the turn began, or since a late contribution was offered.
        self._made, self._stepped_at = (
            0,
            self._began,
        )
        arrivals = self._arrivals
        self._mixed = (
            arrivals.fading is not None and arrivals.groups is None and arrivals.window is None
        )
        self._timed = (  # whether it says with each contribution how long a step takes it
            arrivals.groups is not None
            or arrivals.dynamic is not None
            or (arrivals.window is not None and arrivals.window.seconds is None)
        )

    def stepped(self, samples: int) -> None:
        self._made, self._stepped_at = self._made + 1, self._clock()

    def enter(self) -> None:
        super().enter()
        self._ordered(self.base)

    def turn(
        self, deadline_s: float, decidable: Callable[[], bool] = lambda: True
    ) -> Iterator[Look]:
        """Offers until a round counts it or the wait is over; always waits for a period."""
        left_s = max(deadline_s, 2 * (self._arrivals.period_s or 0.0))
        if self.frozen is not None:
            yield (look := self.settle(0.0, decidable))
            if look.outcome.status == "open":
                return
        while self.unsent and not self.finished:
            if bad := self.not_finite():
                return self.drop(
                    self.swarm.anchor(),
                    (
                        f"what was trained holds NaN or infinity ({bad}); the model "
                        "goes back to the anchor"
                    ),
                )
            if self.moved:
                return self.drop(self.swarm.anchor(), MOVED.format(self.moved))
            before = self._newest_round()
            yield (look := self._offer(left_s, decidable))
            left_s = max(0.0, left_s - look.waited_s)
            if look.outcome.status == "open" or (self.unsent and self._newest_round() == before):
                return  # training goes on; the latter was refused for a reason that holds still

    def _offered_on(self) -> int:
        """The newest anchor's round, for which it is scaled; where another was decided meanwhile it
        is refused.
        """
        newest = self._newest_round()
        self._took_s = self._took_s or max(self._clock() - self._began, 1e-9)
        if self._timed and self._made:
            self.lag = (self._stepped_at - self._began) / self._made
        self._factor = self._weighed(newest - self.base.round)
        return newest

    def _weighed(self, behind: int) -> float:
        """What the turn counts so many rounds later."""
        fading, period_s = self._arrivals.fading, self._arrivals.period_s
        if fading is not None:
            return faded(fading, behind)
        if period_s is None:
            return buffered_factor(behind)
        return fixed_weight(1 / max(1, len(self._run.members())), self._took_s, period_s)

    def _newest_round(self) -> int:
        newest = self.swarm.anchor()
        try:
            return newest.round
        finally:
            newest.release()

    def _write(self, out: Tensor) -> None:
        if not self._mixed:
            super()._write(out)
        else:
            newest = self.swarm.anchor()
            try:
                write_pseudo_gradient(self.flat, newest, out)
                self._note_progress(out)
            finally:
                newest.release()
        out.mul_(self._factor)
        if self._arrivals.period_s is None:
            return
        for start, stop, role in statistics_ranges(self.flat.layout):
            if (
                role != "sum"
            ):  # by the share, whatever the weight: `federated.arrivals.fixed_weights`
                out[start:stop].div_(self._factor * max(1, len(self._run.members())))

    def _adopt(self, frozen: OfferedContribution, counted: bool, new: AnchorView) -> None:
        if counted:
            return super()._adopt(frozen, counted, new)
        self.frozen = None
        self.unsent += frozen.samples
        self._spare += [tensor for tensor in (frozen.snapshot, frozen.own) if tensor is not None]
        if self.settings.rounds is not None and new.round >= self.settings.rounds:
            return self.drop(new, OVER)
        return new.release()

    def _rebase(self, new: AnchorView) -> None:
        """Nothing: the turn goes on from where it began."""
        new.release()

    def _take(self, new: AnchorView) -> None:
        super()._take(new)
        self._began, self._took_s = self._clock(), 0.0
        self._ordered(new)

    def _ordered(self, new: AnchorView) -> None:
        """A turn from this anchor."""
        if self._arrivals.dynamic is not None:
            self.steps = new.steps or None
        if self._timed:
            self._begin()

    def _begin(self) -> None:
        self._began, self._made = self._clock(), 0

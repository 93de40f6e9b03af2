"""A strand: the rounds of one fragment in this script, or of the whole model where there is one.

Strands of a model in fragments end their rounds one after another, H/P inner steps apart, so that
each has the link to itself (Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from ...collectives.group import Evaluated
from ...collectives.layout import Layout
from ...collectives.swarm import AnchorView, FragmentSwarm, Outcome, Pending, Swarm
from ..model.flat import FlatVector
from ..planning import Lag, RoundSteps, again
from .arriving import ArrivingReplica
from .gradients import GradientReplica
from .grouped import GroupedReplica
from .replica import Replica, WaitedOutcome
from .schedule import Counted, Schedule, Since, StepCounter, expected_share
from .site import SiteReplica


class FragmentLog:
    """One fragment of a swarm as a `replica.ReplicaSwarm`."""

    def __init__(self, swarm: FragmentSwarm, fragment: int) -> None:
        self._swarm, self._fragment = swarm, fragment

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> AnchorView:
        """The fragment's newest anchor; the run is open already."""
        return self._swarm.fragment_anchor(self._fragment)

    def anchor(self) -> AnchorView:
        return self._swarm.fragment_anchor(self._fragment)

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
    ) -> Pending[Outcome]:
        return self._swarm.contribute_fragment(
            self._fragment, samples=samples, write=write, base=base, loss=loss, lag=lag
        )


class Bases:
    """The anchors that a script's fragments started from, as one AnchorView; it is of no round that
    the run was ever at.
    """

    digest = ""

    def __init__(self, views: Sequence[AnchorView]) -> None:
        self._views = views
        self.round, self.numel = (
            min(view.round for view in views),
            sum(view.numel for view in views),
        )
        self.samples, self.lag, self.steps = (
            min(view.samples for view in views),
            views[0].lag,
            views[0].steps,
        )

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        stop, at = start + destination.numel(), 0
        for view in self._views:
            first, last = max(start, at), min(stop, at + view.numel)
            if first < last:
                view.copy_into(destination[first - start : last - start], first - at)
            at += view.numel

    def release(self) -> None:
        """Nothing: the leases are the strands'."""


class Strand:
    """A replica, when its rounds end, and what was counted since the last one did."""

    def __init__(
        self,
        replica: Replica,
        closing: Callable[[], int],
        counter: StepCounter,
        clock: Callable[[], float],
        ahead: float,
    ) -> None:
        """``ahead``: share of the first round that is taken as past already."""
        self.replica = replica
        self.schedule = Schedule(replica.settings, clock)
        self.since = Since(counter)
        self._closing = closing
        self._offered = Since(counter)  # inner steps since a contribution is under way
        self._lag = Lag() if replica.settings.share is not None else None
        self._waited_s = 0.0  # since the last boundary
        # of the adoption that was evaluated last, until a contribution says it
        self.evaluated: Evaluated | None = None
        settings = replica.settings
        if settings.sync_every is not None:
            self.since.restore(Counted(round(ahead * settings.sync_every), 0, 0))
        elif settings.round_s is not None:
            self.schedule.restart(ahead * settings.round_s)

    @property
    def pace(self) -> RoundSteps:
        """How long this round is: a plan by the anchor that training started from, so all that did
        have the same.
        """
        return again(self.replica.settings, self.replica.flat.layout.numel, self.replica.base.lag)

    @property
    def due(self) -> bool:
        """Whether the round is over after the step just counted: by the schedule, or because
        another member has finished it.
        """
        replica = self.replica
        if not replica.drawn and self.since.fired > 0:
            return replica.frozen is None or replica.frozen.pending.done()
        if replica.settled:
            return True
        steps = self.pace.steps if self._lag is not None else replica.steps
        if self.schedule.due(self.since, replica.base.round, steps):
            return True
        if not replica.follows:
            return False
        frozen = replica.frozen
        under_way = replica.overlap and frozen is not None
        if not (self.since.fired > 0 and self._closing() > replica.base.round + under_way):
            return False
        # What was waited for in vain is looked at once it is decided.
        return frozen is None or replica.overlap or frozen.pending.done()

    @property
    def late(self) -> bool:
        """Whether it is time to adopt the result of what is under way."""
        replica = self.replica
        delay = self.pace.delay if self._lag is not None else replica.settings.delay
        return (
            delay is not None
            and replica.overlap
            and replica.frozen is not None
            and self._offered.fired >= delay
        )

    @property
    def unsent(self) -> int:
        """Samples trained and in no decided contribution."""
        frozen = self.replica.frozen
        return (
            self.replica.unsent
            + self.since.settle().samples
            + (frozen.samples if frozen is not None else 0)
        )

    @property
    def position(self) -> int:
        """Samples of all members together: those in the anchor, and what this member's undecided
        ones make by its share.
        """
        share = expected_share(self.schedule.share, self.schedule.among, self.schedule.members)
        return self.replica.base.samples + round(self.unsent / share)

    def collect(self, loss: float | None = None) -> None:
        """The round's samples are the replica's to contribute; ``loss`` is what it says of them,
        with what was evaluated since the last round.
        """
        counted = self.since.settle()
        found, self.evaluated = self.evaluated, None
        self.replica.loss = (
            loss if found is None else Evaluated(loss, found.anchor, found.own, found.before)
        )
        self.replica.collect(counted.samples)
        if self._lag is not None:
            self._lag.trained(counted.steps, self.schedule.elapsed_s - self._waited_s)
            self.replica.lag = self._lag.steps
        self.since.clear()

    def begin(self) -> None:
        """A round begins."""
        self.schedule.restart()
        self._waited_s = 0.0

    def noted(self, turn: WaitedOutcome) -> None:
        """What a turn says about the next round."""
        self._waited_s += turn.waited_s
        if turn.outcome.status == "open":
            self._offered.clear()
            return
        if self._lag is not None:
            self._lag.decided(max(turn.outcome.elapsed_s, turn.waited_s))
        self.schedule.share, self.schedule.among = self.replica.share, self.replica.among


def make_strands(
    swarm: Swarm,
    flat: FlatVector,
    counter: StepCounter,
    clock: Callable[[], float],
    dropped: Callable[[int, str], None],
) -> list[Strand]:
    """One strand a fragment of the run, over the parts of ``flat``."""
    settings = swarm.settings
    kind = GradientReplica if settings.method == "gradient_averaging" else Replica
    if settings.site is not None or settings.sample is not None:
        replica = SiteReplica(flat, swarm, clock, dropped, settings)
        return [Strand(replica, lambda: swarm.closing, counter, clock, 0.0)]
    if settings.arrivals is not None:
        arriving = ArrivingReplica if settings.arrivals.groups is None else GroupedReplica
        return [
            Strand(
                arriving(flat, swarm, clock, dropped, settings),
                lambda: swarm.closing,
                counter,
                clock,
                0.0,
            )
        ]
    if settings.fragments == 1:
        return [
            Strand(
                kind(flat, swarm, clock, dropped, settings),
                lambda: swarm.closing,
                counter,
                clock,
                0.0,
            )
        ]
    cut, strands = cast("FragmentSwarm", swarm), list[Strand]()
    for fragment, part in enumerate(flat.cut(settings.fragments)):
        replica = kind(part, FragmentLog(cut, fragment), clock, dropped, settings)
        ahead = (settings.fragments - fragment) % settings.fragments / settings.fragments
        strands.append(
            Strand(
                replica,
                lambda fragment=fragment: cut.fragment_closing(fragment),
                counter,
                clock,
                ahead,
            )
        )
    return strands


def enter(swarm: Swarm, flat: FlatVector, strands: list[Strand]) -> None:
    """Open the run with the whole model; its anchor becomes the live parameters."""
    if len(strands) > 1:
        swarm.open(flat.layout, flat.write_initial).release()
    for strand in strands:
        strand.replica.enter()

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
from ...collectives.swarm import AnchorView, FragmentSwarm, Outcome, Pending, RunSettings, Swarm
from ..model.flat import FlatVector
from .again import Lag, RoundSteps, again
from .replica import Replica, ReplicaSwarm, WaitedOutcome
from .schedule import Counted, Schedule, Since, StepCounter, expected_share
from .slow import PATIENCE, TWICE, SlowMember

HOLD_MOST_S = 3600.0
MakeReplica = Callable[
    [FlatVector, ReplicaSwarm, Callable[[], float], Callable[[int, str], None], RunSettings],
    Replica,
]
"""Makes the replica of one fragment: vector, swarm, clock, what is told of dropped samples, and the
run's settings.
"""


class FragmentLog:
    """One fragment of a swarm as a `replica.ReplicaSwarm`."""

    def __init__(self, swarm: FragmentSwarm, fragment: int) -> None:
        self._swarm, self._fragment = swarm, fragment

    @property
    def holds(self) -> bool:
        """As of `Swarm`, where it has it."""
        return bool(getattr(self._swarm, "holds", False))

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
        hold_s: float = 0.0,
    ) -> Pending[Outcome]:
        return self._swarm.contribute_fragment(
            self._fragment,
            samples=samples,
            write=write,
            base=base,
            loss=loss,
            lag=lag,
            hold_s=hold_s,
        )


class Bases:
    """The anchors that a script's fragments started from, as one AnchorView; it is of no round that
    the run was ever at.
    """

    digest = ""

    def __init__(self, views: Sequence[AnchorView]) -> None:
        self._views = views
        self.round = min(view.round for view in views)
        self.numel = sum(view.numel for view in views)
        self.samples = min(view.samples for view in views)
        self.lag = views[0].lag
        self.steps = views[0].steps

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
        examples: int = 0,
    ) -> None:
        """``ahead``: share of the first round that is taken as past already. ``examples``: how many
        this site has, of a run of sites that goes by them."""
        self.replica = replica
        self.schedule = Schedule(replica.settings, clock, examples)
        self.since = Since(counter)
        self._closing, self._clock = closing, clock
        self._offered = Since(counter)  # inner steps since a contribution is under way
        self._lag = Lag() if replica.settings.share is not None else None
        self._slow = SlowMember() if replica.may_stand_aside else None
        self._waited_s = 0.0  # since the last boundary
        # of the adoption that was evaluated last, until a contribution says it
        self.evaluated: Evaluated | None = None
        settings = replica.settings
        self._ahead = 0  # steps of the first round that count as made, and were not
        if settings.sync_every is not None:
            self._ahead = round(ahead * settings.sync_every)
            self.since.restore(Counted(self._ahead, 0, 0))
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
        if not replica.takes_part and self.since.fired > 0:
            return replica.frozen is None or replica.frozen.pending.done()
        if replica.settled:
            return True
        if replica.settings.work is not None and (under_way := replica.frozen) is not None:
            return self.since.fired > 0 and under_way.pending.done()
        if self._finished:
            return True
        if not replica.follows:
            return False
        frozen = replica.frozen
        under_way = replica.overlap and frozen is not None
        ended = self._closing() > replica.base.round + under_way
        if not (self.since.fired > 0 and (ended or self._ends_here)):
            return False
        # What was waited for in vain is looked at once it is decided.
        return frozen is None or replica.overlap or frozen.pending.done()

    @property
    def part_done(self) -> int:
        """How many steps or samples of its work this site has still to do before it contributes, in
        a run of sites, some being done; 0: none."""
        if self.replica.settings.work is None or not (self.since.fired and self.replica.takes_part):
            return 0
        return self.schedule.left(self.since)

    @property
    def _finished(self) -> bool:
        """Whether this member has made all steps of the round."""
        steps = self.pace.steps if self._lag is not None else self.replica.steps
        return self.schedule.due(self.since, self.replica.base.round, steps)

    @property
    def _stands_aside(self) -> bool:
        """Whether its steps are so long that nobody should wait for this member."""
        settings, round_ = self.replica.settings, self.replica.base.round
        if self._slow is None or settings.sync_every is None or round_ < settings.local_after:
            return False
        full = self.pace.steps if self._lag is not None else settings.sync_every
        return self._slow.stands_aside(settings.lengths.short(round_) or full)

    @property
    def _ends_here(self) -> bool:
        """Whether this member's part of the round is over, since another step would end after the
        round does."""
        return (
            self._stands_aside
            and self._slow is not None
            and self._slow.too_late_for_another(self.schedule.elapsed_s)
        )

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
        samples, work = counted.samples, self.replica.settings.work
        if work is not None and work.steps is not None and counted.steps:
            samples = max(1, samples)  # what it counts is not what it has processed
        self.replica.made += counted.steps
        self._hold()
        self.replica.collect(samples)
        if self._lag is not None:
            self._lag.trained(counted.steps, self.schedule.elapsed_s - self._waited_s)
            self.replica.lag = self._lag.steps
        if self._slow is not None:
            trained_s = self.schedule.elapsed_s - self._waited_s
            self._slow.trained(counted.steps - self._ahead, counted.samples, trained_s)
        self._ahead = 0
        self.since.clear()

    def _hold(self) -> None:
        """A member that is slow does not end a round for the others: what it offers waits for them
        to do so. While rounds are short its step is one, and lasts as long as several; these need
        not be measured: they are in the log.
        """
        slow, base, lengths = self._slow, self.replica.base, self.replica.settings.lengths
        if slow is not None and lengths.growth and lengths.short(base.round) is not None:
            others = lengths.before(self._closing()) - lengths.before(base.round)
            holds = self._stands_aside or others > TWICE * max(1, self.since.settle().steps)
        else:
            holds = slow is not None and self._stands_aside and not self._finished
        self.replica.hold_s = min(HOLD_MOST_S, PATIENCE * slow.round_s) if slow and holds else 0.0

    def begin(self) -> None:
        """A round begins."""
        self.schedule.restart()
        self._waited_s = 0.0
        if self._slow is not None:
            base, lengths = self.replica.base, self.replica.settings.lengths
            made, next_ = lengths.before(base.round), lengths.before(base.round + 1)
            self._slow.adopted(self._clock(), made, base.samples, next_ - made)

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
    make: MakeReplica = Replica,
    examples: int = 0,
) -> list[Strand]:
    """One strand a fragment of the run, over the parts of ``flat``. ``make``: makes the replica
    that the run's settings ask for. ``examples``: this site's.
    """
    settings = swarm.settings
    if settings.fragments == 1:
        replica = make(flat, swarm, clock, dropped, settings)
        return [Strand(replica, lambda: swarm.closing, counter, clock, 0.0, examples)]
    cut, strands = cast("FragmentSwarm", swarm), list[Strand]()
    for fragment, part in enumerate(flat.cut(settings.fragments)):
        replica = make(part, FragmentLog(cut, fragment), clock, dropped, settings)
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

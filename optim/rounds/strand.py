"""A strand: the rounds of one fragment in this script, or of the whole model where there is one.

Strands of a model in fragments end their rounds one after another, H/P inner steps apart, so that
each has the link to itself (Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Callable

from ...collectives.group import Evaluated
from .pacing import Pacing
from .replica import Replica, WaitedOutcome
from .schedule import Counted, Schedule, Since, StepCounter, expected_share


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
        pacing: Callable[[Replica], Pacing] = Pacing,
    ) -> None:
        """``ahead``: share of the first round that is taken as past already. ``examples``: how many
        this site has, of a run of sites that goes by them."""
        self.replica = replica
        self.schedule = Schedule(replica.settings, clock, examples)
        self.since = Since(counter)
        self._closing, self._clock = closing, clock
        self._offered = Since(counter)  # inner steps since a contribution is under way
        self._pacing = pacing(replica)
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
    def round_steps(self) -> int | None:
        """Inner steps of this round; None: it does not end by steps."""
        return self._pacing.steps or self.replica.settings.sync_every

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
        if not (
            self.since.fired > 0 and (ended or self._pacing.ends_here(self.schedule.elapsed_s))
        ):
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
        return self.schedule.due(self.since, self.replica.base.round, self._pacing.steps)

    @property
    def late(self) -> bool:
        """Whether it is time to adopt the result of what is under way."""
        replica = self.replica
        delay = self._pacing.delay
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
        pacing, trained_s = self._pacing, self.schedule.elapsed_s - self._waited_s
        # A member that is slow does not end a round for the others.
        self.replica.hold_s = pacing.hold_s(counted.steps, self._closing, lambda: self._finished)
        self.replica.collect(samples)
        pacing.trained(counted.steps, self._ahead, counted.samples, trained_s)
        if pacing.lag is not None:
            self.replica.lag = pacing.lag
        self._ahead = 0
        self.since.clear()

    def begin(self) -> None:
        """A round begins."""
        self.schedule.restart()
        self._waited_s = 0.0
        self._pacing.begin(self._clock())

    def noted(self, turn: WaitedOutcome) -> None:
        """What a turn says about the next round."""
        self._waited_s += turn.waited_s
        if turn.outcome.status == "open":
            self._offered.clear()
            return
        self._pacing.decided(max(turn.outcome.elapsed_s, turn.waited_s))
        self.schedule.share, self.schedule.among = self.replica.share, self.replica.among

"""When a round ends, what counts as an inner step, and how long a script waits for the others.
Clocks are passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.round_settings import RoundSettings

FLOOR_S = 5.0  # detection of a lost peer and a second attempt must fit in


@dataclass(frozen=True, slots=True)
class Counted:
    """Real inner steps and their samples since the counter was cleared, and steps that GradScaler
    skipped.
    """

    steps: int
    samples: int
    skipped: int


class StepCounter:
    """Counts inner steps and samples, leaving out steps that did not happen.

    A fused optimizer under GradScaler runs `step` also when it skips, with ``optimizer.found_inf``
    set. On a GPU that flag is added to a counter on the device and read only when a round may be
    over, so counting never waits for the device.
    """

    def __init__(self) -> None:
        self._steps = self._samples = self._skipped = 0
        # Float64 (2,): skipped steps, skipped samples.
        self._unread: dict[torch.device, Tensor] = {}

    @property
    def fired(self) -> int:
        """Steps that may be real: those still marked on a device are among them."""
        return self._steps

    def count(self, samples: int, found_inf: Tensor | None = None) -> None:
        """One call of `optimizer.step` that processed ``samples``; ``found_inf`` not zero means it
        changed nothing.
        """
        if found_inf is not None and found_inf.device.type == "cpu":
            if bool((found_inf != 0).any()):
                self._skipped += 1
                return
        elif found_inf is not None:
            flag = (found_inf != 0).any().to(torch.float64)
            weights = torch.tensor([1.0, float(samples)], dtype=torch.float64).to(
                flag.device, non_blocking=True
            )
            unread = self._unread.get(flag.device)
            self._unread[flag.device] = (
                weights * flag if unread is None else unread + weights * flag
            )
        self._steps += 1
        self._samples += samples

    def settle(self) -> Counted:
        """What has been counted; reads the devices' counters."""
        for unread in self._unread.values():
            steps, samples = (int(value) for value in unread.tolist())
            self._steps -= steps
            self._samples -= samples
            self._skipped += steps
        self._unread.clear()
        return Counted(self._steps, self._samples, self._skipped)

    def restore(self, counted: Counted) -> None:
        """Go on from an earlier `settle`."""
        self._unread.clear()
        self._steps, self._samples, self._skipped = counted.steps, counted.samples, counted.skipped

    def clear(self) -> None:
        """Start again from zero."""
        self.restore(Counted(0, 0, 0))


class Since:
    """What a counter has counted since a moment; several of them may watch one counter."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self._mark = Counted(0, 0, 0)
        self.clear()

    @property
    def fired(self) -> int:
        """As `StepCounter.fired`."""
        return self._counter.fired - self._mark.steps

    def settle(self) -> Counted:
        """As `StepCounter.settle`."""
        return _less(self._counter.settle(), self._mark)

    def restore(self, counted: Counted) -> None:
        """So much has been counted already."""
        self._mark = _less(self._counter.settle(), counted)

    def clear(self) -> None:
        """From now on."""
        self._mark = self._counter.settle()


def _less(one: Counted, other: Counted) -> Counted:
    return Counted(
        one.steps - other.steps, one.samples - other.samples, one.skipped - other.skipped
    )


def expected_share(share: float, among: int, members: int) -> float:
    """This member's part of the samples of the next entry, estimated: 0 < part <= 1.

    ``share``: its part of the last entry that counted it, 0 for none yet; ``among``: how many
    members there were then, 0 where that is not known; ``members``: how many there are now, this
    one included. Who came since is taken for an average member, who left as well.
    """
    members = max(1, members)
    if not share:
        return 1 / members
    return share if among in (0, members) else min(1.0, share * among / members)


class Schedule:
    """Whether a round is over: after ``sync_every`` real inner steps, or ``round_s`` seconds with
    at least one step, or when all members together have ``target_samples``. In a run of sites:
    when this site's ``work`` is done, of ``examples`` of its own.

    How many samples the others have is not asked of them: each has the share of the target that it
    had of the last round. Whoever is there first contributes, and the others follow
    (`Swarm.closing`), so an estimate that is off costs little. Before the first round the share is
    one of ``members`` (`expected_share`).
    """

    share = 0.0  # of the samples of the last round; 0: not known yet
    among = 0  # how many members there were in that round; 0: not known
    members = 1

    def __init__(
        self, settings: RoundSettings, clock: Callable[[], float], examples: int = 0
    ) -> None:
        self._work, self._examples = settings.work, examples
        if self._work is None and (
            settings.sync_every is None
            and settings.round_s is None
            and settings.target_samples is None
        ):
            raise ConfigError(
                "the run says neither sync_every nor round_s nor target_samples",
                key="$.train.sync_every",
            )
        self._sync_every = settings.sync_every
        self._round_s = settings.round_s
        self._target = settings.target_samples
        self._lengths = settings.lengths
        self._clock = clock
        self._started = clock()

    def restart(self, elapsed_s: float = 0.0) -> None:
        """A round begins now, or began ``elapsed_s`` ago."""
        self._started = self._clock() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the round began."""
        return self._clock() - self._started

    def due(self, counter: StepCounter | Since, round_: int = 0, steps: int | None = None) -> bool:
        """Whether to synchronise after the step just counted; ``round_``: rounds committed so far;
        ``steps``: the round's, where planned again.
        """
        if self._work is not None:
            return counter.fired > 0 and self.left(counter) == 0
        if (steps := self._lengths.short(round_) or steps or self._sync_every) is not None:
            return counter.fired >= steps and counter.settle().steps >= steps
        if self._target is not None:
            mine = self._target * expected_share(self.share, self.among, self.members)
            return counter.fired > 0 and counter.settle().samples >= mine
        assert self._round_s is not None
        return self.elapsed_s >= self._round_s and counter.fired > 0 and counter.settle().steps > 0

    def left(self, counter: StepCounter | Since) -> int:
        """How many steps or samples of the work of a round are still to do; 0: it is done."""
        work = self._work
        assert work is not None
        if work.steps is not None:
            if (missing := work.steps - counter.fired) > 0:
                return missing
            return max(0, work.steps - counter.settle().steps)
        whole = work.samples or (work.epochs or 1) * self._examples
        return max(0, whole - counter.settle().samples)

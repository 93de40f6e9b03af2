"""How many inner steps a member makes until its run is over, and whether the script's learning-rate
schedules end there, too.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from ...collectives.errors import ConfigError
from ...collectives.script_swarm import Swarm
from ...collectives.swarm import RunSettings
from ..data.ledger import attached_to
from .rates import RateHistory

logger = logging.getLogger("atoll")
BY_POSITION = (
    "Let the schedule follow the run: LambdaLR(optimizer, lambda step: max(0.01, 1 - "
    "sync.position / total_samples)), with sync of attach()"
)
SHORT_OF_END = "the learning-rate schedule (%s) will be at %.0f %% of its way when the run ends: %s"
BEYOND_END = "the learning-rate schedule (%s) ends at %.0f %% of the run's steps, and %s: %s"
STILL_HIGH = (
    "the learning rate falls %s, and will still be %.0f %% of its highest when the run ends: make "
    "its end that of the run, steps_left(swarm) steps of atoll.optim from attach() on, or let it "
    "follow attachment.position"
)
HIGH = 0.5  # where a line is let be: scripts that mean to end at a part of the rate want less
FASTER = (
    "it was made for the run's steps, and rounds end after fewer of this member's, since others "
    "are faster: let it follow attachment.position"
)
FITS = 0.1  # rounds are lost and made again, members come late
CYCLES = 3  # a cosine that goes up and down more often than that means to


def steps_left(swarm: Swarm) -> int:
    """Inner steps (of the optimizer, accumulated batches being one) until ``swarm``'s run has all
    its rounds: rounds × sync_every where none are shorter, less those that are over. Before
    `attach`, too, as schedules are made before it. A round that is lost is made again, so it may
    take a few steps more.

        swarm = join(INVITE)
        total = steps_left(swarm)
        arguments = TrainingArguments(..., max_steps=total)         # transformers
        trainer = lightning.Trainer(max_steps=total, ...)           # Lightning
        schedule = LambdaLR(optimizer, lambda step: 1 - step / total)

    Raises ConfigError where the run does not say it: without a number of rounds, and where rounds
    end by time or samples, or are planned again.
    """
    settings = swarm.settings
    why = why_open(settings)
    if why:
        raise ConfigError(
            f"nobody can say how many steps this run has: {why}", key="$.train", hint=BY_POSITION
        )
    sync = attached_to(swarm)
    done = sync.begun[0] if sync is not None else int(getattr(swarm, "round", 0))
    return steps_after(settings, done)


def why_open(settings: RunSettings) -> str:
    """Why a run's number of steps is not known beforehand; "": it is."""
    if settings.rounds is None:
        return "it has no [train] rounds"
    if settings.sync_every is None:
        return "its rounds end by time or samples"
    if settings.share is not None:
        return "its rounds are planned again as they go ([train] share)"
    if settings.arrivals is not None:
        return "a round does not wait for every member ([exchange.arrivals])"
    return ""


def steps_after(settings: RunSettings, done: int) -> int:
    """Inner steps of the rounds that come after ``done`` of them; `why_open` says nothing."""
    assert settings.rounds is not None
    before = settings.lengths.before
    return max(0, before(settings.rounds) - before(done))


class PlannedEnd(NamedTuple):
    """After how many of its own steps a schedule ends, the setting that says so, and what the rate
    does from there on; "": it stays, as it may be meant to. ``most``: of so many ends and more in a
    run nothing is said.
    """

    steps: int
    setting: str
    then: str
    most: float = math.inf


def planned_end(schedule: object) -> PlannedEnd | None:
    """Of a schedule that decays to an end which can be known, such as torch's cosine and those of
    transformers; None for any other.
    """
    match schedule:
        case OneCycleLR():
            return PlannedEnd(schedule.total_steps, "total_steps", "torch raises an error then")
        case CosineAnnealingLR():
            then = "the rate goes up again from there"
            return PlannedEnd(schedule.T_max, "T_max", then, CYCLES)
        case PolynomialLR():
            return PlannedEnd(schedule.total_iters, "total_iters", "the rate is 0 from there")
        case LinearLR() if schedule.end_factor < schedule.start_factor:
            then = "" if schedule.end_factor else "the rate is 0 from there"
            return PlannedEnd(schedule.total_iters, "total_iters", then)
        case SequentialLR():
            last = planned_end(schedule._schedulers[-1])
            return last and last._replace(steps=schedule._milestones[-1] + last.steps)
        case LambdaLR():
            for each in schedule.lr_lambdas:
                total = each.keywords.get("num_training_steps") if isinstance(each, partial) else 0
                if isinstance(total, int) and total > 0:
                    return PlannedEnd(total, "num_training_steps", "nothing is decayed from there")
        case _:
            pass
    return None


def schedules_of(optimizers: Sequence[Any]) -> list[LRScheduler]:
    """The schedules of these optimizers, or of what wraps them, but for parts of a SequentialLR.
    Nothing that an optimizer has leads to them, so all objects of the process are looked through.
    """
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    if not any("initial_lr" in group for group in groups):
        return []  # who has a schedule has this
    own, found = {id(each) for each in optimizers}, list[LRScheduler]()
    for each in gc.get_objects():
        if issubclass(type(each), LRScheduler):
            at = getattr(each, "optimizer", None)
            while at is not None and id(at) not in own:
                at = getattr(at, "optimizer", None)
            if at is not None:
                found.append(each)
    parts = {
        id(part) for each in found if isinstance(each, SequentialLR) for part in each._schedulers
    }
    return [each for each in found if id(each) not in parts]


class _Seen(NamedTuple):
    """A schedule, and where it and the inner steps were when it was found; ``left``: how many more
    the run had then.
    """

    schedule: LRScheduler
    at: int
    steps: int
    left: int


class ScheduleEnds:
    """Whether an attachment's schedules end with the run. Said once, of the first that does not."""

    def __init__(self, swarm: Swarm, optimizers: Sequence[Optimizer], outermost: Sequence[Any]):
        """``outermost``: what a script gave to `attach` for the ``optimizers``."""
        self._swarm = swarm
        self._optimizers = [*optimizers, *outermost]
        self._seen: list[_Seen] | None = None
        self._known = not optimizers or bool(why_open(swarm.settings))
        self._rates = RateHistory(self._optimizers)
        self._looks = 0
        self._compared = False
        self.follows = False  # the script reads the run's position

    def compare(self, planned: int, *, decays: bool, setting: str) -> None:
        """Warn, once, where a trainer plans ``planned`` more steps and the run has another number
        of them. ``decays``: its learning rate depends on how many they are. ``setting``: how it is
        told another number, with ``{}`` for it. A schedule of the script's own may end elsewhere
        than the trainer: `look` judges it.
        """
        if self._known or self._compared:
            return
        self._compared = True
        left = steps_left(self._swarm)
        if planned == left or left == 0 or (planned > left and not decays):
            return
        self._known = True
        to_type = setting.format("steps_left(swarm)")
        if planned < left:
            logger.warning(
                "training is to end after %d steps here, and the run has %d more: %s, with "
                "steps_left of atoll.optim, trains to its end",
                planned,
                left,
                to_type,
            )
            return
        logger.warning(
            "the learning-rate schedule is made for %d steps, and the run ends after %d, at "
            "%.0f %% of its way: %s, with steps_left of atoll.optim, is the run's own number",
            planned,
            left,
            100 * left / planned,
            to_type,
        )

    def resumed(self) -> None:
        """Steps and schedules were loaded."""
        self._seen = None
        self._rates, self._looks = RateHistory(self._optimizers), 0

    def stepped(self) -> None:
        """An inner step is over."""
        if not self._known:
            self._rates.stepped()

    def look(self, steps: int, done: int) -> None:
        """A round begins, after so many inner steps of this attachment and committed rounds. A
        plain loop steps its schedule each step, or each epoch; so where it ends follows from how
        far it came in the steps that were seen, which is known to one of its steps.
        """
        if self._known:
            return
        left = steps_after(self._swarm.settings, done)
        if self._seen is None:
            self._seen = [
                _Seen(each, each.last_epoch, steps, left)
                for each in schedules_of(self._optimizers)
                if planned_end(each) is not None
            ]
            return
        if not self._seen:
            self._look_at_rates(left)
        for schedule, first, since, had in self._seen:
            end, came = planned_end(schedule), schedule.last_epoch - first
            if end is None or came < 1 or steps == since or not left:
                continue
            each_step = came == steps - since
            least, most = (
                schedule.last_epoch + left * (came + more) / (steps - since)
                for more in ((0, 0) if each_step else (-1, 1))
            )
            likely = (least + most) / 2
            name = f"{type(schedule).__name__}, {end.setting} {end.steps}"
            wanted = "make it of steps_left(swarm) steps (of atoll.optim; before attach())"
            if not each_step:
                wanted = f"about {round(likely)} of its steps end with the run"
            # it is stepped after the optimizer, whose step this is
            if most + 1 < end.steps * (1 - FITS):
                self._known = True
                if each_step and abs(first + had - end.steps) <= FITS * end.steps:
                    wanted = FASTER
                logger.warning(SHORT_OF_END, name, 100 * likely / end.steps, wanted)
            elif end.then and end.steps * (1 + FITS) < least < end.steps * end.most:
                self._known = True
                logger.warning(BEYOND_END, name, 100 * end.steps / likely, end.then, wanted)

    def _look_at_rates(self, left: int) -> None:
        """Of a rate whose schedule is nobody's that is known, or the script's own."""
        self._looks += 1
        if self._looks < 2 or self.follows or (end := self._rates.end(left)) is None:
            return
        if end.curve == "line" and end.left >= HIGH:
            self._known = True
            logger.warning(STILL_HIGH, "in a straight line", 100 * end.left)
        elif end.curve == "cosine" and end.way < 1 - FITS:
            self._known = True
            along = f"on a half cosine, of which {end.way:.0%} will be over then"
            logger.warning(STILL_HIGH, along, 100 * end.left)

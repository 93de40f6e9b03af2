"""Work that a peer asks of its script: vectors from seeds, whole or in intervals."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....security.btard import GradientTask
from ....security.btard.messages import Vector
from ....security.btard.trail import Trail
from ...session.mode_events import WorkAsked
from ...session.pre_round import ScriptWork

if TYPE_CHECKING:
    from ...session.session import Session

OnComputed = Callable[[float, GradientTask, Vector, Trail | None], None]


class SeededTasks(ScriptWork):
    """What the script was asked for and has not computed yet. ``computed`` hears of what it has."""

    def __init__(self, session: Session, intervals: int, computed: OnComputed) -> None:
        self.session, self._intervals, self._computed = session, intervals, computed
        self._step = -1
        self._tasks: dict[int, GradientTask] = {}
        # Of the own work, from the anchor on, where it is in intervals.
        self._states: list[Vector] = []
        # No answer to an earlier life is one to this.
        self._number = 1 + random.SystemRandom().getrandbits(40)

    def begin(self, step: int, start: Vector | None) -> None:
        """A step begins. ``start``: where the own work does, of intervals."""
        self._step, self._states = step, [] if start is None else [start]
        self._tasks = {
            number: task for number, task in self._tasks.items() if task.step >= step - 1
        }

    def ask(self, task: GradientTask) -> None:
        self._number += 1
        self._tasks[self._number] = task
        self._emit(self._number, task)

    def ask_again(self) -> None:
        """There is another script than the one that was asked."""
        for number, task in self._tasks.items():
            self._emit(number, task)

    def _emit(self, number: int, task: GradientTask) -> None:
        self.session.ports.emit(WorkAsked(number, task.step, task.seed, task.interval))

    def computed(self, now: float, number: int, vector: Tensor, part: int = 0) -> None:
        task = self._tasks.get(number)
        if task is None:
            return
        values, trail = vector.clone().numpy(), None
        if self._intervals and task.interval < 0:
            if task.step != self._step or not self._states or part > len(self._states) - 1:
                # of a step that is over; or another script's, that was asked again, and is not
                # there yet
                return
            self._states[part + 1 :] = [values]
            if len(self._states) <= self._intervals:
                return
            values, trail = np.subtract(self._states[0], self._states[-1]), Trail(self._states)
            self._states = []
        del self._tasks[number]
        self._computed(now, task, values, trail)

    def starts(self, number: int) -> Tensor | None:
        task = self._tasks.get(number)
        return None if task is None or task.start is None else torch.from_numpy(task.start)

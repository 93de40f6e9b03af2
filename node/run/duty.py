"""Whether this machine does its part of a run: its script is there and makes steps, these take as
long as they did, its GPU has work. A state machine without a clock, which `verdicts` asks.

A machine has a duty once a script of its own has attached to the run, until that script says
goodbye, the run is finished or left. A seed or an observer never has one, and while training is
paused nobody has. A script that is attached counts as present, however long its steps take: a long
first compile or evaluation is no fault. Whether it stands still is `watching.standstill`'s to say.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from . import events as e

ABSENT_S = 120.0
"""A script whose connection ended, and whose process lives, comes back by then."""
RETURN_S = 300.0
"""So long after its node's return, or after a pause, a script may take to attach."""
MINUTE_S = 60.0
"""Scripts report step times and readings of their GPU once a minute."""
NEWEST, BEFORE, KEPT = 5, 16, 180
"""Reports that count as now; how many older ones are needed; how many are kept: three hours."""
APART_S = 1800.0
"""The newest reports are compared with those that are so much older, where there are enough."""
SLOWER, USUAL_AGAIN = 10.0, 4.0
"""Times the step time before: from the first on it is a verdict, below the other one no more."""
LEAST_S = 0.02
"""Shorter steps than this are not slow."""
READINGS, IDLE_SHARE = 15, 0.05
"""So many readings of a GPU in a row below this share of the time."""

ABSENT, SLOW, IDLE, STANDING = "V11", "V12", "V13", "V22"
OF_DUTY = frozenset({"step_s", "gpu_busy"})
"""Metrics that are reported for this alone, and between the rounds, too."""


class DutyChange(NamedTuple):
    """A verdict to raise (``said`` says why), or with ``said`` None to withdraw. ``since``: when it
    began.
    """

    code: str
    said: str | None
    since: float


class Duty:
    """Of this machine in one run."""

    def __init__(self) -> None:
        self._attached = set[int]()
        self._gone: tuple[float, str] | None = None  # since when no script is there, and why
        self._due = math.inf  # when that is a verdict
        self._paused = self._over = False
        self._steps = deque[tuple[float, float]](maxlen=KEPT)  # when, seconds a step took
        self._usual = 0.0  # seconds of a step before it became slow; 0: it is not
        self._busy = deque[float](maxlen=READINGS)

    def take(self, event: e.RunEvent, at: float) -> list[DutyChange]:
        """An event of the run."""
        match event:
            case e.ScriptAttachedEvent():
                return self._attach(event.pid, at)
            case e.ScriptEndedEvent():
                return self._ended(event, at)
            case e.ScriptExitedEvent() if event.failed:
                return self._died(event.pid, event.how, at)
            case e.ScriptExitedEvent() if not self._attached:
                return self._in_order(at)
            case e.ScriptMissingEvent():
                if self._gone is None and not self._attached:
                    after = f"process {event.pid} {event.how}" if event.how else _RETURNED
                    self._gone, self._due = (event.since, after), at + RETURN_S
            case e.ScriptReportEvent():
                return self._report(event.metrics, at)
            case e.ScriptStillEvent() if self._attached and not self._over:
                return [DutyChange(STANDING, _silent(event), at - event.seconds)]
            case e.RunPausedEvent():
                self._paused = True
                return [DutyChange(code, None, at) for code in (ABSENT, STANDING)]
            case e.RunResumedEvent():
                self._paused, self._due = False, max(self._due, at + RETURN_S)
            case e.RunWaitingEvent() if event.state == "finished":
                return self._end(at)
            case e.RunLeftEvent():
                return self._end(at)
            case _:
                pass
        return []

    def look(self, now: float) -> list[DutyChange]:
        """What time alone brings: nobody has come back."""
        if self._gone is None or self._paused or self._over or now < self._due:
            return []
        since, why = self._gone
        return [DutyChange(ABSENT, why, since)]

    def _attach(self, pid: int, at: float) -> list[DutyChange]:
        self._attached.add(pid)
        self._gone, self._due, self._over = None, math.inf, False
        return [DutyChange(ABSENT, None, at), *self._begin_again(at)]

    def _begin_again(self, at: float) -> list[DutyChange]:
        """Another script, another model: nothing of before is usual."""
        self._steps.clear()
        self._busy.clear()
        self._usual = 0.0
        return [DutyChange(code, None, at) for code in (SLOW, IDLE, STANDING)]

    def _ended(self, event: e.ScriptEndedEvent, at: float) -> list[DutyChange]:
        pid = event.pid
        self._attached.discard(pid)
        changes = self._begin_again(at)
        if event.finished:
            return [*changes, *self._end(at)]
        if (
            self._attached or event.farewell is None
        ):  # another trains; or the node ends, or is older
            return changes
        if event.error:
            return [*changes, *self._died(pid, f"ended with {event.error}", at)]
        if event.farewell:
            return [*changes, *self._in_order(at)]
        self._gone = at, f"process {pid} lives, and is not attached any more"
        self._due = at + ABSENT_S
        return changes

    def _in_order(self, at: float) -> list[DutyChange]:
        """It ended as its owner wanted: the machine is a seed from now on."""
        self._gone, self._due = None, math.inf
        return [DutyChange(ABSENT, None, at)]

    def _died(self, pid: int, how: str, at: float) -> list[DutyChange]:
        if self._over or self._attached - {pid}:
            return []
        self._attached.discard(pid)
        since = self._gone[0] if self._gone is not None else at
        self._gone, self._due = (since, f"process {pid} {how}"), at
        return [DutyChange(ABSENT, None, at), *self.look(at)]  # a better reason replaces one

    def _end(self, at: float) -> list[DutyChange]:
        self._gone, self._due, self._over = None, math.inf, True
        return [DutyChange(code, None, at) for code in (ABSENT, STANDING)]

    def _report(self, metrics: Mapping[str, float], at: float) -> list[DutyChange]:
        changes = list[DutyChange]()
        step_s, busy = metrics.get("step_s"), metrics.get("gpu_busy")
        if step_s is not None and 0 < step_s < math.inf:
            changes += [DutyChange(STANDING, None, at), *self._step(step_s, at)]
        if busy is not None and 0 <= busy <= 1:
            self._busy.append(busy)
            if max(self._busy) >= IDLE_SHARE:
                changes.append(DutyChange(IDLE, None, at))
            elif len(self._busy) == READINGS:
                said = f"busy for {100 * max(self._busy):.0f} % of the time at most, in the last "
                said += f"{READINGS} readings, though the script makes steps"
                changes.append(DutyChange(IDLE, said, at))
        return changes

    def _step(self, step_s: float, at: float) -> list[DutyChange]:
        if self._steps and at - self._steps[-1][0] < MINUTE_S / 2:
            return []
        self._steps.append((at, step_s))
        if len(self._steps) < NEWEST + BEFORE:
            return []
        rows = list(self._steps)
        newest = [value for _, value in rows[-NEWEST:]]
        now = median(newest)
        if self._usual:
            if now <= USUAL_AGAIN * self._usual:
                self._usual = 0.0
                return [DutyChange(SLOW, None, at)]
            return []
        older = [value for _, value in rows[:-NEWEST]]
        long_ago = [value for when, value in rows[:-NEWEST] if at - when >= APART_S]
        before = median(long_ago if len(long_ago) >= BEFORE else older)
        if now < LEAST_S or now < SLOWER * before or min(newest) < USUAL_AGAIN * before:
            return []  # two of five minutes may well be an evaluation's
        self._usual = before
        said = f"a step takes {_seconds(now)}, {_seconds(before)} before: {now / before:.0f} times"
        return [DutyChange(SLOW, said, at)]


_RETURNED = "none has attached since the node came back"


def _silent(event: e.ScriptStillEvent) -> str:
    return (
        f"process {event.pid} has made no step for {event.seconds / 60:.0f} min, "
        f"and one took {_seconds(event.step_s)}; {event.doing}"
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"

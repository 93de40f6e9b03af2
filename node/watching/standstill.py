"""A script that is attached, lives, and makes no step any more: a loader whose workers are gone, a
deadlock, a process that was stopped, a file system that does not answer. Published once, for
`run.duty` to judge.

A script that makes steps gives a sign once a minute (`optim.script.step_times`). One that waits for
a round asks nothing, and stands still for others' sake; that time does not count. Nor do starts,
which may compile for hours. An evaluation or a long export takes processor time, so such silence is
let be for much longer; and what one of them has taken before is usual of this script.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..run.events import RunEvent, ScriptStillEvent

IDLE_S, BUSY_S = 600.0, 3600.0
"""Silence that is no fault: of a process that takes no processor time, and of one that does."""
BUSY = 0.1  # of the time, on all its threads together
SIGNS = 3  # minutes of steps that a script must have made before anything is usual of it
STEPS, LONGER = 20.0, 2.0
"""Times the usual step, and times the longest silence of before: no shorter one is a fault."""
_STATES = {
    "T": "it is stopped, as by Ctrl-Z: kill -CONT {pid} lets it go on",
    "t": "a debugger holds it",
    "D": "it waits for a device or a file system that does not answer",
}
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ProcessReading(NamedTuple):
    """Of a process: seconds of processor time so far, None where nobody can tell, and the letter of
    its state, as ps has it.
    """

    used_s: float | None = None
    state: str = ""


def read_process(pid: int) -> ProcessReading:
    """From /proc, where there is one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ProcessReading((int(fields[11]) + int(fields[12])) / _TICKS, fields[0])
    return ProcessReading()


class Standstill:
    """Of the script of one run. ``read`` says how its process does."""

    def __init__(
        self,
        run_id: str,
        publish: Callable[[RunEvent], None],
        read: Callable[[int], ProcessReading] = read_process,
    ) -> None:
        self._run_id, self._publish, self._read = run_id, publish, read
        self._pid = 0
        self._since: float | None = None  # the newest sign; None: no script, or it waits for others
        self._used: float | None = None  # processor time then
        self._signs = 0
        self._step_s = self._longest = 0.0
        self._told = False

    def begin(self, now: float, pid: int) -> None:
        """A script has attached."""
        self.end()
        self._pid = pid
        self.sign(now)

    def end(self) -> None:
        """It is gone."""
        self._since, self._pid, self._signs = None, 0, 0
        self._step_s = self._longest = 0.0

    def stepped(self, now: float, step_s: float) -> None:
        """It reports how long a step took, once a minute at most."""
        self._signs, self._step_s = self._signs + 1, step_s
        self.sign(now)

    def sign(self, now: float) -> None:
        """It has asked for something, or has got what it waited for: its turn begins."""
        if not self._pid:
            return
        if self._since is not None:
            self._longest = max(self._longest, now - self._since)
        self._since, self._told = now, False
        self._used = self._read(self._pid).used_s

    def wait(self) -> None:
        """It waits for a round, or rests: nothing is expected of it."""
        self._since = None

    def look(self, now: float) -> None:
        """Publish once what is no pause of an honest script any more."""
        if self._since is None or self._told or self._signs < SIGNS:
            return
        silent = now - self._since
        if silent < max(IDLE_S, STEPS * self._step_s, LONGER * self._longest):
            return
        found = self._read(self._pid)
        used = None if self._used is None or found.used_s is None else found.used_s - self._used
        idle = used is not None and used < BUSY * silent
        if not idle and silent < BUSY_S:
            return
        self._told = True
        doing = _STATES.get(found.state, "") if idle else "though its process is busy"
        self._publish(
            ScriptStillEvent(
                run=self._run_id,
                pid=self._pid,
                seconds=round(silent, 1),
                step_s=self._step_s,
                doing=doing.format(pid=self._pid)
                or "its process takes no processor time: it waits for something",
            )
        )

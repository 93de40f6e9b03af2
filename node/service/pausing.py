"""Whether a run's script trains at this node: not while its owner has paused it (`atoll pause`),
nor outside the hours that are set (``node.hours``). The node serves the run's state all the same.

A word is kept in the run's folder and survives the node. A pause holds until `atoll resume`. A
resume outside the hours holds until they begin; then the hours count again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..home.hours import Hours
from ..home.paths import write_atomic
from ..run.events import RunEvent, RunPausedEvent, RunResumedEvent

FILE = "paused"  # in the run's folder
Word = Literal["", "pause", "resume"]


class RunPause:
    """Of one run. ``minute`` tells the minute of the day, by this machine's clock on the wall."""

    def __init__(
        self,
        run_id: str,
        folder: Path,
        hours: Hours | None,
        publish: Callable[[RunEvent], None],
        minute: Callable[[], int] = lambda: minute_of(time.time()),
    ) -> None:
        self._run_id = run_id
        self._file, self._hours, self._publish, self._minute = folder / FILE, hours, publish, minute
        self._word = self._read()
        self._announced = ""

    @property
    def why(self) -> str:
        """Why the script is not to train now; "": it may."""
        if self._word == "pause":
            return "paused by its owner"
        if self._word == "resume" or self._hours is None or self._within:
            return ""
        return f"paused until {self._hours.begin}"

    @property
    def _within(self) -> bool:
        return self._hours is None or self._hours.hold(self._minute())

    def say(self, paused: bool) -> bool:
        """The owner pauses or resumes training; whether that changes anything. Raises StorageError
        where the word cannot be kept.
        """
        before = self.why
        self._keep("pause" if paused else "")
        if not paused and self.why:
            self._keep("resume")
        self.look()
        return bool(before) != paused

    def look(self) -> None:
        """Publish it if it changed; a resume is over once the hours begin. Raises StorageError."""
        if self._word == "resume" and self._within:
            self._keep("")
        if (why := self.why) != self._announced:
            self._announced = why
            if why:
                self._publish(RunPausedEvent(run=self._run_id, why=why))
            else:
                self._publish(RunResumedEvent(run=self._run_id))

    def _keep(self, word: Word) -> None:
        if word == self._word:
            return
        if word:
            write_atomic(self._file, word.encode())
        else:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
        self._word = word

    def _read(self) -> Word:
        try:
            found = self._file.read_bytes()
        except OSError:
            return ""
        return "resume" if found == b"resume" else "pause"  # a torn file: rather not


def minute_of(unix_s: float) -> int:
    """The minute of the day, 0 to 1439, where this machine is."""
    at = time.localtime(unix_s)
    return 60 * at.tm_hour + at.tm_min

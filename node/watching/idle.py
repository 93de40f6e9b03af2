"""A script that gives the run nothing: it has joined and attaches no model, or has attached and
makes no step. Named in status, and once in log and events. One that says what it prepares, such as
that it loads a model, is not: status says what it does, and for how long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..run.events import RunEvent, ScriptIdleEvent, ScriptUnattachedEvent

AFTER_S = 60.0
STEPLESS_S = 130.0
"""A script that makes steps reports so once a minute: two reports are missing by then."""
log = logging.getLogger("atoll")


class Idle:
    """Of one run: which scripts have joined and not attached, and since when the attached one has
    contributed nothing.
    """

    def __init__(self, run_id: str, publish: Callable[[RunEvent], None]) -> None:
        self._run_id, self._publish = run_id, publish
        self._since: float | None = None
        self._announced = False
        self._joined: dict[int, float] = {}  # by process, since when
        self._named = set[int]()  # of those, who was told
        self._prepares: dict[int, str] = {}  # of those, what they say that they do first

    def joined(self, now: float, pid: int) -> None:
        """A script has entered the run; it is to attach a model, or to call collectives."""
        self._joined[pid] = now

    def prepares(self, pid: int, what: str) -> None:
        """That script says what it does before it attaches; "": nothing any more."""
        if pid not in self._joined:
            return
        if what:
            self._prepares[pid] = what
        else:
            self._prepares.pop(pid, None)

    def gone(self, pid: int) -> None:
        """That script attaches, or has ended."""
        self._joined.pop(pid, None)
        self._named.discard(pid)
        self._prepares.pop(pid, None)

    def attached(self, now: float) -> None:
        """The script may train from now on."""
        self._since, self._announced = now, False

    def over(self) -> None:
        """It makes steps, has contributed, or is gone."""
        self._since = None

    def look(self, now: float) -> None:
        """Report each once: AFTER_S after a script joined, STEPLESS_S after one attached."""
        for pid, since in self._joined.items():
            if pid not in self._named | self._prepares.keys() and now - since >= AFTER_S:
                self._named.add(pid)
                log.warning(
                    (
                        "run %s: process %d joined %.0f s ago and has attached nothing; does its "
                        "script call attach(model, optimizer, swarm)?"
                    ),
                    self._run_id,
                    pid,
                    now - since,
                )
                told = ScriptUnattachedEvent(
                    run=self._run_id, pid=pid, seconds=round(now - since, 1)
                )
                self._publish(told)
        if self._since is None or self._announced or now - self._since < STEPLESS_S:
            return
        self._announced = True
        log.warning(
            "run %s: the script has made no step in the %.0f s since it attached; does its "
            "loop call the step() of the optimizer that attach() was given?",
            self._run_id,
            now - self._since,
        )
        self._publish(ScriptIdleEvent(run=self._run_id, seconds=round(now - self._since, 1)))

    def view(self, now: float) -> float | None:
        """Seconds, once they are worth a word; None before, and after a step or a contribution."""
        if self._since is None or now - self._since < STEPLESS_S:
            return None
        return round(now - self._since, 1)

    @property
    def processes(self) -> list[int]:
        """Those that have joined and not attached."""
        return list(self._joined)

    def unattached(self, now: float) -> dict[str, float]:
        """By process: seconds since it joined, of those that should have attached by now."""
        return {
            str(pid): round(now - since, 1)
            for pid, since in self._joined.items()
            if now - since >= AFTER_S and pid not in self._prepares
        }

    def preparing(self, now: float) -> dict[str, tuple[str, float]]:
        """By process: what it does before it attaches, and seconds since it joined."""
        return {
            str(pid): (what, round(now - self._joined[pid], 1))
            for pid, what in self._prepares.items()
        }


class JoinedScript:
    """One of them. Implements `control.service.ExpectedScript`."""

    def __init__(self, idle: Idle, pid: int, wake: Callable[[], None]) -> None:
        self._idle, self._pid, self._wake = idle, pid, wake

    def prepares(self, what: str) -> None:
        """What it does before it attaches."""
        self._idle.prepares(self._pid, what)
        self._wake()

    def gone(self) -> None:
        """It attaches, or has ended."""
        self._idle.gone(self._pid)

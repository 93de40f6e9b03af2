"""A script that is attached and contributes nothing: named in status, and once in log and events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

AFTER_S = 60.0
log = logging.getLogger("atoll")


class Idle:
    """Of one run: since when its script is attached, until it contributes for the first time."""

    def __init__(self, run_id: str, publish: Callable[[dict[str, Any]], None]) -> None:
        self._run_id, self._publish = run_id, publish
        self._since: float | None = None
        self._told = False

    def attached(self, now: float) -> None:
        """The script may train from now on."""
        self._since, self._told = now, False

    def over(self) -> None:
        """It has contributed, or is gone."""
        self._since = None

    def look(self, now: float) -> None:
        """Tell it, once, after AFTER_S. Long rounds of slow steps are no fault, so it is no
        trouble.
        """
        if self._since is None or self._told or now - self._since < AFTER_S:
            return
        self._told = True
        log.warning(
            "run %s: the script has contributed nothing in the %.0f s since it attached; does its loop call the step() of the"
            " optimizer that attach() was given?",
            self._run_id,
            now - self._since,
        )
        self._publish(
            {"event": "script.idle", "run": self._run_id, "seconds": round(now - self._since, 1)}
        )

    def view(self, now: float) -> float | None:
        """Seconds, once they are worth a word; None before, and where a contribution was made."""
        if self._since is None or now - self._since < AFTER_S:
            return None
        return round(now - self._since, 1)

"""The verdicts on a run at this node: published, kept for its status, and told to a command of the
owner's (``[notify] command``).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from ..run.events import RunEvent, VerdictRaisedEvent, VerdictWithdrawnEvent
from ..run.verdicts import PAGES, VerdictChange, Verdicts

log = logging.getLogger("atoll")
COMMAND_S = 30.0
WAITING = 16  # changes that wait for the command; more are dropped, the oldest first


class RunVerdicts:
    """Of one run."""

    def __init__(self, run_id: str, publish: Callable[[RunEvent], None]) -> None:
        self._run_id, self._publish = run_id, publish
        self._verdicts = Verdicts()

    def take(self, event: RunEvent) -> list[VerdictChange]:
        """An event of the run was published; what was withdrawn or raised, and is published now."""
        if isinstance(event, VerdictRaisedEvent):
            return []
        return self._tell(self._verdicts.take(event))

    def look(self, unix_s: float) -> list[VerdictChange]:
        """What time alone brings."""
        return self._tell(self._verdicts.look(unix_s))

    def view(self) -> list[dict[str, Any]]:
        """Those that stand, oldest first, JSON-able."""
        standing = sorted(self._verdicts.standing.values(), key=lambda verdict: verdict.since)
        return [{**verdict._asdict(), "title": PAGES[verdict.code].title} for verdict in standing]

    @property
    def against_averaging(self) -> str:
        """What members' evaluations have against it (V21); "" where nothing."""
        verdict = self._verdicts.standing.get(("V21", ""))
        return verdict.said if verdict is not None else ""

    def _tell(self, changes: Sequence[VerdictChange]) -> list[VerdictChange]:
        for raised, verdict, _ in changes:
            kind = VerdictRaisedEvent if raised else VerdictWithdrawnEvent
            (log.warning if raised else log.info)(
                "run %s: %s %s %s: %s",
                self._run_id,
                verdict.code,
                "holds" if raised else "holds no more",
                verdict.subject,
                verdict.said,
            )
            self._publish(
                kind(
                    run=self._run_id, code=verdict.code, subject=verdict.subject, said=verdict.said
                )
            )
        return list(changes)


class Notifier:
    """Runs the owner's command for each verdict, one at a time: no shell, what happened in its
    environment (``ATOLL_RUN``, ``ATOLL_NAME``, ``ATOLL_CODE``, ``ATOLL_RAISED``, ``ATOLL_PEER``,
    ``ATOLL_TEXT``).
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._waiting: deque[dict[str, str]] = deque(maxlen=WAITING)
        self._more = trio.Event()
        self._busy = False

    async def settled(self, patience_s: float) -> None:
        """Wait until the command has run for each verdict that was told, at most so long."""
        with trio.move_on_after(patience_s):
            while self._waiting or self._busy:
                await trio.sleep(0.05)

    def tell(self, run_id: str, name: str, changes: Sequence[VerdictChange]) -> None:
        """Never waits."""
        for raised, verdict, _ in changes if self._command else ():
            title = PAGES[verdict.code].title
            self._waiting.append(
                {
                    "ATOLL_RUN": run_id,
                    "ATOLL_NAME": name,
                    "ATOLL_CODE": verdict.code,
                    "ATOLL_RAISED": "1" if raised else "0",
                    "ATOLL_PEER": verdict.subject,
                    "ATOLL_TEXT": f"{'' if raised else 'holds no more: '}{title}: {verdict.said}",
                }
            )
            self._more.set()

    async def run(self) -> None:
        """For ever. A command that fails or takes over `COMMAND_S` is a line in the log, and so is
        one that is not there when the node starts.
        """
        if self._command and shutil.which(self._command[0]) is None:
            log.warning("[notify] command cannot be run: no program %s", self._command[0])
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                self._busy = True
                await self._one(self._waiting.popleft())
                self._busy = False

    async def _one(self, settings: Mapping[str, str]) -> None:
        try:
            with trio.move_on_after(COMMAND_S) as scope:
                done = await trio.run_process(
                    list(self._command),
                    env={**os.environ, **settings},
                    stdin=b"",
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
                if done.returncode:
                    log.warning("[notify] command ended with status %d", done.returncode)
            if scope.cancelled_caught:
                log.warning("[notify] command took more than %.0f s and was ended", COMMAND_S)
        except (OSError, ValueError) as error:
            log.warning("[notify] command cannot be run: %s", error)

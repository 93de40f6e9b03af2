"""Whether this machine's script is there: noted in the run's folder for the node's next life, and
published with how it ended. What that means is `run.duty`'s to judge.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import trio

from ...collectives.errors import StorageError
from ..home.paths import write_atomic
from ..run.events import (
    RunLeftEvent,
    ScriptAttachedEvent,
    ScriptEndedEvent,
    ScriptExitedEvent,
    ScriptMissingEvent,
)
from ..service.facts import finished
from .obituary import ScriptProcess

if TYPE_CHECKING:
    from ..service.run import RunService

FILE = "script"  # in the run's folder
GONE_S = 3.0
"""A process whose connection ended without a farewell is gone by then, or lives on."""
OF_SIGNALS = 128
"""Exit statuses from here on are those of scripts that a signal ended, such as 130 of Ctrl-C."""
ENDS_S = 30.0
"""What a script does after its farewell, such as an export, until its exit status is known."""


class _Noted(msgspec.Struct, frozen=True):
    """A script that is attached (``how`` ""), or that ended as nobody wanted."""

    pid: int
    at: float
    how: str = ""


class ScriptPresence:
    """Of one run at one node."""

    def __init__(self, run: RunService) -> None:
        self._run = run
        self._file = run.node.paths.run_dir(run.run_id) / FILE
        self._processes: dict[int, ScriptProcess] = {}
        self._watched = 0  # processes whose end is awaited

    def begin(self) -> None:
        """The node is in the run (again): a script that trained in its last life is missed. That of
        a private node is about to attach.
        """
        try:
            noted = msgspec.json.decode(self._file.read_bytes(), type=_Noted)
        except (OSError, msgspec.MsgspecError):  # none trained here, or the file is torn
            return
        if finished(self._run):
            self._forget()
        elif self._run.seeding:
            self._run.node.publish(
                ScriptMissingEvent(
                    run=self._run.run_id, pid=noted.pid, since=noted.at, how=noted.how
                )
            )

    def attached(self, pid: int, *, averaging: str) -> None:
        """A script trains here; ``averaging``: how the run averages, in words."""
        self._processes[pid] = ScriptProcess(pid)
        self._note(_Noted(pid, time.time()))
        self._run.node.publish(
            ScriptAttachedEvent(run=self._run.run_id, pid=pid, averaging=averaging)
        )

    def ended(self, pid: int, farewell: str | None, *, node_ends: bool) -> None:
        """Its connection ended, with these last words, or None. ``node_ends``: so it would have
        had to.
        """
        process = self._processes.pop(pid, None)
        if process is None:  # it did not get as far as attaching
            self._run.node.publish(ScriptEndedEvent(run=self._run.run_id, pid=pid))
            return
        told = ScriptEndedEvent(
            run=self._run.run_id,
            pid=pid,
            finished=finished(self._run),
            farewell=None if farewell is None and node_ends else farewell is not None,
            error=farewell or "",
        )
        self._run.node.publish(told)
        if farewell == "" or told.finished:
            self._forget()
        elif farewell:
            self._note(_Noted(pid, time.time(), f"ended with {farewell}"))
        # a script that said goodbye waits for the end of its private node
        waits_for_us = farewell is not None and not self._run.seeding
        if farewell or waits_for_us or told.finished or node_ends:
            process.close()
            return
        self._watched += 1
        self._run.node.nursery.start_soon(self._bury, process, farewell is not None)

    async def buried(self, patience_s: float) -> None:
        """Wait until it is known how those ended that are gone."""
        with trio.move_on_after(patience_s):
            while self._watched:
                await trio.sleep(0.05)

    def left(self) -> None:
        """The run is left: nobody is to train here."""
        self._forget()
        self._run.node.publish(RunLeftEvent(run=self._run.run_id))

    async def _bury(self, process: ScriptProcess, said_goodbye: bool) -> None:
        try:
            if not await process.ended(ENDS_S if said_goodbye else GONE_S):
                return
            how, code = await process.how()
            in_order = code == 0
            if said_goodbye and (code is None or not 0 < code < OF_SIGNALS):
                return  # as its owner wanted: in order, or by a signal of theirs
            if in_order:
                self._forget()
            else:
                self._note(_Noted(process.pid, time.time(), how))
            self._run.node.publish(
                ScriptExitedEvent(
                    run=self._run.run_id, pid=process.pid, how=how, failed=not in_order
                )
            )
        finally:
            self._watched -= 1
            process.close()

    def _note(self, noted: _Noted) -> None:
        try:
            write_atomic(self._file, msgspec.json.encode(noted))
        except StorageError as error:
            self._run.troubles.tell(error)

    def _forget(self) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError:
            pass  # the next life of this node asks for a script that nobody misses

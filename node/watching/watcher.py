"""What is noted of one run: the parts of this folder, as a run tells them what happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from ...collectives.identifiers import PeerId
from ..manifest import Manifest, decode_signed
from ..run.diary import Diary
from ..run.events import RunEvent
from ..run.verdicts import VerdictChange
from ..session import events as ev
from .chronicle import Chronicle
from .disk import DiskUsage
from .judging import Notifier, RunVerdicts
from .phases import Phases
from .script import ScriptWatcher
from .timings import Timings

if TYPE_CHECKING:
    from ..service.run import RunService


class RunWatcher:
    """Of one run. Implements `service.outside.RunWatch`."""

    def __init__(self, run: RunService, notifier: Notifier | None = None) -> None:
        """``notifier``: who is told of verdicts; None: nobody."""
        node, folder = run.node, run.node.paths.run_dir(run.run_id)
        self.run, self._notifier = run, notifier
        self.script = ScriptWatcher(run)
        self.chronicle = Chronicle(run)
        self._manifest: Manifest | None = None
        self.timings = Timings(run.run_id, node.publish, self._lane_bytes)
        self.judge = RunVerdicts(run.run_id, node.publish)
        self.disk = DiskUsage(folder)
        self._phases = Phases(run.run_id, node.publish)
        self._diary = Diary(folder, run.run_id, lambda: run.name)

    @property
    def progress(self) -> tuple[str, int, int]:
        return self.chronicle.progress

    @property
    def against_averaging(self) -> str:
        return self.judge.against_averaging

    @property
    def manifest(self) -> Manifest | None:
        """None before the run has found it to be right."""
        signed = self.run.signed
        if self._manifest is None and signed is not None and self.run.terms is not None:
            self._manifest = decode_signed(signed.data).open()
        return self._manifest

    def begin(self) -> None:
        self.script.presence.begin()

    def note(self, fragment: int, event: object) -> None:
        if isinstance(event, ev.PlanTaken):
            self._phases.planned(trio.current_time(), event)
            self.timings.planned(event)
        elif isinstance(event, ev.Timed):
            self.timings.timed(trio.current_time(), event)
        else:
            self.chronicle.note(fragment, event)

    def note_published(self, event: RunEvent) -> None:
        self.chronicle.note_published(event)
        self._diary.write(event)
        self._judged(self.judge.take(event))

    def on_exchange(self, event: object) -> None:
        self._phases.on_exchange(trio.current_time(), event)

    def look(self) -> None:
        self.script.look(trio.current_time())
        self._judged(self.judge.look(time.time()))

    def close(self) -> None:
        self._diary.close()

    def _judged(self, changes: Sequence[VerdictChange]) -> None:
        if self._notifier is not None and changes:
            self._notifier.tell(self.run.run_id, self.run.name, changes)

    def _lane_bytes(self) -> dict[PeerId, tuple[int, int]]:
        return {
            peer: (lane.bytes_sent, lane.bytes_received)
            for peer, lane in self.run.node.engine.stats().items()
        }

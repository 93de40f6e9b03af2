"""What happened in a demo, as one file that `atoll replay` plays."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..run import diary
from ..run.events import RunEvent, ScriptReportEvent
from .board import Board
from .stage import DemoStage


def record(stage: DemoStage, board: Board, run_id: str, file: Path) -> None:
    """Write the events of the first peer's node, and among them what the others' scripts reported,
    each with whose it is (``by``). Raises StorageError.
    """
    first, *others = board.rows.values()

    def reports(name: str, peer: str) -> Iterator[RunEvent]:
        for event in stage.events(name, run_id):
            if isinstance(event, ScriptReportEvent):
                yield msgspec.structs.replace(event, by=peer)

    streams = [stage.events(first.name, run_id), *(reports(row.name, row.peer) for row in others)]
    diary.record(file, run_id, "demo", heapq.merge(*streams, key=lambda event: event.at))

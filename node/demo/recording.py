"""What happened in a demo, as one file that `atoll replay` plays."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..run import diary
from .board import Board
from .stage import DemoStage


def record(stage: DemoStage, board: Board, run_id: str, file: Path) -> None:
    """Write the events of the first peer's node, and among them what the others' scripts reported,
    each with whose it is (``by``). Raises StorageError.
    """
    first, *others = board.rows.values()

    def reports(name: str, peer: str) -> Iterator[dict[str, Any]]:
        for event in stage.events(name, run_id):
            if event["event"] == "script.report":
                yield {**event, "by": peer}

    streams = [stage.events(first.name, run_id), *(reports(row.name, row.peer) for row in others)]
    diary.record(file, run_id, "demo", heapq.merge(*streams, key=lambda event: event["at"]))

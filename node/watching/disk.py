"""How many bytes a run takes on disk at this node, counted once a minute at most."""

from __future__ import annotations

from pathlib import Path

from ..home.paths import bytes_in

AGAIN_S = 60.0


class DiskUsage:
    """Of one run's folder: journal, results, checkpoints, kept contributions, events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at: float | None = None
        self._bytes = 0

    def used(self, now: float) -> int:
        """Bytes. ``now`` in seconds; a count is good for `AGAIN_S`."""
        if self._at is None or now - self._at >= AGAIN_S:
            self._at, self._bytes = now, bytes_in(self._folder)
        return self._bytes

"""Where a script keeps what is its own in a run: one file in the run's folder, beside the
node's.
"""

from __future__ import annotations

from pathlib import Path

from ..home.paths import write_atomic
from ..home.refusals import storage_error

NAME = "site"


class FileShelf:
    """A `collectives.script_swarm.Shelf`. The file is replaced as a whole and synchronised: a crash
    leaves the old one or the new one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def load(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(f"cannot read {self._path}", error) from None

    def save(self, data: bytes) -> None:
        write_atomic(self._path, data)

"""How often a member has handed over a contribution with noise: its privacy, counted on the medium
before each.
"""

from __future__ import annotations

from pathlib import Path

from ...collectives.errors import StorageError
from .medium import REAL, Medium, contents_of, make_folder, storage_error, write_atomically


class SpentCounter:
    """A number in a file. It is never behind what others have received, whatever power takes."""

    def __init__(self, path: Path, medium: Medium = REAL) -> None:
        self._path, self._medium = path, medium

    def count(self) -> int:
        """So many were handed over, or more. Raises StorageError where that is not known: then none
        may be.
        """
        return self._read()[0]

    def last(self) -> int:
        """For which entry of the log the newest was handed over; -1 where that is not known.
        Raises StorageError."""
        return self._read()[1]

    def _read(self) -> tuple[int, int]:
        try:
            steps, *rest = [int(word) for word in contents_of(self._path, self._medium).split()]
            if steps >= 0 and len(rest) < 2:
                return steps, rest[0] if rest else -1
            raise ValueError
        except FileNotFoundError:
            return 0, -1
        except OSError as error:
            raise storage_error(self._path, error) from error
        except ValueError:
            raise StorageError(
                f"{self._path} is damaged",
                code="E303",
                why="It says what this node has spent of its privacy in the run.",
                hint="Write into it how many rounds this node has contributed to, or more.",
            ) from None

    def add(self, entry: int) -> None:
        """One more is about to be handed over, for an entry of the log: it is on the medium when
        this returns. Raises StorageError: then it must not be.
        """
        self._write(self.count() + 1, entry)

    def raise_to(self, steps: int) -> None:
        """So many were handed over, or more: earlier lives may have. Raises StorageError."""
        if self.count() < steps:
            self._write(steps, self.last())

    def _write(self, steps: int, entry: int) -> None:
        try:
            make_folder(self._path.parent, self._medium)
        except OSError as error:
            raise storage_error(self._path, error) from error
        write_atomically(self._path, b"%d %d\n" % (steps, entry), medium=self._medium)

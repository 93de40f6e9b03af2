"""How often a member has handed over a contribution with noise: its privacy, counted on the medium
before each.
"""

from __future__ import annotations

from pathlib import Path

from ...collectives.errors import StorageError
from .medium import REAL, Medium, make_folder, storage_error, write_atomically


class SpentCounter:
    """A number in a file. It is never behind what others have received, whatever power takes."""

    def __init__(self, path: Path, medium: Medium = REAL) -> None:
        self._path, self._medium = path, medium

    def count(self) -> int:
        """So many were handed over, or more. Raises StorageError where that is not known: then none
        may be.
        """
        try:
            if (steps := int(self._medium.contents(self._path))) >= 0:
                return steps
            raise ValueError
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise storage_error(self._path, error) from error
        except ValueError:
            raise StorageError(
                f"{self._path} is damaged",
                code="E303",
                why="It says what this node has spent of its privacy in the run.",
                hint="Write into it how many rounds this node has contributed to, or more.",
            ) from None

    def add(self) -> None:
        """One more is about to be handed over: it is on the medium when this returns. Raises
        StorageError: then it must not be.
        """
        try:
            make_folder(self._path.parent, self._medium)
        except OSError as error:
            raise storage_error(self._path, error) from error
        write_atomically(self._path, b"%d\n" % (self.count() + 1), medium=self._medium)

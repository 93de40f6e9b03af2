"""What a member has used up in all of its lives: operations that it voted in, and how often it has
handed over a contribution with noise, counted on the medium before each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...collectives.errors import StorageError
from ..session.record import MAX_SPENT
from .medium import REAL, Medium, contents_of, make_folder, storage_error, write_atomically


class SpentCounter:
    """A number in a file. It is never behind what others have received, whatever power takes."""

    def __init__(self, path: Path, medium: Medium = REAL) -> None:
        self._path, self._medium = path, medium

    def noisy(self) -> int:
        """So many were handed over, or more. Raises StorageError where that is not known: then none
        may be.
        """
        return self._read()[0]

    def noisy_entry(self) -> int:
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

    def spend_noisy(self, entry: int) -> None:
        """One more is about to be handed over, for an entry of the log: it is on the medium when
        this returns. Raises StorageError: then it must not be.
        """
        self._write(self.noisy() + 1, entry)

    def raise_noisy(self, steps: int) -> None:
        """So many were handed over, or more: earlier lives may have. Raises StorageError."""
        if self.noisy() < steps:
            self._write(steps, self.noisy_entry())

    def _write(self, steps: int, entry: int) -> None:
        try:
            make_folder(self._path.parent, self._medium)
        except OSError as error:
            raise storage_error(self._path, error) from error
        write_atomically(self._path, b"%d %d\n" % (steps, entry), medium=self._medium)


class SpentFiles(SpentCounter):
    """Implements `session.ports.UsedUp` in one folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "privacy")
        self._operations = folder / "operations"
        self.written = 0  # keys, in this life
        self._unforced = self._renewed = False
        self._lost: StorageError | None = None  # why a sync of them failed

    def sync(self, journal: Callable[[], None]) -> None:
        """Force what was written before, after ``journal``, which forces itself."""
        if self._lost is not None:
            raise self._lost
        spent, self._unforced = self._unforced, False
        journal()
        if not spent:
            return
        try:
            file = REAL.open(self._operations)
            try:
                REAL.sync(file)
            finally:
                REAL.close(file)
            REAL.sync_folder(self._operations.parent)
        except OSError as error:
            # As the journal's: the next sync would succeed without what this one has forgotten.
            self._lost = storage_error(self._operations, error)
            raise self._lost from error

    def operations(self) -> list[str]:
        """Operations voted in; the file is cut to the newest when it is read, and as often as so
        many were added. The first time it is written anew: an earlier life's sync may have failed.
        """
        file = self._operations
        try:
            lines = file.read_text(encoding="ascii", errors="replace").split()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(file, error) from error
        if len(lines) > MAX_SPENT or not self._renewed:
            lines = lines[-MAX_SPENT:]
            write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
        self._renewed = True
        return lines

    def spend(self, key: str) -> None:
        """One short line, on the medium before anything is said in the operation."""
        self.written += 1
        if self.written % MAX_SPENT == 0:
            self.operations()
        try:
            with open(self._operations, "a", encoding="ascii") as file:
                file.write(key + "\n")
        except OSError as error:
            raise storage_error(self._operations, error) from error
        self._unforced = True

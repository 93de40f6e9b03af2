"""What steps on one data set have spent of its examples' privacy: a file, over all runs and lives
of a machine. Durable before a gradient is used, so that no kill makes it forget.

Steps are reserved on the medium in blocks, so that not every one waits for it. A kill loses what is
reserved and was not made: at most a 256th of the steps so far, so five kills cost less than a
fiftieth.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from ....collectives.errors import ConfigError, StateError, StorageError
from ....collectives.forced import OWNER, make_folder, new_file, sync_folder
from ....security.privacy import Accountant
from ....security.privacy.rdp import ORDERS, Costs, step_costs

VERSION = 1
BLOCK_OF = 256  # of the steps so far a block has the part of it
MOST_BLOCK = 64


class ExampleLedger:
    """Of one data set, at one process at a time. Raises ConfigError where another one has it,
    StateError for what is no ledger, StorageError."""

    def __init__(self, path: Path, accountant: Accountant) -> None:
        """``accountant`` gets what was spent before."""
        self.path, self._accountant, self._left = path, accountant, 0
        try:
            make_folder(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock: Any = OWNER.fromfd(os.open(path.with_suffix(".lock"), flags, 0o600))
        except OSError as error:
            raise StorageError(f"cannot keep {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another process trains on the examples of {path}",
                key="kept",
                why="Two that count for themselves would each spend what both may.",
                hint="One at a time; a data set of its own has a file of its own.",
            ) from None
        self._read()

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_bytes())
            costs = np.array(data["costs"], np.float64)
            whole = data["version"] == VERSION and costs.shape == (len(ORDERS),)
            if not whole or not bool(np.all(costs >= 0)) or data["steps"] < 0:
                raise ValueError("it has no costs for each order")
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{self.path} is no ledger of examples: {error}",
                why="What was spent of their privacy is not known, and is not taken for nothing.",
                hint="Put it back from a backup. There is no way to begin at 0 with the same data.",
            ) from None
        self._accountant.costs = self._accountant.costs + costs
        self._accountant.steps += int(data["steps"])

    def reserve(self, rate: float, noise: float) -> None:
        """One more step is about to be used: it is on the medium when this returns. Raises
        StorageError: then it must not be."""
        if not self._left:
            made = self._accountant
            block = max(1, min(MOST_BLOCK, made.steps // BLOCK_OF, made.room(rate, noise)))
            self._write(made.costs + block * step_costs(rate, noise), made.steps + block)
            self._left = block
        self._left -= 1

    def close(self) -> None:
        """Give back what is reserved and was not made. Idempotent."""
        if self._lock.closed:
            return
        with contextlib.suppress(StorageError):  # what is there counts more than was made
            if self._left:
                self._write(self._accountant.costs, self._accountant.steps)
        self._left = 0
        self._lock.close()

    def _write(self, costs: Costs, steps: int) -> None:
        if not all(map(math.isfinite, costs.tolist())):
            raise ConfigError(
                "private examples: a step without noise costs everything", key="noise"
            )
        told = {"version": VERSION, "steps": steps, "costs": costs.tolist()}
        temporary = self.path.with_suffix(".tmp")
        try:
            with new_file(temporary, 0o600) as file:
                file.write(json.dumps(told).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}") from None

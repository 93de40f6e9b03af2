"""The table of all faults for bench_faults: its cells, what is written down of each, and what is
kept of one that failed.

Every trial is kept in a file as soon as it is done, so that a table that was cut off goes on where
it was, in the middle of a cell, too: trials count again where they were made with the same
settings.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _bench import progress
from _kits import KINDS, PHASES, TARGETS, Kind, Peer, Phase, Target

OWNERS = 20  # trials of a cell in which an owner is killed or stopped
TRIES = 6  # times a trial is repeated when its fault comes too late
RIGHT = (
    "exact",
    "bit_equal",
    "contributors_right",
    "committed",
    "survivors_counted",
    "kept",
    "next_round_ok",
)
Trial = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault to one target in one phase, so many times."""

    kind: Kind
    phase: Phase
    target: Target
    reps: int

    def __str__(self) -> str:
        return f"{self.kind} {self.phase} {self.target}"


def cells(
    kind: Kind | None, phase: Phase | None, target: Target | None, reps: int, owners: int
) -> list[Cell]:
    """Every cell, or those of a kind, a phase, a target. Killing and stopping an owner is tried
    ``owners`` times.
    """
    return [
        Cell(k, p, t, owners if t == "owner" and k in ("kill", "stop") else reps)
        for k in KINDS
        if k not in ("lie", "leave") and kind in (None, k)
        for p in PHASES
        if phase in (None, p)
        for t in TARGETS
        if target in (None, t)
    ]


@dataclass(slots=True)
class Tried:
    """What was tried of a cell. ``broken``: why it could not go on; ``kept``: where what it left
    is, if it failed.
    """

    trials: list[Trial] = field(default_factory=list[Trial])
    broken: str = ""
    kept: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def hits(self) -> int:
        """Trials whose fault met its phase."""
        return sum(found["hit"] for found in self.trials)

    def over(self, cell: Cell) -> bool:
        """Whether nothing is left to be tried."""
        return bool(self.broken) or self.hits >= cell.reps or len(self.trials) >= cell.reps * TRIES


class Table:
    """Trials as they come. ``journal``: the file they are kept in, or None; ``logs``: where failing
    cells leave theirs.
    """

    def __init__(
        self,
        wanted: Sequence[Cell],
        settings: Mapping[str, Any],
        journal: Path | None,
        logs: Path | None,
    ) -> None:
        self._settings = json.loads(json.dumps(settings))
        self._journal, self._logs = journal, logs
        self._tried = {cell: Tried() for cell in wanted}
        names = {str(cell): cell for cell in wanted}
        for line in self._read():
            if line["settings"] == self._settings and line["cell"] in names:
                self._take(names[line["cell"]], line)
        self._began, self._done = time.monotonic(), 0
        if done := len(self._tried) - len(self.left):
            progress(f"{done} cells are done already")

    @property
    def left(self) -> list[Cell]:
        """Cells that are not done."""
        return [cell for cell, tried in self._tried.items() if not tried.over(cell)]

    def tried(self, cell: Cell) -> Tried:
        """What was tried of a cell."""
        return self._tried[cell]

    def _read(self) -> list[dict[str, Any]]:
        if self._journal is None or not self._journal.exists():
            return []
        return [json.loads(line) for line in self._journal.read_text(encoding="utf-8").splitlines()]

    def _take(self, cell: Cell, line: Mapping[str, Any]) -> None:
        tried = self._tried[cell]
        if "trial" in line:
            tried.trials.append(line["trial"])
        else:
            tried.broken, tried.kept = line["broken"], line["kept"]

    def _write(self, cell: Cell, line: dict[str, Any]) -> None:
        self._take(cell, line)
        if self._journal is not None:
            with open(self._journal, "a", encoding="utf-8") as journal:
                journal.write(
                    json.dumps({"cell": str(cell), **line, "settings": self._settings}) + "\n"
                )

    def add(self, cell: Cell, trial: Trial) -> None:
        """A trial is done."""
        self._write(cell, {"trial": trial})
        self._done += 1

    def end(self, cell: Cell, broken: str, peers: Sequence[Peer], seed: int) -> None:
        """A cell is done; ``broken``: why it could not go on. ``seed``: of the last trial."""
        tried = self._tried[cell]
        if reasons := why(cell, summary(tried.trials, cell), broken):
            self._write(
                cell,
                {
                    "broken": broken,
                    "kept": {
                        "seed": seed,
                        "logs": str(self._keep(cell, tried.trials, broken, peers)),
                    },
                },
            )
        left_s = (
            (time.monotonic() - self._began)
            / max(1, self._done)
            * sum(cell.reps - self._tried[cell].hits for cell in self.left)
        )
        progress(
            f"── {cell}: {'; '.join(reasons) or 'right and in time'} ({len(self.left)} of {len(self._tried)} left, about {left_s / 60:.0f} min)"
        )

    def _keep(
        self, cell: Cell, trials: Sequence[Trial], broken: str, peers: Sequence[Peer]
    ) -> Path:
        if self._logs is None:
            self._logs = Path(tempfile.mkdtemp(prefix="atoll-faults-logs-"))
        folder = self._logs / str(cell).replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for peer in peers:
            for path in [peer.home.with_suffix(".log"), *peer.home.rglob("*.log")]:
                if path.exists():
                    shutil.copyfile(path, folder / f"{peer.name}-{path.name}")
        (folder / "trials.json").write_text(
            json.dumps({"broken": broken, "trials": list(trials)}, indent=1), encoding="utf-8"
        )
        return folder

    def rows(self) -> list[dict[str, Any]]:
        """The figures of every cell that is done."""
        found: list[dict[str, Any]] = []
        for cell, tried in self._tried.items():
            if tried.over(cell):
                figures = summary(tried.trials, cell)
                reasons = why(cell, figures, tried.broken)
                row: dict[str, Any] = {
                    "cell": str(cell),
                    "reps": cell.reps,
                    "passed": not reasons,
                    **figures,
                }
                found.append(row | ({"reasons": reasons, **tried.kept} if reasons else {}))
        return found

    def figures(self) -> dict[str, Any]:
        """The figures of the whole table. ``right``: cells whose values and contributors are all
        right, whatever their time.
        """
        rows = self.rows()
        failing = {
            row["cell"]: {key: row.get(key) for key in ("reasons", "seed", "logs")}
            for row in rows
            if not row["passed"]
        }
        return {
            "cells": len(self._tried),
            "done": len(rows),
            "passed": len(rows) - len(failing),
            "right": sum(row["right"] for row in rows),
            "trials": sum(row["trials"] for row in rows),
            "misses": sum(row["misses"] for row in rows),
            "failing": failing,
            "elapsed_s": round(time.monotonic() - self._began, 1),
            "table": rows,
        }


def summary(trials: Sequence[Trial], cell: Cell) -> dict[str, Any]:
    """The figures of a cell. Every trial has its own ``allowed_s``, ``bulk_s`` and
    ``fault_free_s``: of the swarm it was made with.
    """
    counted = [found for found in trials if found["hit"]]
    figures: dict[str, Any] = {key: sum(found[key] for found in counted) for key in RIGHT}
    for key in ("over_fault_free_s", "since_fault_s", "extra_s", "back_s"):
        figures[f"{key}_max"] = max((found.get(key, 0.0) for found in counted), default=None)
    figures |= {
        key: round(statistics.median([t[key] for t in trials]), 4) if trials else None
        for key in ("fault_free_s", "bulk_s", "allowed_s")
    }
    return {
        "trials": len(counted),
        "misses": len(trials) - len(counted),
        **figures,
        "judged": RIGHT,
        "right": len(counted) >= cell.reps and all(figures[key] == len(counted) for key in RIGHT),
        "within": sum(found.get("extra_s", math.inf) <= found["allowed_s"] for found in counted),
        "all_right": all(found["exact"] for found in trials),
    }


def why(cell: Cell, figures: Mapping[str, Any], broken: str) -> list[str]:
    """What is wrong with the figures of a cell; nothing when it passed."""
    trials = figures["trials"]
    reasons = [broken.splitlines()[0][:300]] if broken else []
    if trials < cell.reps and not broken:
        reasons.append(f"only {trials} of {cell.reps} trials met their phase")
    reasons += [
        f"{key} {figures[key]} of {trials}" for key in figures["judged"] if figures[key] < trials
    ]
    if figures["within"] < trials:
        reasons.append(
            f"in time {figures['within']} of {trials}: {figures['extra_s_max']:.2f} s more, {figures['allowed_s']:.2f} allowed"
        )
    return reasons

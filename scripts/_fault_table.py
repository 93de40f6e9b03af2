"""The table of all faults for bench_faults: its cells, what is written down of each, and what is kept of one that failed.

A row is kept in a file as soon as its cell is done, so that a table that was cut off goes on where it was: rows count again where they
were made with the same settings.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import progress
from _kits import KINDS, PHASES, TARGETS, Kind, Peer, Phase, Target

OWNERS = 20  # trials of a cell in which an owner is killed or stopped
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


def cells(kind: Kind | None, phase: Phase | None, target: Target | None, reps: int, owners: int) -> list[Cell]:
    """Every cell, or those of a kind, a phase, a target. Killing and stopping an owner is tried ``owners`` times."""
    return [
        Cell(k, p, t, owners if t == "owner" and k in ("kill", "stop") else reps)
        for k in KINDS if k not in ("lie", "leave") and kind in (None, k)
        for p in PHASES if phase in (None, p)
        for t in TARGETS if target in (None, t)
    ]  # fmt: skip


class Table:
    """Rows as they come. ``journal``: the file they are kept in, or None; ``logs``: where failing cells leave theirs."""

    def __init__(self, wanted: Sequence[Cell], settings: Mapping[str, Any], journal: Path | None, logs: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._settings = json.loads(json.dumps(settings))
        self._journal, self._logs = journal, logs
        known = {row["cell"]: row for row in self._read() if row["settings"] == self._settings}
        self.left = [cell for cell in wanted if known.get(str(cell), {}).get("reps") != cell.reps]
        for cell in wanted:
            if cell not in self.left:
                self.rows.append({key: value for key, value in known[str(cell)].items() if key != "settings"})
        self._began, self._done = time.monotonic(), 0
        if self.rows:
            progress(f"{len(self.rows)} cells are done already")

    def _read(self) -> list[dict[str, Any]]:
        if self._journal is None or not self._journal.exists():
            return []
        return [json.loads(line) for line in self._journal.read_text(encoding="utf-8").splitlines()]

    def add(self, cell: Cell, figures: dict[str, Any], trials: Sequence[Trial], broken: str, peers: Sequence[Peer], seed: int) -> None:
        """A cell is done; ``broken``: why it could not go on."""
        self.left.remove(cell)
        reasons = why(cell, figures, broken)
        row: dict[str, Any] = {"cell": str(cell), "reps": cell.reps, "passed": not reasons, **figures}
        if reasons:
            row |= {"reasons": reasons, "seed": seed, "logs": str(self._keep(cell, trials, broken, peers))}
        self.rows.append(row)
        if self._journal is not None:
            with open(self._journal, "a", encoding="utf-8") as journal:
                journal.write(json.dumps({**row, "settings": self._settings}) + "\n")
        self._done += cell.reps
        left_s = (time.monotonic() - self._began) / self._done * sum(cell.reps for cell in self.left)
        progress(
            f"── {cell}: {'right and in time' if not reasons else '; '.join(reasons)}"
            f" ({len(self.rows)} cells, {len(self.left)} left, about {left_s / 60:.0f} min)"
        )

    def _keep(self, cell: Cell, trials: Sequence[Trial], broken: str, peers: Sequence[Peer]) -> Path:
        if self._logs is None:
            self._logs = Path(tempfile.mkdtemp(prefix="atoll-faults-logs-"))
        folder = self._logs / str(cell).replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for peer in peers:
            for path in [peer.home.with_suffix(".log"), *peer.home.rglob("*.log")]:
                if path.exists():
                    shutil.copyfile(path, folder / f"{peer.name}-{path.name}")
        (folder / "trials.json").write_text(json.dumps({"broken": broken, "trials": list(trials)}, indent=1), encoding="utf-8")
        return folder

    def summary(self) -> dict[str, Any]:
        """The figures of the whole table. ``right``: cells whose values and contributors are all right, whatever their time."""
        failing = {row["cell"]: {key: row[key] for key in ("reasons", "seed", "logs")} for row in self.rows if not row["passed"]}
        return {
            "cells": len(self.rows) + len(self.left), "done": len(self.rows), "passed": len(self.rows) - len(failing),
            "right": sum(row["right"] for row in self.rows), "trials": sum(row["trials"] for row in self.rows),
            "misses": sum(row["misses"] for row in self.rows), "failing": failing,
            "elapsed_s": round(time.monotonic() - self._began, 1),
        }  # fmt: skip


def why(cell: Cell, figures: Mapping[str, Any], broken: str) -> list[str]:
    """What is wrong with the figures of a cell; nothing when it passed."""
    trials = figures["trials"]
    reasons = [broken.splitlines()[0][:300]] if broken else []
    if trials < cell.reps and not broken:
        reasons.append(f"only {trials} of {cell.reps} trials met their phase")
    for key in figures["judged"]:
        if figures[key] < trials:
            reasons.append(f"{key} {figures[key]} of {trials}")
    if figures["within"] < trials:
        reasons.append(
            f"in time {figures['within']} of {trials}: {figures['over_fault_free_s_max']:.2f} s over, {figures['allowed_s']:.2f} allowed"
        )
    return reasons

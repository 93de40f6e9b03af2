"""What the loop says, told on: held-out loss and answers to the node, which shows them; the newest
evaluation, and the energy that this machine took, kept in the run's folder, for the card of an
exported model.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....collectives.errors import AtollError
from ...home.paths import write_atomic
from ...look.machine import MachineReadings
from ...records.model_card import ENERGY_FILE, EVALUATION_FILE, energy_in
from .loop import Say

if TYPE_CHECKING:
    from ...joining import RunSwarm

logger = logging.getLogger("atoll")

WRITE_S = 60.0  # between two times that the energy is written


def show_records(say: Say, swarm: RunSwarm) -> Say:
    """``say``, which also has the node show answers and evaluations."""

    def shown(record: dict[str, Any]) -> None:
        say(record)
        match record:
            case {"event": "sample", "round": round_, "prompt": prompt, "text": text}:
                swarm.show_answer(round_, prompt, text)
            case {
                "event": "evaluation",
                "round": round_,
                "tokens": tokens,
                "held_out": float(loss),
            }:
                swarm.show_evaluation(round_, tokens, loss)
            case _:
                pass

    return shown


def keep_evaluations(say: Say, folder: Path) -> Say:
    """``say``, which also keeps the newest ``evaluation`` in ``folder``. What cannot be written is
    logged, and training goes on.
    """

    def kept(record: dict[str, Any]) -> None:
        if record.get("event") == "evaluation" and record.get("tokens"):
            found = {key: record[key] for key in ("round", "tokens", "held_out")}
            _keep(folder / EVALUATION_FILE, found)
        say(record)

    return kept


def keep_energy(
    say: Say,
    folder: Path,
    readings: MachineReadings,
    clock: Callable[[], float] = time.monotonic,
) -> Say:
    """``say``, which also counts what energy this machine takes from now on, added to what was
    counted of the run before, and keeps it in ``folder`` now and then and with the ``final``
    record. Where nothing counts it nothing is kept.
    """
    count = EnergyCount(folder, readings, clock)

    def counted(record: dict[str, Any]) -> None:
        count.take(last=record.get("event") == "final")
        say(record)

    return counted


class EnergyCount:
    """The energy that this machine takes while a script trains: its processors' and their memory's
    by RAPL, its GPUs' by NVML, where these tell it.
    """

    def __init__(self, folder: Path, readings: MachineReadings, clock: Callable[[], float]) -> None:
        self._folder, self._readings, self._clock = folder, readings, clock
        before = energy_in(folder)
        self._joules = dict(before.joules) if before is not None else {}
        self._seconds = before.seconds if before is not None else 0.0
        self._at = self._written_at = clock()
        self._last = self._read()

    def take(self, *, last: bool = False) -> None:
        """Read the counters, and write what they came to once a minute, or now."""
        now, found = self._clock(), self._read()
        for name, value in found.items():
            # a driver that was loaded anew counts from 0
            taken = max(0.0, value - self._last.get(name, value))
            self._joules[name] = self._joules.get(name, 0.0) + taken
        self._seconds += now - self._at
        self._at, self._last = now, found
        if self._joules and (last or now - self._written_at >= WRITE_S):
            self._written_at = now
            told = {
                "joules": {name: round(value, 3) for name, value in self._joules.items()},
                "seconds": round(self._seconds, 3),
            }
            _keep(self._folder / ENERGY_FILE, told)

    def _read(self) -> dict[str, float]:
        """By counter, without those that are part of another: cores are of their package."""
        told = self._readings.read()
        found = {
            name: joules
            for name, joules in told["energy_joules"].items()
            if name.startswith("package") and ("/" not in name or name.endswith("/dram"))
        }
        for gpu in told["gpus"]:
            if math.isfinite(joules := gpu.get("joules", math.nan)):
                found[f"GPU {gpu['index']}, {gpu['name']}"] = joules
        return found


def _keep(file: Path, told: dict[str, Any]) -> None:
    try:
        write_atomic(file, json.dumps(told).encode())
    except AtollError as error:
        logger.warning("%s", error)

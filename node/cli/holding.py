"""What `plan` plans for: the run as the machines hold it, how large what travels is, and how long a
step takes on each; or all that is missing to say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ...collectives.errors import ConfigError
from ..manifest import Manifest, adapters_of
from ..manifest.tables import ShapeTable
from ..recipes.models.shapes import look_for_shape
from ..recipes.models.sizing import trained_of
from .fitting import Change, HeldRun, hold, tokens_s, toml_of
from .machines import NamedMachine, machines_of
from .needs import step_settings


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the command line says. ``file``: where ``run`` was read from."""

    file: Path
    run: Manifest
    step_ms: float | None
    parameters: int | None
    peers: tuple[str, ...]
    machines: tuple[str, ...]
    node: str | None
    batch: int | None


@dataclass(frozen=True, slots=True)
class Planned:
    """``run``: with the settings that the machines hold. ``size``: parameters that travel.
    ``step_s``: of a machine of which nothing else is known; ``steps_s``: of each of ``machines``.
    """

    run: Manifest
    shape: ShapeTable | None
    size: int
    step_s: float
    held: HeldRun | None = None
    steps_s: tuple[float, ...] = ()

    @property
    def machines(self) -> tuple[NamedMachine, ...]:
        """That are in the run."""
        return () if self.held is None else self.held.machines

    @property
    def change(self) -> Change:
        """Settings that are not as in the file."""
        return {} if self.held is None else self.held.change

    @property
    def pairs(self) -> frozenset[tuple[str, str]] | None:
        """Codecs with overlaps that all machines hold; None: nobody knows of any bound."""
        return None if self.held is None else self.held.pairs

    def holds(self, codec: str, overlap: str) -> bool:
        """Whether all machines hold the run as the file says it, with this codec and overlap."""
        if self.held is None:
            return True
        known = (codec, overlap) in self.held.pairs or overlap == "eager"
        return known and not self.change and not self.held.left_out

    def settings(self) -> dict[str, dict[str, Any]]:
        """Tables of a manifest with what is changed for the machines."""
        found = dict[str, dict[str, Any]]()
        for path, value in self.change.items():
            table, _, key = path.rpartition(".")
            found.setdefault(table, {})[key] = value
        return found

    def lines(self) -> list[str]:
        """For people: what is changed, and who is left out."""
        if self.held is None:
            return []
        lines = [f"memory: {each}" for each in self.held.advice]
        if self.change:
            lines.append(f"so that every machine holds it: {toml_of(self.change)}")
        lines += [f"without {name}: {why}" for name, why in self.held.left_out.items()]
        return [*lines, ""] if lines else []

    def document(self) -> dict[str, Any] | None:
        """For JSON."""
        if self.held is None:
            return None
        return {
            "method": self.run.model.method if self.run.model.pretrained else None,
            "settings": dict(self.change),
            "machines": [each.name for each in self.machines],
            "left_out": dict(self.held.left_out),
            "advice": list(self.held.advice),
        }


def planned_for(asked: PlanRequest) -> Planned:
    """Raises ConfigError that names all that is missing at once, and E416 where no machine holds
    the run.
    """
    if asked.machines and (asked.peers or asked.node or asked.batch):
        raise click.UsageError("--machine says who is there: leave --peer, --node and --batch out")
    machines, run = machines_of(asked.machines), asked.run
    shape = look_for_shape(run.model, asked.file.parent) if run.model.pretrained else None
    _refuse_size(asked, shape)
    size = asked.parameters or run.parameters
    if size is None and shape is not None:
        size = trained_of(shape, step_settings(run))
    unknown = [each.name for each in machines if shape is None or each.flops is None]
    if missing := _missing(asked, size, unknown):
        raise missing
    assert size is not None
    step_s = (asked.step_ms or 0.0) / 1000
    if not machines:
        return Planned(run, shape, size, step_s)
    own = asked.parameters if shape is None else None
    held = hold(run, shape, machines, own)
    if shape is not None:
        size = trained_of(shape, step_settings(held.manifest))
    steps_s = step_s or None
    return Planned(
        held.manifest,
        shape,
        size,
        step_s,
        held,
        tuple(steps_s or _step_s(each, shape, held.manifest) for each in held.machines),
    )


def _step_s(machine: NamedMachine, shape: ShapeTable | None, run: Manifest) -> float:
    rate = tokens_s(machine, shape, run) if shape is not None else None
    assert rate is not None, "asked for before"
    return run.train.inner.tokens_per_step / rate


def _refuse_size(asked: PlanRequest, shape: ShapeTable | None) -> None:
    """Refuse a size that is known otherwise: that of a base whose adapters travel."""
    lora = adapters_of(asked.run)
    if asked.parameters is None or shape is None:
        return
    travels = trained_of(shape, step_settings(asked.run))
    if asked.parameters != travels:
        raise ConfigError(
            f"--parameters {asked.parameters:,}, and {travels:,} travel of this run's model",
            key="parameters",
            why="Only its adapters train."
            if lora is not None
            else "That follows from the shape of the model.",
            hint="Leave --parameters out.",
        )


def _missing(asked: PlanRequest, size: int | None, unknown: Sequence[str]) -> ConfigError | None:
    """All that is asked for, in one error; None where nothing is missing."""
    file, wanted = asked.file.name, list[tuple[str, str, str]]()
    if asked.step_ms is None and (unknown or not asked.machines):
        why = "Everything is planned against the time of a step, and only your script knows it."
        if asked.machines:
            why = f"How fast {', '.join(dict.fromkeys(unknown))} would train it is not known."
        wanted.append(
            (
                "step",
                "how long does an inner step take?",
                why,
            )
        )
    if size is None:
        travels = adapters_of(asked.run) is not None
        wanted.append(
            (
                "parameters",
                "how many parameters do its adapters have?"
                if travels
                else "how many parameters does the model have?",
                "No machine has looked at this model: its adapters alone train and travel."
                if travels
                else "The manifest leaves the model to each member's script.",
            )
        )
    if not wanted:
        return None
    hint = f"Time a few steps without atoll; then: atoll plan {file} --step-ms 250"
    if wanted[0][0] != "step":
        said = f"Say it: atoll plan {file} --parameters 10000000"
        hint = f"{said}, or [model] parameters in the manifest"
    elif size is None:
        hint += " --parameters 10000000"
    return ConfigError(
        "\n".join(each[1] for each in wanted),
        key=wanted[0][0],
        why=" ".join(each[2] for each in wanted),
        hint=hint,
    )

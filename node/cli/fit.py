"""fit: which models these machines can train, how, how fast, and what it takes to join."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import ConfigError
from ..home.output import Terminal, bytes_text, count_text, current, span_text
from .options import GIVEN, GivenPath, shared_options

if TYPE_CHECKING:
    from ..manifest import Manifest
    from ..manifest.tables import ShapeTable
    from ..recipes.models.sizing import StepBytes, StepSettings
    from .fitting import FitVerdict
    from .machines import NamedMachine
    from .needs import Count

USUAL = (
    "SmolLM2-135M",
    "SmolLM2-360M",
    "Qwen3-0.6B",
    "Llama-3.2-1B",
    "Qwen3-1.7B",
    "Llama-3.2-3B",
    "Qwen3-4B",
    "Llama-3.1-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Llama-3.1-70B",
)
MEASURE_S = 3600.0
ERROR = (
    "Memory is calculated from the model's shape, not tried: LoRA on 135M parameters was within "
    "10% of it on a CPU (scripts/bench/bench_fit.py); larger models, and what a GPU's driver and "
    "allocator add, were not measured. Tokens a second are of makers' figures, within a factor of "
    "two. To try it here: --measure"
)
COUNTED = ERROR.replace(
    "calculated from the model's shape, not tried",
    "counted by a step of the model on the meta device, which holds no values, where a method fits",
)


@dataclass(frozen=True, slots=True)
class _ModelRow:
    """One model on one kind of machine. ``installs``: by method, what has to be installed besides,
    "" for nothing. ``rate``: tokens/s of one, None: not known.
    """

    name: str
    parameters: int
    verdicts: dict[str, FitVerdict]
    installs: dict[str, str]
    rate: float | None
    join_s: float | None

    @property
    def best(self) -> FitVerdict | None:
        """The first method that fits."""
        return next((each for each in self.verdicts.values() if each.fits), None)


@click.command("fit")
@click.argument(
    "manifest", type=GivenPath(dir_okay=False, path_type=Path), metavar="[RUN.toml]", required=False
)
@click.option(
    "--machine",
    "machines",
    multiple=True,
    type=GIVEN,
    metavar="MACHINES",
    help=(
        'Machines in place of this one, such as "8 x 4090@100Mbit/64GB" (card, link up and down, '
        "memory; then /DISK); repeatable. CARD is cpu, a name, or its memory, such as 20GB."
    ),
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=GIVEN,
    metavar="ORG/NAME|DIR",
    help="A model of the hub, or a folder with its config.json; repeatable. Default: some known.",
)
@click.option("--length", type=click.IntRange(16, 1 << 20), help="Tokens of a sample (1024).")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=10_000_000,
    show_default=True,
    help="Say how long all together take to train on so many.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Make two steps here of the one --model or RUN.toml, with random weights, and say what "
    "they took.",
)
@shared_options
def fit_command(
    manifest: Path | None,
    machines: tuple[str, ...],
    models: tuple[str, ...],
    length: int | None,
    tokens: int,
    measure: bool,
) -> int:
    """Say what this machine, or a list of machines, can train: for each model and method yes, no,
    or the settings with which it fits; tokens a second, and the time to join.

    Nothing is downloaded. Exit status 1: no model fits on every machine, by any method.
    """
    terminal = current()
    runs = _runs(manifest, models, length)
    if measure:
        return _measured(terminal, runs, machines)
    from .machines import machines_of

    found = machines_of(machines) if machines else [_here(terminal)]
    kinds = _alike(found)
    count = _count(terminal, runs, found)
    rows = {
        name: [_row(run, shape, of[0], count) for run, shape in runs] for name, of in kinds.items()
    }
    whole = _whole(runs, found, tokens, count)
    error = ERROR if count is None else COUNTED
    lines = list[str]()
    for name, of in kinds.items():
        lines += [terminal.style(_head(name, of), sys.stdout, bold=True)]
        lines += [f"  {line}" for line in _table(terminal, rows[name])]
        lines += [f"  {line}" for line in _why_not(rows[name])]
        lines += [f"  {line}" for line in _to_install(rows[name], here=not machines)] + [""]
    if len(found) > 1 or found[0].flops is not None:
        lines += [*_together(whole, tokens), ""]
    lines.append(error)
    terminal.data("\n".join(lines), _document(kinds, rows, whole, tokens, error))
    fits = [run for run in whole if run["method"] is not None]
    return 0 if fits else 1


def _runs(
    manifest: Path | None, models: Sequence[str], length: int | None
) -> list[tuple[Manifest, ShapeTable]]:
    """A run of each model, by the template's settings or those of the file. Raises ConfigError
    that names all models whose shape nobody knows.
    """
    from ..manifest import load_manifest, parse_manifest
    from ..recipes.models.shapes import look_for_shape
    from .fitting import changed
    from .templates import FINETUNE, with_model

    if manifest is not None and models:
        raise click.UsageError("RUN.toml says its model: leave --model out")
    near = manifest.parent if manifest is not None else Path()
    if manifest is not None:
        made = [load_manifest(manifest)]
        if not made[0].model.pretrained:
            file = manifest.name
            raise ConfigError(
                f"{file} trains {made[0].model.entry}, whose steps only its script knows",
                key="$.model.entry",
                hint=f"What a member's machine needs beside it: atoll validate {file}",
            )
    else:
        made = [parse_manifest(with_model(FINETUNE, name)) for name in models or USUAL]
    if length is not None:
        made = [changed(run, {"data.length": length}) for run in made]
    shapes = [look_for_shape(run.model, near) for run in made]
    unknown = [_named(run) for run, shape in zip(made, shapes, strict=True) if shape is None]
    if unknown:
        raise ConfigError(
            f"the shape of {', '.join(unknown)} is not known on this machine",
            key="model",
            why="Nothing is downloaded to say what fits. Known by name are the usual sizes of "
            "SmolLM, Llama, Qwen and Mistral; others by config.json in a folder or in the hub's "
            "cache.",
            hint="hf download ORG/NAME config.json, or --model DIR",
        )
    return [(run, shape) for run, shape in zip(made, shapes, strict=True) if shape is not None]


def _named(run: Manifest) -> str:
    where = run.model.hub or run.model.folder or run.model.gguf or run.name
    return where.rpartition("/")[2] if run.model.hub is None else where


def _here(terminal: Terminal) -> NamedMachine:
    """This machine, with the link that its settings allow."""
    from .machines import this_one
    from .settings import settings_of

    up, down = settings_of(terminal, ask=False).config.limits
    return this_one(terminal.paths.state_dir, up or None, down or None)


def _alike(machines: Sequence[NamedMachine]) -> dict[str, list[NamedMachine]]:
    """Machines of one kind together, by the name of the first, without its number."""
    kinds: dict[tuple[Any, ...], list[NamedMachine]] = {}
    for each in machines:
        kinds.setdefault((each.free, each.up, each.down, each.flops), []).append(each)
    found: dict[str, list[NamedMachine]] = {}
    for of in kinds.values():
        name = of[0].name if len(of) == 1 else of[0].name.rpartition("-")[0]
        found[name if name not in found else of[0].name] = of
    return found


def _count(
    terminal: Terminal,
    runs: Sequence[tuple[Manifest, ShapeTable]],
    machines: Sequence[NamedMachine],
) -> Count | None:
    """For one model on machines without a GPU, where the libraries are: a step on the meta device,
    some seconds a method. None where the formula must do: of many models it would take minutes,
    and bfloat16 beside float32, as GPUs calculate, is not there on meta.
    """
    if len(runs) != 1 or any(each.free.gpu is not None for each in machines):
        return None
    from ..recipes.models.shapes import config_values, look_for_config

    ((run, shape),) = runs
    terminal.say(f"counting a step of {_named(run)} …")
    try:
        from ..recipes.models.counting import config_of, counted_bytes

        config = config_of(look_for_config(run.model, Path()) or config_values(shape))
    except (ImportError, ConfigError):
        return None

    @functools.cache
    def count(shape: ShapeTable, settings: StepSettings) -> StepBytes:
        return counted_bytes(config, shape, settings)

    return count


def _row(run: Manifest, shape: ShapeTable, machine: NamedMachine, count: Count | None) -> _ModelRow:
    from ..recipes.models.shapes import whole_parameters
    from .fitting import METHODS, changed, installs, judge, tokens_s
    from .needs import USUAL_RATE

    verdicts = dict[str, Any]()
    for method in METHODS:
        verdict = judge(run, shape, {machine.name: machine.free}, method, count=count)
        assert verdict is not None, "its shape is known"
        verdicts[method] = verdict
    extras = {method: installs(run, each) for method, each in verdicts.items()}
    row = _ModelRow(_named(run), whole_parameters(shape), verdicts, extras, None, None)
    if (best := row.best) is None:
        return row
    rate = tokens_s(machine, shape, changed(run, best.change))
    return dataclasses.replace(row, rate=rate, join_s=best.needs.join_s(machine.down or USUAL_RATE))


def _whole(
    runs: Sequence[tuple[Manifest, ShapeTable]],
    machines: Sequence[NamedMachine],
    tokens: int,
    count: Count | None,
) -> list[dict[str, Any]]:
    """For each model the first method that all machines hold, and what they do together."""
    from .fitting import METHODS, changed, judge, tokens_s, toml_of, words_of

    found = list[dict[str, Any]]()
    for run, shape in runs:
        made: dict[str, Any] = {"model": _named(run), "method": None, "settings": "", "words": ""}
        for method in METHODS:
            free = {each.name: each.free for each in machines}
            verdict = judge(run, shape, free, method, count=count)
            if verdict is not None and verdict.fits:
                own = changed(run, verdict.change)
                rates = [tokens_s(each, shape, own) for each in machines]
                known = [rate for rate in rates if rate is not None]
                share = _training_share(own, shape, machines, rates)
                rate = sum(known) * share if len(known) == len(rates) else None
                made |= {
                    "method": method,
                    "settings": toml_of(verdict.change),
                    "words": words_of(verdict.change),
                    "tokens_s": rate,
                    "training_share": share,
                    "days": None if rate is None else tokens / rate / 86_400,
                }
                break
        found.append(made)
    return found


def _training_share(
    run: Manifest,
    shape: ShapeTable,
    machines: Sequence[NamedMachine],
    rates: Sequence[float | None],
) -> float:
    """Which part of the time is training, by the run's own settings; 1 where links or rates are
    not known.
    """
    from ...optim.planning import Choice, Conditions, PeerConditions, estimate
    from ..recipes.models.sizing import trained_of
    from .needs import step_settings

    if len(machines) < 2 or any(each.up is None for each in machines) or None in rates:
        return 1.0
    step = run.train.inner.tokens_per_step
    peers = [
        PeerConditions(each.name, each.up or 1.0, each.down or each.up or 1.0, step / (rate or 1.0))
        for each, rate in zip(machines, rates, strict=True)
    ]
    size = trained_of(shape, step_settings(run))
    conditions = Conditions(size, tuple(peers), rtt_s=0.05)
    choice = Choice(run.train.sync_every or 10, run.exchange.codec, run.train.overlap)
    return min(1.0, estimate(conditions, choice).share)


def _head(name: str, machines: Sequence[NamedMachine]) -> str:
    first, free = machines[0], machines[0].free
    parts = [f"{bytes_text(free.gpu)} of GPU memory" if free.gpu is not None else "no GPU"]
    if free.cards:
        parts = [f"{len(free.cards)} GPUs, {bytes_text(min(free.cards))} of memory on each"]
    parts.append("its memory not said" if free.host is None else f"{bytes_text(free.host)} free")
    if free.disk is not None:
        parts.append(f"{bytes_text(free.disk)} of disk")
    if first.up is not None:
        parts.append(f"{8e-6 * first.up:.4g} Mbit/s")
    count = f"{len(machines)} x " if len(machines) > 1 else ""
    return f"{count}{name}: {', '.join(parts)}"


def _table(terminal: Terminal, rows: Sequence[_ModelRow]) -> list[str]:
    head = ["MODEL", "SIZE", "FULL", "LORA", "QLORA", "TOKENS/S", "JOIN"]
    cells = [
        [
            row.name,
            count_text(row.parameters),
            *(each.word for each in row.verdicts.values()),
            "-" if row.rate is None else _rate(row.rate),
            "-" if row.join_s is None else span_text(row.join_s),
        ]
        for row in rows
    ]
    return terminal.table(head, cells).splitlines()


def _rate(tokens_s: float) -> str:
    return f"{tokens_s:,.0f}" if tokens_s >= 10 else f"{tokens_s:.2g}"


def _why_not(rows: Sequence[_ModelRow]) -> list[str]:
    """What the smallest model lacks that no method fits."""
    missing = [row for row in rows if row.best is None]
    if not missing:
        return []
    row = min(missing, key=lambda each: each.parameters)
    last = row.verdicts["qlora"]
    return [f"{row.name} in four bits, the least there is: {line}" for line in last.short]


def _to_install(rows: Sequence[_ModelRow], *, here: bool) -> list[str]:
    """What of the table takes an extra that is not installed: on this machine, or on those that are
    named, of which nobody knows what they have.
    """
    from ..recipes.models.libraries import BITSANDBYTES, OF_FOUR_BITS, has_bitsandbytes

    if here and has_bitsandbytes():
        return []
    wanting = {
        "qlora" if method == "qlora" else "adamw8bit"
        for row in rows
        for method, each in row.verdicts.items()
        if each.fits and row.installs[method]
    }
    if not wanting:
        return []
    where = "which is not installed here" if here else "on each machine"
    what = f"{' and '.join(sorted(wanting))} need{'s' * (len(wanting) == 1)} {BITSANDBYTES}"
    return [f"{what}, {where}: pip install '{OF_FOUR_BITS}'"]


def _together(whole: Sequence[dict[str, Any]], tokens: int) -> list[str]:
    """What all do together."""
    lines = list[str]()
    for run in whole:
        if run["method"] is None:
            lines.append(f"{run['model']}: no method fits on all of them")
            continue
        how = run["method"] + (f" with {run['words']}" if run["words"] else "")
        line = f"{run['model']}: {how}"
        if run["days"] is not None:
            line += (
                f"; {_rate(run['tokens_s'])} tokens a second, {tokens:,} in "
                f"{span_text(run['days'] * 86_400)}"
            )
        lines.append(line)
    return ["All together, by the first method that all hold:", *(f"  {each}" for each in lines)]


def _verdict(verdict: FitVerdict, install: str) -> dict[str, Any]:
    from .needs import needs_document

    return {
        "fits": verdict.fits,
        "settings": dict(verdict.change),
        "install": install,
        "short_of": list(verdict.short),
        "needs": needs_document(verdict.needs),
        "gpu_bytes": verdict.needs.gpu,
    }


def _document(
    kinds: dict[str, list[NamedMachine]],
    rows: dict[str, list[_ModelRow]],
    whole: Sequence[dict[str, Any]],
    tokens: int,
    error: str,
) -> dict[str, Any]:
    return {
        "machines": [
            {
                "name": name,
                "count": len(of),
                "host_bytes": of[0].free.host,
                "gpu_bytes": of[0].free.gpu,
                "cards": max(1, len(of[0].free.cards)) if of[0].free.gpu is not None else 0,
                "disk_bytes": of[0].free.disk,
                "up": of[0].up,
                "down": of[0].down,
                "models": [
                    {
                        "model": row.name,
                        "parameters": row.parameters,
                        "methods": {
                            key: _verdict(each, row.installs[key])
                            for key, each in row.verdicts.items()
                        },
                        "tokens_s": row.rate,
                        "join_s": row.join_s,
                    }
                    for row in rows[name]
                ],
            }
            for name, of in kinds.items()
        ],
        "together": list(whole),
        "tokens": tokens,
        "error": error,
    }


def _measured(
    terminal: Terminal, runs: Sequence[tuple[Manifest, ShapeTable]], machines: Sequence[str]
) -> int:
    """Two steps in a process of their own, as the run would make them, beside what is counted."""
    from ..home.interpreter import PYTHON
    from ..recipes.models.shapes import config_values, look_for_config
    from ..recipes.models.sizing import PROGRAMS, on_gpu, step_bytes
    from .needs import step_settings

    if machines or len(runs) != 1:
        raise click.UsageError(
            "--measure is for one model on this machine: --model ORG/NAME, or RUN.toml"
        )
    ((run, shape),) = runs
    settings = step_settings(run)
    said = PROGRAMS + step_bytes(shape, settings).peak
    config = look_for_config(run.model, Path()) or config_values(shape)
    given = json.dumps({"shape": config, **dataclasses.asdict(settings)})
    terminal.say(f"two steps of {_named(run)}, {settings.method}, with random weights …")
    command = [*PYTHON, "-m", "atoll.node.recipes.finetune.measuring", given]
    environment = {**terminal.child_environ(), "MALLOC_MMAP_THRESHOLD_": "65536"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=MEASURE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"two steps of {_named(run)} were not made in {span_text(MEASURE_S)}",
            key="--measure",
            hint="A smaller model, or --length 256",
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it was ended, most likely for its memory"])[
            -1
        ]
        raise ConfigError(
            f"{_named(run)} could not be tried here: {last[:300]}",
            key="--measure",
            hint="What is counted: the same without --measure",
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["gpu"] is not None:
        said = on_gpu(step_bytes(shape, step_settings(run, gpu=True)))
    took = found["gpu"] if found["gpu"] is not None else found["peak"]
    text = (
        f"{_named(run)}, {settings.method}: {found['tokens_s']:,.1f} tokens a second"
        + ("" if took is None else f", {bytes_text(took)} at the peak")
        + f"; counted {bytes_text(said)}"
    )
    terminal.data(text, {"model": _named(run), "measured": found, "counted_bytes": said})
    return 0

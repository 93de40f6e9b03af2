"""simulate --peers: a run on machines and links that the user describes, in virtual time."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import structs

from ...collectives.errors import ConfigError, StorageError
from ..home.output import Terminal, bytes_text, span_text
from ..run.gain import ddp_bytes

if TYPE_CHECKING:
    from ...collectives.swarm import RunSettings
    from ...optim.federated.simulation import Task
    from ..manifest import Manifest
    from ..simulation.churn import Mishap
    from ..simulation.fleet import FleetPeer
    from ..simulation.fleet_run import PlayedRun

ROUNDS = 20  # unless --rounds, --seconds or the manifest says how many
STAND_IN = {"width": 32, "layers": 2, "heads": 2, "context": 32}
"""What is trained where the run's own model cannot be: 43 thousand parameters."""
MUCH_BYTES = 2 << 30  # of memory: said before it is taken
MOST_TRAINED = 2_000_000  # parameters of a built-in model that is trained itself
ONLY = frozenset({"manifest", "peers", "churn", "step_ms", "parameters", "untrained", "seed"})
ALSO = frozenset({"rounds", "seconds", "task", "out", "lr"})
"""Options of `atoll simulate` that go with --peers: of it alone, and of the other ways as well."""


def simulated_fleet(terminal: Terminal, manifest: Manifest, given: dict[str, Any]) -> None:
    """Play it, and say how long it took, what of that was training, and what came of it.

    Raises ConfigError for what cannot be played.
    """
    from ...collectives.bounds import most_members
    from ..simulation.fleet import parse_fleet
    from ..simulation.fleet_run import FleetRun

    _check_options(given)
    settings, parameters = _settings(manifest, given), _parameters(manifest, given)
    fleet = parse_fleet(
        given["peers"],
        step_s=None if given["step_ms"] is None else given["step_ms"] / 1000,
        flops=_flops(manifest),
        most=most_members(manifest.topology),
    )
    task, trained = _task(manifest, given)
    mishaps = _mishaps(given["churn"], fleet, given)
    run = FleetRun(
        settings,
        fleet,
        parameters,
        task,
        batch=manifest.train.inner.batch,
        lr=given["lr"] or manifest.train.inner.lr,
        mishaps=mishaps,
        until_s=given["seconds"],
        seed=given["seed"],
        start_at=float(int(time.time())),
    )
    _warn(terminal, len(fleet), task)
    newest = 0

    def heard(played: PlayedRun) -> None:
        nonlocal newest
        if played.rounds > newest:
            newest = played.rounds
            at, counted = played.counted[-1]
            since_s = at - (played.begun_s or 0.0)
            terminal.say(f"round {newest}: {counted} of {len(fleet)}, {span_text(since_s)}")
        elif played.begun_s is None:
            terminal.say(f"{played.entered} of {len(fleet)} machines have come in")

    level = logging.getLogger("atoll").level
    logging.getLogger("atoll").setLevel(logging.CRITICAL)  # each machine would tell its own story
    try:
        played = run.play(heard)
    finally:
        logging.getLogger("atoll").setLevel(level)
    document = _document(manifest, run, played, trained)
    lines = _lines(played, document)
    if given["out"] is not None:
        lines += _write(given["out"], manifest.name, played, document)
    terminal.data("\n".join(lines), document)


def _warn(terminal: Terminal, machines: int, task: Task | None) -> None:
    """Say what memory a large fleet takes, before it takes it."""
    from ..simulation.fleet_run import memory_bytes
    from .needs import host_memory

    trained = sum(each.numel() for each in task.model().parameters()) if task is not None else 0
    needed, free = memory_bytes(machines, trained), host_memory()
    if free is not None and needed > free:
        terminal.say(
            f"this takes about {bytes_text(needed)} of memory, and {bytes_text(free)} are free: "
            "fewer machines, --untrained, or a smaller --task"
        )
    elif needed > MUCH_BYTES:
        terminal.say(f"this takes about {bytes_text(needed)} of memory, and some hours perhaps")


def _check_options(given: dict[str, Any]) -> None:
    """What else was typed belongs to the other ways of `atoll simulate`."""
    typed = click.get_current_context().get_parameter_source
    for name in given.keys() - ONLY - ALSO:
        if typed(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with --peers",
                key=name,
                why="It is of simulations of federated methods.",
            )


def _settings(manifest: Manifest, given: dict[str, Any]) -> RunSettings:
    for there, table in (
        (manifest.btard is not None, "[btard]"),
        (manifest.secure is not None, "[secure]"),
        (manifest.kind == "federated", 'kind = "federated"'),
        (manifest.train.target_samples is not None, "[train] target_samples"),
        (manifest.adapters.settings().mode not in ("", "plain"), "[adapters]"),
    ):
        if there:
            raise ConfigError(
                f"a run with {table} is not played on machines of one's own",
                key="peers",
                why="Played are DiLoCo and local SGD, also in fragments and with late results.",
                hint="Without --peers, atoll simulate RUN.toml plays federated methods",
            )
    settings = manifest.settings()
    rounds = given["rounds"] or settings.rounds
    if rounds is None and given["seconds"] is None:
        rounds = ROUNDS
    # The model that is played is another one than the run's, with other buffers.
    return structs.replace(settings, rounds=rounds, buffers={})


def _parameters(manifest: Manifest, given: dict[str, Any]) -> int:
    size = given["parameters"] or manifest.parameters
    if size is None:
        raise ConfigError(
            "how many parameters does the model have?",
            key="parameters",
            why="The manifest leaves the model to each member's script.",
            hint="--parameters 125000000, or [model] parameters in the manifest",
        )
    return int(size)


def _flops(manifest: Manifest) -> float | None:
    """Of an inner step: 6 a parameter and token, where the manifest knows both."""
    if manifest.model.entry != "builtin:gpt" or manifest.parameters is None:
        return None
    from ..manifest import gpt_config

    tokens = manifest.train.inner.batch * gpt_config(manifest.model).context
    return 6.0 * manifest.parameters * tokens


def _task(manifest: Manifest, given: dict[str, Any]) -> tuple[Task | None, str]:
    """What is trained, and what it is called."""
    if given["untrained"]:
        return None, ""
    from ..manifest.tables import ModelTable
    from ..recipes.simulated import load_task

    if given["task"] is not None:
        return load_task(manifest, given["task"]), given["task"]
    own = manifest.model.entry == "builtin:gpt" and (manifest.parameters or 0) <= MOST_TRAINED
    if not own:
        table = ModelTable(entry="builtin:gpt", config=dict(STAND_IN))
        manifest = structs.replace(manifest, model=table)
    return load_task(manifest, None), "the run's model" if own else "a small GPT in its place"


def _mishaps(text: str | None, fleet: Sequence[FleetPeer], given: dict[str, Any]) -> list[Mishap]:
    from ..simulation.churn import draw, parse_script

    if not text:
        return []
    if "=" in text:
        until_s = given["seconds"] or 30 * 86_400.0
        return draw(text, len(fleet), until_s, Random(f"{given['seed']}/churn"))
    try:
        script = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{text} cannot be read: {error}",
            key="churn",
            hint='A file of lines such as: at 300 kill 3 back 60; or "mtbf=2h, back=10m"',
        ) from None
    return parse_script(script, [peer.name for peer in fleet])


def _document(manifest: Manifest, run: Any, played: PlayedRun, trained: str) -> dict[str, Any]:
    machines = [
        {
            "name": machine.name,
            "step_s": round(machine.step_s, 6),
            "up": machine.up,
            "down": machine.down,
            "steps": machine.steps,
            "rounds": machine.rounds,
            "samples": machine.samples,
            "training_share": round(machine.share, 4),
            "deaths": machine.deaths,
            "bytes_sent": machine.bytes_sent,
            "bytes_received": machine.bytes_received,
        }
        for machine in played.machines
    ]
    # bf16 gradients all-reduced in every step by a ring: 2 (n - 1) / n times 2 bytes a value
    steps, n = max(machine.steps for machine in played.machines), len(machines)
    return {
        "schema": 1,
        "run": manifest.name,
        "ended": played.ended,
        "parameters": run.parameters,
        "trained": trained,
        "trained_parameters": played.trained,
        "begun_s": None if played.begun_s is None else round(played.begun_s, 3),
        "seconds": round(played.seconds, 3),
        "silent_s": round(played.silent_s, 3),
        "rounds": played.rounds,
        "samples": played.samples,
        "training_share": round(played.share, 4),
        "bytes": played.bytes,
        "ddp_bytes": round(steps * ddp_bytes(n, run.parameters)),
        "loss": [[round(at, 3), round_, round(loss, 6)] for at, round_, loss in played.loss],
        "counted": [[round(at, 3), count] for at, count in played.counted],
        "machines": machines,
    }


def _lines(played: PlayedRun, document: dict[str, Any]) -> list[str]:
    width = max(len("MACHINE"), *(len(machine.name) for machine in played.machines))
    lines = [
        f"{'MACHINE':{width}}  {'STEP':>8}  {'UP / DOWN':>21}  ROUNDS    SAMPLES  TRAINING  SENT"
    ]
    for machine in played.machines:
        died = {0: "", 1: "  died once"}.get(machine.deaths, f"  died {machine.deaths} times")
        step = f"{machine.step_s:.3g} s"
        link = f"{_mbit(machine.up)} / {_mbit(machine.down)} Mbit/s"
        lines.append(
            f"{machine.name:{width}}  {step:>8}  {link:>21}  "
            f"{machine.rounds:6}  {machine.samples:9,}  {machine.share:8.1%}  "
            f"{bytes_text(machine.bytes_sent)}{died}"
        )
    lines.append("")
    if played.ended == "stalled" or played.silent_s > max(600.0, played.seconds):
        lines.append(
            f"no round was decided in the last {span_text(played.silent_s)}: too few machines "
            "are left for a quorum"
        )
    rounds = "1 round" if played.rounds == 1 else f"{played.rounds} rounds"
    lines.append(
        f"{rounds} in {span_text(document['seconds'])} "
        f"after {span_text(document['begun_s'] or 0.0)} until all had the model; "
        f"{document['training_share']:.1%} training"
    )
    lines.append(
        f"{document['samples']:,} samples, {bytes_text(document['bytes'])} sent "
        f"({bytes_text(document['ddp_bytes'])} by gradients in every step)"
    )
    if played.loss:
        first, last = played.loss[0], played.loss[-1]
        lines.append(
            f"held-out loss {first[2]:.3f} after round {first[1]}, {last[2]:.3f} after {last[1]} "
            f"({document['trained']}, {document['trained_parameters']:,} parameters)"
        )
    return lines


def _mbit(rate: int) -> str:
    return f"{rate * 8 / 1e6:g}"


def _write(out: Path, name: str, played: PlayedRun, document: dict[str, Any]) -> list[str]:
    from ..run import diary

    events = out / "events.jsonl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "simulation.json").write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}") from None
    diary.record(events, "simulated", f"{name}, simulated", played.events)
    return [f"written: {out / 'simulation.json'}", f"to see it: atoll replay {events}"]


def fleet_options(command: Any) -> Any:
    """The options that only --peers has."""
    for option in (
        click.option("--seed", type=click.IntRange(0), default=0, help="Of everything drawn."),
        click.option("--untrained", is_flag=True, help="Steps take their time, no model learns."),
        click.option("--parameters", type=click.IntRange(1), help="Size of the run's model."),
        click.option(
            "--step-ms",
            type=click.FloatRange(0, min_open=True),
            metavar="MS",
            help="What an inner step takes on the first GPU of --peers.",
        ),
        click.option(
            "--churn",
            metavar="FILE|DRAWN",
            help='What happens to machines: a file of lines, or "mtbf=2h, back=10m".',
        ),
        click.option(
            "--peers",
            metavar="MACHINES",
            help='The run itself on these: "8 x 4090@100Mbit, 2 x 250ms@20Mbit/100Mbit+40ms".',
        ),
    ):
        command = option(command)
    return command

"""simulate: federated methods on many clients in virtual time."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import structs

from ...collectives.errors import ConfigError, StorageError
from ..home.output import Terminal, bytes_text, current
from ..manifest.manifest import fading_of
from ..manifest.optional_tables import READS
from ..run.registry import MODES
from .options import GIVEN, GivenPath, shared_options
from .simulating_fleet import fleet_options, simulated_fleet

if TYPE_CHECKING:
    from ...optim.federated.member import Knobs
    from ...optim.federated.simulation import Fleet, Sites, StudySettings
    from ...optim.federated.simulation.study import Means
    from ..manifest import Manifest

MAX_CLIENTS = 10_000
SERVER_LR = {"fedadam": 0.03, "fedyogi": 0.03, "fedadagrad": 0.03, "fedavgm": 0.3}
PLAIN_LR = 0.1  # of inner steps of plain SGD


@click.command("simulate")
@click.argument("manifest", type=GivenPath(dir_okay=False, path_type=Path), metavar="RUN.toml")
@click.option(
    "--methods",
    type=GIVEN,
    metavar="A,B",
    help="Federated methods, compared; all: every one (the manifest's, or fedavg).",
)
@click.option(
    "--clients",
    default=20,
    show_default=True,
    type=click.IntRange(1, MAX_CLIENTS),
    help="How many.",
)
@click.option(
    "--alpha",
    type=float,
    default=0.1,
    show_default=True,
    help="How uneven classes are dealt: 0.1 very, 100 hardly (Dirichlet).",
)
@click.option(
    "--shards",
    type=click.IntRange(1, 1000),
    help="Instead of --alpha: so many shards of one class each client.",
)
@click.option(
    "--speeds",
    default="1",
    show_default=True,
    type=GIVEN,
    metavar="S,S",
    help="Seconds a step, repeated over the clients.",
)
@click.option(
    "--sites",
    type=GIVEN,
    metavar="N@S,N@S",
    help='Sites of so many examples each, and seconds a step: "960@1s, 640@1s, 20@5s".',
)
@click.option(
    "--rounds", type=click.IntRange(1, 1_000_000), help="Outer steps (the manifest's, or 50)."
)
@click.option(
    "--seconds",
    type=float,
    help="End after so much virtual time; where not given, that of --rounds synchronous rounds.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 1_000_000),
    help="Inner steps a turn (the manifest's sync_every, or 10).",
)
@click.option(
    "--asked",
    type=click.IntRange(1, MAX_CLIENTS),
    help="How many clients a synchronous round asks (the manifest's sample, or all).",
)
@click.option(
    "--lr", type=float, help="Of inner steps (0.1 of plain SGD; with --peers the manifest's)."
)
@click.option("--beta", type=float, help="Of FedAvg-M and SCAFFOLD-M (the manifest's, or 0.3).")
@click.option(
    "--buffer",
    default=None,
    type=click.IntRange(1, MAX_CLIENTS),
    help="FedBuff's: contributions a step (the manifest's, or 5).",
)
@click.option(
    "--unbiased",
    is_flag=True,
    help=(
        "FedBuff's contributions count by how rare they are, so that slow clients have their share."
    ),
)
@click.option(
    "--server-lr", type=float, help="Of the outer step (1; of adaptive ones 0.03, of fedavgm 0.3)."
)
@click.option(
    "--dropout",
    type=float,
    default=0.0,
    show_default=True,
    help="How likely a client does not come back from a turn.",
)
@click.option(
    "--trace",
    type=GivenPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="When clients are there, as JSON (docs/federated-simulation.md).",
)
@click.option(
    "--attack",
    type=GIVEN,
    metavar="NAME",
    help="What hostile clients do: sign_flip, optimised_alie, label_flip, delayed …",
)
@click.option(
    "--hostile",
    type=click.IntRange(0, MAX_CLIENTS),
    default=0,
    show_default=True,
    help="How many clients are hostile.",
)
@click.option(
    "--personal",
    type=click.Choice(["tuned", "ditto", "clusters"]),
    help="Models of one's own for each site, too (synchronous methods).",
)
@click.option(
    "--seeds",
    default=1,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Runs of each method.",
)
@click.option(
    "--task",
    type=GIVEN,
    metavar="FILE.py:NAME",
    help="What is trained, where the manifest's model is local.",
)
@click.option(
    "--out",
    type=GivenPath(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write simulation.json and curves.png here.",
)
@fleet_options
@shared_options
def simulate_command(manifest: Path, out: Path | None, task: str | None, **given: Any) -> None:
    """Try federated methods, or the run on machines of your own, in virtual time.

    With --peers the run is played by the code of a node on machines and links that you describe,
    with what you let happen to them: time, bytes, training share, loss (docs/simulate.md).

    Without it, federated methods are compared on clients with uneven data. The classes of a real
    run do the work; no network is used. The server's step is the manifest's, [federated], where it
    has this method, robust rules are those of [robust] with its f, and what [secure] and [privacy]
    do to contributions is done to them, noise included. Where it says its work, rounds close as
    those of nodes do, of --sites that --churn kills.
    """
    from ..manifest import load_manifest
    from ..recipes.simulated import load_task

    terminal = current()
    run = load_manifest(manifest)
    if given["peers"] is not None:
        return simulated_fleet(terminal, run, given | {"task": task, "out": out})
    given["lr"] = PLAIN_LR if given["lr"] is None else given["lr"]
    _take_sites(given)
    if given["personal"] == "clusters" and run.secure is not None:
        raise ConfigError(
            "clusters of sites whose contributions are masked",
            key="personal",
            why="They are found from contributions in the clear.",
        )
    if run.btard is not None and given["attack"] is not None:
        raise ConfigError(
            f"--attack was removed for runs with [btard], as {run.name} is",
            key="attack",
            hint="In a checkout of atoll, scripts/bench/bench_btard.py --runs 0 --attacks NAME "
            "plays attacks on BTARD",
        )
    document = _run(terminal, run, load_task(run, task), given)
    lines = _table(document["table"])
    for name, sites in document["sites"].items():
        groups = sorted(Counter(sites["cluster"]).values(), reverse=True)
        of = (
            f", from {len(groups)} models of clusters of {', '.join(map(str, groups))} sites"
            if len(groups) > 1
            else ""
        )
        lines.append(
            f"{name}: one model for all {_mean(sites['one_for_all']):.3f} at the sites, models of "
            f"their own {_mean(sites['own']):.3f}{of}"
        )
    lines += [
        f"{name}: a site that takes part in all rounds spends epsilon {found['epsilon']:.3g}"
        for name, found in document["table"].items()
        if "epsilon" in found
    ]
    lines += document.pop("said")
    if out is not None:
        lines += _write(out, document)
    return terminal.data("\n".join(lines), document)


def _run(
    terminal: Terminal, manifest: Manifest, task: Any, given: dict[str, Any]
) -> dict[str, Any]:
    """All runs of all methods, as one document."""
    from ...optim.federated.simulation import NAMES, personalised, simulate
    from ...optim.federated.simulation.report import curve, row
    from ...optim.federated.simulation.study import ARRIVING
    from .simulating_sites import round_lines, round_rows

    wanted: str = given["methods"] or (
        manifest.federated.method if manifest.kind == "federated" else "fedavg"
    )
    names = list(NAMES) if wanted == "all" else [name.strip() for name in wanted.split(",")]
    devices, clients, said = _fleet(manifest, given), given["clients"], list[str]()
    rounds: dict[str, Any] = {}
    table: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    sites: dict[str, Any] = {}
    by_site: dict[str, Any] = {}
    beside = [
        key
        for key in ("before", "keep", "neighbours", "radius", "momentum")
        if getattr(manifest.robust, key)
    ]
    if beside:
        terminal.say(f"of [robust] the rule and f are simulated, not {', '.join(beside)}")
    for name in names:
        results: list[Any] = []
        for seed in range(given["seeds"]):
            settings = _settings(manifest, name, seed, given)
            parts = _parts(task, given, seed)
            terminal.say(f"{name}, seed {seed}: {clients} clients are trained on this machine")
            results.append(simulate(task, parts, devices, settings))
            how = (given["personal"] or manifest.federated.own) if seed == 0 else None
            if how and name in ARRIVING:
                terminal.say(f"{name}: no models of one's own, which go with synchronous methods")
            elif how:
                sites[name] = _sites(
                    personalised(task, parts, devices, settings, how, pull=manifest.federated.pull)
                )
        table[name], curves[name] = row(results), [curve(result) for result in results]
        if results[0].settings.means is not None:
            table[name] |= _spent(manifest, table[name]["rounds"])
        elif manifest.secure is not None:
            terminal.say(f"{name}: without [secure] and [privacy], with which it does not go")
        by_site[name] = results[0].by_site
        if results[0].settings.work is not None:
            said += round_lines(name, results)
            rounds[name] = round_rows(results)
        terminal.say(f"{name}: {table[name]['accuracy']:.3f}")
    return {
        "settings": {
            key: str(value) if isinstance(value, Path) else value for key, value in given.items()
        },
        "run": manifest.name,
        "table": table,
        "curves": curves,
        "by_site": by_site,
        "sites": sites,
        "rounds": rounds,
        "said": said,
    }


def _parts(task: Any, given: dict[str, Any], seed: int) -> Any:
    """Who has which samples."""
    from ...optim.federated.simulation import dirichlet, label_shards, sized

    if given["sizes"]:
        return sized(task.labels, given["sizes"], given["alpha"], seed)
    if given["shards"]:
        return label_shards(task.labels, given["clients"], given["shards"], seed)
    return dirichlet(task.labels, given["clients"], given["alpha"], seed)


def _take_sites(given: dict[str, Any]) -> None:
    """Sites that are described stand in place of so many clients, and their speeds."""
    given["sizes"] = None
    if given["sites"] is None:
        return
    from .simulating_sites import parse_sites

    typed = click.get_current_context().get_parameter_source
    for name in ("clients", "speeds", "shards"):
        if typed(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--{name} beside --sites",
                key=name,
                why="The sites say how many they are, what each has, and how fast it is.",
            )
    given["sizes"], speeds = parse_sites(given["sites"])
    given["clients"], given["speeds"] = len(speeds), ",".join(map(str, speeds))


def _settings(manifest: Manifest, name: str, seed: int, given: dict[str, Any]) -> StudySettings:
    from ...optim.federated.simulation import NAMES, StudySettings
    from ...optim.federated.simulation.study import ARRIVING

    rounds, train = given["rounds"] or manifest.train.rounds or 50, manifest.train
    steps = given["steps"] or train.sync_every or 10
    server_lr = given["server_lr"] or SERVER_LR.get(name, 1.0)
    settings = StudySettings(
        name,
        rounds=rounds,
        steps=steps,
        batch=train.inner.batch,
        asked=_asked(manifest, given),
        knobs=_knobs(manifest, given),
        server_lr=server_lr,
        least=steps,
        most=5 * steps,
        first=steps,
        attack=given["attack"],
        hostile=given["hostile"],
        seed=seed,
        measure=max(1, rounds // 50),
        buffer=given["buffer"] or 5,
        unbiased=given["unbiased"],
    )
    if manifest.kind == "federated" and name == manifest.federated.method:
        settings = replace(
            settings,
            buffer=given["buffer"] or manifest.federated.buffer,
            period=manifest.federated.period_s,
        )
        settings = replace(
            settings,
            fading=fading_of(manifest.federated),
            slack=manifest.federated.slack,
            most=math.ceil(steps * manifest.federated.longest),
        )
    if name not in NAMES:
        settings.check(given["clients"])
    if manifest.kind == "federated":
        outer = (
            manifest.federated.settings()
            if name == manifest.federated.method and given["server_lr"] is None
            else None
        )
        settings = replace(
            settings,
            outer=outer,
            even=manifest.secure is not None and manifest.secure.max_weight == 1,
        )
    if manifest.work is not None and name not in ARRIVING:
        settings = replace(
            settings,
            work=manifest.work,
            even=manifest.work.weights == "equal",
            fewest=_fewest(manifest),
        )
    settings = replace(settings, seconds=given["seconds"] or settings.seconds)
    if (
        name in ARRIVING
    ):  # as much time as the others have, and as many outer steps as it makes of it
        slowest = max(_numbers(given["speeds"], "speeds"))
        settings = replace(
            settings, rounds=None, seconds=min(settings.seconds, rounds * steps * slowest)
        )
    elif manifest.secure is not None and not settings.method.control:
        settings = replace(settings, means=_secure_means(manifest, settings, given["clients"]))
    elif manifest.robust.rule != "mean" and manifest.robust.f:
        settings = replace(settings, rule=manifest.robust.rule, f=manifest.robust.f)
    return settings


def _secure_means(manifest: Manifest, settings: StudySettings, clients: int) -> Callable[[], Means]:
    from ..manifest.federated import check_budget

    means = MODES.load("secure.simulated", "SecureMeans", key="[secure]")
    threshold_of = MODES.load("secure.vectors", "threshold_of", key="[secure]")
    run = manifest.settings()
    assert run.secure is not None
    if settings.asked is None:
        check_budget(
            structs.replace(
                manifest, train=structs.replace(manifest.train, rounds=settings.rounds)
            ),
            manifest.name,
        )
    members = min(clients, settings.asked or clients)
    if (needed := threshold_of(run.secure, members)) > members:
        raise ConfigError(
            f"{members} clients in a round, and with [secure] it needs {needed}",
            key="clients",
            hint=f"--clients {needed}, or more",
        )
    return partial(means, run.secure, run.privacy, settings.seed)


def _fewest(manifest: Manifest) -> Callable[[int], int]:
    """How many contributions a round needs of so many members."""
    secure = manifest.settings().secure
    if secure is None:
        return lambda _: 1
    from ...collectives.swarm import LEAST_SITES

    threshold_of = MODES.load("secure.vectors", "threshold_of", key="[secure]")
    return lambda members: max(LEAST_SITES, threshold_of(secure, members))


def _spent(manifest: Manifest, rounds: float) -> dict[str, float]:
    """What a site has spent that was in all rounds, in a run with [privacy]."""
    if manifest.privacy is None:
        return {}
    epsilon_after = MODES.load("privacy.budget", "epsilon_after", key="[privacy]")
    return {"epsilon": epsilon_after(manifest.privacy.settings(), round(rounds))}


def _asked(manifest: Manifest, given: dict[str, Any]) -> int | None:
    sample = manifest.settings().sample
    if given["asked"] is not None or sample is None:
        return given["asked"]
    return sample.wanted(given["clients"])


def _knobs(manifest: Manifest, given: dict[str, Any]) -> Knobs:
    from ...optim.federated.member import Knobs

    table = manifest.federated
    beta = table.beta if manifest.kind == "federated" and "beta" in READS[table.method] else 0.3
    return Knobs(
        given["lr"], table.mu, beta if given["beta"] is None else given["beta"], table.ahead
    )


def _fleet(manifest: Manifest, given: dict[str, Any]) -> Fleet:
    from .simulating_sites import killed_sites

    found = _machines(given)
    killed = killed_sites(
        manifest, given["churn"], given["clients"], given["seconds"], given["seed"]
    )
    devices = [
        replace(device, killed=spans) for device, spans in zip(found.devices, killed, strict=True)
    ]
    return replace(found, devices=tuple(devices))


def _machines(given: dict[str, Any]) -> Fleet:
    from ...optim.federated.simulation import fleet

    speeds = _numbers(given["speeds"], "speeds")
    if given["trace"] is None:
        return fleet(given["clients"], speeds, given["dropout"])
    try:
        trace = json.loads(given["trace"].read_text(encoding="utf-8"))
        return fleet(
            given["clients"], speeds, given["dropout"], trace["clients"], float(trace["period_s"])
        )
    except OSError as error:
        raise ConfigError(f"cannot read {given['trace']}: {error.strerror}", key="trace") from None
    except (ValueError, KeyError, TypeError) as error:
        form = '{"period_s": 86400, "clients": [[[0, 3600], [7200, 9000]], …]}'
        raise ConfigError(
            f"{given['trace']} is no trace: {error}", key="trace", hint=form
        ) from None


def _numbers(text: str, key: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--{key} {text!r} is no list of numbers", key=key, hint=f"--{key} 1,1.5,2,4,5"
        ) from None


def _sites(sites: Sites) -> dict[str, Any]:
    return {
        "one_for_all": list(sites.one_for_all),
        "own": list(sites.own),
        "cluster": list(sites.cluster),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _table(table: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        f"{'method':14}{'accuracy':>9}{'least at a site':>17}{'rounds':>8}"
        f"{'bytes':>11}{'waiting':>9}{'time':>11}"
    ]
    for name, row in table.items():
        lines.append(
            f"{name:14}{row['accuracy']:9.3f}{row['site_accuracy_least']:17.3f}"
            f"{row['rounds']:8.0f}{bytes_text(round(row['bytes'])):>11}"
            f"{row['idle_share']:9.1%}{row['seconds']:9.0f} s"
        )
    return lines


def _write(out: Path, document: dict[str, Any]) -> list[str]:
    from .curves import draw

    try:
        out.mkdir(parents=True, exist_ok=True)
        file = out / "simulation.json"
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        drawn = draw(
            {name: curves[0] for name, curves in document["curves"].items()}, out / "curves.png"
        )
    except OSError as error:
        raise StorageError(
            f"cannot write to {out}: {error.strerror}", hint="Another folder: --out DIR"
        ) from None
    return [
        f"written: {file}",
        f"drawn: {out / 'curves.png'}" if drawn else "no curves.png: pip install 'atoll[plot]'",
    ]

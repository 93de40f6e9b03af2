"""split: clusters of a run's members, and a manifest for a run of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import ConfigError
from ..home.output import Terminal, current, short_peer
from .options import RUN, GivenPath, shared_options

if TYPE_CHECKING:
    from ..manifest import Manifest
    from ..records.figures import Split

MODEL = "model"  # folder of the exported model below --out


@click.command("split")
@click.argument("run", type=RUN)
@click.option(
    "--from",
    "folders",
    type=GivenPath(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="Contributions of other members; repeatable.",
)
@click.option(
    "--rounds",
    default=2,
    show_default=True,
    type=click.IntRange(2, 10_000),
    help="Look at so many of the newest rounds.",
)
@click.option(
    "--clusters", "count", type=click.IntRange(1, 1024), help="So many, not as many as show."
)
@click.option(
    "--out",
    type=GivenPath(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write a manifest for each, and the model.",
)
@shared_options
def split_command(
    run: str, folders: tuple[Path, ...], rounds: int, count: int | None, out: Path | None
) -> None:
    """Find clusters of members whose updates point the same way, for a run of each.

    RUN is an id, its beginning, or a name; its manifest says [audit] keep_contributions, and each
    member keeps its own in RUN'S FOLDER/contributions: name copies of the others' with --from. The
    newest rounds are clustered in two halves; where these do not agree nothing is written.

    --out: DIR/NAME-1.toml and so on, each for a run that only members of that cluster may enter,
    and DIR/model. One of the members begins it: atoll new DIR/NAME-1.toml --from DIR/model
    """
    from ..manifest import load_run
    from ..records.audit import audit, of_node
    from ..run.registry import MODES

    check_split, split, manifests = (
        MODES.load("clusters", name, key="atoll split")
        for name in ("check_split", "split", "manifests")
    )
    terminal = current()
    signed = load_run(terminal.paths, run)
    parent = signed.open()
    check_split(parent)
    source = of_node(terminal.paths, signed)
    for name in source.logs:
        audit(source, name)
    found = split(source, folders, rounds, count, lambda entry: terminal.say(f"entry {entry} read"))
    if out is not None and not found.stable:
        raise ConfigError(
            (
                "the clusters are not stable: those of the older rounds agree with those of the "
                f"newer ones by {found.agree:.2f}, not by 1"
            ),
            key="--rounds",
            why="Chance, or rounds too early or too late, decide more than the data do.",
            hint="More rounds (--rounds N), another number (--clusters N), or one model for all",
        )
    files = _write(terminal, run, parent, found, out) if out is not None else []
    machine: dict[str, Any] = {
        "run_id": signed.run_id,
        "name": parent.name,
        "entries": found.rounds,
        "clusters": found.clusters,
        "unseen": found.unseen,
        "stable": found.stable,
        "agree": found.agree,
        "within": found.within,
        "between": found.between,
        "manifests": [str(file) for file in files],
        "runs": [each.name for each in manifests(parent, found)],
    }
    terminal.data("\n".join(_lines(terminal, parent, found, files)), machine)


def _write(terminal: Terminal, run: str, parent: Manifest, found: Split, out: Path) -> list[Path]:
    from ..home.refusals import storage_error
    from ..manifest import load_run, parse_manifest
    from ..manifest.form import as_toml
    from ..records.export import export_run
    from ..run.registry import MODES

    manifests = MODES.load("clusters", "manifests", key="atoll split")
    export_run(terminal.paths, load_run(terminal.paths, run), out / MODEL, force=True)
    files = list[Path]()
    for made in manifests(parent, found):
        text = as_toml(made)
        parse_manifest(text)  # that somebody can found it
        file = out / f"{made.name}.toml"
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise storage_error(f"cannot write {file}", error) from None
        files.append(file)
    return files


def _lines(terminal: Terminal, parent: Manifest, found: Split, files: list[Path]) -> list[str]:
    rows = [
        (str(number), str(len(group)), ", ".join(map(short_peer, group)))
        for number, group in enumerate(found.clusters, 1)
    ]
    summary = f"entries {found.rounds[0]} to {found.rounds[-1]}: " + (
        "both halves say the same"
        if found.stable
        else f"not stable, the halves agree by {found.agree:.2f}"
    )
    cosines = [
        f"{cosine:.2f} {where}"
        for cosine, where in ((found.within, "within a cluster"), (found.between, "between them"))
        if cosine is not None
    ]
    lines = [*terminal.table(("cluster", "members", "who"), rows).splitlines(), summary]
    lines += [f"mean cosine of two updates: {', '.join(cosines)}"] if cosines else []
    lines += (
        [f"not in these rounds, and in no cluster: {', '.join(map(short_peer, found.unseen))}"]
        if found.unseen
        else []
    )
    for number, group in enumerate(found.clusters, 1):
        if len(group) < parent.least:
            lines.append(
                f"cluster {number} has fewer members than its rule needs: "
                f"{parent.least}; edit its manifest"
            )
    return [
        *lines,
        *(
            f"written  {file}; a member begins it: atoll new {file} --from {file.parent / MODEL}"
            for file in files
        ),
    ]

"""events, logs: what happened in a run, from the file that its node keeps of it; the node's own
log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click

from ...collectives.errors import ConfigError
from ...collectives.foreign import escaped
from ..home.durations import duration_s
from ..home.output import Terminal, as_json, current
from ..run.events import RunEvent, document
from ..views.event_words import Words
from .options import RUN, shared_options

LOOK_S = 0.5
LAST_LINES = 50


@click.command("events")
@click.argument("run", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("--since", default="", metavar="SPAN", help="Only of the last 90s, 30min, 12h, 7d.")
@click.option("--all", "everything", is_flag=True, help="Also phases and timings of rounds.")
@shared_options
def events_command(run: str, follow: bool, since: str, everything: bool) -> None:
    """Say what happened in a run, in words, oldest first; with --json one JSON object a line.

    RUN is an id, its beginning, or a name. The file is events.jsonl in the run's folder; a node
    keeps the last 32 MiB.
    """
    from ..manifest import load_run
    from ..run import diary

    terminal = current()
    folder = terminal.paths.run_dir(load_run(terminal.paths, run).run_id)
    since_s = time.time() - duration_s(since) if since else 0.0
    found = diary.follow(folder, since_s, _wait) if follow else diary.events(folder, since_s)
    if terminal.json:
        for event in found:
            _print(terminal, as_json(document(event)))
        return
    words = Words()
    for event in found:
        if everything or not event.quiet:
            for line in words.of(event):
                _print(terminal, f"{_when(event)}  {line}")


@click.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on.")
@click.option(
    "-n",
    "lines",
    default=LAST_LINES,
    show_default=True,
    type=click.IntRange(0),
    help="How many lines.",
)
@shared_options
def logs_command(follow: bool, lines: int) -> None:
    """Show the node's log: the last lines of the one in the background, or of a script's private
    node if that wrote last.
    """
    terminal = current()
    found = [
        file
        for name in ("node.log", "private-node.log")
        if (file := terminal.paths.log_dir / name).exists()
    ]
    if not found:
        raise ConfigError(
            f"there is no log in {terminal.paths.log_dir}",
            why="Logs are written by nodes in the background and by private nodes of scripts.",
            hint="atoll up --background",
        )
    newest = max(found, key=lambda file: file.stat().st_mtime)
    terminal.say(str(newest))
    for line in _tail(newest, lines, follow):
        _print(terminal, as_json({"line": line}) if terminal.json else line)


def _when(event: RunEvent) -> str:
    return datetime.fromtimestamp(event.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _tail(file: Path, lines: int, follow: bool) -> Iterator[str]:
    """The last ``lines`` of a log, then, with ``follow``, those to come. Reads at most the last MiB
    to find them.
    """
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - (1 << 20)))
        for line in log.read().decode(errors="replace").splitlines()[-lines:] if lines else ():
            yield escaped(line, 8192)
        while follow:
            line = log.readline()
            if line:
                yield escaped(line.decode(errors="replace").rstrip("\n"), 8192)
            else:
                _wait()


def _wait() -> None:
    threading.Event().wait(LOOK_S)


def _print(terminal: Terminal, line: str) -> None:
    """A line of the result. Ends the command when nobody reads it any more."""
    try:
        terminal.print(line)
    except BrokenPipeError:
        raise click.exceptions.Exit(141) from None

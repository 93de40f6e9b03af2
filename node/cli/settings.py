"""The settings a command goes by, and the question whether ``./atoll.toml`` may be among them
(`local_settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import ConfigError
from ..home.output import Terminal, current
from .options import asking_options, shared_options

if TYPE_CHECKING:
    from ..home.config import Loaded
    from ..home.local_settings import LocalSettings


def settings_of(
    terminal: Terminal, flags: Mapping[str, Any] | None = None, *, ask: bool = False
) -> Loaded:
    """The settings in use; one line is said about a file of the current folder that is not used.
    ``ask``: whether the person at the terminal may be asked about it. ``--yes`` is no answer to
    that: it was given for what the command says it does.

    Raises ConfigError, StorageError."""
    from ..home.config import load_config

    if ask and terminal.interactive and not terminal.yes:
        _ask(terminal)
    loaded = load_config(terminal.paths, flags, terminal.environ, named=terminal.config)
    if loaded.unused:
        terminal.say(loaded.unused)
    return loaded


def _ask(terminal: Terminal) -> None:
    from ..home.local_settings import local_settings, trust

    found = local_settings(terminal.paths, terminal.environ, named=terminal.config)
    if found is None or found.trusted:
        return
    for line in _described(found):
        terminal.say(line)
    if click.confirm("Use it, now and until it changes?", default=False, err=True):
        trust(terminal.paths, found)


def _described(found: LocalSettings) -> list[str]:
    """What a settings file would set, one entry a line, with control characters escaped."""
    from pathlib import Path

    from ..home.config import entries
    from ..home.own_data import KEY

    lines = [f"{str(found.path)!r} would set for this machine:"]
    for table, rows in entries(found.text, found.path).items():
        for key, value in rows.items():
            lines.append(f"  {table}.{key} = {value!r}")
            if f"{table}.{key}" == KEY and value:
                file = found.path.parent / Path(str(value).rpartition(":")[0]).expanduser()
                lines.append(f"    which runs the code in {str(file)!r}")
    return lines


@click.command("trust")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False))
@asking_options
@shared_options
def trust_command(file: str | None) -> int:
    """Let atoll.toml of this folder, or FILE, set what it says, until its contents change."""
    from ..home.local_settings import LOCAL_FILE, local_settings, trust

    terminal = current()
    found = local_settings(terminal.paths, terminal.environ, named=file or LOCAL_FILE)
    if found is None:  # a named file that is missing is an error already
        raise ConfigError(f"there is no {LOCAL_FILE} in this folder", exit_code=2)
    for line in _described(found):
        terminal.say(line)
    agreed = terminal.confirm("Use it, now and until it changes?")
    if agreed:
        trust(terminal.paths, found)
    terminal.data(
        f"{found.path} is {'trusted' if agreed else 'not trusted'}",
        {"file": found.path, "sha256": found.digest, "trusted": agreed},
    )
    return 0 if agreed else 1

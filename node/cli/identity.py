"""init, id, config: this machine's key, folders and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..home.output import Terminal, current
from .options import GIVEN, shared_options
from .settings import trust_command

if TYPE_CHECKING:
    from ...security.identity import Identity


def identity_of(terminal: Terminal) -> Identity:
    """This node's identity, made on first use. Raises SecurityError E210, StorageError."""
    from ...security.key_file import load_or_create
    from ..home.paths import make_private
    from ..home.refusals import storage_error

    file = terminal.paths.identity_file
    make_private(file.parent)
    try:
        return load_or_create(file)
    except OSError as error:
        raise storage_error(f"cannot use {file}", error) from None


@click.command("init")
@shared_options
def init_command() -> None:
    """Make this machine's key and settings; safe to repeat."""
    from ..home.names import name_of
    from ..home.paths import write_atomic
    from .settings import settings_of

    terminal = current()
    paths = terminal.paths
    fresh = not paths.identity_file.exists()
    paths.ensure()
    identity = identity_of(terminal)
    if not paths.config_file.exists():
        write_atomic(
            paths.config_file,
            b"# atoll config show lists all settings with their defaults\n[node]\n",
        )
    settings_of(terminal)
    lines = [
        f"peer      {identity.peer}  “{name_of(identity.peer)}”",
        f"key       {paths.identity_file}{'  (new; keep a copy)' if fresh else ''}",
        f"settings  {paths.config_file}",
        f"state     {paths.state_dir}",
    ]
    machine = {
        "peer": identity.peer,
        "name": name_of(identity.peer),
        "created": fresh,
        "identity": paths.identity_file,
        "config": paths.config_file,
        "state": paths.state_dir,
    }
    terminal.data("\n".join(lines), machine)
    terminal.say("Next: atoll demo, or atoll join INVITE, or atoll new RUN.toml")


@click.command("id")
@shared_options
def id_command() -> None:
    """Print this machine's peer id, whose key is made where there is none."""
    from ..home.names import name_of

    terminal = current()
    fresh = not terminal.paths.identity_file.exists()
    identity = identity_of(terminal)
    terminal.data(
        identity.peer, {"peer": identity.peer, "name": name_of(identity.peer), "created": fresh}
    )
    if fresh:
        terminal.say(f"A new key, in {terminal.paths.identity_file}; keep a copy")


@click.group("config")
@shared_options
def config_command() -> None:
    """Show or change settings."""


config_command.add_command(trust_command)


@config_command.command("show")
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@shared_options
def show(origin: bool) -> None:
    """Print all settings in use."""
    from ..home.config import flat
    from .settings import settings_of

    terminal = current()
    loaded = settings_of(terminal)
    values = flat(loaded.config)
    human = "\n".join(
        f"{key} = {_shown(value)}"
        + (f"    # {loaded.origins.get(key, 'default')}" if origin else "")
        for key, value in values.items()
    )
    terminal.data(
        human,
        {
            "settings": values,
            "origins": {key: loaded.origins.get(key, "default") for key in values},
        },
    )


@config_command.command("set")
@click.argument("key", type=GIVEN)
@click.argument("value")
@shared_options
def set_(key: str, value: str) -> None:
    """Set KEY, such as node.port, to VALUE in your config.toml; lists are separated by commas."""
    from ..home.config import set_value

    terminal = current()
    stored = set_value(terminal.paths, key, value)
    terminal.data(
        f"{key} = {_shown(stored)}",
        {"key": key, "value": stored, "file": terminal.paths.config_file},
    )
    terminal.say("A running node takes it up when it is started again.")


@config_command.command("path")
@shared_options
def path_() -> None:
    """Print the folders and files in use."""
    terminal = current()
    paths = terminal.paths
    found = {
        "config": paths.config_file,
        "identity": paths.identity_file,
        "state": paths.state_dir,
        "cache": paths.cache_dir,
        "socket": paths.control_socket,
    }
    terminal.data("\n".join(f"{name:9} {path}" for name, path in found.items()), found)


def _shown(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)

"""service install, status, remove: the node, and a run's training, started by the system."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import ConfigError, StateError
from ..home.ending import GRACE_S
from ..home.interpreter import PYTHON
from ..home.output import Terminal, current
from ..home.own_data import is_factory
from ..home.paths import user_path, write_atomic
from ..home.refusals import storage_error
from .options import DATA, DRAIN, GIVEN, RUN, shared_options

if TYPE_CHECKING:
    from ..home.units import Service

NOT_RUNNING = 3
MANAGER_S = 4000.0
"""A bound for hangs: a node on a slow disk says late that it is ready, and one that ends may take
its ``node.drain_s``.
"""
XDG = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
_SYSTEM = click.option(
    "--system", is_flag=True, help="A service of the machine, not of this user; needs root."
)
_JOIN = click.option(
    "--join",
    "run",
    metavar="RUN",
    type=RUN,
    help="Of the training of this run, which needs the node's service; not of the node.",
)


@click.group("service")
@shared_options
def service_command() -> None:
    """Let the system run the node, and start it again: systemd on Linux, launchd on macOS."""


@service_command.command("install")
@_SYSTEM
@_JOIN
@click.option("--user", metavar="NAME", type=GIVEN, help="Whose node it is, with --system.")
@click.option(
    "--script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --join: train with your own script.",
)
@click.option("--data", type=DATA, metavar="PATH|FILE.py:NAME", help="With --join: as atoll join.")
@DRAIN
@click.option("--print", "shown", is_flag=True, help="Print the file, and do nothing else.")
@shared_options
def install_command(
    system: bool,
    run: str | None,
    user: str | None,
    script: Path | None,
    data: str | None,
    drain: float | None,
    shown: bool,
) -> None:
    """Write a service and start it. Its settings are those of this home: atoll config show

    First the node:  atoll service install   Then, for each run:  atoll service install --join RUN
    A run that this machine is not in yet is joined once by hand: you are asked, a service is not.
    """
    from ..home.units import launchd, systemd

    terminal = current()
    if (script or data) and run is None:
        raise click.UsageError("--script and --data are of the training: --join RUN")
    if user and not system:
        raise click.UsageError("--user is for --system")
    owner = (user or os.environ.get("SUDO_USER") or getpass.getuser()) if system else ""
    _belong_to(terminal, owner)
    service = _service_of(terminal, run, script, data, drain)
    log = terminal.paths.log_dir / f"{service.name}.log"
    mac = sys.platform == "darwin"
    text = launchd(service, log, user=owner) if mac else systemd(service, user=owner).encode()
    if shown:
        terminal.data(text.decode().rstrip("\n"), {"name": service.name, "text": text.decode()})
        return
    manager = _manager(system)
    file = _file(service.name, system)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
        file.chmod(0o644)
    except OSError as error:
        raise storage_error(f"cannot write {file}", error) from None
    if mac:
        _tell([*manager, "bootstrap", _domain(system), str(file)])
    else:
        _tell([*manager, "daemon-reload"])
        _tell([*manager, "enable", "--now", f"{service.name}.service"])
    terminal.data(f"{service.name} is installed: {file}", {"name": service.name, "file": file})
    if not mac and not system:
        terminal.say("To run while nobody is logged in, and from the start of the machine:")
        terminal.say(f"  sudo loginctl enable-linger {getpass.getuser()}")
    terminal.say(
        f"Its log: {log}"
        if mac
        else f"Its log: journalctl {'' if system else '--user '}-u {service.name} -f"
    )


@service_command.command("status")
@_SYSTEM
@shared_options
def status_command(system: bool) -> int:
    """Show the services that were installed. Exit status 3: none is, or one does not run."""
    terminal, manager = current(), _manager(system)
    rows = [(name, _state(manager, name, system)) for name in _installed(system)]
    terminal.data(
        terminal.table(("SERVICE", "STATE"), rows)
        if rows
        else "no service is installed; atoll service install",
        {"services": dict(rows)},
    )
    return 0 if rows and all(state in ("active", "running") for _, state in rows) else NOT_RUNNING


@service_command.command("remove")
@_SYSTEM
@_JOIN
@shared_options
def remove_command(system: bool, run: str | None) -> None:
    """Stop a service and delete it: the node's with all that need it, or one run's training.

    The open round is handed over first. Keys, settings and what is known of runs stay.
    """
    terminal, manager = current(), _manager(system)
    _belong_to(terminal, os.environ.get("SUDO_USER", "") if system else "")
    names = _installed(system)
    if run is not None:
        wanted = _training(terminal, run, names)
        names = [name for name in names if name == wanted]
    if not names:
        raise StateError(
            "there is no such service", exit_code=NOT_RUNNING, hint="atoll service status"
        )
    for name in sorted(names, reverse=True):  # the training before the node that it needs
        file = _file(name, system)
        if sys.platform == "darwin":
            _tell([*manager, "bootout", f"{_domain(system)}/atoll.{name}"], may_fail=True)
        else:
            _tell([*manager, "disable", "--now", f"{name}.service"], may_fail=True)
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(f"cannot delete {file}", error) from None
    if sys.platform != "darwin":
        _tell([*manager, "daemon-reload"])
    terminal.data(f"removed: {', '.join(names)}", {"removed": names})


def _belong_to(terminal: Terminal, owner: str) -> None:
    """From now on the folders of this command are those of the user whose processes the service's
    will be: sudo has given it root's. "": they are.
    """
    if not owner or owner == getpass.getuser():
        return
    try:
        home = pwd.getpwnam(owner).pw_dir
    except KeyError:
        raise ConfigError(f"there is no user {owner!r} on this machine", exit_code=2) from None
    named = {name: os.environ[name] for name in ("ATOLL_HOME",) if name in os.environ}
    terminal.environ = {"HOME": home, **named}


def _service_of(
    terminal: Terminal, run: str | None, script: Path | None, data: str | None, drain: float | None
) -> Service:
    from ..home.units import NODE, Service
    from .settings import settings_of

    home = terminal.home or terminal.environ.get("ATOLL_HOME")
    environment = (
        {"ATOLL_HOME": str(user_path(home))}
        if home
        else {name: terminal.environ[name] for name in XDG if name in terminal.environ}
    )
    command = [*PYTHON, "-m", "atoll.node.cli"]
    within = ["--drain", f"{drain:g}"] if drain is not None else []
    if run is None:
        stop_s = drain or settings_of(terminal).config.node.drain_s
        return Service(
            NODE, "atoll node", [*command, "up", *within], environment, None, stop_s, ready=True
        )
    from ..manifest import load_run

    signed = load_run(terminal.paths, run)
    command += ["join", signed.run_id, "--yes", *within]
    if script is not None:
        command += ["--script", str(script.absolute())]
    if data:
        command += ["--data", data if is_factory(data) else str(Path(data).absolute())]
    return Service(
        _name_of(signed.run_id),
        f"atoll training of {signed.open().name}",
        command,
        environment,
        script.absolute().parent if script is not None else None,
        drain or GRACE_S,
        after=NODE,
    )


def _name_of(run_id: str) -> str:
    return f"atoll-run-{run_id[:8]}"


def _training(terminal: Terminal, run: str, installed: Sequence[str]) -> str:
    """The service of a run by its id, also of one that is forgotten since, or by its name."""
    if (name := _name_of(run)) in installed:
        return name
    from ..manifest import load_run

    return _name_of(load_run(terminal.paths, run).run_id)


def _folder(system: bool) -> Path:
    if sys.platform == "darwin":
        return user_path("/Library/LaunchDaemons" if system else "~/Library/LaunchAgents")
    if system:
        return Path("/etc/systemd/system")
    return user_path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "systemd" / "user"


def _file(name: str, system: bool) -> Path:
    mac = sys.platform == "darwin"
    return _folder(system) / (f"atoll.{name}.plist" if mac else f"{name}.service")


def _installed(system: bool) -> list[str]:
    pattern = "atoll.atoll-*.plist" if sys.platform == "darwin" else "atoll-*.service"
    return sorted(
        file.name.removeprefix("atoll.").rpartition(".")[0]
        for file in _folder(system).glob(pattern)
        if file.name.removeprefix("atoll.").startswith(("atoll-node", "atoll-run-"))
    )


def _domain(system: bool) -> str:
    return "system" if system else f"gui/{os.getuid()}"


def _manager(system: bool) -> list[str]:
    """The command of the system's supervisor. Raises StateError where there is none."""
    mac = sys.platform == "darwin"
    name = "launchctl" if mac else "systemctl"
    if shutil.which(name) is None:
        raise StateError(
            f"there is no {name} on this machine",
            why="Services are those of systemd and launchd; a container has neither.",
            hint="The file for another supervisor to be made from: atoll service install --print",
        )
    return [name] if system or mac else [name, "--user"]


def _state(manager: Sequence[str], name: str, system: bool) -> str:
    if sys.platform == "darwin":
        found = _ran([*manager, "print", f"{_domain(system)}/atoll.{name}"])
        return "running" if "state = running" in found.stdout else "stopped"
    return _ran([*manager, "is-active", f"{name}.service"]).stdout.strip() or "unknown"


def _tell(command: Sequence[str], *, may_fail: bool = False) -> None:
    done = _ran(command)
    if done.returncode and not may_fail:
        raise ConfigError(
            f"{' '.join(command)} failed with status {done.returncode}",
            why=done.stderr.strip(),
            hint=(
                "A user without a session has no systemd of its own: sudo loginctl "
                "enable-linger USER, or --system"
                if "connect to bus" in done.stderr
                else "It is tried again until it is removed: atoll service remove"
            ),
            exit_code=1,
        )


def _ran(command: Sequence[str]) -> subprocess.CompletedProcess[Any]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MANAGER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StateError(f"{command[0]} does not answer: {error}") from None

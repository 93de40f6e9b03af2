"""doctor: everything that can be wrong with this machine as a node, in one list."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import stat
import sys
from typing import Any

import click

from ...collectives.errors import AtollError
from ..home.output import Terminal, bytes_text, current
from ..views.reach_views import network_advice, network_error, network_rows
from .daemon import running
from .options import shared_options
from .reaching import findings, rows_text

LOW_BYTES = 2 << 30
Row = tuple[str, str, str]


@click.command("doctor")
@click.option(
    "--fix", is_flag=True, help="Mend what can be mended without asking: folders, key, permissions."
)
@shared_options
def doctor_command(fix: bool) -> int:
    """Check this machine as a node: versions, key, disk, the running node, and whether others reach
    it.

    Exit status 1: something is wrong that keeps it from taking part.
    """
    terminal = current()
    rows = [_versions(), _identity(terminal, fix), _disk(terminal), *_locks(terminal)]
    hint = _node(terminal, rows)
    failed, warned = (sum(row[0] == level for row in rows) for level in ("fail", "warn"))
    terminal.data(
        rows_text(terminal, rows),
        {"findings": findings(rows), "failed": failed, "warnings": warned, "advice": hint},
    )
    if hint:
        terminal.say(hint)
    words = [
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in ((failed, "failure"), (warned, "warning"))
        if count
    ]
    terminal.say(
        f"{', '.join(words) or 'all well'}. "
        f"{'You cannot take part yet.' if failed else 'You can join.'}"
    )
    return 1 if failed else 0


def _versions() -> Row:
    found, missing = [f"python {platform.python_version()}"], list[str]()
    for name in ("torch", "libp2p", "trio"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing or sys.version_info < (3, 11):
        return (
            "fail",
            "versions",
            f"{', '.join(found)}; not here: {', '.join(missing) or 'Python 3.11'}",
        )
    return "ok", "versions", ", ".join(found)


def _identity(terminal: Terminal, fix: bool) -> Row:
    file = terminal.paths.identity_file
    if not file.exists():
        if not fix:
            return "warn", "identity", f"no key at {file} yet: atoll init, or atoll doctor --fix"
        from .identity import identity_of

        terminal.paths.ensure()
        identity_of(terminal)
        return "ok", "identity", f"made {file}"
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        if not fix:
            return (
                "fail",
                "identity",
                f"others on this machine may read {file} (mode {mode:o}): atoll doctor --fix",
            )
        os.chmod(file, 0o600)
        return "ok", "identity", f"{file} is yours alone now"
    return "ok", "identity", str(file)


def _disk(terminal: Terminal) -> Row:
    folder = terminal.paths.state_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return "ok" if free >= LOW_BYTES else "warn", "disk", f"{bytes_text(free)} free at {folder}"


def _locks(terminal: Terminal) -> list[Row]:
    """A warning where the home's one node cannot be told by other machines that have the folder."""
    from ..home.lifecycle import NO_LOCKS_HERE, locks_here

    return [] if locks_here(terminal.paths.runtime_dir) else [("warn", "locks", NO_LOCKS_HERE)]


def _node(terminal: Terminal, rows: list[Row]) -> str:
    """Adds what the running node knows; what to do."""
    from ..control.protocol import Check

    try:
        client = running(terminal)
    except AtollError as error:
        rows.append(("fail", "node", f"{error.code} {error.message}"))
        return error.hint
    if client is None:
        rows.append(("warn", "node", "not running, so nothing is known of the network"))
        return "Start it and ask again: atoll up --background && atoll doctor"
    with client:
        status: dict[str, Any] = client.status()
        clock = client.ask(Check).value["clock"]
    network: dict[str, Any] = status.get("network") or {}
    connected = len(network.get("connected") or ())
    rows.append(
        (
            "ok" if connected else "warn",
            "node",
            f"up, connected to {connected} peer{'' if connected == 1 else 's'}",
        )
    )
    troubles = [
        *(status.get("troubles") or ()),
        *(run["trouble"] for run in status.get("runs") or () if run.get("trouble")),
    ]
    rows += [
        ("fail", "trouble", f"{trouble.get('code', '')} {trouble.get('message', '')}")
        for trouble in troubles
    ]
    error = network_error(network, clock)
    takes_part = error is not None and error.code == "E130"  # it dials others
    rows += [
        ("warn" if takes_part and level == "fail" else level, what, text)
        for level, what, text in network_rows(network, clock)
    ]
    return error.hint if error else network_advice(network)

"""A node, and the training of a run, as services of the system: systemd units and launchd agents,
as text.
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...collectives.errors import ConfigError

DRAIN_ROOM_S = 15  # beyond what a node takes to end, before the system kills it
NODE = "atoll-node"
NEVER_AGAIN = (2, 64, 65, 66, 70, 76, 77, 78)
"""Exit statuses that another start would give again: usage, a wrong setting, a key that others
read, a differing model."""
ENDED = 143
"""What `atoll join` exits with after SIGTERM."""
_ODD = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Service(NamedTuple):
    """What is to run. ``folder``: where; None: in its user's home. ``after``: the unit of the node
    that it needs; "": none. ``ready``: it tells systemd when it is.
    """

    name: str
    description: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path | None
    stop_s: float
    after: str = ""
    ready: bool = False


def systemd(service: Service, *, user: str = "") -> str:
    """The text of a unit. ``user``: whose processes a system unit's are; "": a user unit. Raises
    ConfigError for a word that no unit can hold.
    """
    # Not Requires: systemd would stop the training whenever the node is started again.
    after = f"After={service.after}.service\nWants={service.after}.service\n"
    environment = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in service.environment.items()
    )
    return f"""\
# Written by: atoll service install. Gone by: atoll service remove
[Unit]
Description={_plain(service.description)}
Wants=network-online.target
After=network-online.target
{after if service.after else ""}\
StartLimitIntervalSec=0

[Service]
Type={"notify" if service.ready else "simple"}
{f"User={_plain(user)}" + chr(10) if user else ""}\
WorkingDirectory={_plain(str(service.folder)) if service.folder else "-~"}
{environment}\
ExecStart={" ".join(map(_word, service.command))}
Restart=on-failure
RestartSec=10
RestartPreventExitStatus={" ".join(map(str, NEVER_AGAIN))}
# SIGTERM, to the first process alone, hands the open round over: a script would die of it.
KillMode=mixed
SuccessExitStatus={ENDED}
# A machine that is taken away waits no longer than this.
TimeoutStopSec={service.stop_s + DRAIN_ROOM_S:g}
TimeoutStartSec=180
LimitNOFILE=65536
NoNewPrivileges=true

[Install]
WantedBy={"multi-user.target" if user else "default.target"}
"""


def launchd(service: Service, log: Path, *, user: str = "") -> bytes:
    """A launchd agent, or with ``user`` a daemon, as a property list."""
    settings = {
        "Label": f"atoll.{service.name}",
        "ProgramArguments": list(service.command),
        **({"WorkingDirectory": str(service.folder)} if service.folder else {}),
        "EnvironmentVariables": dict(service.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": round(service.stop_s + DRAIN_ROOM_S),
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
        **({"UserName": user} if user else {}),
    }
    return plistlib.dumps(settings)


def _plain(text: str) -> str:
    """A value alone on its line, which a backslash at its end would join to the next."""
    if text.endswith("\\"):
        raise ConfigError(f"{text!r} cannot stand in a service's file", why="It is one line.")
    return _checked(text)


def _checked(text: str) -> str:
    if _ODD.search(text):
        raise ConfigError(f"{text!r} cannot stand in a service's file", why="It is one line.")
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """A word of a command, in which systemd takes ``$`` for its own."""
    return _quoted(text.replace("$", "$$"))


def _quoted(text: str) -> str:
    """A word of a line of words: quotes, backslashes and ``%`` are systemd's own."""
    text = _checked(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"' if re.search(r"[^A-Za-z0-9_@%+=:,./\$-]", text) else text

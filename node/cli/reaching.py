"""netcheck, ping, relay: how this node is reached, how a peer is, and being a meeting place for
others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ...collectives.errors import ConfigError
from ..home.interpreter import PYTHON
from ..home.output import Terminal, current, error_object, short_peer, show_error
from ..home.paths import user_path
from ..views.alone import alone
from ..views.reach_views import flow_row, network_advice, network_error, network_rows, outcome
from .daemon import connect
from .options import GIVEN, PEER, shared_options

PAUSE_S = 1.0
UDP = ("ok", "udp", "not needed: peers speak TCP, so a network that blocks UDP changes nothing")
RELAYED_STILL = (
    "It works, but slowly: the two routers do not let a direct connection through. What would: "
    "atoll netcheck, here and there"
)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}

UNIT = """\
[Unit]
Description=atoll relay and bootstrap node
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
ExecStart={command}
Restart=always
RestartSec=5
DynamicUser=yes
StateDirectory=atoll
Environment=ATOLL_HOME=/var/lib/atoll OMP_NUM_THREADS=1
{rights}NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
LimitNOFILE=65536

[Install]
WantedBy=multi-user.target"""

LOW_PORTS = "AmbientCapabilities=CAP_NET_BIND_SERVICE\n"
"""What a service of nobody's needs for a port below 1024."""

CONTAINER = """\
FROM docker.io/library/python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends \\
        build-essential python3-dev libgmp-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir atoll
ENV ATOLL_HOME=/var/lib/atoll OMP_NUM_THREADS=1
VOLUME /var/lib/atoll
EXPOSE {port}/tcp {lane_port}/tcp
ENTRYPOINT [{options}]"""


def rows_text(terminal: Terminal, rows: list[tuple[str, str, str]]) -> str:
    """One line a finding, its level in colour."""
    return "\n".join(
        f" {terminal.style(f'{level:4}', sys.stdout, fg=_COLOURS[level])}  {what:8} {text}"
        for level, what, text in rows
    )


@click.command("netcheck")
@click.option(
    "--bandwidth",
    metavar="PEER",
    type=GIVEN,
    help="Measure, too, how fast bytes go to this member of a run (ten seconds).",
)
@shared_options
def netcheck_command(bandwidth: str | None) -> int:
    """Say whether others can reach this node, and what that means.

    Exit status 69: nobody answers (E110), or nobody can reach it and no relay takes it (E130). 75
    (E120): this machine's clock is wrong.
    """
    from ..control.protocol import Check

    terminal = current()
    with connect(terminal) as client:
        status = client.status()
        asked = client.ask(Check, find_peer(status, bandwidth) if bandwidth else "").value
    network: dict[str, Any] = status.get("network") or {}
    reach: dict[str, Any] = network.get("reach") or {}
    rows = [*network_rows(network, asked["clock"]), UDP]
    rows += [flow_row(asked["bandwidth"])] if asked["bandwidth"] else []
    error = network_error(network, asked["clock"])
    hint = error.hint if error else network_advice(network)
    reason = error_object(error)["error"] if error else None
    verdict = "alone" if alone(network) else outcome(reach)
    terminal.data(
        rows_text(terminal, rows),
        {
            "verdict": verdict,
            "findings": findings(rows),
            "advice": hint,
            "error": reason,
            "reach": reach,
            **asked,
        },
    )
    if error and not terminal.json:
        show_error(terminal, error)
    elif hint:
        terminal.say(hint)
    return error.exit_code if error else 0


def findings(rows: Sequence[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Rows for programs."""
    return [{"level": level, "what": what, "text": text} for level, what, text in rows]


def find_peer(status: dict[str, Any], named: str) -> str:
    """The id of a peer named by its id, the end of it, or its two-word name, among those that the
    node knows. Raises ConfigError.
    """
    from ..home.names import name_of

    network: dict[str, Any] = status.get("network") or {}
    known = {*(network.get("connected") or ()), *(network.get("bootstrap") or {})}
    for run in status.get("runs") or ():
        known |= set(run.get("members") or ())
    known |= {peer for members in (network.get("runs") or {}).values() for peer in members}
    wanted = named.lstrip("…")
    found = sorted(
        peer for peer in known if peer == wanted or peer.endswith(wanted) or name_of(peer) == wanted
    )
    if len(found) == 1:
        return found[0]
    if not found and len(wanted) > 40:
        return wanted
    what = (
        f"no peer is called {named!r}" if not found else f"{len(found)} peers are called {named!r}"
    )
    raise ConfigError(
        what,
        why="A peer is named by its id, the end of it, or its two-word name.",
        hint="Who is known: atoll peers",
    )


@click.command("ping")
@click.argument("peer", type=PEER)
@click.option("--count", type=click.IntRange(1), default=3, show_default=True, help="How often.")
@click.option(
    "--until-direct",
    is_flag=True,
    help="Go on until the path goes through no relay, at most --count times (then 30 by default).",
)
@click.option(
    "--bandwidth",
    is_flag=True,
    help="Then measure how fast bytes go there and back (ten seconds; members of a run only).",
)
@shared_options
@click.pass_context
def ping_command(
    context: click.Context, peer: str, count: int, until_direct: bool, bandwidth: bool
) -> int:
    """Say how a peer is reached, and how long a round trip takes.

    PEER: its id, the end of it, or its two-word name. Exit status 1: --until-direct, and it still
    goes through a relay.
    """
    from ..control.protocol import Check, Ping

    terminal = current()
    if until_direct and context.get_parameter_source("count") == click.core.ParameterSource.DEFAULT:
        count = 30
    answers: list[dict[str, Any]] = []
    with connect(terminal) as client:
        target = find_peer(client.status(), peer)
        for number in range(count):
            if number:
                threading.Event().wait(PAUSE_S)
            found = client.ask(Ping, target).value
            answers.append(found)
            if not terminal.json:
                terminal.data(pong(found), {})
            if until_direct and found["path"] != "relay":
                break
        flow = client.ask(Check, target).value["bandwidth"] if bandwidth else None
    relayed = answers[-1]["path"] == "relay"
    if flow and not terminal.json:
        terminal.data(flow_row(flow)[2], {})
    if relayed:
        terminal.say(
            RELAYED_STILL
            if until_direct
            else (
                f"It works, but slowly. Whether it becomes direct: atoll ping {peer} --until-direct"
            )
        )
    if terminal.json:
        terminal.data(
            "", {"peer": target, "path": answers[-1]["path"], "answers": answers, "bandwidth": flow}
        )
    return 1 if until_direct and relayed else 0


def pong(found: dict[str, Any]) -> str:
    """One answer as a line."""
    routes = {
        "relay": "through a relay",
        "punched": f"punched {found['address']}",
        "lan": f"lan {found['address']}",
    }
    return (
        f"pong from {short_peer(found['peer'])}  {found['rtt_ms']:.1f} ms  "
        f"{routes.get(found['path'], 'direct ' + found['address'])}"
    )


@click.command("relay")
@click.option(
    "--port",
    type=click.IntRange(1, 65534),
    default=4150,
    show_default=True,
    help="TCP port to listen on, and the next one for lanes.",
)
@click.option(
    "--announce",
    multiple=True,
    type=GIVEN,
    metavar="ADDRESS",
    help="Address that others dial, where it is not this machine's own.",
)
@click.option(
    "--known-runs-only",
    is_flag=True,
    help="Relay only for peers of runs that this node has heard of.",
)
@click.option("--print-systemd", is_flag=True, help="Print a systemd unit that does this, and end.")
@click.option(
    "--print-container", is_flag=True, help="Print a container file that does this, and end."
)
@shared_options
def relay_command(
    port: int,
    announce: tuple[str, ...],
    known_runs_only: bool,
    print_systemd: bool,
    print_container: bool,
) -> None:
    """Be a bootstrap and a relay for others, on a machine with a public address.

    It takes part in no run and sees ciphertext only. Members name it: atoll up --bootstrap ADDRESS,
    or it goes into invites. Where a firewall is in front of it both ports must be open.
    """
    from .identity import identity_of

    terminal = current()
    options = [
        f"--port={port}",
        *(f"--announce={address}" for address in announce),
        *(["--known-runs-only"] if known_runs_only else []),
    ]
    if print_systemd:
        me = Path(sys.argv[0]).absolute()  # a shell that is told .venv/bin/atoll says just that
        command = " ".join(
            [
                str(me) if me.name == "atoll" and me.exists() else "/usr/local/bin/atoll",
                "relay",
                *options,
            ]
        )
        unit = UNIT.format(command=command, rights=LOW_PORTS if port < 1024 else "")
        terminal.data(unit, {"unit": unit})
        return
    if print_container:
        text = CONTAINER.format(
            port=port,
            lane_port=port + 1,
            options=", ".join(json.dumps(part) for part in ["atoll", "relay", *options]),
        )
        terminal.data(text, {"container": text})
        return
    terminal.paths.ensure()
    identity_of(terminal)
    command = [
        *PYTHON,
        "-m",
        "atoll.node",
        "--port",
        str(port),
        "--lane-port",
        str(port + 1),
    ]
    command += [part for address in announce for part in ("--announce", address)]
    command += [] if known_runs_only else ["--relay-for-all"]
    command += ["--home", str(user_path(terminal.home))] if terminal.home else []
    command += ["--json"] if terminal.json else []
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, terminal.child_environ())

"""up, down, status, ls, peers, leave: the running node."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import AtollError, DeadlineExceededError, NetworkError, SwarmClosedError
from ..home.interpreter import PYTHON
from ..home.logs import open_log
from ..home.output import Terminal, current
from ..home.paths import make_private, user_path
from .options import DRAIN, GIVEN, HOURS, RUN, shared_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..home.config import NodeConfig
    from ..joining.commands import NodeClient

GONE_S = 10.0
SCRIPTS_S = 60.0  # a script that is interrupted hands its round over
READY_S = 120.0  # a cold start imports libp2p and torch from a slow disk
WATCH_S = 2.0
ASKED_S, QUIET_S = 1.0, 10.0  # between two looks whether it answers; until it is said what is done
_SLICE_S = 0.2
NOT_RUNNING = 3


def connect(terminal: Terminal) -> NodeClient:
    """The running node of this home. Raises NetworkError (E003, exit 3) when there is none."""
    from ..joining.commands import NodeClient

    return NodeClient.connect(terminal.paths)


def running(terminal: Terminal) -> NodeClient | None:
    """The running node, or None."""
    try:
        return connect(terminal)
    except NetworkError as error:
        if error.code == "E003":
            return None
        raise


def node_addresses(terminal: Terminal) -> tuple[str, ...]:
    """Addresses at which the running node can be reached by others; nothing when none runs."""
    client = running(terminal)
    if client is None:
        return ()
    with client:
        return addresses_of(client.status())


def addresses_of(status: dict[str, Any]) -> tuple[str, ...]:
    """Where others can dial the node, from a status document."""
    return tuple(str(address) for address in (status.get("network") or {}).get("addresses") or ())


@click.command("up")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="TCP port to listen on; 0: any free one."
)
@click.option(
    "--listen",
    multiple=True,
    type=GIVEN,
    metavar="ADDRESS",
    help="Multiaddr to listen on; repeatable.",
)
@click.option(
    "--bootstrap",
    multiple=True,
    type=GIVEN,
    metavar="ADDRESS",
    help="Peer to ask first; repeatable.",
)
@click.option(
    "--max-up",
    metavar="RATE",
    type=GIVEN,
    help="Limit of what it sends, such as 20Mbit/s or 2.5MB/s.",
)
@click.option("--max-down", metavar="RATE", type=GIVEN, help="Limit of what it receives.")
@HOURS
@DRAIN
@click.option(
    "--metrics",
    metavar="ADDRESS",
    type=GIVEN,
    help="Serve metrics to Prometheus there; :9464 is port 9464 of this machine only.",
)
@click.option(
    "--site", metavar="LABEL", help="The same label at all nodes of one fast network, or SITE/HOST."
)
@click.option(
    "--no-port-mapping",
    is_flag=True,
    help="Do not ask the router to lead a port here (NAT-PMP, UPnP).",
)
@click.option(
    "--no-lan-discovery",
    is_flag=True,
    help="Do not look for peers in the house, nor be found there (multicast DNS).",
)
@click.option(
    "--no-dht",
    is_flag=True,
    help="Take no part in the DHT: members are found by bootstraps, invites and each other only.",
)
@click.option(
    "--relay-only",
    is_flag=True,
    help="Show no member where this machine is: be reached through relays only.",
)
@click.option("--background", is_flag=True, help="Run it behind you; returns when it is ready.")
@shared_options
def up_command(
    port: int | None,
    listen: tuple[str, ...],
    bootstrap: tuple[str, ...],
    max_up: str | None,
    max_down: str | None,
    hours: str | None,
    drain: float | None,
    metrics: str | None,
    site: str | None,
    no_port_mapping: bool,
    no_lan_discovery: bool,
    no_dht: bool,
    relay_only: bool,
    background: bool,
) -> int:
    """Run this machine's node.

    Ctrl-C once: it finishes or hands over its round and ends. Twice: it ends now.
    """
    from ..home.lifecycle import already_running
    from .identity import identity_of
    from .settings import settings_of

    terminal = current()
    flags = {
        "node.port": port,
        "node.listen": listen,
        "node.bootstrap": bootstrap,
        "node.site": site,
        "node.metrics": metrics,
    }
    limits = {
        "node.max_up": max_up,
        "node.max_down": max_down,
        "node.hours": hours,
        "node.drain_s": drain,
    }
    config = settings_of(terminal, flags | limits, ask=True).config
    _ = config.limits, config.hours, config.metrics  # a wrong one is told here
    terminal.paths.ensure()
    identity_of(terminal)
    client = first_there(terminal)
    if client is not None and not client.node.private:
        client.close()
        raise already_running(terminal.paths)
    if client is not None:
        _take_over(terminal, client)
    if config.metrics is not None and not config.metrics.local:
        terminal.say(
            f"metrics at {config.metrics.url}: whoever reaches this address can read them, "
            "without a password"
        )
    command = _node_command(config)
    command += ["--no-port-mapping"] if no_port_mapping else []
    command += ["--no-lan-discovery"] if no_lan_discovery else []
    command += ["--relay-only"] if relay_only else []
    command += ["--no-dht"] if no_dht else []
    if terminal.home:
        command += ["--home", str(user_path(terminal.home))]
    if background:
        return _start_behind(terminal, command, terminal.child_environ())
    command += ["--json"] if terminal.json else []
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, terminal.child_environ())


def _node_command(config: NodeConfig) -> list[str]:
    """What starts a node with these settings."""
    command = [*PYTHON, "-m", "atoll.node", "--lane-port", str(config.node.lane_port)]
    named = (
        ("--listen", config.listen_addresses),
        ("--bootstrap", config.node.bootstrap),
        ("--announce", config.node.announce),
    )
    command += [
        part for option, addresses in named for address in addresses for part in (option, address)
    ]
    for option, rate in (("--max-up", config.node.max_up), ("--max-down", config.node.max_down)):
        command += [option, rate] if rate else []
    command += ["--hours", config.node.hours] if config.node.hours else []
    command += ["--drain", str(config.node.drain_s)]
    command += ["--metrics", config.node.metrics] if config.node.metrics else []
    command += ["--site", config.node.site] if config.node.site else []
    return command


def first_there(terminal: Terminal) -> NodeClient | None:
    """The node of this home; one that starts, as a script's own does some time after `atoll down`,
    or ends, is waited for.
    """
    from ..home.lifecycle import node_there

    until = time.monotonic() + READY_S
    while (client := running(terminal)) is None and node_there(terminal.paths):
        if time.monotonic() > until:
            return None
        threading.Event().wait(_SLICE_S)
    return client


def _take_over(terminal: Terminal, client: NodeClient) -> None:
    """End a script's private node, which hands its round over; the script then waits some seconds
    for the node that comes in its place.
    """
    node, process = client.node, client.process
    terminal.say(
        f"taking the place of the private node (process {node.pid}) of script {node.parent_pid}, "
        "which trains on with the new one"
    )
    with client, suppress(SwarmClosedError):  # it ended before it could answer
        client.down()
    _wait_gone(process)


def _start_behind(terminal: Terminal, command: list[str], environment: dict[str, str]) -> int:
    """Start the node in a session of its own; wait until it is ready or says why not."""
    log = terminal.paths.log_dir / "node.log"
    address = terminal.paths.control_socket.with_name(f"up.{os.getpid()}")
    make_private(address.parent)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes,
        ExitStack() as stack,
        open_log(log) as output,
    ):
        address.unlink(missing_ok=True)
        notes.bind(os.fsencode(address))
        stack.callback(address.unlink, missing_ok=True)
        notes.settimeout(_SLICE_S)
        process = subprocess.Popen(
            command,
            env={**environment, "NOTIFY_SOCKET": str(address)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _wait_ready(terminal, process, notes, log)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        process.returncode = 0  # it goes on without us: neither waited for nor warned about
    with connect(terminal) as client:
        status = client.status()
    addresses = list(addresses_of(status))
    terminal.data(
        f"node {status.get('peer', '')} is up, process {process.pid}\n" + "\n".join(addresses),
        {"pid": process.pid, "peer": status.get("peer"), "addresses": addresses, "log": log},
    )
    terminal.say(f"log: {log}    stop it: atoll down")
    return 0


def _wait_ready(
    terminal: Terminal, process: subprocess.Popen[bytes], notes: socket.socket, log: Path
) -> None:
    """Read notes until READY=1, or until the node has answered for a while without: a system may
    refuse it the note. Raises the error the node names, SwarmClosedError (E161) when it says none.
    """
    from ..home.notify import MAX_NOTE_BYTES, error_in

    waited_s, asked_s, answered, told = 0.0, 0.0, 0, False
    while waited_s < READY_S:
        ended = process.poll() is not None
        try:
            note = notes.recv(MAX_NOTE_BYTES).decode(errors="replace")
        except TimeoutError:
            if ended:
                raise SwarmClosedError(
                    f"the node ended while starting (status {process.returncode})",
                    code="E161",
                    why=_last_words(log),
                    hint=f"Read {log}",
                ) from None
            waited_s += _SLICE_S
            if waited_s - asked_s >= ASKED_S:
                asked_s = waited_s
                answered += _answers(terminal, process.pid)
                if answered > 1:
                    return
            if waited_s >= QUIET_S and not told:
                told = True
                terminal.say(f"the node is still starting; its log: {log}")
            continue
        if (error := error_in(note)) is not None:
            raise error
        if "READY=1" in note.splitlines():
            return
    raise SwarmClosedError(
        f"the node was not ready within {READY_S:g} s",
        code="E161",
        why=_last_words(log),
        hint=f"Read {log}",
    )


def _answers(terminal: Terminal, pid: int) -> bool:
    """Whether this process serves as the home's node."""
    with suppress(AtollError, OSError), connect(terminal) as client:
        return client.node.pid == pid
    return False


def _last_words(log: Path) -> str:
    """The last error in a log with what is said below it, else the last line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    errors = [at for at, line in enumerate(lines) if re.match(r"E\d{3} ", line)]
    last = " ".join(line.strip() for line in lines[errors[-1] if errors else -1 :])
    return f"Its last words: {last}" if last else ""


@click.command("down")
@click.option("--now", is_flag=True, help="Hand nothing over.")
@click.option(
    "--scripts", is_flag=True, help="End the scripts that train on this node, too, as Ctrl-C would."
)
@shared_options
def down_command(now: bool, scripts: bool) -> int:
    """Stop the node; it finishes its round first. Ctrl-C: stop it now.

    A script that trains on this node trains on alone: it waits 20 seconds for a node to be there
    again and then starts one of its own, with the same key. --scripts ends it first.

    A node that does not answer is told to end by a signal.
    """
    terminal = current()
    try:
        client = running(terminal)
    except DeadlineExceededError as silent:
        return _end_silent(terminal, silent, now=now)
    if client is None:
        terminal.data("no node is running", {"stopped": False})
        return 0
    with client:
        pid, visible = client.node.pid, client.process  # the second: 0 in another PID namespace
        training = _told_training(terminal, client)
        ended = list[int]()
        if training:
            for name, process in training:
                terminal.say(f"process {process} trains {name} here, or has joined it to do so")
            if not scripts and terminal.interactive and not terminal.yes:
                scripts = click.confirm("End it, too?", default=False, err=True)
            if scripts and visible != pid:
                terminal.say("the node runs in another container, and so may they: end them there")
            elif scripts:
                ended = _end_scripts(terminal, client, training)
            else:
                terminal.say(
                    "It trains on alone, and starts a node of its own after 20 s without one. End "
                    "it, too: atoll down --scripts"
                )
        if not now:
            terminal.say("draining: the round is finished or handed over")
        try:
            client.down(now=now)
        except SwarmClosedError:
            pass  # it ended before it could answer
        except KeyboardInterrupt:
            if visible:
                os.kill(visible, signal.SIGTERM)
            raise
    _wait_gone(visible)
    terminal.data(
        "the node ended",
        {
            "stopped": True,
            "pid": pid,
            "scripts": [process for _, process in training],
            "ended": ended,
        },
    )
    return 0


def _end_silent(terminal: Terminal, silent: DeadlineExceededError, *, now: bool) -> int:
    """End a node that does not answer, as one that the system refuses new connections: by the
    signal that a service manager sends. Raises ``silent`` where it stays.
    """
    from ..client.link import process_behind
    from ..home.sockets import is_stopped

    process = process_behind(terminal.paths.control_socket)
    if not process or is_stopped(process):
        raise silent
    terminal.say(f"the node does not answer; process {process} is told to end by a signal")
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGINT if now else signal.SIGTERM)
        if not _wait_gone(process):
            raise silent
    terminal.data("the node ended", {"stopped": True, "pid": process, "scripts": [], "ended": []})
    return 0


def _training(client: NodeClient) -> list[tuple[str, int]]:
    """The name of a run and the process of each script that trains it on this node, or has joined
    it and is to attach.
    """
    return [
        (str(run.get("name") or run["run_id"][:8]), int(process))
        for run in client.runs()
        for process in run.get("script_pids") or ()
    ]


def _told_training(terminal: Terminal, client: NodeClient) -> list[tuple[str, int]]:
    """The same; none where the node cannot say, to which the system refuses a file, say: it is to
    end all the more."""
    try:
        return _training(client)
    except AtollError as error:
        terminal.say(f"which scripts train here, the node cannot say: {error}")
        return []


def _end_scripts(
    terminal: Terminal, client: NodeClient, training: Sequence[tuple[str, int]]
) -> list[int]:
    """Interrupt the scripts and wait until none is attached, but not for ever; the processes that
    have let go.
    """
    for _, process in training:
        _interrupt(process, lambda: {known for _, known in _training(client)})
    until = time.monotonic() + SCRIPTS_S
    while (left := {process for _, process in _training(client)}) and time.monotonic() < until:
        threading.Event().wait(_SLICE_S)
    for process in sorted(left):
        terminal.say(f"process {process} has not ended; it trains on alone")
    return sorted({process for _, process in training} - left)


def _interrupt(process: int, attached: Callable[[], set[int]]) -> None:
    """Interrupt a script if it is still attached. Since the node named it, perhaps before a
    question was answered, it may have ended, and another process may have its number: ``attached``
    is asked once the process is held."""
    try:
        held = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # a system without it, or one that forbids it
        held = -1
    with suppress(ProcessLookupError, PermissionError):
        try:
            if process not in attached():
                return
            number = _ending_signal(process)
            if held >= 0:
                signal.pidfd_send_signal(held, number)
            else:
                os.kill(process, number)
        finally:
            if held >= 0:
                os.close(held)


def _ending_signal(process: int) -> signal.Signals:
    """SIGINT, as Ctrl-C sends it; SIGTERM where that is ignored, as by what a shell script starts
    behind itself.
    """
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
        ignored = next(line for line in lines.splitlines() if line.startswith("SigIgn:"))
        if int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1:
            return signal.SIGTERM
    return signal.SIGINT


def _wait_gone(pid: int) -> bool:
    """Wait until a process that was told to end has ended, and say whether: port and home are then
    free. 0: one that cannot be seen from here.
    """
    for _ in range(round(GONE_S / _SLICE_S) if pid else 0):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, PermissionError):  # another user's has its number now
            return True
        threading.Event().wait(_SLICE_S)
    return not pid


@click.command("status")
@click.argument("run", required=False, type=RUN)
@shared_options
def status_command(run: str | None) -> int:
    """Show the node and its runs on one screen. Exit status 3: no node is running."""
    from ..views.documents import status_text

    terminal = current()
    client = running(terminal)
    if client is None:
        terminal.data("no node is running", {"running": False})
        terminal.say("Start it: atoll up    See everything work: atoll demo")
        return NOT_RUNNING
    with client:
        status = client.status()
        if run:
            run_id = client.find_run(run).run_id
            status["runs"] = [
                entry for entry in status.get("runs") or () if entry.get("run_id") == run_id
            ]
    terminal.data(
        "" if terminal.json else status_text(terminal, status), {"running": True, **status}
    )
    return 0


@click.command("ls")
@shared_options
def ls_command() -> None:
    """List the runs of this node, also those it is not in at the moment."""
    from ..home.paths import bytes_in
    from ..manifest import decode_manifest, list_runs
    from ..views.documents import runs_table

    terminal = current()
    found: dict[str, dict[str, Any]] = {}
    for run_id, signed in list_runs(terminal.paths).items():
        manifest = decode_manifest(signed.manifest)
        found[run_id] = {
            "run_id": run_id,
            "name": manifest.name,
            "organiser": signed.organiser,
            "rounds": manifest.train.rounds,
            "phase": "stored",
            "disk_bytes": bytes_in(terminal.paths.run_dir(run_id)),
        }
    client = running(terminal)
    if client is not None:
        with client:
            for entry in client.runs():
                found[entry["run_id"]] = found.get(entry["run_id"], {}) | entry
    runs = list(found.values())
    terminal.data("" if terminal.json else runs_table(terminal, runs), {"runs": runs})


@click.command("peers")
@click.argument("run", required=False, type=RUN)
@click.option("--watch", is_flag=True, help="Show it again every two seconds until Ctrl-C.")
@shared_options
def peers_command(run: str | None, watch: bool) -> None:
    """Show the members of a run.

    RUN: id, its beginning, or name; the only one when left out.
    """
    from ..run.quorum import quorum_of
    from ..views.documents import peers_table

    terminal = current()
    with connect(terminal) as client:
        while True:
            peers = client.peers(run or "")
            table = "" if terminal.json else peers_table(terminal, peers)
            if watch and terminal.live:
                click.clear()
            terminal.data(table, {"peers": peers, "quorum": quorum_of(peers)})
            _say_finished(terminal, client, run or "")
            if not watch:
                return
            threading.Event().wait(WATCH_S)


def _say_finished(terminal: Terminal, client: NodeClient, run: str) -> None:
    """One line beside the members of a run that has all its rounds."""
    if words := finished_words(client, client.find_run(run).run_id):
        terminal.say(words)


def finished_words(client: NodeClient, run_id: str) -> str:
    """That a run of the node has all its rounds, and what there is to do; "" where it has not."""
    from ..run.status import read_run_status
    from ..views.documents import finished_text, run_state

    for entry in client.status().get("runs") or ():
        if entry.get("run_id") == run_id and entry.get("finished"):
            status = read_run_status(entry)
            return f"{status.name} is {run_state(status)}. {finished_text(status)}"
    return ""


@click.command("leave")
@click.argument("run", required=False, type=RUN)
@click.option("--now", is_flag=True, help="Do not wait for the open round.")
@shared_options
def leave_command(run: str | None, now: bool) -> None:
    """Leave a run; the node finishes its round first.

    It then serves the run's state to nobody. RUN: id, its beginning, or name; the only one when
    left out.
    """
    terminal = current()
    with connect(terminal) as client:
        info = client.find_run(run or "")
        client.leave(info.run_id, now=now)
    terminal.data(
        f"left {info.name} ({info.run_id[:8]})",
        {"run_id": info.run_id, "name": info.name, "left": True},
    )
    terminal.say(f"Back in: atoll join {info.run_id[:8]}")

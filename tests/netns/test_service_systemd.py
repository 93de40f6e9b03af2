"""`atoll service` under a systemd that is process 1 of a machine: start, crash, restart, stop, a
machine that boots again, and the end of it; two peers outside train with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import ATOLL, SCRIPT
from machine_kit import Machine, MachineError, missing
from netns.lab import Host, Lab
from tiny_run import TINY

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
]  # slow: the longer limit; .ci/run takes each test once

PATIENCE_S = 120.0  # a bound for hangs
RUN = TINY.replace(
    "[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }",
    '[model]\nentry = "local:x"',
).replace("rounds = 6\n", "")
LASTING = SCRIPT.replace(
    "        x = torch", "        time.sleep(0.02)\n        x = torch"
).replace(
    "import sys, torch",
    "import atexit, pathlib, sys, time, torch\n"
    "atexit.register(lambda: pathlib.Path(__file__ + '.ended').write_text('in order'))",
)
"""Trains until it is told to end, and leaves a note if it could do so in order."""
SUDO = ("env", "SUDO_USER=ada")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if reason := missing():
        pytest.skip(f"no machine with systemd: {reason}")
    with Lab(2) as made:
        yield made


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    try:
        made = Machine(lab.hosts[1].namespace, tmp_path / "machine")
    except MachineError as error:
        pytest.skip(f"no machine with systemd: it does not boot here: {error}")
    with made:
        made.add_user("ada")
        yield made


class Outside:
    """A peer beside the machine: `atoll join` with a script."""

    def __init__(self, host: Host, home: Path, invite: str, script: Path) -> None:
        self.home = home
        self._out = home.with_suffix(".out")
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                host.command([*ATOLL, "join", "--yes", "--script", str(script)]),
                env={**os.environ, "ATOLL_HOME": str(home), "ATOLL_INVITE": invite, "CI": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that this peer's node has seen decided, in order."""
        files = self.home.glob("state/runs/*/events.jsonl")
        events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [event for event in events if event.get("event") == "round.committed"]

    def wait(self, contributors: int) -> None:
        """Until three rounds from now on have so many."""
        end, after = time.monotonic() + PATIENCE_S, len(self.rounds())
        while sum(len(row["contributors"]) == contributors for row in self.rounds()[after:]) < 3:
            assert time.monotonic() < end, self._out.read_text()[-3000:]
            time.sleep(0.1)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)


@pytest.fixture
def outside(lab: Lab, tmp_path: Path) -> Iterator[list[Outside]]:
    started: list[Outside] = []
    yield started
    for peer in started:
        peer.end()


def test_a_service_of_the_machine_trains_on(
    lab: Lab, machine: Machine, outside: list[Outside], tmp_path: Path
) -> None:
    def shown(unit: str, what: str) -> str:
        return machine.run("systemctl", "show", "--property", what, "--value", unit).strip()

    def active(unit: str) -> None:
        machine.wait(lambda: shown(unit, "ActiveState") == "active", f"{unit} is not active")

    for folder in (tmp_path, machine.file("/home/ada")):
        (folder / "train.py").write_text(LASTING)
    machine.file("/home/ada/run.toml").write_text(RUN)
    machine.run(*SUDO, "atoll", "service", "install", "--system")
    assert shown("atoll-node", "User") == "ada"
    assert "no runs" in machine.run("atoll", "status", user="ada")  # her shell sees this node
    made = json.loads(machine.run("atoll", "new", "/home/ada/run.toml", "--json", user="ada"))
    invite = json.loads(machine.run("atoll", "invite", "new", "--json", user="ada"))["invite"]
    node, training = "atoll-node", f"atoll-run-{made['run_id'][:8]}"
    join = ("--join", "tiny", "--script", "/home/ada/train.py", "--drain", "20")
    machine.run(*SUDO, "atoll", "service", "install", "--system", *join)
    for name in ("north", "south"):
        outside.append(Outside(lab.hosts[0], tmp_path / name, invite, tmp_path / "train.py"))
    north = outside[0]
    north.wait(3)
    script = shown(training, "MainPID")

    # ---- crash: the others go on, systemd starts the node, and the script goes on with it
    machine.run("kill", "-9", shown(node, "MainPID"))
    north.wait(2)
    active(node)
    assert shown(node, "NRestarts") == "1"
    north.wait(3)

    # ---- restart
    machine.run("systemctl", "restart", node)
    north.wait(3)
    assert (shown(training, "MainPID"), shown(training, "NRestarts")) == (script, "0")

    # ---- stop: the script ends as after Ctrl-C, hands its round over and is not started again
    machine.run("systemctl", "stop", training)
    found = [shown(training, what) for what in ("ActiveState", "Result", "ExecMainStatus")]
    assert found == ["inactive", "success", "143"]
    assert machine.file("/home/ada/train.py.ended").read_text() == "in order"
    assert machine.run("atoll", "service", "status", "--system", status=3).split()[-1] == "inactive"

    # ---- the machine is taken away and comes back: both start by themselves
    before = machine.leader
    machine.call("systemctl", "reboot")
    machine.booted(after=before)
    north.wait(3)
    machine.run("atoll", "service", "status", "--system")
    rounds = [event["round"] for event in north.rounds()]
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds)))  # none was lost

    removed = machine.run(*SUDO, "atoll", "service", "remove", "--system", "--json")
    assert json.loads(removed)["removed"] == [node, training]
    assert machine.run("systemctl", "--failed", "--quiet") == ""
    assert not list(machine.file("/etc/systemd/system").glob("**/atoll-*"))
    machine.run("atoll", "service", "status", "--system", status=3)
    assert machine.run("find", "/home/ada", "-user", "root", "-name", "*atoll*") == ""


def test_a_service_of_a_user_outlives_the_session(machine: Machine) -> None:
    machine.run("atoll", "service", "install", user="ada")
    machine.run("atoll", "service", "status", user="ada")
    unit = ("systemctl", "--user", "show", "--value", "--property")
    assert machine.run(*unit, "UnitFileState", "atoll-node", user="ada") == "enabled\n"
    machine.run("atoll", "status", user="ada")
    machine.run("systemctl", "--user", "stop", "atoll-node", user="ada")
    assert machine.run(*unit, "Result", "atoll-node", user="ada") == "success\n"
    machine.run("atoll", "service", "status", user="ada", status=3)
    machine.run("atoll", "service", "remove", user="ada")
    assert not list(machine.file("/home/ada/.config/systemd").glob("**/atoll-*"))

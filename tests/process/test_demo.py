"""The demo as a user runs it, shortened: real nodes and scripts, a SIGKILL, a late join, no process
left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input_kit import soon

pytestmark = pytest.mark.slow


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that have the folder in their environment (Linux; elsewhere none
    are found).
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"ATOLL_HOME={folder}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_nothing_outlives_the_demo(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "demo"
    command = [
        sys.executable,
        "-m",
        "atoll.node.cli",
        "demo",
        "--quick",
        "--no-baseline",
        "--json",
        "--out",
        str(out),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "ATOLL_HOME": ""},
    ) as demo:
        soon(lambda: len(_processes_of(out / "homes")) >= 6, "three nodes and three scripts")
        demo.send_signal(number)
        told, _ = demo.communicate(timeout=60)
    soon(lambda: not _processes_of(out / "homes"), "all of them have ended")
    ending = (
        (-9, "")
        if number == signal.SIGKILL
        else (130, '{"schema": 1, "interrupted": true, "exit": 130}\n')
    )
    assert (demo.returncode, told.decode()) == ending


def test_quick_demo(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [
        sys.executable,
        "-m",
        "atoll.node.cli",
        "demo",
        "--quick",
        "--json",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "ATOLL_HOME": ""},
        check=False,
    )
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result.get("failures") == [], done.stdout + done.stderr
    assert done.returncode == 0
    assert result["ok"]
    assert result["anchors_identical"]
    assert result["killed"]
    assert result["joined_late"]
    assert result["rounds"] == 20
    assert result["bytes_sent"] > 0
    assert json.loads((out / "result.json").read_text())["loss_swarm"] == result["loss_swarm"]
    assert _processes_of(out / "homes") == []
    assert not (out / "homes").exists()

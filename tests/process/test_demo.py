"""The demo as a user runs it, shortened: real nodes and scripts, a SIGKILL, a late join, no process
left behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from bad_input_kit import soon
from cli_kit import ATOLL

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


def _round_on_the_page(address: str) -> int:
    """The newest round that the page knows."""
    place, token = address.split("#")
    asked = urllib.request.Request(place + "api/run", headers={"x-atoll-token": token})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: int = json.load(answer)["quick"]["round"]
    return found


def test_quick_demo(tmp_path: Path) -> None:
    out, kept = tmp_path / "demo", tmp_path / "kept.jsonl.gz"
    command = [*ATOLL, "demo", "--quick", "--json", "--ui"]
    command += ["--keep-events", str(kept), "--out", str(out)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ATOLL_HOME": ""},
    ) as demo:
        assert demo.stderr is not None
        said = ""
        for line in demo.stderr:
            said += line
            if line.startswith("round   1/20"):
                break
        page = re.search(r"the page: (http://127\.0\.0\.1:\S+)", said)
        assert page, said
        address = page[1]
        soon(lambda: _round_on_the_page(address) > 0, "the page shows the first round")
        told, rest = demo.communicate(timeout=600)
    assert told.count("\n") == 1, told + said + rest
    result = json.loads(told)
    assert result.get("failures") == [], told + said + rest
    assert demo.returncode == 0
    assert result["ok"]
    assert result["anchors_identical"]
    assert result["killed"]
    assert result["joined_late"]
    assert result["rounds"] == 20
    assert result["bytes_sent"] > 0
    assert json.loads((out / "result.json").read_text())["loss_swarm"] == result["loss_swarm"]
    assert _processes_of(out / "homes") == []
    assert not (out / "homes").exists()
    command = [*ATOLL, "replay", str(kept), "--json"]
    picture = json.loads(subprocess.run(command, capture_output=True, timeout=120).stdout)
    assert (picture["run"]["name"], picture["quick"]["round"]) == ("demo", 20)
    assert sorted(row["member"] for row in picture["peers"]) == [False, True, True, True]
    assert len(picture["losses"]) == 4, "what the others' scripts reported is there, too"

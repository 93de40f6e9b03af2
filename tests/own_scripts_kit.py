"""A user's own scripts as processes of their own, beside a node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli_kit import SCRIPT, atoll
from tiny_run import TINY

RUN = TINY.replace(
    "[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }",
    '[model]\nentry = "local:x"',
).replace("rounds = 6\n", "")
PACED = SCRIPT.replace("loss.backward();", "import time; time.sleep(0.02); loss.backward();")
WRONG = PACED.replace("loss.backward();", 'attachment.round < 2 or {}["mine"]; loss.backward();')


@contextmanager
def plain(home: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A script that is started without atoll join."""
    with subprocess.Popen(
        [sys.executable, str(home.parent / f"{name}.py")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ATOLL_HOME": str(home), "ATOLL_RUN": "tiny"},
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def until(process: subprocess.Popen[str], words: str) -> str:
    """The lines of stderr up to one with these words."""
    assert process.stderr is not None
    seen = ""
    while words not in seen:
        line = process.stderr.readline()
        assert line, f"no {words!r} in:\n{seen}"
        seen += line
    return seen


def attached_as(home: Path, pid: int) -> None:
    """Wait until a run of the node has this process attached."""
    ends = time.monotonic() + 120
    while not any(run["script_pid"] == pid for run in atoll(home, "status")["runs"]):
        assert time.monotonic() < ends
        time.sleep(0.2)

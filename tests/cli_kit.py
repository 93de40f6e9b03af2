"""The command line as processes of their own, and a script to train with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ATOLL = [sys.executable, "-m", "atoll.node.cli"]
LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")
SCRIPT = """
import sys, torch
from atoll.node import join
from atoll.optim import attach
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with join() as swarm:
    attachment = attach(model, optimizer, swarm)
    while not attachment.done:
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
    print("arguments", sys.argv[1:], "round", attachment.round)
"""


_started: list[subprocess.Popen[str]] = []


@contextmanager
def nothing_stays() -> Iterator[None]:
    """End what a failed test left behind: commands by SIGTERM, so that they end their nodes and
    scripts.
    """
    yield
    for process in _started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)
        with process:  # closes the pipes of one that nobody listened to
            pass
    _started.clear()


def start(home: Path, *argv: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "ATOLL_HOME": str(home), "CI": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*ATOLL, *argv],
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
    )
    _started.append(process)
    return process


def atoll(home: Path, *argv: str, status: int = 0) -> dict[str, Any]:
    """Run a command with --json; its one object."""
    with start(home, *argv, "--json") as process:
        out, err = process.communicate(timeout=150)
    assert process.returncode == status, out + err
    found: dict[str, Any] = json.loads(out)
    return found


def alive(pid: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""A node in a PID namespace of its own, as in a container, whose home others use, too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_input_kit import PATIENCE_S, atoll, soon

from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

pytestmark = pytest.mark.netns
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
UP = ("up", "--listen", "/ip4/127.0.0.1/tcp/0", "--no-lan-discovery", "--no-port-mapping")


@contextmanager
def inside(home: Path, *argv: str) -> Generator[subprocess.Popen[str]]:
    """A command in a container of its own, which ends with this."""
    with subprocess.Popen(
        [*CONTAINER, sys.executable, "-m", "atoll.node.cli", *argv],
        env={**os.environ, "ATOLL_HOME": str(home), "CI": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("from_inside", [False, True])
def test_what_a_node_calls_itself_is_never_signalled_elsewhere(
    tmp_path: Path, from_inside: bool
) -> None:
    """There its number is some other process's."""
    home = tmp_path / "home"
    with inside(home, *UP, "--no-dht") as node:
        soon(lambda: atoll(home, "status").status == 0, "it is up")
        with NodeClient.connect(find_paths(home)) as client:
            assert client.node.pid < 100
            assert client.process > 0
            assert client.process != client.node.pid
        if from_inside:
            with inside(home, "down", "--scripts") as command:
                said, _ = command.communicate(timeout=PATIENCE_S)
            assert command.returncode == 0, said
            assert "the node ended" in said
        else:
            assert atoll(home, "down").out == "the node ended\n"
        node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 0

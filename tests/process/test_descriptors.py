"""A daemon to which scripts come and go holds no more for it: descriptors and shared memory go with
the script, without a garbage collector.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bad_input_kit import LAYOUT, NUMEL, Run, new_run, odd, soon

from atoll.node import join
from atoll.node.control.protocol import JoinRequest
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient
from atoll.node.service.buffers import MAX_FREE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:operation 'op-:RuntimeWarning"),  # `one_script` drops some
    pytest.mark.skipif(
        not Path("/proc/self/maps").exists(), reason="descriptors are counted in /proc"
    ),
]
SCRIPTS = 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[Run, int]]:
    """A run, and the process of a daemon that is in it."""
    run = new_run(tmp_path)
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*odd("counting"), "--home", str(run.home), "--json"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        with NodeClient.connect(find_paths(run.home)) as client:
            client.join(JoinRequest(manifest=run.signed.encode()))
        yield run, process.pid
    finally:
        process.terminate()
        process.communicate(timeout=60)


def one_script(run: Run, number: int) -> None:
    """Attach, contribute, reduce, and go: every other one without waiting for what it asked for."""
    swarm = join(
        run.signed.run_id, home=run.home, private=False, progress=lambda stage, done, total: None
    )
    try:
        swarm.open(LAYOUT, lambda initial: initial.zero_()).release()
        contribution = swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
        reduction = swarm.all_reduce(
            torch.ones(2 * NUMEL), weight=1, op_id=f"op-{number}", deadline_s=30
        )
        if number % 2:
            assert contribution.wait(30).counted
            assert reduction.wait(30).status == "committed"
            swarm.anchor()  # leased when the connection ends: that memory is the script's for ever
    finally:
        swarm.close()


def held(pid: int) -> tuple[int, int]:
    """Descriptors of a process but those of results, of which a run keeps some on disk; and its
    mappings of shared memory.
    """
    links = list[str]()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(fd))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("/results/" not in link for link in links), sum(
        "memfd:atoll" in line for line in maps
    )


def test_scripts_come_and_go(daemon: tuple[Run, int]) -> None:
    run, pid = daemon
    for number in range(2):
        one_script(run, number)
    with NodeClient.connect(find_paths(run.home)) as client:
        soon(lambda: not client.status()["runs"][0]["script"], "the second script has gone")
        before = held(pid)
        for number in range(SCRIPTS):
            one_script(run, 2 + number)
        soon(lambda: not client.status()["runs"][0]["script"], "the last script has gone")
        limits = (
            before[0] + 3 * MAX_FREE,
            before[1] + MAX_FREE,
        )  # a pool keeps a few buffers, of three descriptors and a mapping each
        soon(
            lambda: all(map(operator.le, held(pid), limits)),
            f"descriptors and mappings are {before} again, but for what a pool keeps",
        )

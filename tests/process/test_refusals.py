"""A system that refuses what others give: what is done without it, and what is said."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from bad_input_kit import Member, Told, atoll, ended, new_run, one_round, refused, soon
from refusing_kit import Refusing, missing

from atoll.collectives.errors import AtollError
from atoll.collectives.round_settings import MOST_REPLAYED
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient
from atoll.node.storage.results import MAX_FILES

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
UP = (
    *("up", "--background", "--listen", "/ip4/127.0.0.1/tcp/0"),
    *("--no-lan-discovery", "--no-port-mapping", "--no-dht"),
)


@contextmanager
def down_at_the_end(home: Path) -> Generator[None]:
    try:
        yield
    finally:
        assert atoll(home, "down").status == 0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_home_without_locks_has_one_node_all_the_same(tmp_path: Path, number: int) -> None:
    system, home = Refusing(tmp_path), tmp_path / "home"
    system.refuse("flock", number)
    told = atoll(home, *UP, **system.environ)
    assert told.status == 0, told
    with down_at_the_end(home):
        second = refused(home, "E102", 73, *UP, **system.environ)
        assert "a node runs with this home already" in second["message"]
        third = refused(home, "E102", 73, "up", *UP[2:], **system.environ)  # asks the lock itself
        assert "a node runs with this home already" in third["message"]
        rows = atoll(home, "doctor", **system.environ).out
        assert "warn  locks    the file system of this home has no locks" in rows
        assert "has no locks" in (find_paths(home).log_dir / "node.log").read_text()


def test_a_command_in_a_deleted_folder_needs_none(tmp_path: Path) -> None:
    for command, status in (("status", 3), ("config show", 0), ("doctor", 0)):
        folder = tmp_path / "gone"
        folder.mkdir()
        found = subprocess.run(
            f'rmdir "{folder}" && exec "{sys.executable}" -m atoll.node.cli {command}',
            env={**os.environ, "ATOLL_HOME": str(tmp_path / "home")},
            cwd=folder,
            shell=True,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == status, (command, found)


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_node_starts_under_a_long_and_a_missing_temporary_folder(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60) / ("y" * 40)
    for number, folder in enumerate((long, tmp_path / "none")):
        home = tmp_path / f"home{number}"
        told = atoll(home, *UP, TMPDIR=str(folder))
        assert told.status == 0, told
        assert atoll(home, "down").status == 0


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_long_home_is_found_whatever_the_temporary_folder(tmp_path: Path) -> None:
    home = tmp_path / ("h" * 90)
    assert atoll(home, *UP, TMPDIR=str(tmp_path)).status == 0
    with down_at_the_end(home):
        assert atoll(home, "status").status == 0


@pytest.mark.parametrize(
    ("call", "number", "code", "words"),
    [
        ("socket", errno.EMFILE, "E502", "more files and connections are open"),
        ("thread", errno.EAGAIN, "E502", "starts no more threads"),
        ("create", errno.ENOSPC, "E501", "the disk is full"),
        ("create", errno.EROFS, "E501", "only be read"),
        ("fsync", errno.EIO, "E501", "the medium failed"),
        ("flock", errno.EIO, "E501", "the medium failed"),
    ],
)
def test_a_start_that_is_refused_says_by_what(
    tmp_path: Path, call: str, number: int, code: str, words: str
) -> None:
    system, home = Refusing(tmp_path, "atoll.node --"), tmp_path / "home"
    home.mkdir()
    system.refuse(call, number)
    told = atoll(home, *UP, **system.environ)
    assert told.status in (71, 73, 74), told
    assert code in told.err, told
    assert words in told.err, told
    assert "defect" not in told.err, told


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_node_that_is_stopped_is_named_by_every_command(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert atoll(home, *UP).status == 0
    with NodeClient.connect(find_paths(home)) as client:
        pid = client.node.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        error = refused(home, "E112", 75, "status")
        assert error["why"] == f"process {pid} is stopped (Ctrl-Z, a debugger)"
        assert error["hints"] == [f"Let it go on: kill -CONT {pid}"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert atoll(home, "down").status == 0


def test_a_closed_terminal_drains_a_node_and_leaves_no_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert atoll(home, *UP).status == 0
    paths = find_paths(home)
    with NodeClient.connect(paths) as client:
        pid = client.node.pid
    os.kill(pid, signal.SIGHUP)
    with suppress(ProcessLookupError):  # at every moment until it is gone
        while Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGHUP)
            time.sleep(0.001)
    assert not (paths.runtime_dir / "node.json").exists()
    assert not paths.control_socket.exists()


def said(told: Told) -> str:
    return told.out + told.err


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_running_node_outlives_a_refusal_of_descriptors(tmp_path: Path) -> None:
    system, home = Refusing(tmp_path, "atoll.node --"), tmp_path / "home"
    assert atoll(home, *UP, **system.environ).status == 0
    with down_at_the_end(home):
        system.refuse("accept", errno.EMFILE, count=3)
        with NodeClient.connect(find_paths(home)) as client:
            client.status()
        soon(lambda: system.left() == 0, "it was refused")
        system.allow()
        assert "defect" not in said(atoll(home, "status"))


@pytest.mark.slow
def test_a_run_goes_on_after_checkpoints_failed_for_longer_than_results_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a checkpoint needs is refused, what a result needs is not, until there is no room for
    another result: only a checkpoint makes some, and no entry comes that would write one.
    """
    system = Refusing(tmp_path, "atoll.node --")
    for name, value in system.environ.items():
        monkeypatch.setenv(name, value)
    run = new_run(tmp_path)
    with ended(member := run.organiser()):
        one_round(member)
        system.refuse("rename", errno.ENOSPC)

        def stuck() -> bool:
            ticket = member.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
            return ticket.wait(10).status == "open"

        soon(stuck, "no room for another result")
        said_of_it = {each["message"] for each in member.state()["troubles"]}
        assert any("No space left" in message for message in said_of_it), said_of_it
        round_ = member.state()["round"]
        assert round_ > MAX_FILES - 2 * MOST_REPLAYED
        system.allow()
        soon(lambda: member.state()["round"] > round_ + 2 or _contributes(member), "it goes on")
        one_round(member)
        assert member.state()["trouble"] is None


def _contributes(member: Member) -> bool:
    with suppress(AtollError):  # the one before is open still
        member.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(5)
    return False

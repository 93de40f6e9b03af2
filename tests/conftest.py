"""What every test gets: a time limit that fails the test with all stacks, hypothesis without its
own deadlines, quiet threads, and one width of the terminal.

The limit is for hangs only, not a measurement: 120 s a test (900 s where marked slow or netns). It
works by SIGALRM in the main thread; a test that does not come back even then is ended by pytest's
faulthandler_timeout (pyproject.toml), stacks first.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

LIMIT_S = 120
SLOW_LIMIT_S = 900

# One thread a process: the suite runs beside itself (real peers, simulations), and sums do not
# change with the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nodes of tests that run at the same time must not find each other.
os.environ.setdefault("ATOLL_NETWORK__LAN_DISCOVERY", "false")
# What commands print is compared as text: wrapped alike in every terminal, and where there is none.
os.environ["COLUMNS"] = "100"

# `too_slow` judges the clock, so on a busy machine it would fail a test that is right.
hypothesis.settings.register_profile(
    "atoll",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("atoll")

_stderr_fd = os.dup(2)  # before pytest captures it

# Under nohup, in a shell's background jobs and in some CI these are ignored, and every process of a
# test would inherit that; a handler that does nothing is not inherited.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Modules and tests stay to the end: they are not looked through for garbage, neither while
    they are loaded (a third of that time) nor afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    """The day whose share is played, so that it can be played again."""
    day = os.environ.get("ATOLL_DAY", "")
    return f"ATOLL_DAY={day}: a share of what has the mark rota" if day else ""


def _turn(item: pytest.Item) -> bool:
    """Whether it is played on the day that .ci/run names; always where none is named.

    Tests of a file that has the mark as a whole have one day: they may share a swarm.
    """
    day, mark = os.environ.get("ATOLL_DAY", ""), item.get_closest_marker("rota")
    if not day or mark is None:
        return True
    whole = any(name == "rota" for name in _names_of_file(item))
    name = item.path.name if whole else item.nodeid
    return zlib.crc32(name.encode()) % mark.args[0] == int(day) % mark.args[0]


def _names_of_file(item: pytest.Item) -> list[str]:
    """Names of the marks that all tests of its file have."""
    file = item.getparent(pytest.Module)
    return [] if file is None else [mark.name for mark in file.own_markers]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where real processes meet real clocks, a test that failed is tried once more, and both tries
    are shown ("rerun" in the summary: to be looked into). What is decided by seeds and virtual time
    has one try. What has the mark `rota` waits for its day.
    """
    if resting := [item for item in items if not _turn(item)]:
        config.hook.pytest_deselected(items=resting)
        items[:] = [item for item in items if _turn(item)]
    for item in items:
        if {"process", "netns"} & set(item.path.parts):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a hung test with the stacks of all threads instead of hanging the session."""
    marks = ("slow", "netns")
    limit_s = SLOW_LIMIT_S if any(map(request.node.get_closest_marker, marks)) else LIMIT_S
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def expired(signum: int, frame: object) -> None:
        faulthandler.dump_traceback(_stderr_fd)
        pytest.fail(f"no end after {limit_s} s (stacks of all threads on stderr)", pytrace=True)

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def atoll_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh ATOLL_HOME (0700) for this test and the processes it starts."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("ATOLL_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the project."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter to start processes with."""
    return sys.executable

"""Everything in a node's home is its owner's only: files 0600, folders 0700, whatever the umask,
and what was open before is closed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bad_input_kit import atoll, ended, new_run, one_round

from atoll.node.home.paths import find_paths

pytestmark = pytest.mark.slow


@pytest.fixture
def open_umask() -> Iterator[None]:
    """What is made without asking for a mode is everybody's."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(home: Path) -> dict[str, str]:
    """By path: the modes of what others have rights to."""
    modes: dict[Path, int] = {}
    for path in (home, *home.rglob("*")):
        with suppress(FileNotFoundError):  # a node that runs renames and removes files meanwhile
            modes[path] = path.lstat().st_mode
    return {
        str(path.relative_to(home)): oct(stat.S_IMODE(mode))
        for path, mode in modes.items()
        if stat.S_IMODE(mode) & 0o077 and not stat.S_ISLNK(mode)
    }


@pytest.mark.usefixtures("open_umask")
def test_files_of_a_node_that_takes_part_in_rounds(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    a = run.organiser()
    b = run.member("b")
    with ended(a, b):
        one_round(a, b)
        one_round(a, b)
        written = {path.name for path in b.home.rglob("*")}
        assert {"layout", "identity.key", "private-node.log"} <= written
        for member in (a, b):
            assert open_to_others(member.home) == {}
    for member in (a, b):
        assert open_to_others(member.home) == {}


@pytest.mark.usefixtures("open_umask")
def test_a_daemon_closes_what_was_open_before(tmp_path: Path) -> None:
    home = tmp_path / "home"
    paths = find_paths(home)
    paths.ensure()
    paths.config_file.write_text('[node]\nlisten = ["/ip4/127.0.0.1/tcp/0"]\n')
    old = paths.runs_dir / "a-run" / "results"
    old.mkdir(parents=True, mode=0o755)
    (old / "0").write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.write_bytes(b"not atoll's")
    (old / "link").symlink_to(outside)
    (paths.log_dir / "node.log").write_text("an earlier life\n")
    assert atoll(home, "up", "--background").status == 0
    try:
        assert open_to_others(home) == {}
        assert stat.S_IMODE(paths.config_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(outside.stat().st_mode) & 0o077  # a link is not followed
    finally:
        assert atoll(home, "down").status == 0
    assert open_to_others(home) == {}

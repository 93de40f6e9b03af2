"""A node's log has a bound, whatever is written to it and by whom."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.node.home.logs import MAX_LOG_BYTES, open_log

WRITER = """
import logging, os, sys
from pathlib import Path
from atoll.node.home.logs import log_to_stderr

log = log_to_stderr()
log.files, log.most = [Path(each) for each in sys.argv[1:]], 4_000
for number in range(500):
    logging.getLogger("atoll").info("record %d", number)
    os.write(1, b"printed %d\\n" % number)
"""


def test_a_log_that_is_too_long_is_begun_anew_with_one_before_it(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    with open_log(log) as output:
        subprocess.run(
            [sys.executable, "-c", WRITER, str(tmp_path / "private-node.log"), str(log)],
            stdout=output,
            stderr=output,
            check=True,
        )
    before = tmp_path / "node.log.1"
    assert {path.name for path in tmp_path.iterdir()} == {"node.log", "node.log.1"}
    for path in (log, before):
        assert path.stat().st_size <= 4_100
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    numbers = [
        int(line.split()[-1]) for line in (before.read_text() + log.read_text()).splitlines()
    ]
    first = numbers[1]
    assert first > 300
    both = [number for number in range(first, 500) for _ in range(2)]
    assert numbers[-2 * (499 - first) :] == both[2:]  # records and what was printed, none lost


def test_standard_error_that_is_no_log_of_the_node_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    with mine.open("ab") as output:
        subprocess.run(
            [sys.executable, "-c", WRITER, str(tmp_path / "node.log")],
            stdout=output,
            stderr=output,
            check=True,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert len(mine.read_text().splitlines()) == 1000


@pytest.mark.parametrize(("nbytes", "aside"), [(MAX_LOG_BYTES, False), (MAX_LOG_BYTES + 1, True)])
def test_a_node_that_starts_puts_a_long_log_aside(tmp_path: Path, nbytes: int, aside: bool) -> None:
    log = tmp_path / "node.log"
    with log.open("wb") as file:
        file.truncate(nbytes)
    open_log(log).close()
    assert log.stat().st_size == (0 if aside else nbytes)
    assert (tmp_path / "node.log.1").exists() == aside

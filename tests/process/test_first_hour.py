"""What somebody sees in the first hour: a run that is finished, a node that goes and comes again
under scripts that train.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_kit import LISTEN, SCRIPT, atoll, nothing_stays, start
from tiny_run import TINY

pytestmark = pytest.mark.slow

OWN = TINY.replace(
    "[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }",
    '[model]\nentry = "local:x"',
)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


class Lines:
    """The lines that a process has written to a pipe, and those to come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.all = process, list[str]()
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                self.all.append(line.rstrip("\n"))
                self._more.notify()

    def wait(self, words: str, *, after: int = 0, timeout_s: float = 120) -> int:
        """The number of the first line with these words, no earlier than ``after``."""
        with self._more:
            assert self._more.wait_for(lambda: self._find(words, after) >= 0, timeout_s), self.all
            return self._find(words, after)

    def _find(self, words: str, after: int) -> int:
        found = (i for i in range(after, len(self.all)) if words in self.all[i])
        return next(found, -1)


@contextmanager
def plain(home: Path, folder: Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], Lines]]:
    """A person's own script, started without atoll join."""
    (folder / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "ATOLL_HOME": str(home), "ATOLL_RUN": "tiny", **more}
    with subprocess.Popen(
        [sys.executable, str(folder / "train.py")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process, Lines(process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(60)


def test_finished_is_a_state_and_everybody_says_so(tmp_path: Path) -> None:
    home, recipe = tmp_path / "a", tmp_path / "run.toml"
    recipe.write_text(OWN.replace("rounds = 6", "rounds = 2"))
    made = atoll(home, "new", str(recipe))
    assert made["known"] is False
    with plain(home, tmp_path) as (process, lines):
        assert process.wait(120) == 0
    assert any("round 1/2: 1 contributed" in line for line in lines.all), lines.all
    finished = f"run {made['run_id'][:8]} is finished: all its 2 rounds are committed"
    assert any(finished in line for line in lines.all), lines.all

    with plain(home, tmp_path, ATOLL_QUIET="1") as (process, lines):  # too late
        out, _ = process.stdout.read() if process.stdout else "", process.wait(120)
    assert process.returncode == 0
    assert out == "arguments [] round 2\n"
    assert any(finished in line for line in lines.all), lines.all
    assert not any("admitted" in line or "round 1/2" in line for line in lines.all), lines.all
    with plain(home, tmp_path) as (process, lines):
        assert process.wait(120) == 0
    assert not any("training alone" in line for line in lines.all), lines.all

    with start(home, "join", "tiny", "--yes", "--script", str(tmp_path / "train.py")) as joined:
        _, err = joined.communicate(timeout=150)
    assert joined.returncode == 0, err
    assert "tiny is finished: all its 2 rounds are committed" in err
    assert "left tiny" not in err

    atoll(home, "up", "--background", *LISTEN)
    try:
        again = atoll(home, "new", str(recipe))
        assert (again["known"], again["finished"]) == (True, True)
        (run,) = atoll(home, "status")["runs"]
        assert run["finished"] is True
        for command, words in (
            ("status", "finished: all 2 rounds are committed"),
            ("ls", "finished: all 2 rounds are committed"),
            ("peers", "tiny is finished: all 2 rounds are committed. The model: atoll export"),
            ("pause", "tiny is finished: all its 2 rounds are committed"),
        ):
            with start(home, command) as looked:
                out, err = looked.communicate(timeout=60)
            assert words in out + err
        assert [row["completed"] for row in atoll(home, "peers")["peers"]] == [2]
        with start(home, "new", str(recipe)) as looked:
            _, err = looked.communicate(timeout=60)
        assert "tiny is finished: all 2 rounds are committed. The model: atoll export" in err
        assert "Train in it" not in err
        assert atoll(home, "rm", "tiny", "--yes", status=73)["error"]["code"] == "E300"
    finally:
        atoll(home, "down")
    with start(home, "events", "tiny") as looked:
        out, err = looked.communicate(timeout=60)
    assert "round 1: 1 contributed" in out, out + err
    assert out.count("the script has let go") == 4
    folder = home / "state" / "runs" / made["run_id"]
    (folder / "privacy").write_text("3")
    forgotten = atoll(home, "rm", "tiny", "--yes")
    assert forgotten["kept"] == [str(folder / "privacy")]
    assert [path.name for path in folder.iterdir()] == ["privacy"]
    assert atoll(home, "events", "tiny", status=78)["error"]["code"] == "E400"


def test_a_node_takes_the_place_of_a_private_one_and_down_ends_the_script(tmp_path: Path) -> None:
    home, recipe = tmp_path / "a", tmp_path / "run.toml"
    recipe.write_text(OWN.replace("rounds = 6\n", ""))
    atoll(home, "new", str(recipe))
    with plain(home, tmp_path) as (process, lines):
        lines.wait("contributed")
        private = json.loads((home / "run" / "node.json").read_text())
        assert private["private"] is True
        up = atoll(home, "up", "--background", *LISTEN)
        assert up["pid"] != private["pid"]
        lines.wait("contributed", after=len(lines.all))
        (run,) = atoll(home, "status")["runs"]
        assert run["script_pid"] == process.pid
        down = atoll(home, "down", "--scripts")
        assert (down["scripts"], down["ended"]) == ([process.pid], [process.pid])
        assert process.wait(60) == 130
    assert not any("Traceback" in line for line in lines.all), lines.all
    assert not (home / "run" / "node.json").exists()


def test_the_view_of_join_outlives_its_node(tmp_path: Path) -> None:
    home, recipe = tmp_path / "a", tmp_path / "run.toml"
    recipe.write_text(TINY.replace("rounds = 6\n", "").replace("steps = 60", "steps = 1000000"))
    atoll(home, "new", str(recipe))
    atoll(home, "up", "--background", *LISTEN)
    with start(home, "join", "tiny", "--yes") as joined:
        lines = Lines(joined)
        lines.wait("round 2")
        down = atoll(home, "down")
        assert len(down["scripts"]) == 1
        assert down["ended"] == []
        lines.wait("training goes on alone")
        atoll(home, "up", "--background", *LISTEN)
        again = lines.wait("there is a node again")
        lines.wait("round ", after=again + 1)
        joined.send_signal(signal.SIGINT)
        assert joined.wait(100) == 130
    lines.wait("the script stopped after")
    atoll(home, "down")


def test_a_run_begins_with_as_many_as_it_says_or_by_word(tmp_path: Path) -> None:
    one, two, recipe = tmp_path / "one", tmp_path / "two", tmp_path / "run.toml"
    recipe.write_text(OWN.replace("rounds = 6", "rounds = 2\nstart_with = 2"))
    atoll(one, "up", "--background", *LISTEN)
    try:
        invite = atoll(one, "new", str(recipe))["invite"]
        with plain(one, tmp_path) as (first, lines):
            lines.wait("waiting for 1 more peer (1 of 2 are there); begin without: atoll begin ")
            (run,) = atoll(one, "status")["runs"]
            assert (run["starting"], run["round"]) == ({"there": 1, "wanted": 2}, 0)
            with start(one, "ls") as looked:
                assert "waiting for 1 more peer (1 of 2 are there)" in looked.communicate()[0]
            with plain(two, tmp_path, ATOLL_RUN=invite) as (second, others):
                assert (first.wait(120), second.wait(120)) == (0, 0)
        for told in (lines, others):
            told.wait("training begins" if told is lines else "round 2/2: 2 contributed")
            told.wait("round 1/2: 2 contributed")
        assert atoll(one, "begin")["begun"] is False

        recipe.write_text(OWN.replace("rounds = 6", "rounds = 1\nstart_with = 3"))
        made = atoll(one, "new", str(recipe))
        with plain(one, tmp_path, ATOLL_RUN=made["run_id"]) as (first, lines):
            lines.wait("waiting for 2 more peers (1 of 3 are there)")
            begun = atoll(one, "begin", made["run_id"])
            assert (begun["begun"], begun["missing"]) == (True, 2)
            assert first.wait(60) == 0
        lines.wait("round 1/1: 1 contributed")
        with start(one, "events", made["run_id"]) as looked:
            out = looked.communicate(timeout=60)[0]
        assert "the script waits with its first step: 1 of 3 members are there" in out
        assert "training begins; 1 of 3 members are there" in out
    finally:
        atoll(one, "down", "--scripts")

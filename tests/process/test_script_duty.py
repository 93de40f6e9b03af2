"""What watch, status and the owner's command say once the script of this machine has died, by real
nodes and scripts; and that nothing is said where it ended as its owner wanted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import LISTEN, SCRIPT, atoll, nothing_stays, start
from own_scripts_kit import PACED, RUN, WRONG, attached_as, plain, until

pytestmark = pytest.mark.slow
FEW = PACED.replace("while not attachment.done:", "for _ in range(40):")
TELL = """#!/bin/sh
printf '%s %s %s\\n' "$ATOLL_CODE" "$ATOLL_RAISED" "$ATOLL_TEXT" >> "$(dirname "$0")/told"
"""


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A home with a run, without a node; verdicts are told to a command that keeps them."""
    home = tmp_path / "a"
    recipe, tell = tmp_path / "run.toml", tmp_path / "tell.sh"
    recipe.write_text(RUN)
    tell.write_text(TELL)
    tell.chmod(0o700)
    for name, text in (("good", PACED), ("wrong", WRONG), ("few", FEW), ("own", SCRIPT)):
        (tmp_path / f"{name}.py").write_text(text)
    atoll(home, "new", str(recipe))
    atoll(home, "config", "set", "notify.command", str(tell))
    return home


@pytest.fixture
def home(stage: Path) -> Iterator[Path]:
    """The same with its node."""
    atoll(stage, "up", "--background", *LISTEN)
    try:
        yield stage
    finally:
        atoll(stage, "down", "--scripts")


def watched(home: Path) -> tuple[int, list[tuple[str, str]]]:
    """The exit status of `atoll watch`, and the verdicts that stand."""
    with start(home, "watch", "tiny", "--json") as process:
        out, err = process.communicate(timeout=150)
    assert process.returncode in (0, 1, 3), err
    found: dict[str, Any] = json.loads(out)
    return process.returncode, [(each["code"], each["said"]) for each in found["verdicts"]]


def within(seconds: float, holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.2)


def told(home: Path) -> list[str]:
    file = home.parent / "told"
    return file.read_text().splitlines() if file.exists() else []


def status_text(home: Path) -> str:
    with start(home, "status") as process:
        return process.communicate(timeout=150)[0]


def test_a_killed_script_is_one_thing_in_watch_status_and_notify(home: Path) -> None:
    with plain(home, "good") as process:
        until(process, "round 2")
        assert watched(home) == (0, [])
        process.kill()
        process.wait(60)
    within(60, lambda: watched(home)[0] == 1)
    status, ((code, said),) = watched(home)
    assert (status, code) == (1, "V11")
    assert said in (
        f"process {process.pid} died of SIGKILL",
        f"process {process.pid} is gone",  # a system that does not tell how, before Linux 6.15
    )
    within(60, lambda: bool(told(home)))
    assert told(home) == [f"V11 1 no script trains here: {said}"]
    # nobody waits for oneself: once the wait is longer than usual, it says the same
    within(60, lambda: "  waiting  " in status_text(home))
    shown = status_text(home)
    assert "seeding; no script is training here since 2" in shown
    assert f"verdict  V11 no script trains here: {said}" in shown
    me = atoll(home, "status")["peer"]
    run = atoll(home, "status")["runs"][0]
    assert me not in run["waiting"]["of"]
    assert run["waiting"]["what"].startswith("a script that trains: none is attached here")

    # what its page says, typed as it stands
    for command, promised in (
        ("explain V11", "atoll pause RUN"),
        ("events tiny", said),
        ("logs", "V11 holds"),
        ("pause tiny", "tiny rests here"),
        ("watch tiny", "nothing is wrong"),
        ("resume tiny", ""),
    ):  # the pause takes the verdict back, and its end gives the script time to start
        with start(home, *command.split()) as typed:
            out, err = typed.communicate(timeout=150)
        assert (typed.returncode, promised in out + err) == (0, True), out + err
    with plain(home, "good") as process:
        attached_as(home, process.pid)
        within(60, lambda: watched(home) == (0, []))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    assert watched(home) == (0, [])
    assert told(home)[1:] == [f"V11 0 holds no more: no script trains here: {said}"]


def test_a_script_that_raised_is_named_and_one_that_ended_is_not(home: Path) -> None:
    with plain(home, "few") as process:
        process.communicate(timeout=150)
    assert process.returncode == 0
    assert watched(home) == (0, [])
    with plain(home, "wrong") as process:
        process.communicate(timeout=150)
    assert process.returncode == 1
    said = f"process {process.pid} ended with KeyError: 'mine'"
    within(60, lambda: watched(home) == (1, [("V11", said)]))
    atoll(home, "pause", "tiny")
    assert watched(home) == (0, [])
    atoll(home, "leave", "tiny")
    assert watched(home) == (0, [])


def test_a_script_of_join_that_raised_is_named(home: Path) -> None:
    with start(home, "join", "tiny", "--yes", "--script", str(home.parent / "wrong.py")) as joined:
        joined.communicate(timeout=150)
    assert joined.returncode == 1
    within(60, lambda: watched(home)[0] == 1)
    ((code, said),) = watched(home)[1]
    assert (code, said.partition(" ended with ")[2]) == ("V11", "KeyError: 'mine'")


def test_a_killed_scripts_private_node_tells_before_it_ends(stage: Path) -> None:
    with plain(stage, "good") as process:
        until(process, "round 2")
        process.kill()
        process.wait(60)
    within(60, lambda: atoll_status(stage) == 3)  # the private node ends with its script
    status, ((code, said),) = watched(stage)
    assert (status, code, said.startswith(f"process {process.pid} ")) == (1, "V11", True)
    assert told(stage) == [f"V11 1 no script trains here: {said}"]


def test_a_private_node_that_ends_with_its_script_says_nothing(stage: Path) -> None:
    with plain(stage, "few") as process:
        began = time.monotonic()
        process.communicate(timeout=150)
        assert time.monotonic() - began < 100
    assert process.returncode == 0
    assert (watched(stage), told(stage)) == ((3, []), [])


def test_a_script_that_does_not_come_back_with_its_node_is_missed(home: Path) -> None:
    with plain(home, "good") as process:
        until(process, "round 2")
        os.kill(node_of(home), signal.SIGKILL)  # as a power cut ends both
        process.kill()
        process.wait(60)
    atoll(home, "up", "--background", *LISTEN)

    def missed() -> bool:
        with start(home, "events", "tiny") as looked:
            return "a script trained here until the node ended" in looked.communicate()[0]

    within(60, missed)
    assert watched(home) == (0, [])  # in the first minutes of a start


def node_of(home: Path) -> int:
    return int(json.loads(next(home.rglob("node.json")).read_text())["pid"])


def atoll_status(home: Path) -> int:
    with start(home, "status", "--json") as process:
        process.communicate(timeout=150)
    return process.returncode

"""What is said when a user's own script ends in a way that nobody planned, attaches nothing, or is
paused; by real nodes and scripts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import LISTEN, atoll, nothing_stays, start
from own_scripts_kit import PACED, RUN, WRONG, attached_as, plain, until
from seeds import RARE
from terminal_kit import ATOLL, Person

pytestmark = [*RARE]

OTHER = PACED.replace("Linear(4, 1)", "Linear(5, 1)").replace("randn(8, 4)", "randn(8, 5)")
NOTHING = "import time\nfrom atoll.node import join\nswarm = join()\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose node is up and in a run of its own; scripts lie beside it."""
    home, recipe = tmp_path / "a", tmp_path / "run.toml"
    recipe.write_text(RUN)
    for name, text in (("good", PACED), ("wrong", WRONG), ("other", OTHER), ("nothing", NOTHING)):
        (tmp_path / f"{name}.py").write_text(text)
    atoll(home, "up", "--background", *LISTEN)
    try:
        atoll(home, "new", str(recipe))
        yield home
    finally:
        atoll(home, "down", "--scripts")


def attached(home: Path) -> int:
    """The process of the script that is attached, once one is."""
    ends = time.monotonic() + 120
    while not (pid := atoll(home, "status")["runs"][0]["script_pid"]):
        assert time.monotonic() < ends
        time.sleep(0.2)
    return int(pid)


def words_of(home: Path) -> str:
    with start(home, "events", "tiny") as looked:
        return looked.communicate(timeout=120)[0]


def test_each_end_of_a_script_has_its_own_words(home: Path) -> None:
    with start(home, "join", "tiny", "--yes", "--script", str(home.parent / "wrong.py")) as joined:
        _, err = joined.communicate(timeout=150)
    assert joined.returncode == 1
    assert "KeyError: 'mine'" in err
    assert "wrong.py" in err
    for ours in ("optim/script", "node/client", "runpy", "left tiny"):
        assert ours not in err, err
    assert "the script ended with status 1: its last lines say why" in err

    with start(home, "join", "tiny", "--yes", "--script", str(home.parent / "good.py")) as joined:
        os.kill(attached(home), signal.SIGKILL)
        _, err = joined.communicate(timeout=150)
    assert joined.returncode == 128 + signal.SIGKILL
    assert "the script was killed by SIGKILL after" in err

    with plain(home, "other") as process:
        _, err = process.communicate(timeout=150)
    assert (process.returncode, "E301" in err, "Traceback" in err) == (76, True, False), err

    with plain(home, "good") as process:
        until(process, "round ")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=150)
    assert (process.returncode, err.count("Traceback")) == (130, 0), err

    with plain(home, "good") as process:
        until(process, "round ")
        atoll(home, "leave", "tiny")
        assert "this node has left run tiny" in until(process, "has left run")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=150)
    assert (process.returncode, err.count("Traceback")) == (130, 0), err

    told = words_of(home)
    assert told.count("the script has let go") == 4
    assert "closed its swarm" not in told


def test_a_script_that_attaches_nothing_is_named(home: Path) -> None:
    with start(home, "join", "tiny", "--yes", "--script", str(home.parent / "nothing.py")) as join:
        err = until(join, "has attached nothing")
        assert (
            "nothing.py has run for 60 s and has attached nothing: it must call join() and" in err
        )
        ends = time.monotonic() + 120
        while not (run := atoll(home, "status")["runs"][0])["unattached"]:
            assert time.monotonic() < ends
            time.sleep(1)
        (pid,) = run["unattached"]
        join.send_signal(signal.SIGINT)
        assert join.wait(100) == 130
    assert f"process {pid} joined " in words_of(home)
    assert atoll(home, "status")["runs"][0]["unattached"] == {}


def test_down_ends_a_script_that_has_joined_and_not_attached(home: Path) -> None:
    with plain(home, "nothing") as process:
        ends = time.monotonic() + 120
        found = list[Any]()
        while not any(run["script_pids"] for run in found):
            assert time.monotonic() < ends
            time.sleep(0.2)
            found = atoll(home, "status")["runs"]
        assert [(run["script_pids"], run["script_pid"]) for run in found] == [([process.pid], None)]
        loads = "waiting for the model that this machine's script loads"
        assert found[0]["progress"] == [loads, 0, 0]  # who founds it misses no member
        down = atoll(home, "down", "--scripts")
        assert (down["scripts"], down["ended"]) == ([process.pid], [process.pid])
        assert process.wait(60) in (130, -signal.SIGINT)  # perhaps before join() has returned


def test_down_asks_at_a_terminal_whether_the_script_is_to_end(home: Path) -> None:
    with plain(home, "good") as process:
        attached_as(home, process.pid)
        until(process, "round 1: ")
        for answer in ("n", "y"):
            with Person([*ATOLL, "down"], {"ATOLL_HOME": str(home)}, home.parent) as person:
                person.wait_for("End it, too? [y/N]")
                assert f"process {process.pid} trains tiny here" in person.seen
                person.type(f"{answer}\n")
                assert person.end() == 0
                assert "the node ended" in person.seen
            if answer == "n":
                assert "It trains on alone, and starts a node of its own" in person.seen
                atoll(home, "up", "--background", *LISTEN)
                attached_as(home, process.pid)
        assert "It trains on alone" not in person.seen
        process.communicate(timeout=100)
        assert process.returncode == 130


def test_a_paused_script_rests_and_its_node_serves(home: Path) -> None:
    with plain(home, "good") as process:
        until(process, "round ")
        assert atoll(home, "pause", "tiny")["changed"] is True
        until(process, "training is paused by its owner")
        ends = time.monotonic() + 60
        while (run := atoll(home, "status")["runs"][0])["script"]:  # nobody waits for it
            assert time.monotonic() < ends
            time.sleep(0.2)
        assert (run["paused"], run["script_pid"]) == ("paused by its owner", process.pid)
        again = atoll(home, "status")["runs"][0]
        assert again["round"] == run["round"]
        with start(home, "ls") as looked:
            assert "paused by its owner; the node serves the run" in looked.communicate()[0]
        assert atoll(home, "resume", "tiny")["paused"] == ""
        until(process, "training goes on")
        until(process, f"round {run['round'] + 2}")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    told = words_of(home)
    assert told.index("training is paused by its owner") < told.index("training may go on")


def test_sigterm_ends_all_of_it_within_the_notice(tmp_path: Path) -> None:
    home, recipe = tmp_path / "a", tmp_path / "run.toml"
    recipe.write_text(RUN)
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    (tmp_path / "good.py").write_text(
        PACED.replace("with join()", stubborn + "with join()")  # after atoll has set its own
    )
    atoll(home, "new", str(recipe))
    drain_s = 10
    with start(
        home,
        *("join", "tiny", "--yes", "--script", str(tmp_path / "good.py"), "--drain", str(drain_s)),
    ) as joined:
        until(joined, "round 2")
        node = json.loads((home / "run" / "node.json").read_text())["pid"]
        began = time.monotonic()
        joined.send_signal(signal.SIGTERM)
        _, err = joined.communicate(timeout=100)
        took = time.monotonic() - began
    assert joined.returncode == 128 + signal.SIGTERM, err
    assert took < drain_s + 5, took  # and 5 s for a busy machine
    with pytest.raises(ProcessLookupError):
        os.kill(node, 0)

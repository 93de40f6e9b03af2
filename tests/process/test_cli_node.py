"""The command line with real nodes on loopback: up, new, join, Ctrl-C, a second peer, export, down,
and what can go wrong.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import LISTEN, SCRIPT, alive, atoll, nothing_stays, start
from safetensors.numpy import load_file
from tiny_run import TINY

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(TINY)
    return tmp_path / "a"


def test_a_run_from_beginning_to_end(home: Path, tmp_path: Path) -> None:
    up = atoll(home, "up", "--background", *LISTEN)
    assert up["addresses"][0].startswith("/ip4/127.0.0.1/tcp/")
    try:
        assert atoll(home, "up", *LISTEN, status=73)["error"]["code"] == "E102"
        assert atoll(home, "netcheck")["verdict"] == "alone"  # the first node of a run: no failure
        made = atoll(home, "new", str(tmp_path / "run.toml"))
        assert made["invite"]
        first = start(home, "join", "tiny", "--yes", "--json")
        assert atoll(home, "ping", "nobody", status=78)["error"]["code"] == "E400"
        second = atoll(tmp_path / "b", "join", made["invite"], "--yes", "--steps", "30")
        out, err = first.communicate(timeout=150)
        assert first.returncode == 0, err
        assert json.loads(out)["round"] == 6
        assert second["exit"] == 0
        assert second["run_id"] == made["run_id"]
        status = atoll(home, "status", "tiny")
        assert status["running"]
        assert status["runs"][0]["round"] == 6
        assert [peer["you"] for peer in atoll(home, "peers")["peers"] if peer["member"]].count(
            True
        ) == 1
        exported = atoll(home, "export", "tiny", str(tmp_path / "out"))
        assert exported["round"] == 6
        weights = load_file(tmp_path / "out" / "model.safetensors")
        assert sum(w.size for w in weights.values()) == exported["parameters"] == 29_536
        assert atoll(home, "leave", "tiny")["left"] is True
    finally:
        assert atoll(home, "down")["stopped"] is True
    assert not alive(up["pid"])
    assert atoll(home, "status", status=3)["running"] is False
    assert not list((home / "run").glob("*.sock"))


def test_the_organiser_joins_by_an_invite_of_its_own(home: Path, tmp_path: Path) -> None:
    """As whoever pastes the same line everywhere. Its node announced itself with the certificate,
    which it then refused itself, and ended, at every start."""
    up = atoll(home, "up", "--background", *LISTEN)
    try:
        made = atoll(home, "new", str(tmp_path / "run.toml"))
        joined = atoll(home, "join", made["invite"], "--yes", "--steps", "30")
        assert (joined["exit"], joined["run_id"]) == (0, made["run_id"])
        assert alive(up["pid"])
        assert atoll(home, "status", "tiny")["runs"][0]["round"] > 0
    finally:
        atoll(home, "down")


def test_own_script_in_a_private_node_and_ctrl_c(home: Path, tmp_path: Path) -> None:
    text = TINY.replace('name = "tiny"', 'name = "own"').replace("rounds = 6", "rounds = 3")
    (tmp_path / "run.toml").write_text(
        text.replace(
            "[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }",
            '[model]\nentry = "local:x"',
        )
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    atoll(home, "new", str(tmp_path / "run.toml"))
    refused = atoll(home, "join", "own", "--yes", status=78)
    assert refused["error"]["key"] == "$.model.entry"
    with start(
        home, "join", "own", "--yes", "--script", str(tmp_path / "train.py"), "--", "--mine", "7"
    ) as process:
        out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert out == "arguments ['--mine', '7'] round 3\n"
    assert atoll(home, "status", status=3) == {"schema": 1, "running": False}


def test_ctrl_c_drains_and_leaves_nothing_behind(home: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        TINY.replace("rounds = 6\n", "").replace("steps = 60", "steps = 1000000")
    )
    atoll(home, "new", str(tmp_path / "run.toml"))
    with start(home, "join", "tiny", "--yes") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("round 2"):
                break
        node = json.loads((home / "run" / "node.json").read_text())["pid"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (130, "")
    assert "the script stopped after" in err
    assert "Traceback" not in err
    assert not alive(node)
    assert not (home / "run" / "node.json").exists()


def test_the_port_is_taken(home: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        for argv in (("up", "--background", "--listen", address), ("up", "--listen", address)):
            with start(home, *argv) as process:
                out, err = process.communicate(timeout=100)
            assert (process.returncode, out) == (73, "")
            assert "E101" in err
            assert "Traceback" not in err


def test_a_node_whose_home_is_deleted_ends_and_says_why(home: Path, tmp_path: Path) -> None:
    with start(home, "up", *LISTEN) as process:
        assert process.stderr is not None
        while "is up" not in (line := process.stderr.readline()):
            assert line
        home.rename(tmp_path / "away")
        out, err = process.communicate(timeout=100)
    assert process.returncode == 73, err
    said = f"the home of this node is gone: {home / 'run'} was deleted, or moved away"
    assert said in " ".join(err.split())  # it is wrapped
    assert "Traceback" not in out + err
    assert not home.exists()


def test_nobody_answers_at_the_invites_address(home: Path, tmp_path: Path) -> None:
    dead = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDzMngWyanCrpqTHK4eTtc1Fy14yrqBAsJ2Rb8b5ZWeZM"
    invite = atoll(tmp_path / "o", "new", str(tmp_path / "run.toml"), "--bootstrap", dead)["invite"]
    error = atoll(home, "join", invite, "--yes", status=69)["error"]
    assert error["code"] == "E110"
    assert "not a ban" in error["message"]
    assert (home / "identity.key").exists()
    assert not list((home / "state" / "runs").iterdir())  # nothing is kept of what was not entered
    assert atoll(home, "status", status=3)["running"] is False

"""What a person reads of a run: `atoll events` and `atoll logs` as commands, and what a plain script
says of the others.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cli_kit import ATOLL
from round_table import RoundTable

from atoll.collectives.swarm import RunSettings
from atoll.node.cli import run
from atoll.node.home.paths import Paths, find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run.diary import Diary
from atoll.node.run.events import read_event
from atoll.optim import attach
from atoll.security.identity import Identity

PEERS = [f"12D3KooW{name * 44}" for name in "abc"]


def made(home: Path) -> tuple[Paths, Diary]:
    """A home that knows a run called told, and the writer of its events."""
    paths = find_paths(home)
    paths.ensure()
    manifest = parse_manifest('schema = 1\nname = "told"\n[model]\nentry = "local:x"\n')
    signed = sign_manifest(manifest, Identity.generate())
    save_run(paths, signed)
    return paths, Diary(paths.run_dir(signed.run_id), signed.run_id, lambda: "told")


def test_events_since_a_time_in_words_and_as_json(
    atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, diary = made(atoll_home)
    now = time.time()
    for ago, round_ in ((7200.0, 1), (60.0, 2)):
        shares = {PEERS[0]: 5, PEERS[1]: 3}
        diary.write(
            read_event(
                {
                    "at": now - ago,
                    "event": "round.committed",
                    "round": round_,
                    "members": PEERS[:2],
                    "contributors": shares,
                    "counted": True,
                }
            )
        )
        diary.write(
            read_event(
                {"at": now - ago, "event": "round.phase", "log": "m", "round": 1, "phase": "reduce"}
            )
        )
    diary.close()
    assert run(["events", "told"]) == 0
    said = capsys.readouterr().out
    assert ("round 1: 2 contributed, 8 samples" in said, "round 2: 2" in said) == (True, True)
    assert "round.phase" not in said
    assert run(["events", "told", "--since", "1h"]) == 0
    said = capsys.readouterr().out
    assert ("round 1:" in said, "round 2:" in said) == (False, True)
    assert run(["events", "told", "--since", "1h", "--all"]) == 0
    assert "round.phase" in capsys.readouterr().out
    assert run(["events", "told", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines].count("round.committed") == 2
    assert run(["events", "told", "--since", "soon"]) == 2


def test_events_and_logs_are_followed_as_they_are_written(atoll_home: Path) -> None:
    paths, diary = made(atoll_home)
    diary.write(read_event({"at": time.time(), "event": "run.goes_on"}))
    log = paths.log_dir / "node.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"line {number}\n" for number in range(5)))
    environment = {**os.environ, "ATOLL_HOME": str(atoll_home)}

    def follow(*argv: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*ATOLL, *argv], stdout=pipe, text=True, env=environment)

    with follow("events", "told", "--follow") as told, follow("logs", "-f", "-n", "2") as logged:
        assert told.stdout is not None
        assert logged.stdout is not None
        assert told.stdout.readline().endswith("it goes on\n")
        assert [logged.stdout.readline() for _ in range(2)] == ["line 3\n", "line 4\n"]
        diary.write(read_event({"at": time.time(), "event": "script.attached", "pid": 7}))
        assert told.stdout.readline().endswith("a script trains, process 7\n")
        with log.open("a") as more:
            more.write("line 5 \x1b[31m\n")
        assert logged.stdout.readline() == "line 5 \\x1b[31m\n"
        for process in (told, logged):
            process.terminate()
    diary.close()


def test_a_plain_script_says_who_comes_goes_and_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atoll")
    settings = RunSettings(sync_every=1, codec="fp32", deadline_s=0.01)
    table = RoundTable([PEERS[0], PEERS[1]], settings)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(model, optimizer, table.member(PEERS[0]))

    def heard() -> list[str]:
        caplog.clear()
        attachment._lookout.count()
        return caplog.messages

    assert heard() == []
    with table.changed:
        table.lost.add(table.member(PEERS[1]).peer)
    assert heard() == ["bbbbbbbb is not reached any more; rounds go on without it"]
    with table.changed:
        table.lost.clear()
    assert heard() == ["bbbbbbbb is back"]
    with table.changed:
        table.peers.append(table.member(PEERS[2]).peer)
    assert heard() == ["cccccccc is a member"]
    with table.changed:
        table.peers.remove(table.member(PEERS[1]).peer)
    assert heard() == ["bbbbbbbb is no member any more"]


def test_quiet_leaves_a_plain_scripts_warnings_only() -> None:
    code = (
        "from atoll.node.joining.speaking import speak\n"
        "import logging\n"
        "speak(None)\n"
        "logging.getLogger('atoll').info('round 1')\n"
        "logging.getLogger('atoll').warning('finished')\n"
    )
    for quiet, said in (("", ["atoll: round 1", "atoll: finished"]), ("1", ["atoll: finished"])):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "ATOLL_QUIET": quiet},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr.splitlines() == said


def test_peers_names_a_departed_member_so(capsys: pytest.CaptureFixture[str]) -> None:
    from atoll.node.home.output import Terminal
    from atoll.node.views.documents import peers_table

    gone = {"peer": PEERS[0], "member": False, "live": False, "round": 4}
    leaving = {"peer": PEERS[1], "member": False, "live": True, "round": 4, "former": True}
    entering = {"peer": PEERS[2], "member": False, "live": True, "round": 4, "former": False}
    table = peers_table(Terminal(no_color=True), [gone, leaving, entering]).splitlines()
    assert [row.split("  ")[-1].strip() for row in table[1:]] == ["no more", "no more", "not yet"]


def test_watch_says_that_no_node_looks_and_ends_with_3(
    atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For cron: a node that was killed writes no events, and no verdict is raised any more."""
    _, diary = made(atoll_home)
    diary.write(read_event({"at": time.time() - 300.0, "event": "state.ready", "round": 0}))
    diary.close()
    assert run(["watch", "told"]) == 3
    assert capsys.readouterr().out == (
        "no node is running, so nobody looks at this run now; the newest event is of 5 min ago\n"
    )
    assert run(["watch", "told", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "node": False, "verdicts": []}

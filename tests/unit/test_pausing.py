"""Hours of the day, and whether a run's script trains: its owner's word beside them."""

from __future__ import annotations

import logging
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_node import Node

from atoll.collectives.errors import ConfigError
from atoll.node.control.protocol import Pause
from atoll.node.home.config import load_config, set_value
from atoll.node.home.hours import DAY, Hours, hours_of
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient, join
from atoll.node.run.events import RunPausedEvent
from atoll.node.run.status import read_run_status
from atoll.node.service.pausing import FILE, RunPause
from atoll.node.views.documents import run_state
from atoll.node.views.event_words import Words
from atoll.optim import attach
from atoll.optim.script import attachment


@pytest.mark.parametrize(
    ("text", "first", "stop"),
    [
        ("22-06", 22 * 60, 6 * 60),
        ("9:30-17", 570, 1020),
        (" 0 - 24:00 ", None, None),
        ("18-24", 18 * 60, 0),
        ("0-6", 0, 360),
        ("24-06", None, None),
        ("24-6", None, None),
        ("", None, None),
        ("7-7", None, None),
        ("25-3", None, None),
        ("1:60-3", None, None),
        ("24:30-3", None, None),
        ("nights", None, None),
        ("1-2-3", None, None),
        ("１-２", None, None),
    ],
)
def test_hours_are_read(text: str, first: int | None, stop: int | None) -> None:
    if first is not None and stop is not None:
        assert hours_of(text, "node.hours") == Hours(first, stop)
    elif not text:
        assert hours_of(text, "node.hours") is None
    else:
        with pytest.raises(ConfigError) as told:
            hours_of(text, "node.hours")
        assert (told.value.code, told.value.key) == ("E413", "$.node.hours")


def test_hours_hold_every_minute_that_they_should() -> None:
    for first, stop in ((22 * 60, 6 * 60), (0, 1), (570, 1020), (1439, 0)):
        inside = {(first + n) % DAY for n in range((stop - first) % DAY)}
        assert {minute for minute in range(DAY) if Hours(first, stop).hold(minute)} == inside


def test_settings_that_are_numbers_are_read_from_texts(tmp_path: Path) -> None:
    paths = find_paths(tmp_path)
    told = load_config(paths, environ={"ATOLL_NODE__DRAIN_S": "3.5", "ATOLL_NODE__PORT": "7"})
    assert (told.config.node.drain_s, told.config.node.port) == (3.5, 7)
    assert set_value(paths, "node.drain_s", "25") == 25.0
    assert set_value(paths, "node.hours", "22-06") == "22-06"
    assert set_value(paths, "notify.command", "echo 'a b'") == "echo 'a b'"
    assert load_config(paths, environ={}).config.notify_command == ("echo", "a b")
    for key, text in (
        ("node.drain_s", "soon"),
        ("node.drain_s", "nan"),
        ("node.drain_s", "inf"),
        ("node.drain_s", "0.5"),
        ("node.port", "1.5"),
        ("node.hours", "nights"),
        ("notify.command", "say 'a"),
    ):
        with pytest.raises(ConfigError) as wrong:
            set_value(paths, key, text)
        assert wrong.value.key == f"$.{key}"


def test_a_command_that_the_node_could_not_run_is_refused_with_one_that_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else verdicts would be told to nobody."""
    paths, script = find_paths(tmp_path / "home"), tmp_path / "my tell.sh"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    script.write_text("#!/bin/sh\n")
    for text in ("'./my tell.sh' 7", "'~/my tell.sh' 7"):
        script.chmod(0o600)
        with pytest.raises(ConfigError) as refused:
            set_value(paths, "notify.command", text)
        assert refused.value.hint == f"chmod +x '{script}'"
        script.chmod(0o700)
        with pytest.raises(ConfigError) as refused:
            set_value(paths, "notify.command", text)
        *words, value = shlex.split(refused.value.hint)
        assert words == ["atoll", "config", "set", "notify.command"]
        set_value(paths, "notify.command", value)
        assert load_config(paths, environ={}).config.notify_command == (str(script), "7")
    for text in ("no-such-program", str(tmp_path / "gone.sh"), "./gone.sh"):
        with pytest.raises(ConfigError, match="which the node cannot run"):
            set_value(paths, "notify.command", text)
    assert set_value(paths, "notify.command", "") == ""


class Clock:
    minute = 12 * 60

    def __call__(self) -> int:
        return self.minute


def make(folder: Path, hours: Hours | None = None) -> tuple[RunPause, Clock, list[tuple[str, Any]]]:
    told, clock = list[tuple[str, Any]](), Clock()
    return (
        RunPause(
            "r",
            folder,
            hours,
            lambda event: told.append((event.kind, getattr(event, "why", None))),
            clock,
        ),
        clock,
        told,
    )


def test_a_pause_holds_until_the_owner_resumes_also_over_a_restart(tmp_path: Path) -> None:
    pause, _, told = make(tmp_path)
    assert pause.why == ""
    assert pause.say(False) is False
    assert (pause.say(True), pause.say(True)) == (True, False)
    again, _, _ = make(tmp_path)
    assert again.why == "paused by its owner"
    assert again.say(False) is True
    assert not (tmp_path / FILE).exists()
    assert told == [("run.paused", "paused by its owner")]


def test_hours_pause_and_a_resume_holds_until_they_begin(tmp_path: Path) -> None:
    pause, clock, told = make(tmp_path, Hours(22 * 60, 6 * 60))
    pause.look()
    assert pause.why == "paused until 22:00"
    assert pause.say(False) is True
    assert (pause.why, pause.say(False)) == ("", False)
    clock.minute = 22 * 60
    pause.look()
    clock.minute = 6 * 60
    pause.look()
    assert pause.why == "paused until 22:00"
    clock.minute = 23 * 60
    pause.look()
    assert pause.say(True) is True
    clock.minute = 23 * 60 + 1
    assert pause.why == "paused by its owner"
    noon, by_hours = (None, "paused until 22:00")
    assert told == [
        ("run.paused", by_hours),
        ("run.resumed", noon),
        ("run.paused", by_hours),
        ("run.resumed", noon),
        ("run.paused", "paused by its owner"),
    ]


def test_a_torn_word_is_a_pause(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"")
    assert make(tmp_path)[0].why == "paused by its owner"


def test_it_is_said_in_words() -> None:
    run = {"phase": "running", "script": False, "paused": "paused until 22:00"}
    assert run_state(read_run_status(run)) == "paused until 22:00; the node serves the run"
    event = RunPausedEvent(why="paused until 22:00")
    assert list(Words().of(event)) == ["training is paused until 22:00; the node serves the run"]


def test_a_script_rests_between_two_rounds_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attachment, "REST_S", 0.01)
    caplog.set_level(logging.INFO, "atoll")
    node = Node(tmp_path)
    try:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rested, steps = threading.Event(), 0
        with (
            NodeClient.connect(node.paths) as client,
            join("reference", home=tmp_path, private=False) as swarm,
        ):
            attached = attach(model, optimizer, swarm, batch_size=2)
            assert client.ask(Pause, "").value == {
                "run_id": swarm.run_id,
                "paused": "paused by its owner",
                "changed": True,
            }

            def train() -> None:
                nonlocal steps
                while attached.round < 3:
                    model(torch.ones(2, 3)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
                rested.set()

            thread = threading.Thread(target=train)
            thread.start()
            assert not rested.wait(0.5)
            at = steps
            assert not rested.wait(0.2)
            assert (steps, attached.round) == (at, 1)
            client.ask(Pause, "", False)
            assert rested.wait(30)
            thread.join()
    finally:
        node.stop()
    said = [record.getMessage() for record in caplog.records]
    assert "training is paused by its owner; this machine goes on serving the run" in said
    assert "training goes on" in said

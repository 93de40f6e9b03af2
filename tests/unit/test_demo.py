"""The demo's pieces: the board's arithmetic, the verdict's checks, the plots, and processes that
are really killed.
"""

from __future__ import annotations

import io
import json
import math
import os
import queue
import re
import select
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from atoll.node.demo.board import Board
from atoll.node.demo.figure import THEMES, Theme, draw, seen_share, story, title
from atoll.node.demo.plot import Mark, braille_plot, sparkline
from atoll.node.demo.processes import DemoProcess, Inbox, end, kill
from atoll.node.demo.stage import MANIFEST, PARAMETERS, prepare
from atoll.node.demo.verdict import DemoResult, judge
from atoll.node.demo.view import (
    SILENCE_S,
    LiveScreen,
    PlainScreen,
    doing,
    mib,
    strip,
    traffic,
)
from atoll.node.run.gain import ddp_bytes

NAMES = ["peer 1", "peer 2", "peer 3", "peer 4"]


def shares(*names: str) -> list[dict[str, object]]:
    return [{"peer": f"id-{name[-1]}", "samples": 160} for name in names]


def played(
    *,
    last_digest: str = "aa",
    late_counted: bool = True,
    committed_after_kill: bool = True,
    held_out: float = 1.9,
) -> Board:
    """A board after a short run: 6 rounds, peer 3 killed after round 2, peer 4 in from round 5."""
    board = Board(NAMES, rounds_total=6, sync_every=20, params=1000)
    for name in NAMES:
        board.rows[name].peer = f"id-{name[-1]}"
    board.measured({"event": "anchor", "round": 0, "held_out": 5.6})

    def commit(number: int, at: float, *names: str) -> None:
        for name in names:
            board.line(
                name, {"event": "step", "step": 20 * number, "loss": 5.0 - number / 2}, at - 0.1
            )
            record = {
                "event": "round",
                "status": "committed",
                "round": number,
                "counted": True,
                "contributors": shares(*names),
                "bytes_sent": 50,
            }
            board.line(name, record, at)

    commit(1, 1.0, "peer 1", "peer 2", "peer 3")
    commit(2, 2.0, "peer 1", "peer 2", "peer 3")
    board.killed("peer 3", 2.5)
    if committed_after_kill:
        commit(
            3, 2.7, "peer 1", "peer 2", "peer 3"
        )  # was under way, and still counts the killed peer
        commit(4, 4.75, "peer 1", "peer 2")
        commit(5, 5.5, "peer 1", "peer 2", *(["peer 4"] if late_counted else []))
        if late_counted:
            board.joined_late("peer 4", 5.5)
        commit(6, 6.5, "peer 1", "peer 2", *(["peer 4"] if late_counted else []))
    board.measured({"event": "anchor", "round": 6, "held_out": held_out})
    for name, digest in (("peer 1", "aa"), ("peer 2", "aa"), ("peer 4", last_digest)):
        board.line(name, {"event": "final", "round": 6, "anchor_bits": digest}, 7.0)
    board.measured({"event": "alone", "step": 0, "held_out": 5.6})
    board.measured({"event": "alone", "step": 120, "held_out": 2.1})
    return board


def verdict(board: Board, *, solo: bool = True) -> DemoResult:
    return judge(
        board,
        seconds=12.3,
        solo=solo,
        kill=True,
        late="peer 4",
        files=("a.png",),
        extra={"name": "demo"},
    )


def test_board_counts_rounds_bytes_and_what_ddp_would_send() -> None:
    board = played()
    assert [row.round for row in board.rounds] == [1, 2, 3, 4, 5, 6]
    assert board.rounds[3].contributors == ("peer 1", "peer 2")
    assert board.rounds[0].samples == 480
    # a killed peer's late lines are not taken in: round 3 counts for peers 1 and 2 only
    assert board.rows["peer 3"].counted == 2
    assert board.bytes_sent == 50 * (6 + 6 + 2 + 2)
    # k peers: ring all-reduce of bf16 gradients, 2(k-1)/k * 2 bytes a parameter, peer and step
    assert ddp_bytes(3, 1000) == pytest.approx(3 * (2 * 2 / 3) * 2 * 1000)
    assert ddp_bytes(1, 1000) == 0
    assert board.ddp_equivalent_bytes == 20 * (3 * 8000 + 4000 + 2 * 8000)


def test_recovery_is_counted_to_the_first_round_without_the_killed_peer() -> None:
    assert played().recovery_s() == pytest.approx(4.75 - 2.5)
    assert played(committed_after_kill=False).recovery_s() is None


def test_open_rounds_are_not_committed_ones() -> None:
    board = Board(NAMES, rounds_total=6, sync_every=20, params=1000)
    board.line(
        "peer 1", {"event": "round", "status": "open", "round": 1, "reason": "deadline"}, 1.0
    )
    assert board.rounds == []
    assert board.rows["peer 1"].note == "deadline"


def test_a_run_that_kept_every_promise() -> None:
    found = verdict(played())
    assert found.ok
    assert found.failures == ()
    machine = found.as_json()
    keys = {
        "ok",
        "anchors_identical",
        "peers",
        "killed",
        "joined_late",
        "recovery_s",
        "loss_swarm",
        "loss_solo",
        "rounds",
        "bytes_sent",
    }
    assert keys | {"ddp_equivalent_bytes", "seconds"} <= machine.keys()
    assert json.loads(json.dumps(machine)) == machine
    assert (
        machine["killed"],
        machine["joined_late"],
        machine["anchors_identical"],
        machine["peers"],
    ) == (True, True, True, 4)
    assert (
        machine["loss_swarm"],
        machine["loss_solo"],
        machine["recovery_s"],
        machine["rounds"],
    ) == (1.9, 2.1, 2.25, 6)
    text = found.text()
    assert "identical, bit for bit" in text
    assert "0.905 of it" in text
    assert "FAILED" not in text


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        (played(last_digest="ab"), "are not the same"),
        (played(late_counted=False), "peer 4 joined late and contributed to no round"),
        (played(committed_after_kill=False), "no round was committed after the kill"),
        (played(held_out=4.9), "the loss did not fall"),
        (played(held_out=math.nan), "the loss did not fall"),
    ],
)
def test_each_broken_promise_is_found(board: Board, expected: str) -> None:
    found = verdict(board)
    assert not found.ok
    assert any(expected in failure for failure in found.failures)
    assert "FAILED" in found.text()


def test_a_peer_that_did_not_finish_fails_the_demo() -> None:
    board = played()
    board.rows["peer 2"].state = "failed"
    assert any("peer 2 did not finish" in failure for failure in verdict(board).failures)
    assert not replace(verdict(played()), failures=("x",)).ok


def test_without_a_baseline_none_is_asked_for() -> None:
    board = played()
    board.solo.clear()
    assert verdict(board, solo=False).ok
    assert verdict(board, solo=False).as_json()["loss_solo"] is None
    assert any("alone gave no result" in failure for failure in verdict(board).failures)


def test_plot_shows_curves_and_marks() -> None:
    lines = braille_plot(
        [[(0, 5.0), (10, 1.0)]],
        columns=20,
        rows=5,
        marks=[Mark(0, "a"), Mark(10, "b"), Mark(99, "c")],
        x_label="rounds",
    )
    assert lines[0].strip() == "a" + " " * 18 + "b"
    assert lines[1].startswith("  5.000 ┤")
    assert lines[5].startswith("  1.000 ┤")
    assert lines[-1].endswith("10 rounds")
    top_left, bottom_right = lines[1][9], lines[5][9 + 19]
    assert ord(top_left) & 0x01
    assert ord(bottom_right) & 0x80
    assert all(len(line) <= 29 for line in lines)


def test_plots_survive_odd_numbers() -> None:
    assert braille_plot([[], [(0, math.nan)]]) == ["(nothing to plot)"]
    assert len(braille_plot([[(3, 2.0)]], rows=4)) == 6
    assert sparkline([]) == ""
    assert sparkline([1, math.nan, 2, 3]) == "▁▅█"
    assert sparkline([2, 2]) == "▁▁"


def test_figures_are_a_light_and_a_dark_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for board in (played(), Board(NAMES, rounds_total=6, sync_every=20, params=1)):
        files = draw(board, tmp_path)
        assert [file.name for file in files] == ["loss.png", "loss-dark.png"]
        light, dark = (file.read_bytes() for file in files)
        assert light.startswith(b"\x89PNG")
        assert dark.startswith(b"\x89PNG")
        assert light != dark


def test_the_figure_says_the_two_numbers_that_matter_and_no_more_than_is_so() -> None:
    board = played()
    assert title(board) == "Trained together: 10% lower loss than alone, 1100× fewer bytes than DDP"
    assert story(board) == (
        "3 peers on one machine  ·  peer 3 was killed, next round 2.2 s later  ·  peer 4 came late"
    )
    # six rounds of 160 samples, of the 17 contributions in all rounds
    assert seen_share(board) == pytest.approx(6 / 17)
    assert board.identical
    assert not played(last_digest="ab").identical
    worse = played(held_out=4.2)
    assert title(worse).startswith("Trained together: 100% higher loss than alone")
    worse.solo.clear()
    assert title(worse) == "Trained together: 1100× fewer bytes than DDP"
    nothing = Board(NAMES, rounds_total=6, sync_every=20, params=1)
    assert (title(nothing), seen_share(nothing)) == ("Trained together: 0 rounds", 1.0)


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_the_figures_colours_can_be_read(theme: Theme) -> None:
    ground = luminance(theme.ground)
    for name in ("ink", "muted", "swarm", "alone", "killed", "joined"):
        low, high = sorted((luminance(getattr(theme, name)), ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_views_say_who_contributed(capsys: pytest.CaptureFixture[str]) -> None:
    board = played()
    assert strip(board, "peer 1") == "██████"
    assert strip(board, "peer 3") == "██✗···"
    assert strip(board, "peer 4") == "····██"
    assert "DDP would have sent" in traffic(board)
    assert (mib(2**20), mib(3 * 2**30)) == ("1.0 MiB", "3.00 GiB")
    screen = PlainScreen()
    screen.show(board, 7.0)
    screen.show(board, 7.1)  # nothing new: nothing printed
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 7
    assert printed.err.startswith("  7.0 s  starting\n")
    assert re.search(r"round   4/6    4\.8 s  peer 1, peer 2", printed.err)
    assert "\x1b" not in printed.err
    text = io.StringIO()
    Console(file=text, width=120).print(LiveScreen(colour=False).block(board, 7.0))
    assert "killed (SIGKILL)" in text.getvalue()


def test_a_plain_screen_is_never_silent_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    """A call every fifth of a second, as the director makes them, and nothing happens."""
    board, screen = played(), PlainScreen()
    board.rounds.clear()
    board.phase = "training"
    at, silent = 0.0, 0.0
    said: list[str] = []
    for _ in range(200):
        at += 0.2
        screen.show(board, at)
        told = capsys.readouterr().err
        silent = 0.0 if told else silent + 0.2
        said += told.splitlines()
        assert silent < SILENCE_S + 0.2
    assert 9 <= len(said) <= 11, "and it does not babble"
    assert said[1].endswith(
        "training; peer 1 done, step 120; peer 2 done, step 120; peer 4 done, step 120"
    )


def test_progress_after_the_last_round_counts_the_steps_of_one_machine() -> None:
    board = played()
    board.phase = "one machine alone, for comparison"
    board.measured({"event": "step", "step": 40})
    assert doing(board) == (
        "one machine alone, for comparison: step 40 of 120; 2 models of the swarm evaluated"
    )


def test_the_manifest_of_the_demo_is_valid(tmp_path: Path) -> None:
    from atoll.node.manifest import gpt_config, load_manifest

    stage = prepare(tmp_path / "demo", steps=250, seed=3)
    assert (stage.rounds, stage.steps) == (12, 240)
    manifest = load_manifest(stage.manifest)
    assert (manifest.train.rounds, manifest.train.sync_every, manifest.train.inner.steps) == (
        12,
        20,
        240,
    )
    assert gpt_config(manifest.model).parameters == PARAMETERS
    assert "{" in MANIFEST
    prepare(tmp_path / "demo", steps=250, seed=3)  # again: what is there is a demo's


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    from atoll.collectives.errors import ConfigError

    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds other files"):
        prepare(tmp_path, steps=100, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def _child(code: str, tmp_path: Path, inbox: Inbox) -> DemoProcess:
    return DemoProcess(
        "peer 1", "script", [sys.executable, "-c", code], {}, tmp_path / "log", inbox
    )


def test_processes_are_read_line_by_line_and_their_end_is_told(tmp_path: Path) -> None:
    inbox: Inbox = queue.SimpleQueue()
    child = _child(
        "import sys; print('{\"event\": \"step\"}'); print('hello'); print('oops', file=sys.stderr); sys.exit(3)",
        tmp_path,
        inbox,
    )
    assert child.wait(30)
    assert inbox.get(timeout=10).record == {"event": "step"}
    assert inbox.get(timeout=10).record == {"event": "exit", "code": 3}
    assert sorted(child.last_words().splitlines()) == ["hello", "oops"]
    end([child])


def test_kill_takes_the_process_and_what_it_started(tmp_path: Path) -> None:
    inbox: Inbox = queue.SimpleQueue()
    code = (
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(json.dumps({'child': child.pid}), flush=True)\nchild.wait()"
    )
    child = _child(code, tmp_path, inbox)
    grandchild = inbox.get(timeout=30).record["child"]
    descriptor = os.pidfd_open(grandchild) if hasattr(os, "pidfd_open") else None
    kill([child])
    assert child.wait(30)
    assert inbox.get(timeout=10).record == {"event": "exit", "code": -9}
    if descriptor is not None:  # Linux; readable once that process has ended
        assert select.select([descriptor], [], [], 30)[0]
        os.close(descriptor)
    end([child])


def test_end_is_patient_and_then_is_not(tmp_path: Path) -> None:
    inbox: Inbox = queue.SimpleQueue()
    stubborn = _child(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); signal.pause()",
        tmp_path,
        inbox,
    )
    assert inbox.get(timeout=30).record == {}
    end([stubborn], timeout_s=0.3)
    assert not stubborn.alive
    assert inbox.get(timeout=10).record["code"] == -9

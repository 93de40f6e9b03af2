"""Where `atoll join` takes an invite from, and that the list of processes does not show it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from terminal_kit import ATOLL, shown_to_all

from atoll.node.cli.join import join_command, target_of
from atoll.node.home.output import Terminal
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity

DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDzMngWyanCrpqTHK4eTtc1Fy14yrqBAsJ2Rb8b5ZWeZM"


def test_each_source_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "invite"
    file.write_text("atoll1:abc\n  def\n")  # wrapped by a mail program
    quiet = Terminal(environ={"ATOLL_INVITE": "atoll1:environment\n"}, json=True)
    assert target_of(quiet, None, file) == "atoll1:abcdef"
    assert target_of(quiet, None, None) == "atoll1:environment"
    assert target_of(quiet, "tide", None) == "tide"  # an argument is before the environment
    monkeypatch.setattr(sys, "stdin", io.StringIO("atoll1:stdin\n"))
    assert target_of(quiet, "-", None) == "atoll1:stdin"
    with pytest.raises(click.UsageError, match="no invite in stdin"):
        target_of(quiet, "-", None)
    with pytest.raises(click.UsageError, match="both"):
        target_of(quiet, "tide", file)
    with pytest.raises(click.UsageError, match="--invite-file FILE"):
        target_of(Terminal(environ={}), None, None)


@pytest.mark.parametrize(
    ("argv", "target", "arguments"),
    [
        (["tide", "--", "a", "--yes"], "tide", ("a", "--yes")),
        (["--invite-file", "x", "--", "a"], None, ("a",)),
        (["--yes"], None, ()),
    ],
)
def test_what_comes_after_two_dashes_is_the_scripts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    target: str | None,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    context = join_command.make_context("join", argv)
    assert context.params["target"] == target
    assert context.params["arguments"] + context.meta["atoll.join.after"] == arguments


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_invite_among_the_arguments_is_wiped_and_no_child_gets_it(tmp_path: Path) -> None:
    invite = make_invite("a" * 26, [DEAD], Identity.generate(), now_s=time.time()).encode()
    environment = {**os.environ, "ATOLL_HOME": str(tmp_path / "h"), "CI": "1"}
    joining = subprocess.Popen(
        [*ATOLL, "join", invite, "--yes", "--threads", "1"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert joining.stderr is not None
        said = ""
        for line in joining.stderr:
            said += line
            if line.startswith("asking "):  # the node is there, and knows the invite
                break
        assert "asking " in said
        assert shown_to_all(invite[7:40]) == [], said
    finally:
        joining.kill()
        joining.communicate()

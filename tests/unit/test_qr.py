"""The QR code of an invite: its modules are the encoder's, it fits a usual terminal, and where it
cannot be drawn the terminal says why.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import segno

from atoll.node.cli import run
from atoll.node.cli.qr import LEAST_ZONE, QUIET_ZONE, half_blocks, modules
from atoll.node.home.output import Terminal

RUN = 'schema = 1\nname = "tide"\n[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }\n'
ADDRESS = "/ip4/203.0.113.7/tcp/4150/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
DARK = {" ": (0, 0), "▄": (0, 1), "▀": (1, 0), "█": (1, 1)}
INVERTED = {sign: (1 - a, 1 - b) for sign, (a, b) in DARK.items()}


def read(lines: list[str], zone: int, signs: dict[str, tuple[int, int]]) -> list[list[int]]:
    """The modules that lines of half blocks show, without the quiet zone, which has to be light."""
    rows = [[signs[c][half] for c in line] for line in lines for half in (0, 1)]
    size = len(rows[0])
    assert not any(any(row) for row in rows[:zone] + rows[size - zone :])
    assert not any(any(row[:zone] + row[size - zone :]) for row in rows)
    return [row[zone : size - zone] for row in rows[zone : size - zone]]


def expected(text: str) -> list[list[int]]:
    return [list(row) for row in segno.make_qr(text, error="l").matrix]


class Screen(io.TextIOWrapper):
    """stderr of a terminal with an encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        raw = self.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue().decode(self.encoding)


@pytest.fixture
def invite_new(
    atoll_home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.toml").write_text(RUN)
    assert run(["new", "run.toml", "--bootstrap", ADDRESS]) == 0
    capsys.readouterr()
    return ("invite", "new", "--bootstrap", ADDRESS, "--qr")


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("zone", [LEAST_ZONE, QUIET_ZONE])
def test_half_blocks_show_the_modules_of_the_encoder(inverted: bool, zone: int) -> None:
    lines = half_blocks(modules("atoll2:abc"), zone, inverted=inverted)
    assert read(lines, zone, INVERTED if inverted else DARK) == expected("atoll2:abc")


@pytest.mark.parametrize(
    ("columns", "zone", "colour"), [(80, QUIET_ZONE, True), (62, LEAST_ZONE, False)]
)
def test_an_invite_fits_a_usual_terminal(
    invite_new: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    zone: int,
    colour: bool,
) -> None:
    screen = Screen("utf-8")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run([*invite_new, *([] if colour else ["--no-color"])]) == 0
    line = capsys.readouterr().out.rstrip("\n")
    assert re.fullmatch(r"atoll2:[1-9A-HJ-NP-Za-km-z]+", line)
    drawn = [row for row in screen.text.splitlines() if set(row) & set("▀▄█")]
    painted = "\x1b[38;5;16m\x1b[48;5;231m"
    assert all(row.startswith(painted) and row.endswith("\x1b[0m") for row in drawn) == colour
    plain = [row.removeprefix(painted).removesuffix("\x1b[0m") for row in drawn]
    size = len(expected(line)) + 2 * zone
    blank = [" " * size] * (zone // 2) if colour else []
    assert {len(row) for row in plain} == {size}
    assert size <= columns
    assert read([*blank, *plain, *blank], zone, DARK if colour else INVERTED) == expected(line)


@pytest.mark.parametrize(
    ("encoding", "columns", "said"),
    [
        ("utf-8", "40", r"No QR code: it needs 6\d columns, and this terminal has 40\."),
        ("latin-1", "80", r"No QR code: this terminal's encoding is (latin1|iso88591)"),
    ],
)
def test_where_it_cannot_be_drawn_the_terminal_says_why(
    invite_new: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    columns: str,
    said: str,
) -> None:
    screen = Screen(encoding)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", columns)
    assert run(invite_new) == 0
    assert capsys.readouterr().out.startswith("atoll2:")
    assert re.search(said, screen.text)
    assert not set(screen.text) & set("▀▄█")


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_who_wants_no_talk_gets_no_picture(
    invite_new: tuple[str, ...], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert run([*invite_new, option]) == 0
    said = capsys.readouterr()
    assert not set(said.out + said.err) & set("▀▄█")


def test_a_text_that_no_code_holds_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    from atoll.node.cli.qr import show_qr

    show_qr(Terminal(environ={}), "x" * 3000)
    assert "No QR code: 3000 characters are too many" in capsys.readouterr().err

"""What docs/demo shows: a recording of a real run that `atoll replay` plays, and pictures of it that
are small; and the terminal that a script draws as an SVG.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from house import ROOT

from atoll.node.cli import run

sys.path.append(str(ROOT / "scripts"))
from _terminal_svg import Screen, paint, pieces, play

SHOWN = ROOT / "docs/demo"
MOST_BYTES = 400_000
SVG = "{http://www.w3.org/2000/svg}"


def test_the_recording_is_played(atoll_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(SHOWN / "events.jsonl.gz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    about = found["run"]
    assert (about["name"], found["state"]) == ("demo", "finished: all 35 rounds are committed")
    assert (about["rounds"], about["sync_every"], about["codec"]) == (35, 20, "int8")
    assert found["rounds"]["round"] == list(range(1, 36))
    assert found["skipped"] == 0
    who = [int(bits, 16) for bits in found["rounds"]["who"]]
    lost = [int(bits, 16) for bits in found["rounds"]["lost"]]
    by_peer = {row["number"]: [bits >> row["number"] & 1 for bits in who] for row in found["peers"]}
    gone = [row for row in found["peers"] if row["state"] == "gone"]
    assert len(gone) == 1, "one was killed"
    assert lost.count(1 << gone[0]["number"]) == 1
    assert not any(by_peer[gone[0]["number"]][20:])
    late = [number for number, rounds in by_peer.items() if not any(rounds[:15])]
    assert len(late) == 1, "one came late"
    assert sum(by_peer[late[0]]) >= 10
    assert len(by_peer) == len(found["losses"]) == 4
    assert {row["loss"] < 2.8 for row in found["peers"]} == {True}


def test_the_pictures_are_there_and_small() -> None:
    files = {path.name: path.stat().st_size for path in SHOWN.iterdir()}
    assert sum(files.values()) < MOST_BYTES
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"(?:src|srcset)=\"docs/demo/([^\"]+)\"", text))
    assert shown == set(files) - {"events.jsonl.gz", "run.toml"}
    for name in shown:
        if name.endswith("-dark.png"):
            assert name.replace("-dark", "") in shown, "a dark picture has a light one"
    assert all(
        (ROOT / path).exists() for path in re.findall(r"src(?:set)?=\"(docs/[^\"]+)\"", text)
    )


def test_the_shown_terminal_moves_and_runs_nothing() -> None:
    root = ElementTree.parse(SHOWN / "terminal.svg").getroot()
    assert {node.tag.removeprefix(SVG) for node in root.iter()} <= {
        "svg",
        "title",
        "style",
        "rect",
        "circle",
        "text",
        "tspan",
    }
    assert not [key for node in root.iter() for key in node.attrib if key.startswith("on")]
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "@keyframes" in str(style.text)
    assert not re.search(r"url\(|@import", str(style.text))
    said = "\n".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    assert "round 35/35" in said
    assert "was lost in the round" in said


def test_a_line_is_written_once_for_as_long_as_it_stays() -> None:
    screens = [
        Screen(["name", "one"], 1.0),
        Screen(["name", "two"], 1.0),
        Screen(["name", "two", paint("end", fg="green")], 2.0),
    ]
    root = ElementTree.fromstring(play(screens, 20, "a title"))
    texts = {"".join(node.itertext()): str(node.get("class")) for node in root.iter(f"{SVG}text")}
    assert sorted(texts) == ["end", "name", "one", "two"]
    style = str(root.findtext(f"{SVG}style"))
    assert f".{texts['name']}{{" not in style, "always there"
    shown = {
        "one": "0.00%{visibility:visible}25.00%{visibility:hidden}",
        "two": "0.00%{visibility:hidden}25.00%{visibility:visible}",
        "end": "0.00%{visibility:hidden}50.00%{visibility:visible}",
    }
    for words, frames in shown.items():
        assert f"@keyframes {texts[words]}{{{frames}}}" in style
    still = re.findall(r"@media \(prefers-reduced-motion\)\{\.(\w+)\{visibility:hidden", style)
    assert still == [texts["one"]], "who wants no motion sees the last screen"


def test_painted_pieces_keep_their_columns_and_text_stays_text() -> None:
    line = "ab " + paint("cd", fg="red") + paint("ef", fg="red") + "  " + paint("g", dim=True)
    assert pieces(line) == [(0, "", "ab "), (3, "red", "cdef"), (9, "dim", "g")]
    assert paint("x", fg="no such colour") == "x"
    hostile = "</text><script>hit()</script>&"
    root = ElementTree.fromstring(play([Screen([hostile], 1.0)], 40, '"><script/>'))
    assert not [node for node in root.iter() if node.tag == f"{SVG}script"]
    assert "".join(next(root.iter(f"{SVG}text")).itertext()) == hostile

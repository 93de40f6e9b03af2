"""Damaged files of a run: who can fetch the state from others does, and says so; who is alone gets
a clear error and loses nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input_kit import (
    LAYOUT,
    Member,
    Run,
    atoll,
    ended,
    new_home,
    new_run,
    one_round,
    refused,
    soon,
)
from seeds import RARE

from atoll.collectives.errors import StorageError
from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.security.key_file import load_or_create

pytestmark = [*RARE]


def flip(path: Path, at: int = -5) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x20
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Lose the second half."""
    os.truncate(path, path.stat().st_size // 2)


def all_checkpoints(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """Damage every generation that is there: one that is whole would do."""

    def damaged(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            damage(path)

    return damaged


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "checkpoint": ("checkpoint", all_checkpoints(flip)),
    "checkpoint cut": ("checkpoint", all_checkpoints(cut)),
    "checkpoint gone": ("checkpoint", all_checkpoints(Path.unlink)),
    "entries": ("journal/entries", lambda path: flip(path, 60)),
    "entries cut": ("journal/entries", cut),
    "meta": ("journal/meta.json", lambda path: path.write_bytes(b"\0garbage")),
    "meta gone": ("journal/meta.json", Path.unlink),
}

VOTED = ("journal/entries", "journal/meta.json", "checkpoint/atoll.json", "layout")


def contents(folder: Path) -> dict[str, bytes]:
    """All that lies below a folder, but for its diary, which tells of what was met."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("events.")
    }


def test_the_only_member_is_told_and_loses_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    a = run.organiser()
    with ended(a):
        one_round(a)
        one_round(a)
        before = a.anchor()
        soon(
            lambda: json.loads((a.folder / "checkpoint" / "atoll.json").read_text())["round"] == 2,
            "the checkpoint of round 2",
        )
    for name, (file, damage) in DAMAGE.items():
        shutil.copytree(a.folder, tmp_path / "backup", symlinks=True)
        damage(a.folder / file)
        damaged = contents(a.folder)
        with pytest.raises(StorageError) as told:
            run.organiser()
        assert (told.value.code, told.value.exit_code) == ("E303", 74), name
        assert "backup" in told.value.hint
        assert contents(a.folder) == damaged, (
            name
        )  # nothing was made of it: no second founding, no new incarnation
        shutil.rmtree(a.folder)
        (tmp_path / "backup").rename(a.folder)
    all_checkpoints(flip)(a.folder / "checkpoint")
    script = tmp_path / "train.py"
    script.write_text("from atoll.node import join\njoin()\n")
    enter = ("join", run.signed.run_id, "--yes", "--script", str(script))
    error = refused(run.home, "E303", 74, *enter)
    assert "state.safetensors" in error["message"] or "checkpoint" in error["message"]
    assert not list((run.home / "run").glob("*.sock"))
    all_checkpoints(flip)(a.folder / "checkpoint")
    with ended(again := run.organiser()):
        assert again.anchor() == before
        one_round(again)
        assert "Traceback" not in again.log()


def test_a_daemon_lives_on_and_enters_the_run_once_the_file_is_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with ended(a := run.organiser()):
        one_round(a)
    other = sign_manifest(parse_manifest('schema = 1\nname = "other"'), run.identity)
    save_run(a.paths, other)
    broken = a.paths.run_dir("a" * 26)
    broken.mkdir()
    (broken / "manifest").write_bytes(b"no manifest")
    all_checkpoints(flip)(a.folder / "checkpoint")
    up = atoll(run.home, "up", "--background", "--json")
    assert up.status == 0, up
    try:
        status = json.loads(atoll(run.home, "status", "--json").out)
        phases = {entry["run_id"]: entry["phase"] for entry in status["runs"]}
        assert phases == {run.signed.run_id: "failed", other.run_id: "seeking"}
        assert [trouble["code"] for trouble in status["troubles"]] == ["E303"]
        shown = atoll(run.home, "status").out
        assert shown.count("E303") == 2
        script = tmp_path / "train.py"
        script.write_text("from atoll.node import join\njoin()\n")
        enter = ("join", run.signed.run_id, "--yes", "--script", str(script))
        refused(run.home, "E303", 74, *enter)
        all_checkpoints(flip)(a.folder / "checkpoint")
        assert (again := atoll(run.home, *enter)).status == 0, again
        assert (
            json.loads(atoll(run.home, "status", run.signed.run_id, "--json").out)["runs"][0][
                "phase"
            ]
            == "running"
        )
    finally:
        assert atoll(run.home, "down").status == 0
    assert "Traceback" not in (a.paths.log_dir / "node.log").read_text()


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint gone", "entries", "meta"])
def test_a_member_fetches_the_state_from_the_others(tmp_path: Path, name: str) -> None:
    run = new_run(tmp_path)
    a = run.organiser()
    with ended(a):
        b = run.member("b")
        one_round(a, b)
        b.end()
        one_round(a)
        meta = b.folder / "journal" / "meta.json"
        file, damage = DAMAGE[name]
        before = json.loads(meta.read_text())["incarnation"]
        damage(b.folder / file)
        with ended(b := run.member("b")):
            assert "E303" in b.codes()
            assert "E303" in b.log()
            one_round(a, b)
            assert b.anchor() == a.anchor()
            reborn = json.loads(meta.read_text())["incarnation"] > before
            assert reborn == (
                not name.startswith("checkpoint")
            )  # whose votes are whole needs no new life
            assert not (b.folder / "set-aside").exists()


def test_folders_of_two_members_that_were_exchanged_are_refused_as_they_are(
    tmp_path: Path,
) -> None:
    """Each key would vote from the other's journal. Who has its own again is who it was; whose
    folder is moved away fetches the state, in a new life.
    """
    run = new_run(tmp_path)
    with ended(a := run.organiser()):
        b, c = run.member("b"), run.member("c")
        one_round(a, b, c)
        peers = {
            member.home.name: load_or_create(member.paths.identity_file).peer for member in (b, c)
        }
        folders = [b.folder, c.folder]
        b.end()
        c.end()
        metas = [folder / "journal" / "meta.json" for folder in folders]
        lives = [json.loads(meta.read_text()) for meta in metas]
        assert [life["peer"] for life in lives] == [peers["b"], peers["c"]]

        exchange(*folders)
        before = [contents(folder) for folder in folders]
        for name in ("b", "c"):
            with pytest.raises(StorageError) as told:
                run.member(name)
            assert (told.value.code, told.value.exit_code) == ("E309", 74)
            assert peers["b"] in told.value.message
            assert peers["c"] in told.value.message
        for folder, files in zip(folders, before, strict=True):
            now = contents(folder)
            assert {name: now[name] for name in files if name in VOTED} == {
                name: files[name] for name in files if name in VOTED
            }

        exchange(*folders)
        folders[0].rename(tmp_path / "aside")
        with ended(b := run.member("b"), c := run.member("c")):
            one_round(a, b, c)
            later = [json.loads(meta.read_text())["incarnation"] for meta in metas]
            assert later[0] > lives[0]["incarnation"]
            assert later[1] == lives[1]["incarnation"]


def exchange(one: Path, other: Path) -> None:
    """Each folder is called as the other was."""
    beside = one.with_name("beside")
    one.rename(beside)
    other.rename(one)
    beside.rename(other)


def test_a_damaged_layout_or_newest_checkpoint_is_mended_at_home(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with ended(a := run.organiser()):
        one_round(a)
        before = a.anchor()
        soon(
            lambda: json.loads((a.folder / "checkpoint" / "atoll.json").read_text())["round"] == 1,
            "the checkpoint of round 1",
        )
    (a.folder / "layout").write_bytes(b"\xff")
    flip(a.folder / "checkpoint" / "state.safetensors")  # the one before and the results do
    with ended(a := run.organiser()):
        assert a.anchor() == before
        assert a.layout == LAYOUT
        assert "E303" in a.codes()
        one_round(a)


def test_an_organiser_whose_folder_is_gone_never_founds_the_run_twice(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with ended(a := run.organiser()):
        one_round(a)
    shutil.rmtree(a.folder / "journal")
    shutil.rmtree(a.folder / "checkpoint")
    with pytest.raises(StorageError) as told:
        run.organiser()
    assert (told.value.code, told.value.exit_code) == ("E303", 74)
    assert not (a.folder / "checkpoint").exists()


def test_other_files_of_the_home_may_be_garbage(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with ended(a := run.organiser()):
        one_round(a)
    (a.paths.state_dir / "peers.json").write_bytes(b"\x00\xff{")
    (a.folder / "admission").write_bytes(b"\x00\xff{")
    (a.paths.runtime_dir / "node.json").write_bytes(b"\x00\xff{")
    with ended(a := run.organiser()):
        one_round(a)


def test_the_homes_settings_name_the_wrong_key(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    find_paths(home).config_file.write_text("[node]\nports = 1\n")
    assert refused(home, "E411", 78, "up")["key"] == "$.node.ports"
    with pytest.raises(Exception) as told:
        Member(
            home,
            Run(
                tmp_path,
                new_run(tmp_path).signed,
                new_run(tmp_path / "x").identity,
                "/ip4/127.0.0.1/tcp/9",
            ).signed.run_id,
        )
    assert getattr(told.value, "code", "") == "E411"
